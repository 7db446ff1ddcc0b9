from __future__ import annotations

from typing import Any

import msgspec
import pytest
from robot_rig import ACTIONS, DT_NS, HORIZON, LEASE_NS, MS, make_config

from ppstream.config.schema import ImageConfig, StreamConfig
from ppstream.core.errors import MAX_TEXT
from ppstream.sessions.contract import description, refusal, rejection_reason, welcome
from ppstream.wire.fields import MAX_DETAILS, WIRE_MAJOR, WIRE_MINOR, encoder
from ppstream.wire.robot_messages import (
    Described,
    Hello,
    StreamDeclaration,
    StreamDescription,
    to_robot,
)
from ppstream.wire.unix_socket import PACKET_BYTES_MAX

JOINTS, IMU = StreamDeclaration("joints", 3, "float32"), StreamDeclaration("imu", 2, "float64")


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {"streams": (JOINTS, IMU), "actions": ACTIONS, "major": 1}
    return Hello(robot="arm", **{"minor": WIRE_MINOR, **fields, **changes})


def test_a_robot_that_declares_what_is_configured_is_not_refused() -> None:
    assert rejection_reason(make_config(), hello()) == (None, [])


@pytest.mark.parametrize(("rows", "most"), [(1, ()), (2, (259, 333))])
def test_a_robot_hears_how_much_of_each_of_its_streams_is_taken(
    rows: int, most: tuple[int, ...]
) -> None:
    said = hello(streams=(IMU, JOINTS))
    assert welcome(make_config(rows=rows), said, 7, "ready", 5).samples_per_s == most


def test_a_refusal_has_a_line_for_each_difference() -> None:
    reason, lines = rejection_reason(make_config(), hello(streams=(JOINTS,), actions=("dx",)))
    assert reason == "contract"
    assert lines == [
        "stream 'imu': expected [2] float64, got none",
        "actions: expected 2: ['dx', 'dy'], got 1: ['dx']",
    ]


def test_another_major_version_is_said_before_anything_else() -> None:
    reason, (line,) = rejection_reason(make_config(), hello(major=2, minor=0, streams=()))
    assert reason == "version"
    assert "expected 1.1 or 1.2, got 2.0" in line


def test_a_description_has_the_configurations_contract_and_fits_the_wire() -> None:
    config = make_config()
    wrist = StreamConfig(name="wrist", rate_hz=30.0, image=ImageConfig(height=4, width=2))
    config = msgspec.structs.replace(
        config,
        streams=(*config.streams, wrist),
        actions=msgspec.structs.replace(config.actions, max_age_ms=60.0),
    )
    assert to_robot.decode(encoder.encode(description(config, "warming"))) == Described(
        WIRE_MAJOR,
        WIRE_MINOR,
        phase="warming",
        streams=(
            StreamDescription("joints", (3,), "float32"),
            StreamDescription("imu", (2,), "float64"),
            StreamDescription("wrist", (4, 2, 3), "uint8", ("raw", "jpeg")),
        ),
        reference="joints",
        actions=ACTIONS,
        horizon=HORIZON,
        dt_ns=DT_NS,
        lease_ns=LEASE_NS,
        max_age_ns=60 * MS,
    )


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["a"] * MAX_DETAILS, MAX_DETAILS),
        (["a"] * (MAX_DETAILS + 1), MAX_DETAILS - 1),
        (["\U0001f600" * 1000] * 8, 8),
        (["\U0001f600" * 1000] * 9, 8),
        (["\U0001f600" * 1000] * 1000, 8),
        (["\U0001f600" * 9000], 1),
        ([], 0),
    ],
)
def test_a_refusal_fits_one_packet_and_says_how_many_lines_are_left_out(
    lines: list[str], told: int
) -> None:
    body = encoder.encode(refusal("contract", lines))
    details = to_robot.decode(body).details  # type: ignore[union-attr]
    assert len(body) <= PACKET_BYTES_MAX
    assert details[:told] == tuple(line[:MAX_TEXT] for line in lines[:told])
    assert details[told:] == ((f"and {len(lines) - told} more",) if told < len(lines) else ())
