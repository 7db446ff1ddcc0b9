"""The wire: what was written by this version of a message is read by every later one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ppstream import messages as m

GOLDEN = Path(__file__).parent / "golden"
STAMPS = memoryview(bytes(range(8)))
VALUES = memoryview(bytes(range(12)))

#: Every message of version 1.0 with a value in every field. Rows are never changed: a later minor
#: version adds rows of its own.
FROM_ROBOT: dict[str, Any] = {
    "hello": m.Hello(
        1, 0, "arm", (m.StreamDeclaration("joints", 7, "float32"),), ("dx", "dy"), 11, False
    ),
    "samples": m.Samples(281474976710655, 1, STAMPS, VALUES),
    "report": m.Report(7, 2, 300, 25_000_000, 4),
    "reset": m.Reset(7),
    "bye": m.Bye(7),
    "ping": m.Ping(7),
}
TO_ROBOT: dict[str, Any] = {
    "welcome": m.Welcome(1, 0, 7, "ready", 5 * 10**9, 10**8, 16, 10**7, (-1.0, -2.5), (1.0, 2.5)),
    "refused": m.Refused("contract", ("expected 7", "got 6")),
    "phase": m.Phase("draining"),
    "action_chunk": m.ActionChunk(7, 1, 2, 300, -5, 10, 20, 10**18, 3, VALUES),
    "lost": m.Lost(7),
}
CONTROL: dict[str, Any] = {
    "rank_hello": m.RankHello(1, "token", 0, 1, "host", "boot", 42, {"config": {"a.b": 1}}),
    "rank_welcome": m.RankWelcome("run", "logs/run"),
    "rank_refused": m.RankRefused(("a.b: 1 here, 2 there",)),
    "ready": m.Ready({"link": "host"}),
    "heartbeat": m.Heartbeat(12),
    "bell": m.Bell(300),
    "policy_fault": m.PolicyFault(5, "exception", "text"),
    "measure": m.Measure(30),
    "measured": m.Measured((1, 2, 3)),
    "drain": m.Drain("duration"),
    "goodbye": m.Goodbye(0, "drained"),
    "phase_change": m.PhaseChange("ready"),
}
FAMILIES = {
    "from_robot": (m.from_robot, FROM_ROBOT),
    "to_robot": (m.to_robot, TO_ROBOT),
    "control": (m.control, CONTROL),
}
CASES = [(family, name) for family, (_, cases) in FAMILIES.items() for name in cases]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_message_keeps_the_bytes_of_version_1_0(family: str, name: str) -> None:
    decoder, cases = FAMILIES[family]
    golden = (GOLDEN / f"{family}-1.0-{name}.bin").read_bytes()
    assert m.encoder.encode(cases[name]) == golden
    assert decoder.decode(golden) == cases[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_message_of_a_union_has_golden_bytes(family: str) -> None:
    decoder, cases = FAMILIES[family]
    assert {type(case) for case in cases.values()} == set(decoder.type.__args__)


def test_a_hello_without_the_newer_fields_still_opens_a_session() -> None:
    short = msgspec.msgpack.encode([1, 1, 0, "arm", [["joints", 7, "float32"]], ["dx"]])
    hello = m.from_robot.decode(short)
    assert hello == m.Hello(1, 0, "arm", (m.StreamDeclaration("joints", 7, "float32"),), ("dx",))


@pytest.mark.parametrize(
    ("decoder", "message"), [(m.from_robot, m.Ping(7)), (m.to_robot, m.Phase("ready"))]
)
def test_fields_of_a_newer_robot_wire_are_skipped(decoder: Any, message: Any) -> None:
    fields = msgspec.msgpack.decode(m.encoder.encode(message))
    assert decoder.decode(msgspec.msgpack.encode([*fields, {"new": [1]}])) == message


def test_a_control_frame_with_an_unknown_field_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        m.control.decode(msgspec.msgpack.encode([6, 300, "new"]))


def test_the_version_of_a_hello_can_be_read_when_the_rest_cannot() -> None:
    foreign = msgspec.msgpack.encode([1, 2, 3, {"robot": "arm"}])
    with pytest.raises(m.DECODE_ERRORS):
        m.from_robot.decode(foreign)
    assert m.hello_version.decode(foreign) == m.HelloVersion(2, 3)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x98\xa6\xa6\xa6\xa6\xa6\xa6\xa6", id="tag is text, and not UTF-8"),
        pytest.param(b"\xdd\x7f\xff\xff\xff\x06", id="array of 2 billion"),
        pytest.param(b"\x95\x02\x07\x00\xc6\xff\xff\xff\xff", id="4 GiB of stamps"),
        pytest.param(b"\x91" * 100_000, id="deep nest"),
        pytest.param(m.encoder.encode(m.Lost(7)), id="an answer, not a question"),
        pytest.param(msgspec.msgpack.encode([6, -1]), id="negative session"),
        pytest.param(msgspec.msgpack.encode([6, 2**63]), id="session beyond int64"),
        pytest.param(msgspec.msgpack.encode([1, 1, 0, "x" * 65, [], []]), id="name too long"),
        pytest.param(msgspec.msgpack.encode([1, 1, 0, "x", [], ["a"] * 1025]), id="1025 actions"),
    ],
)
def test_a_hostile_frame_raises_only_what_is_caught(frame: bytes) -> None:
    with pytest.raises(m.DECODE_ERRORS):
        m.from_robot.decode(frame)
