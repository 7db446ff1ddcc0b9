from __future__ import annotations

from typing import Any

import pytest
from robot_rig import ACTIONS, make_config

from ppstream.sessions.contract import rejection_reason
from ppstream.wire.fields import WIRE_MINOR
from ppstream.wire.robot_messages import Hello, StreamDeclaration

JOINTS, IMU = StreamDeclaration("joints", 3, "float32"), StreamDeclaration("imu", 2, "float64")


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {"streams": (JOINTS, IMU), "actions": ACTIONS, "major": 1}
    return Hello(robot="arm", **{"minor": WIRE_MINOR, **fields, **changes})


@pytest.mark.parametrize("streams", [(JOINTS, IMU), (IMU, JOINTS)])
def test_the_order_of_streams_is_the_robots_own(streams: Any) -> None:
    assert rejection_reason(make_config(), hello(streams=streams)) == (None, [])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"streams": (JOINTS,)}, "stream 'imu': expected [2] float64, got none"),
        (
            {"streams": (JOINTS, StreamDeclaration("imu", 2, "float32"))},
            "stream 'imu': expected [2] float64, got [2] float32",
        ),
        (
            {"streams": (IMU, StreamDeclaration("joints", 4, "float32"))},
            "stream 'joints': expected [3] float32, got [4] float32",
        ),
        (
            {"streams": (JOINTS, IMU, StreamDeclaration("wrist", 1, "float32"))},
            "stream 'wrist': the pipeline has none of this name",
        ),
        ({"streams": (JOINTS, IMU, IMU)}, "stream 'imu': declared twice"),
        ({"actions": ("dx",)}, "actions: expected 2: ['dx', 'dy'], got 1: ['dx']"),
    ],
)
def test_a_difference_says_what_was_expected_and_got(changes: Any, line: str) -> None:
    assert rejection_reason(make_config(), hello(**changes)) == ("contract", [line])


def test_actions_in_another_order_are_another_contract() -> None:
    reason, lines = rejection_reason(make_config(), hello(actions=("dy", "dx")))
    assert reason == "contract"
    assert lines == ["action 0: expected 'dx', got 'dy'", "action 1: expected 'dy', got 'dx'"]


def test_another_major_version_is_said_before_anything_else() -> None:
    reason, (line,) = rejection_reason(make_config(), hello(major=2, minor=0, streams=()))
    assert reason == "version"
    assert "expected 1.1 or 1.2, got 2.0" in line
