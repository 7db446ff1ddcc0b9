from __future__ import annotations

from typing import Any

import pytest

from ppstream.wire.contract import differences
from ppstream.wire.fields import WIRE_MAJOR, WIRE_MINOR
from ppstream.wire.robot_messages import Described, StreamDeclaration, StreamDescription

RUN = Described(
    WIRE_MAJOR,
    WIRE_MINOR,
    phase="ready",
    streams=(
        StreamDescription("joints", (3,), "float32"),
        StreamDescription("imu", (2,), "float64"),
        StreamDescription("wrist", (4, 2, 3), "uint8", ("raw", "jpeg")),
    ),
    reference="joints",
    actions=("dx", "dy"),
    horizon=4,
    dt_ns=1,
    lease_ns=1,
)
JOINTS, IMU = StreamDeclaration("joints", 3, "float32"), StreamDeclaration("imu", 2, "float64")
WRIST = StreamDeclaration("wrist", 24, "uint8", "jpeg")


@pytest.mark.parametrize("streams", [(JOINTS, IMU, WRIST), (WRIST, IMU, JOINTS)])
def test_the_order_of_streams_is_the_robots_own(streams: Any) -> None:
    assert differences(RUN, streams, ("dx", "dy")) == []


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param((JOINTS, IMU, WRIST), id="a robot that tells no shape"),
        pytest.param(
            (JOINTS, IMU, StreamDeclaration("wrist", 24, "uint8", shape=(4, 2, 3))), id="the run's"
        ),
        pytest.param(
            (StreamDeclaration("joints", 3, "float32", shape=(1, 3)), IMU, WRIST),
            id="of a stream whose axes are the robot's own",
        ),
    ],
)
def test_a_shape_is_compared_where_a_camera_s_is_stated(streams: Any) -> None:
    assert differences(RUN, streams, ("dx", "dy")) == []


@pytest.mark.parametrize(
    ("streams", "line"),
    [
        ((JOINTS, WRIST), "stream 'imu': expected [2] float64, got none"),
        (
            (JOINTS, StreamDeclaration("imu", 2, "float32"), WRIST),
            "stream 'imu': expected [2] float64, got [2] float32",
        ),
        (
            (IMU, StreamDeclaration("joints", 4, "float32"), WRIST),
            "stream 'joints': expected [3] float32, got [4] float32",
        ),
        (
            (JOINTS, IMU, WRIST, StreamDeclaration("tail", 1, "float32")),
            "stream 'tail': the pipeline has none of this name",
        ),
        ((JOINTS, IMU, IMU, WRIST), "stream 'imu': declared twice"),
        (
            (JOINTS, IMU, StreamDeclaration("wrist", 12, "uint8")),
            "stream 'wrist': expected [4, 2, 3] uint8, got [12] uint8",
        ),
        (
            (JOINTS, IMU, StreamDeclaration("wrist", 24, "uint8", shape=(2, 4, 3))),
            "stream 'wrist': expected [4, 2, 3] uint8, got [2, 4, 3] uint8",
        ),
        (
            (JOINTS, IMU, StreamDeclaration("wrist", 24, "uint8", "jpeg", (2, 4, 3))),
            "stream 'wrist': expected [4, 2, 3] uint8, got [2, 4, 3] uint8",
        ),
        (
            (JOINTS, IMU, StreamDeclaration("wrist", 24, "uint8", "png")),
            "stream 'wrist': expected raw or jpeg, got png",
        ),
        (
            (StreamDeclaration("joints", 3, "float32", "jpeg"), IMU, WRIST),
            "stream 'joints': expected raw, got jpeg",
        ),
    ],
)
def test_a_difference_says_what_was_expected_and_got(streams: Any, line: str) -> None:
    assert differences(RUN, streams, ("dx", "dy")) == [line]


def test_every_difference_is_a_line() -> None:
    lines = differences(RUN, (JOINTS,), ("dx",))
    assert lines == [
        "stream 'imu': expected [2] float64, got none",
        "stream 'wrist': expected [4, 2, 3] uint8, got none",
        "actions: expected 2: ['dx', 'dy'], got 1: ['dx']",
    ]


def test_actions_in_another_order_are_another_contract() -> None:
    assert differences(RUN, (JOINTS, IMU, WRIST), ("dy", "dx")) == [
        "action 0: expected 'dx', got 'dy'",
        "action 1: expected 'dy', got 'dx'",
    ]
