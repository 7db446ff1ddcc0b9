from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from fuzz.robots import fuzz_sessions
from robot_rig import MS, make_chunk, make_config, wait_until
from session_desk import STREAMS, Desk, hello, open_desk, samples

from ppstream.config.schema import ImageConfig, PipelineConfig, RobotLimits, StreamConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.errors import ConfigError
from ppstream.ingest.stamp_filter import NEVER_NS
from ppstream.sessions.contract import description
from ppstream.sessions.server import Sessions
from ppstream.sessions.table import SILENCE_NS
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import MAX_DETAILS, WIRE_MAJOR, WIRE_MINOR, encoder
from ppstream.wire.message_memory import LargeMessage
from ppstream.wire.message_socket import MessageSocket

pytestmark = pytest.mark.usefixtures("either_socket")


@pytest.fixture
def desk() -> Iterator[Desk]:
    with open_desk() as desk:
        yield desk


@pytest.fixture
def desk_of_two() -> Iterator[Desk]:
    with open_desk(rows=2) as desk:
        yield desk


@pytest.fixture
def desk_before_ready() -> Iterator[Desk]:
    with open_desk(phase="bring-up") as desk:
        yield desk


def test_a_robot_is_welcomed_with_phase_lease_and_limits(desk: Desk) -> None:
    welcome = desk.admit(desk.robot())
    assert welcome.phase == "ready"
    assert (welcome.lease_ns, welcome.horizon, welcome.dt_ns) == (200 * MS, 4, 10 * MS)
    assert (welcome.low, welcome.high) == ((-1.0, -1.0), (1.0, 1.0))
    assert desk.rows[0].session == welcome.session != 0


def test_a_robot_is_told_the_limits_of_its_own() -> None:
    config = make_config(rows=2)
    robots = {"arm": RobotLimits(high=(0.5, 0.5)), "other": RobotLimits(low=(0.0, 0.0))}
    actions = msgspec.structs.replace(config.actions, robots=robots)
    with open_desk(config=msgspec.structs.replace(config, actions=actions)) as desk:
        for robot, low, high in (("arm", -1.0, 0.5), ("other", 0.0, 1.0)):
            welcome = desk.admit(desk.robot(), robot=robot)
            assert (welcome.low, welcome.high) == ((low, low), (high, high))
        assert [row.robot for row in desk.rows] == ["arm", "other"]


def test_samples_reach_the_ring_of_their_stream(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    assert desk.send(robot, samples(session, 1, 2, 3), samples(session, 7, stream=1)) == 4
    rings = desk.rows[0].rings
    assert (rings["joints"].count, rings["joints"].newest_ns) == (3, 3)
    assert (rings["imu"].count, rings["imu"].newest_ns) == (1, 7)
    assert rings["imu"].newest_rx_ns == desk.now_ns


@pytest.mark.parametrize(
    ("stamps", "values"),
    [(b"\0" * 8, b"\0" * 8), (b"\0" * 9, b"\0" * 12), (b"\0" * 16, b"\0" * 12), (b"", b"\0")],
)
def test_samples_of_a_wrong_size_are_counted_as_shape(
    desk: Desk, stamps: bytes, values: bytes
) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, m.Samples(session, 0, memoryview(stamps), memoryview(values)))
    assert [*desk.rows[0].rings["joints"].ledger.dropped] == ["shape"]


def test_a_stream_that_was_not_declared_is_counted(desk: Desk) -> None:
    robot = desk.robot()
    message = samples(desk.admit(robot).session, 1)
    desk.send(robot, msgspec.structs.replace(message, stream=2))
    assert desk.sessions.statistics().frames_dropped == {"stream": 1}


def test_a_stranger_is_told_that_the_session_is_lost(desk: Desk) -> None:
    robot = desk.robot()
    desk.send(robot, m.Ping(99))
    assert desk.receive(robot) == m.Lost(99)
    assert desk.sessions.statistics().frames_dropped == {"stranger": 1}


def test_nobody_can_speak_for_another_ones_session(desk: Desk) -> None:
    victim, thief = desk.robot(), desk.robot()
    session = desk.admit(victim).session
    assert desk.send(thief, samples(session, 1), m.Bye(session)) == 0
    assert desk.rows[0].session == session


def test_an_older_session_of_the_same_connection_is_a_strangers(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    assert desk.send(robot, samples(session + 1, 1)) == 0
    assert desk.receive(robot) == m.Lost(session + 1)


@pytest.mark.parametrize("phase", ["warming", "bring-up", "ready", "degraded", "draining"])
def test_the_contract_is_told_in_every_phase_and_takes_no_row(phase: str) -> None:
    with open_desk(phase=None) as desk:
        robot = desk.robot()
        desk.send(robot, m.Describe(WIRE_MAJOR, WIRE_MINOR))
        assert desk.receive(robot) == description(desk.config, "starting")
        desk.sessions.set_phase(phase)
        desk.send(robot, m.Describe(WIRE_MAJOR, WIRE_MINOR - 1))
        assert desk.receive(robot) == description(desk.config, phase)
        statistics = desk.sessions.statistics()
        assert (statistics.opened, statistics.frames_handled) == (0, 2)
        assert statistics.frames_dropped == {}


def test_a_robot_with_a_session_may_ask_for_the_contract_too(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, m.Describe(WIRE_MAJOR, WIRE_MINOR))
    assert desk.receive(robot) == description(desk.config, "ready")
    assert desk.send(robot, samples(session, 1)) == 1


def test_the_contract_is_not_told_in_words_of_another_version(desk: Desk) -> None:
    robot = desk.robot()
    desk.send(robot, m.Describe(WIRE_MAJOR, WIRE_MINOR + 1))
    answer = desk.receive(robot)
    assert answer.reason == "version"
    assert "upgrade ppstream on rank 0" in answer.details[0]


def test_strangers_are_answered_seldom(desk: Desk) -> None:
    robot = desk.robot()
    desk.send(robot, *[m.Ping(number) for number in range(50)])
    assert desk.receive(robot) == m.Lost(0)
    assert robot.drain() == []


def test_a_frame_that_is_nested_too_deep_costs_nobody_anything(desk: Desk) -> None:
    ping = msgspec.msgpack.encode([6, 99, None])
    desk.send(desk.robot(), ping[:-1] + b"\x91" * 50_000)  # behind the fields that are known
    assert desk.sessions.statistics().frames_dropped == {"undecodable": 1}
    robot = desk.robot()
    assert desk.send(robot, samples(desk.admit(robot).session, 1)) == 1


def test_another_contract_is_refused_with_the_difference(desk: Desk) -> None:
    robot = desk.robot()
    desk.send(robot, hello(streams=STREAMS[:1], actions=("dy", "dx")))
    assert desk.receive(robot) == m.Refused(
        "contract",
        (
            "stream 'imu': expected [2] float64, got none",
            "action 0: expected 'dx', got 'dy'",
            "action 1: expected 'dy', got 'dx'",
        ),
    )
    assert desk.sessions.statistics().refused == {"contract": 1}


@pytest.mark.parametrize(
    "frame",
    [
        encoder.encode(hello(major=2, minor=0)),
        msgspec.msgpack.encode([1, 2, 0, {"unlike": 1}]),
    ],
)
def test_another_major_version_is_refused_also_when_it_cannot_be_read(
    desk: Desk, frame: bytes
) -> None:
    robot = desk.robot()
    desk.send(robot, frame)
    answer = desk.receive(robot)
    assert answer.reason == "version"
    assert "expected 1.1 or 1.2, got 2.0; upgrade ppstream on rank 0" in answer.details[0]


def test_a_refusal_always_fits_the_wire(desk: Desk) -> None:
    robot = desk.robot()
    streams = tuple(m.StreamDeclaration(f"s{n}", 1, "float32") for n in range(256))
    desk.send(robot, hello(streams=streams, actions=("x" * 64,) * 1024))
    assert len(desk.receive(robot).details) == MAX_DETAILS


def test_when_all_rows_are_taken_a_further_robot_is_refused(desk: Desk) -> None:
    desk.admit(desk.robot())
    other = desk.robot()
    desk.send(other, hello(robot="other"))
    assert desk.receive(other).reason == "full"


def test_each_robot_has_a_row_of_its_own(desk_of_two: Desk) -> None:
    desk = desk_of_two
    one, two = desk.robot(), desk.robot()
    first, second = desk.admit(one).session, desk.admit(two, robot="two").session
    desk.send(two, samples(second, 5))
    assert [row.session for row in desk.rows] == [first, second]
    assert [row.rings["joints"].count for row in desk.rows] == [0, 1]
    desk.send(one, m.ResetRequest(first))
    assert [row.session_epoch for row in desk.rows] == [1, 0]
    assert desk.rows[1].rings["joints"].count == 1


def test_a_name_is_free_again_when_its_holder_has_been_silent(desk: Desk) -> None:
    desk.admit(desk.robot())
    newcomer = desk.robot()
    desk.send(newcomer, hello())
    assert desk.receive(newcomer).reason == "name_in_use"
    desk.now_ns += SILENCE_NS
    desk.sessions.drain(desk.now_ns)
    desk.admit(newcomer)
    assert desk.sessions.statistics().closed == {"silent": 1}


def test_each_robot_is_given_up_when_its_own_silence_has_lasted(desk_of_two: Desk) -> None:
    desk = desk_of_two
    desk.admit(desk.robot(), robot="one")
    desk.now_ns += SILENCE_NS // 2
    desk.admit(desk.robot(), robot="two")
    left = []
    for pause_ns in (SILENCE_NS // 2 - 1, 1, SILENCE_NS // 2 - 1, 1):
        desk.now_ns += pause_ns
        desk.sessions.drain(desk.now_ns)
        left.append([row.robot for row in desk.rows if row.session])
    assert left == [["one", "two"], ["two"], ["two"], []]


def test_the_same_robot_takes_its_place_back_at_once(desk: Desk) -> None:
    before = desk.admit(desk.robot()).session
    after = desk.admit(desk.robot(), resumes=before).session
    assert after != before
    assert desk.rows[0].session == after
    assert desk.sessions.statistics().closed == {"resumed": 1}


def test_a_hello_sent_twice_opens_one_session(desk: Desk) -> None:
    robot = desk.robot()
    assert desk.admit(robot).session == desk.admit(robot).session
    assert desk.sessions.statistics().opened == 1


def test_a_robot_that_says_anything_is_not_silent(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    assert desk.sessions.next_due_ns() == desk.now_ns + SILENCE_NS
    desk.now_ns += SILENCE_NS - 1
    desk.send(robot, m.Ping(session))
    desk.now_ns += SILENCE_NS - 1
    desk.sessions.drain(desk.now_ns)
    assert desk.rows[0].session == session
    assert desk.sessions.next_due_ns() == desk.now_ns + 1


def test_frames_that_wait_in_the_socket_count_before_silence_does(desk: Desk) -> None:
    # rank 0 itself was stopped for longer than the limit; the robot was not
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.now_ns += 10 * SILENCE_NS
    assert robot.send(encoder.encode(m.Ping(session)))
    wait_until(lambda: _is_readable(desk.sessions.fds[0]))
    desk.sessions.drain(desk.now_ns)
    assert desk.rows[0].session == session


def _is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_a_reset_empties_the_rings_and_begins_an_episode(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, samples(session, 1, 2), m.ResetRequest(session))
    assert desk.rows[0].session_epoch == 1
    assert not desk.rows[0].present


def test_a_robot_that_leaves_frees_its_row(desk: Desk) -> None:
    robot = desk.robot()
    desk.send(robot, m.Bye(desk.admit(robot).session))
    assert desk.rows[0].session == 0
    assert desk.sessions.next_due_ns() is None


def test_reports_are_kept_for_the_log(desk: Desk) -> None:
    robot = desk.robot()
    report = m.ChunkReport(desk.admit(robot).session, 0, 5, 30 * MS, 2)
    desk.send(robot, report)
    assert [*desk.sessions.reports] == [report]


def test_a_chunk_reaches_its_robot(desk: Desk) -> None:
    robot = desk.robot()
    chunk = make_chunk(5, session=desk.admit(robot).session, end_ns=-3)
    desk.sessions.emit(0, chunk)
    assert desk.receive(robot) == chunk
    assert desk.sessions.statistics().chunks_sent == 1


def test_a_chunk_that_is_nobodys_is_dropped_with_its_reason(desk: Desk) -> None:
    robot = desk.robot()
    desk.sessions.emit(0, make_chunk(session=1))
    session = desk.admit(robot).session
    desk.sessions.emit(0, make_chunk(session=1))
    desk.sessions.emit(0, make_chunk(session=session, episode=1))
    desk.sessions.set_phase("draining")
    desk.sessions.emit(0, make_chunk(session=session))
    desk.sessions.set_phase("ready")
    for phase in ("draining", "ready"):
        assert desk.receive(robot) == m.Phase(phase)
    robot.close()

    def is_unreachable() -> bool:
        desk.sessions.emit(0, make_chunk(session=session))
        return "undeliverable" in desk.sessions.statistics().chunks_dropped

    wait_until(is_unreachable)
    dropped = desk.sessions.statistics().chunks_dropped
    assert dropped.pop("undeliverable") == 1
    assert dropped == {"no_session": 2, "episode": 1, "not_ready": 1}


def test_before_ready_a_robot_is_admitted_and_touches_no_row(desk_before_ready: Desk) -> None:
    desk = desk_before_ready
    robot = desk.robot()
    welcome = desk.admit(robot)
    assert welcome.phase == "bring-up"
    desk.rows[0].open(1)  # bring-up's own samples
    assert desk.send(robot, samples(welcome.session, 1, 2), m.ResetRequest(welcome.session)) == 0
    desk.sessions.emit(0, make_chunk(session=welcome.session))
    assert desk.sessions.statistics().chunks_dropped == {"not_ready": 1}
    assert desk.sessions.statistics().samples_early == 2
    desk.rows[0].close()

    desk.sessions.set_phase("ready")
    assert desk.receive(robot) == m.Phase("ready")
    assert (desk.rows[0].session, desk.rows[0].session_epoch) == (welcome.session, 1)
    assert desk.send(robot, samples(welcome.session, 3)) == 1


def test_nobody_is_admitted_while_the_run_ends(desk: Desk) -> None:
    desk.sessions.set_phase("draining")
    robot = desk.robot()
    desk.send(robot, hello())
    assert desk.receive(robot).reason == "draining"


def test_without_an_endpoint_there_are_no_sessions() -> None:
    config = make_config()
    service = msgspec.structs.replace(config.service, endpoint=None)
    with pytest.raises(ConfigError, match=r"service\.endpoint"):
        Sessions(msgspec.structs.replace(config, service=service), [])


def test_ten_thousand_fuzzed_frames_are_counted_while_another_robot_is_served() -> None:
    counts = fuzz_sessions(10_000, seed=0)  # raises when a frame is lost or the robot not served
    assert counts["sent"] == 10_000
    assert counts["dropped undecodable"] > 1000
    assert counts["handled"] > 1000


SIDE = 128  # of frames that are larger than a packet


def config_with_cameras(rows: int = 2) -> PipelineConfig:
    image = ImageConfig(height=SIDE, width=SIDE)
    cameras = [
        StreamConfig(name=name, dim=SIDE * SIDE * 3, rate_hz=30.0, dtype="uint8", image=image)
        for name in ("left", "right")
    ]
    config = make_config(rows=rows)
    return msgspec.structs.replace(config, streams=(*config.streams, *cameras))


class LocalRobot(NamedTuple):
    desk: Desk
    socket: MessageSocket
    session: int


@pytest.fixture
def desk_with_cameras() -> Iterator[Desk]:
    with open_desk(config=config_with_cameras()) as desk:
        yield desk


@pytest.fixture
def local_robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRobot]:
    """A robot with cameras whose frames lie in memory that it shares."""
    monkeypatch.setattr("robot_rig.default_endpoint", f"unix://{tmp_path}/own")
    with open_desk(config=config_with_cameras()) as desk:
        socket = desk.robot()
        yield LocalRobot(desk, socket, admit_with_cameras(desk, socket))


def frames(session: int, *stamps_ns: int, stream: int = 3, seed: int = 0) -> m.Samples:
    shape = (len(stamps_ns), SIDE * SIDE * 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return m.Samples(session, stream, np.array(stamps_ns, np.int64).data, pixels.data)


def admit_with_cameras(desk: Desk, robot: MessageSocket, name: str = "arm") -> int:
    sides = [m.StreamDeclaration(name, SIDE * SIDE * 3, "uint8") for name in ("left", "right")]
    return desk.admit(robot, robot=name, streams=(*STREAMS, *sides)).session


def test_a_large_frame_comes_into_the_ring_of_its_camera_and_robot(desk_with_cameras: Desk) -> None:
    desk = desk_with_cameras
    robots = [desk.robot(), desk.robot()]
    sessions = [admit_with_cameras(desk, robot, f"arm {n}") for n, robot in enumerate(robots)]
    for number, (robot, session) in enumerate(zip(robots, sessions, strict=True)):
        for stream in (2, 3):
            message = frames(session, 7, stream=stream, seed=2 * number + stream)
            assert desk.send(robot, message) == 1
    for number, row in enumerate(desk.rows):
        for stream, name in ((2, "left"), (3, "right")):
            bank, sent = row.rings[name].bank, frames(1, 7, seed=2 * number + stream)
            assert bank.values[number, 0].numpy().tobytes() == sent.values.tobytes()
            assert (row.rings[name].count, row.rings["joints"].count) == (1, 0)
    assert desk.sessions.statistics().frames_dropped == {}


def test_large_frames_are_judged_as_small_ones(desk_with_cameras: Desk) -> None:
    desk = desk_with_cameras
    robot, other = desk.robot(), desk.robot()
    session = admit_with_cameras(desk, robot)
    ring, sessions = desk.rows[0].rings["right"], desk.sessions
    assert desk.send(robot, frames(session, 5), frames(session, 7, 8)) == 3
    assert desk.send(robot, frames(session, 8), frames(session, 6)) == 0
    assert ring.ledger.dropped == {"duplicate": 1, "late": 1}
    short = m.Samples(session, 3, frames(1, 9).stamps, memoryview(bytes(SIDE * SIDE * 3 - 1)))
    assert desk.send(robot, short) == 0
    assert ring.ledger.dropped["shape"] == 1
    assert desk.send(robot, frames(session, 9, stream=9), frames(session + 1, 9)) == 0
    assert desk.send(other, frames(session, 9)) == 0
    assert sessions.statistics().frames_dropped == {"stream": 1, "stranger": 2}
    assert (ring.count, ring.newest_ns) == (3, 8)


@pytest.mark.parametrize("spoil", ["longer", "shorter", "other length", "other stream"])
def test_a_large_message_that_is_nearly_a_frame_is_none(
    local_robot: LocalRobot, spoil: str
) -> None:
    desk, robot, session = local_robot
    whole = bytearray(encoder.encode(frames(session, 7)))
    length_at = len(whole) - SIDE * SIDE * 3 - 4
    if spoil == "longer":
        whole += b"\0"
    elif spoil == "shorter":
        del whole[-1]
    elif spoil == "other length":
        whole[length_at + 3] ^= 1
    else:
        whole[whole.index(encoder.encode(session)) + len(encoder.encode(session))] = 0xC0
    assert robot.send(bytes(whole))
    assert desk.sessions.drain(desk.now_ns) == 0
    assert desk.sessions.statistics().frames_dropped == {"undecodable": 1}
    assert desk.send(robot, frames(session, 7)) == 1


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("took_ns", [NS_PER_MS // 3, NS_PER_MS])
def test_what_comes_while_a_large_frame_is_read_is_taken_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, took_ns: int
) -> None:
    monkeypatch.setattr("robot_rig.default_endpoint", f"unix://{tmp_path}/own")
    clock_ns = 0
    with open_desk(config=config_with_cameras(rows), clock=lambda: clock_ns) as desk:
        robot = desk.robot()
        session = admit_with_cameras(desk, robot)
        rings = [desk.rows[0].rings[name] for name in ("left", "right")]
        next_one = [encoder.encode(frames(session, 8))]
        read_into = LargeMessage.read_into

        def read_slowly(message: LargeMessage, into: memoryview, offset: int) -> None:
            nonlocal clock_ns
            read_into(message, into, offset)
            clock_ns += took_ns
            if next_one:
                assert robot.send(next_one.pop())

        monkeypatch.setattr(LargeMessage, "read_into", read_slowly)
        assert robot.send(encoder.encode(frames(session, 7, stream=2)))
        is_over = took_ns >= NS_PER_MS  # others wait, too
        assert desk.sessions.drain(desk.now_ns) == (1 if is_over else 2)
        received_ns = [desk.now_ns, NEVER_NS if is_over else desk.now_ns + took_ns]
        assert [ring.newest_rx_ns for ring in rings] == received_ns
        assert desk.sessions.drain(desk.now_ns) == (1 if is_over else 0)


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_large_frame_whose_memory_is_lost_is_dropped_and_the_next_one_taken(
    local_robot: LocalRobot, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    desk, robot, session = local_robot
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lost_but_its_mark)
        assert desk.send(robot, frames(session, 5)) == 0
    assert desk.sessions.statistics().frames_dropped == {"undecodable": 1}
    assert desk.send(robot, frames(session, 7)) == 1


def lost_but_its_mark(fd: int, what: int, at: int, pread: Any = os.pread) -> Any:
    if at == 0:  # the sender looks how much of it was read
        return pread(fd, what, at)
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_large_frames_come_at_a_limited_rate_and_once_the_run_is_ready() -> None:
    desk_config = config_with_cameras()
    limit = desk_config.samples_per_second(desk_config.streams[3])
    with open_desk(config=desk_config, phase="bring-up") as desk:
        robot = desk.robot()
        session = admit_with_cameras(desk, robot)
        assert desk.send(robot, frames(session, 1)) == 0
        assert desk.sessions.statistics().samples_early == 1
        desk.sessions.set_phase("ready")
        desk.now_ns += NS_PER_S  # a second begins
        sent = [frames(session, stamp_ns) for stamp_ns in range(2, limit + 3)]
        assert desk.send(robot, *sent) == limit
        ledger = desk.rows[0].rings["right"].ledger
        assert (ledger.received, ledger.dropped["rate"]) == (limit + 1, 1)
