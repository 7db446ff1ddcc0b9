from __future__ import annotations

import select
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from robot_rig import make_config, wait_until
from session_desk import STREAMS, Desk, hello, open_desk, samples

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.sessions.table import (
    CHANGES_PER_S,
    DRAIN_FRAMES,
    DRAIN_NS,
    HEADER_BYTES,
    SILENCE_NS,
    STRANGER_FRAMES_PER_S,
    frame_bytes_max,
    frames_per_second,
)
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import (
    MAX_DIM,
    MAX_INSTRUCTION,
    MAX_NAME,
    MAX_PUSH_BYTES,
    WIRE_MAJOR,
    WIRE_MINOR,
    encoder,
)
from ppstream.wire.robot_messages import CHANGE_BYTES_MAX

CONFIG = make_config(rows=2)
LIMIT = frames_per_second(CONFIG)
SAMPLES_LIMIT = CONFIG.samples_per_second(CONFIG.streams[0])
pytestmark = pytest.mark.usefixtures("either_socket")


@pytest.fixture
def desk() -> Iterator[Desk]:
    with open_desk(rows=2) as desk:
        desk.sessions.drain(desk.now_ns)  # a second begins
        yield desk


@pytest.mark.parametrize(("extra", "dropped"), [(-1, {}), (0, {}), (1, {"rate": 1})])
def test_a_robot_may_send_so_many_frames_a_second_and_not_one_more(
    desk: Desk, extra: int, dropped: dict[str, int]
) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, *[m.Ping(session)] * (LIMIT + extra))
    assert desk.sessions.statistics().frames_dropped == dropped
    desk.now_ns += NS_PER_S
    desk.send(robot, m.Ping(session))  # the next second begins
    assert desk.sessions.statistics().frames_dropped == dropped


def test_a_flood_of_one_robot_takes_nothing_from_another(desk: Desk) -> None:
    loud, quiet = desk.robot(), desk.robot()
    desk.admit(loud, robot="loud")
    session = desk.admit(quiet, robot="quiet").session
    desk.send(loud, *[b"\xc1"] * (LIMIT + 1000))
    dropped = desk.sessions.statistics().frames_dropped
    assert dropped["rate"] == 1000  # unread, while the others could not be decoded
    assert desk.send(quiet, *[samples(session, stamp) for stamp in range(1, 101)]) == 100
    assert desk.sessions.statistics().frames_dropped == dropped


def test_a_reset_behind_a_burst_is_heard(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, *[samples(session, 1)] * (LIMIT + 10), m.ResetRequest(session))
    desk.send(robot, samples(session, 2))
    statistics = desk.sessions.statistics()
    assert (desk.rows[0].session_epoch, statistics.resets) == (1, 1)
    assert statistics.frames_dropped == {"rate": 11}


def test_the_longest_instruction_behind_a_burst_is_heard() -> None:
    config = make_config(rows=2)
    policy = msgspec.structs.replace(config.policy, instructions=True)
    with open_desk(config=msgspec.structs.replace(config, policy=policy)) as desk:
        asked: list[str] = []
        desk.sessions.requests.attach(
            lambda _, text, confirm: asked.append(text), lambda *_, **__: None
        )
        robot = desk.robot()
        session = desk.admit(robot).session
        text = "\U0001f600" * MAX_INSTRUCTION
        desk.send(robot, *[m.Ping(session)] * LIMIT, m.Instruct(session, 1, text))
        assert asked == [text]
        assert desk.sessions.statistics().frames_dropped == {}


def test_a_goodbye_behind_a_burst_is_heard(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, *[m.Ping(session)] * LIMIT, m.Bye(session))
    assert desk.sessions.statistics().closed == {"bye": 1}


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_robot_whose_resets_cannot_be_heard_any_more_learns_that_its_session_is_over(
    desk: Desk, extra: int
) -> None:
    loud, quiet, waits = desk.robot(), desk.robot(), desk.robot()
    lost = desk.admit(loud, robot="loud").session
    session = desk.admit(quiet, robot="quiet").session
    desk.send(waits, hello(robot="waits"))
    assert desk.receive(waits).reason == "full"
    desk.send(loud, *[m.Ping(lost)] * LIMIT)
    desk.send(loud, *[m.ResetRequest(lost)] * (CHANGES_PER_S + extra))
    statistics = desk.sessions.statistics()
    assert statistics.resets == CHANGES_PER_S + min(extra, 0)
    assert statistics.closed == ({"rate": 1} if extra > 0 else {})
    assert statistics.frames_dropped == ({"rate": 1} if extra > 0 else {})
    if extra > 0:
        assert desk.receive(loud) == m.Lost(lost)
        assert isinstance(desk.receive(waits), m.Welcome)
    assert desk.send(quiet, *[samples(session, stamp) for stamp in range(1, 101)]) == 100
    desk.now_ns += NS_PER_S
    desk.send(quiet, *[m.Ping(session)] * LIMIT)  # the next second begins
    desk.send(quiet, *[m.ResetRequest(session)] * CHANGES_PER_S)
    assert desk.sessions.statistics().closed == statistics.closed


@pytest.mark.parametrize("body", [b"\x94", b"\x92\x04" + bytes(CHANGE_BYTES_MAX)])
def test_what_is_too_short_or_too_long_to_be_a_reset_is_not_read_beyond_the_limit(
    desk: Desk, body: bytes
) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, *[m.Ping(session)] * LIMIT, *[body] * (CHANGES_PER_S + 1))
    statistics = desk.sessions.statistics()
    assert (statistics.frames_dropped, statistics.open) == ({"rate": CHANGES_PER_S + 1}, 1)


@pytest.mark.parametrize("message", [m.Ping(9), m.Describe(WIRE_MAJOR, WIRE_MINOR)])
@pytest.mark.parametrize(("extra", "over"), [(-1, 0), (0, 0), (1, 1)])
def test_strangers_share_one_limit(desk: Desk, extra: int, over: int, message: Any) -> None:
    one, other = desk.robot(), desk.robot()
    desk.send(one, *[message] * 100)
    desk.send(other, *[message] * (STRANGER_FRAMES_PER_S - 100 + extra))
    assert desk.sessions.statistics().frames_dropped.get("rate", 0) == over
    desk.now_ns += NS_PER_S
    desk.admit(desk.robot())


def test_a_lone_robot_may_replay_as_fast_as_it_can() -> None:
    assert frames_per_second(make_config(rows=1)) > 10**9


def lone_config() -> PipelineConfig:
    config = make_config()
    return msgspec.structs.replace(config, streams=config.streams[:1])


def test_a_lone_robot_that_never_pauses_keeps_nobody_out() -> None:
    with open_desk(config=lone_config()) as desk:
        loud, other = desk.robot(), desk.robot()
        session = desk.admit(loud, streams=STREAMS[:1]).session
        stamps_ns = count(1, NS_PER_MS)
        desk.send(loud, samples(session, next(stamps_ns)))
        other.send(encoder.encode(m.Describe(WIRE_MAJOR, WIRE_MINOR)))
        answers: list[Any] = []

        def hear() -> list[Any]:
            desk.now_ns += NS_PER_MS
            loud.send(encoder.encode(samples(session, next(stamps_ns))))  # always one to read
            desk.sessions.drain(desk.now_ns)
            answers.extend(other.drain())
            return answers

        # a local message is there once it was sent; elsewhere the network takes what it takes
        while desk.sessions.endpoint.startswith("unix://") and not hear():
            assert desk.now_ns < 11 * NS_PER_S
        wait_until(lambda: answers or hear())
    assert isinstance(m.to_robot.decode(answers[0].body), m.Described)


def test_all_that_a_lone_robot_says_is_taken_in_turn_and_counted() -> None:
    with open_desk(config=lone_config()) as desk:
        robot = desk.robot()
        session = desk.admit(robot, streams=STREAMS[:1]).session
        ring = desk.rows[0].reference
        desk.send(robot, samples(session, 1))
        desk.now_ns += NS_PER_MS  # no stamp leads more than the first one
        bad = msgspec.structs.replace(samples(session, 5), values=memoryview(b"\0" * 8))
        sent = [samples(session, 2, 3), samples(session, 4), m.ResetRequest(session), bad]
        assert desk.send(robot, *sent, samples(session, 6), samples(session + 1, 7)) == 4
        assert (ring.count, ring.newest_ns, desk.rows[0].session_epoch) == (1, 6, 1)
        assert ring.ledger.dropped["new_episode"] == 4
        assert ring.ledger.dropped["shape"] == 1
        statistics = desk.sessions.statistics()
        assert statistics.frames_dropped == {"stranger": 1}
        assert statistics.frames_handled == 7  # and its Hello


@pytest.mark.parametrize(
    ("dim", "limit"), [(3, MAX_PUSH_BYTES), (MAX_PUSH_BYTES, 4 * MAX_PUSH_BYTES)]
)
def test_the_largest_frame_holds_a_push_and_a_sample(dim: int, limit: int) -> None:
    config = make_config()
    stream = msgspec.structs.replace(config.streams[0], dim=dim)
    config = msgspec.structs.replace(config, streams=(stream,))
    assert frame_bytes_max(config) == limit + HEADER_BYTES


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ((WIRE_MAJOR, WIRE_MINOR), None),
        ((WIRE_MAJOR, WIRE_MINOR - 1), None),
        ((WIRE_MAJOR, WIRE_MINOR + 1), "upgrade ppstream on rank 0"),
        ((WIRE_MAJOR, WIRE_MINOR - 2), "upgrade ppstream on the robot"),
        ((WIRE_MAJOR + 1, 0), "upgrade ppstream on rank 0"),
        ((WIRE_MAJOR - 1, 7), "upgrade ppstream on the robot"),
    ],
)
def test_this_minor_version_and_the_one_before_are_served(
    desk: Desk, version: tuple[int, int], advice: str | None
) -> None:
    robot = desk.robot()
    desk.send(robot, hello(major=version[0], minor=version[1]))
    answer = desk.receive(robot)
    if advice is None:
        assert isinstance(answer, m.Welcome)
        assert (answer.major, answer.minor) == (WIRE_MAJOR, WIRE_MINOR)
    else:
        assert answer.reason == "version"
        assert f"got {version[0]}.{version[1]}; {advice}" in answer.details[0]


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"robot": "x" * MAX_NAME}, True),
        ({"robot": "x" * (MAX_NAME + 1)}, False),
        ({"robot": ""}, False),
        ({"instruction": "x" * MAX_INSTRUCTION}, True),
        ({"instruction": "x" * (MAX_INSTRUCTION + 1)}, False),
    ],
)
def test_texts_of_a_hello_have_a_longest_form(
    desk: Desk, changes: dict[str, Any], fits: bool
) -> None:
    desk.send(desk.robot(), hello(**changes))
    statistics = desk.sessions.statistics()
    assert (statistics.opened, statistics.frames_dropped) == (
        (1, {}) if fits else (0, {"undecodable": 1})
    )


@pytest.mark.parametrize(("count", "fits"), [(255, True), (256, True), (257, False)])
def test_a_hello_declares_at_most_256_streams(desk: Desk, count: int, fits: bool) -> None:
    streams = tuple(m.StreamDeclaration(f"s{n}", 1, "float32") for n in range(count))
    desk.send(desk.robot(), hello(streams=streams))
    statistics = desk.sessions.statistics()
    assert statistics.refused == ({"contract": 1} if fits else {})
    assert statistics.frames_dropped == ({} if fits else {"undecodable": 1})


def test_an_encoding_that_the_stream_does_not_have_is_another_contract(desk: Desk) -> None:
    robot = desk.robot()
    joints = msgspec.structs.replace(STREAMS[0], encoding="jpeg")
    desk.send(robot, hello(streams=(joints, STREAMS[1])))
    assert desk.receive(robot).details == ("stream 'joints': expected raw, got jpeg",)


@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
def test_names_of_actions_and_values_of_a_sample_have_a_largest_number(
    desk: Desk, over: int, fits: bool
) -> None:
    desk.send(desk.robot(), hello(actions=("a",) * (1024 + over)))
    wide = m.StreamDeclaration("joints", MAX_DIM + over, "float32")
    desk.send(desk.robot(), hello(streams=(wide,)))
    statistics = desk.sessions.statistics()
    assert statistics.refused == ({"contract": 2} if fits else {})
    assert statistics.frames_dropped == ({} if fits else {"undecodable": 2})


@pytest.mark.parametrize(("rows", "answer"), [(1, "full"), (2, None)])
def test_so_many_robots_are_admitted_as_there_are_rows(rows: int, answer: str | None) -> None:
    with open_desk(rows=rows) as desk:
        desk.admit(desk.robot(), robot="first")
        second = desk.robot()
        desk.send(second, hello(robot="second"))
        heard = desk.receive(second)
        assert (heard.reason if isinstance(heard, m.Refused) else None) == answer


@pytest.mark.parametrize(("extra", "over"), [(-1, 0), (0, 0), (1, 1)])
def test_a_robot_may_send_so_many_samples_of_a_stream_a_second_and_not_one_more(
    desk: Desk, extra: int, over: int
) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    half = range(1, SAMPLES_LIMIT // 2 + 1)
    rest = range(half.stop, SAMPLES_LIMIT + 1 + extra)
    desk.send(
        robot, samples(session, *half), samples(session, *rest), samples(session, 1, stream=1)
    )
    ledger = desk.rows[0].rings["joints"].ledger
    assert ledger.received == SAMPLES_LIMIT + extra
    assert ledger.dropped.get("rate", 0) == over * len(rest)  # a frame is one or none
    assert desk.rows[0].rings["imu"].ledger.in_flight == 1  # each stream has a limit of its own
    desk.now_ns += NS_PER_S
    desk.send(robot, samples(session, 10**6))  # the next second begins
    assert ledger.dropped.get("rate", 0) == over * len(rest)


def test_a_ring_full_may_come_at_once_and_a_lone_robot_s_samples_have_no_limit() -> None:
    stream = CONFIG.streams[0]
    assert CONFIG.ring_samples(stream) + 4 * stream.rate_hz == SAMPLES_LIMIT
    assert make_config(rows=1).samples_per_second(stream) > 10**9


@pytest.mark.parametrize(("look_ns", "readings"), [(0, 4), (DRAIN_NS // 2, 2), (DRAIN_NS, 1)])
def test_a_drain_ends_when_its_time_is_over_and_asks_for_another(
    look_ns: int, readings: int
) -> None:
    looks = count(0, look_ns)
    with open_desk(rows=2, clock=lambda: next(looks)) as desk:
        robot = desk.robot()
        ping = encoder.encode(m.Ping(desk.admit(robot).session))
        woken: list[int] = []
        desk.sessions.set_wake(lambda: woken.append(1))
        taken = [4 * DRAIN_FRAMES]

        def takes_all_it_may() -> bool:
            """Puts back what was taken before, since it may not all have been there."""
            for _ in range(taken[-1]):
                wait_until(lambda: robot.send(ping))
            before = desk.sessions.statistics().frames_received
            desk.sessions.drain(desk.now_ns)
            taken.append(desk.sessions.statistics().frames_received - before)
            return taken[-1] >= readings * DRAIN_FRAMES

        wait_until(takes_all_it_may)
        assert taken[-1] == readings * DRAIN_FRAMES
        is_announced = woken or select.select(desk.sessions.fds, [], [], 0)[0]
        assert is_announced or taken[-1] == taken[0], "what is left waits and nobody says so"


def test_robots_are_heard_in_turn_beside_one_that_fills_its_socket() -> None:
    looks = count(0, DRAIN_NS)  # each drain reads once
    with open_desk(rows=2, clock=lambda: next(looks)) as desk:
        loud, quiet = desk.robot(), desk.robot()
        ping = encoder.encode(m.Ping(desk.admit(loud, robot="loud").session))
        session = desk.admit(quiet, robot="quiet").session
        sent = 0

        def is_heard() -> bool:
            nonlocal sent
            sent += sum(loud.send(ping) for _ in range(10 * DRAIN_FRAMES))
            return desk.sessions.drain(desk.now_ns) == 1

        wait_until(lambda: quiet.send(encoder.encode(samples(session, 1))))
        wait_until(is_heard)
        waiting = sent - desk.sessions.statistics().frames_received
    assert waiting > DRAIN_FRAMES


def test_strangers_that_keep_the_socket_full_keep_no_silent_robot() -> None:
    looks = count(0, DRAIN_NS)  # each drain reads once
    with open_desk(rows=2, clock=lambda: next(looks)) as desk:
        loud = desk.robot()
        desk.admit(desk.robot())
        begun_ns = desk.now_ns
        while desk.sessions.statistics().open:
            assert desk.now_ns < begun_ns + 2 * SILENCE_NS + NS_PER_S
            desk.now_ns += NS_PER_S // 10
            for _ in range(4 * DRAIN_FRAMES):
                loud.send(b"\xc1")
            desk.sessions.drain(desk.now_ns)
        assert desk.sessions.statistics().closed == {"silent": 1}


def test_a_robot_whose_frames_wait_behind_others_after_a_pause_is_not_silent(
    tmp_path: Path,
) -> None:
    looks = count(0, DRAIN_NS)  # each drain reads once
    config = make_config(f"unix://{tmp_path}/here/robot", rows=2)
    with open_desk(config=config, clock=lambda: next(looks)) as desk:
        robot, others = desk.robot(), [desk.robot() for _ in range(2 * DRAIN_FRAMES)]
        session = desk.admit(robot).session
        for other in others:
            desk.send(other, b"\xc1")
        before = desk.sessions.statistics().frames_received
        for each in (*others, *others, robot):
            each.send(encoder.encode(m.Ping(session)))
        desk.now_ns += 3 * SILENCE_NS
        for _ in range(2):
            desk.sessions.drain(desk.now_ns)
            desk.now_ns += NS_PER_MS
        heard = desk.sessions.statistics().frames_received - before
        assert heard <= len(others)  # the robot is behind them
        while desk.sessions.statistics().frames_received - before <= 2 * len(others):
            desk.sessions.drain(desk.now_ns)
            desk.now_ns += NS_PER_MS
        assert desk.sessions.statistics().open == 1
