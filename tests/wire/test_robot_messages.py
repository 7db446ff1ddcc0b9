"""The wire: what was written by this version of a message is read by every later one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from golden_messages import NEWEST, VERSIONS, path_of

from ppstream.wire import rank_messages
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import DECODE_ERRORS, encoder

CASES = [
    pytest.param(family, version, decoder, name, message, id=f"{family}-{version}-{name}")
    for family, version, decoder, rows in VERSIONS
    for name, message in rows.items()
]


@pytest.mark.parametrize(("family", "version", "decoder", "name", "message"), CASES)
def test_bytes_of_every_minor_version_still_decode(
    family: str, version: str, decoder: Any, name: str, message: Any
) -> None:
    golden = path_of(family, version, name).read_bytes()
    assert decoder.decode(golden) == message
    if version == NEWEST:
        assert encoder.encode(message) == golden


@pytest.mark.parametrize(
    ("decoder", "rows"), [(d, rows) for _, version, d, rows in VERSIONS if version == NEWEST]
)
def test_every_message_of_a_union_has_golden_bytes(decoder: Any, rows: dict[str, Any]) -> None:
    assert {type(row) for row in rows.values()} == set(decoder.type.__args__)


class HelloOf10(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Hello as a program of wire version 1.0 declares it."""

    major: int
    minor: int
    robot: str
    streams: tuple[tuple[Any, ...], ...]
    actions: tuple[str, ...]
    resumes: int = 0
    real_time: bool = True


def test_a_hello_of_1_1_is_read_by_a_program_of_1_0() -> None:
    golden = path_of("from_robot", "1.1", "hello").read_bytes()
    hello = msgspec.msgpack.decode(golden, type=HelloOf10)
    assert (hello.minor, hello.robot, hello.resumes, hello.real_time) == (1, "arm", 11, False)


def test_a_hello_without_the_newer_fields_still_opens_a_session() -> None:
    short = msgspec.msgpack.encode([1, 1, 0, "arm", [["joints", 7, "float32"]], ["dx"]])
    hello = m.from_robot.decode(short)
    assert hello == m.Hello(1, 0, "arm", (m.StreamDeclaration("joints", 7, "float32"),), ("dx",))


@pytest.mark.parametrize(
    ("decoder", "message"), [(m.from_robot, m.Ping(7)), (m.to_robot, m.Phase("ready"))]
)
def test_fields_of_a_newer_robot_wire_are_skipped(decoder: Any, message: Any) -> None:
    values = msgspec.msgpack.decode(encoder.encode(message))
    assert decoder.decode(msgspec.msgpack.encode([*values, {"new": [1]}])) == message


def test_a_control_frame_with_an_unknown_field_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        rank_messages.control.decode(msgspec.msgpack.encode([6, 300, "new"]))


def test_the_version_of_a_hello_can_be_read_when_the_rest_cannot() -> None:
    foreign = msgspec.msgpack.encode([1, 2, 3, {"robot": "arm"}])
    with pytest.raises(DECODE_ERRORS):
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
        pytest.param(encoder.encode(m.Lost(7)), id="an answer, not a question"),
        pytest.param(msgspec.msgpack.encode([6, -1]), id="negative session"),
        pytest.param(msgspec.msgpack.encode([6, 2**63]), id="session beyond int64"),
        pytest.param(msgspec.msgpack.encode([1, 1, 0, "x" * 65, [], []]), id="name too long"),
        pytest.param(msgspec.msgpack.encode([1, 1, 0, "x", [], ["a"] * 1025]), id="1025 actions"),
    ],
)
def test_a_hostile_frame_raises_only_what_is_caught(frame: bytes) -> None:
    with pytest.raises(DECODE_ERRORS):
        m.from_robot.decode(frame)


@pytest.mark.parametrize(
    ("decoder", "name", "field"),
    [
        (m.from_robot, "prefix", "dt_ns"),
        (m.to_robot, "action_chunk", "dt_ns"),
        (m.to_robot, "welcome", "dt_ns"),
        (m.to_robot, "welcome", "lease_ns"),
        (m.to_robot, "welcome", "silence_ns"),
    ],
)
def test_a_duration_of_nothing_is_none(decoder: Any, name: str, field: str) -> None:
    (message,) = (rows[name] for _, v, d, rows in VERSIONS if v == NEWEST and d is decoder)
    for span, fits in ((1, True), (0, False), (-1, False)):
        frame = encoder.encode(msgspec.structs.replace(message, **{field: span}))
        with nullcontext() if fits else pytest.raises(msgspec.ValidationError, match=">= 1"):
            decoder.decode(frame)
