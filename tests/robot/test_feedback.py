from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import msgspec
import pytest
from robot_rig import (
    ANY_PORT,
    DT_NS,
    LEASE_NS,
    MS,
    make_chunk,
    make_client,
    make_config,
    wait_until,
)

from ppstream.core.clock import ManualClock, now_ns
from ppstream.robot.feedback import Feedback
from ppstream.robot.timeline import ActionTimeline
from ppstream.sessions.contract import welcome
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import MAX_FAULT, WIRE_MINOR, encoder
from ppstream.wire.transports import bind_server

SESSION = 7
ARM = m.Hello(1, WIRE_MINOR, "arm", (), ())


class Robot:
    """A timeline, and what its feedback sends by a clock that is told to move."""

    def __init__(self, minor: int = WIRE_MINOR) -> None:
        self.clock = ManualClock(10**12)
        self.timeline = ActionTimeline(2)
        self.feedback = Feedback(self.timeline, self.clock)
        self.timeline.on_trouble = self.feedback.hurry
        self.sent: list[Any] = []
        self.is_full = False
        self.open(SESSION, minor)

    def open(self, session: int, minor: int = WIRE_MINOR) -> None:
        config = make_config()
        answer = welcome(config, ARM, session, "ready", LEASE_NS)
        self.feedback.adopt(msgspec.structs.replace(answer, minor=minor))

    def send(self, message: Any) -> bool:
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full

    def tell(self, session: int = SESSION, **options: Any) -> int | None:
        return self.feedback.send_state(self.send, session, self.clock(), **options)

    def after(self, ns: int, **options: Any) -> int | None:
        self.clock.advance(ns)
        return self.tell(**options)

    def hold(self) -> None:
        """Execute an action, and have nothing for the tick behind it."""
        now = self.clock()
        seq = self.timeline.statistics().received
        assert self.timeline.merge(make_chunk(seq, end_ns=now - DT_NS), now) is None
        assert self.timeline.action_at(now) is not None
        self.timeline.held(now)


def test_the_first_state_of_a_session_says_that_the_robot_tells() -> None:
    robot = Robot()
    assert robot.tell() == robot.clock() + 1000 * MS
    assert robot.sent == [m.RobotState(SESSION, 0, 0, 0, "", 0)]


def test_who_asks_too_early_is_told_when() -> None:
    robot = Robot()
    due_ns = robot.tell()
    assert robot.after(10 * MS) == due_ns
    robot.feedback.hurry()
    assert robot.tell() == robot.clock() + 90 * MS


def test_what_did_not_change_is_not_said_again_and_what_did_once_a_second() -> None:
    robot = Robot()
    robot.tell()
    for _ in range(100):
        robot.after(100 * MS)
    assert len(robot.sent) == 1
    robot.hold()
    for _ in range(100):
        robot.after(100 * MS)
    holds = robot.sent[1:]
    assert len(holds) == 1 + 9  # when it began, and each second while it goes on
    assert [state.holds for state in holds] == [1] * 10
    assert all(a.held_ns < b.held_ns for a, b in pairwise(holds))


def test_holds_that_follow_each_other_quickly_are_said_ten_times_a_second_at_most() -> None:
    robot = Robot()
    robot.tell()
    for _ in range(500):
        robot.hold()
        robot.after(2 * MS)
    assert 9 <= len(robot.sent) <= 11
    assert robot.sent[-1].holds > 450


def test_a_state_that_nobody_could_take_is_said_later() -> None:
    robot = Robot()
    robot.is_full = True
    due_ns = robot.tell()
    assert due_ns == robot.clock() + 1000 * MS, "it would try without a pause"
    robot.is_full = False
    robot.after(1000 * MS)
    assert len(robot.sent) == 1


def test_the_last_state_is_said_at_once() -> None:
    robot = Robot()
    robot.tell()
    robot.hold()
    robot.after(1, is_last=True)
    assert robot.sent[-1].holds == 1


def test_the_longest_wait_for_a_chunk_counts_also_while_it_lasts() -> None:
    robot = Robot()
    robot.tell()
    for gap_ns in (30 * MS, 10 * MS):
        robot.feedback.arrived(robot.clock())
        robot.clock.advance(gap_ns)
    robot.feedback.arrived(robot.clock())
    robot.after(1000 * MS)
    assert robot.sent[-1].chunk_gap_ns == 1000 * MS
    robot.feedback.arrived(robot.clock())
    robot.clock.advance(2000 * MS)
    robot.feedback.await_ready(robot.clock())  # the run left the phases in which chunks are due
    robot.clock.advance(60_000 * MS)
    robot.feedback.arrived(robot.clock())
    robot.after(1)
    assert robot.sent[-1].chunk_gap_ns == 2000 * MS


def test_a_session_begins_with_what_is_under_way_and_without_the_rest() -> None:
    robot = Robot()
    robot.feedback.arrived(robot.clock())
    robot.hold()
    robot.after(5000 * MS)
    robot.open(SESSION + 1)
    assert robot.tell(SESSION) is None, "the session is another one"
    robot.after(500 * MS, session=SESSION + 1)
    assert robot.sent[-1] == m.RobotState(SESSION + 1, 1, 5500 * MS, 0, "", 5500 * MS)
    robot.hold()
    robot.feedback.arrived(robot.clock())
    robot.timeline.clear()
    robot.open(SESSION + 2)
    robot.after(100 * MS, session=SESSION + 2)
    assert robot.sent[-1] == m.RobotState(SESSION + 2, 0, 0, 0, "", 100 * MS)


def test_a_fault_is_said_in_characters_that_print(caplog: pytest.LogCaptureFixture) -> None:
    robot = Robot()
    robot.timeline.held(robot.clock(), "stop: \udcff\x1b[2J " + "x" * 1000)
    robot.tell()
    assert [each.getMessage().isprintable() for each in caplog.records] == [True]
    assert robot.sent[-1].fault == "stop:   [2J " + "x" * (MAX_FAULT - 12)
    assert m.from_robot.decode(encoder.encode(robot.sent[-1])) == robot.sent[-1]


def test_a_clock_that_was_set_back_makes_no_duration_that_rank_0_refuses() -> None:
    robot = Robot()
    now = robot.clock()
    early = make_chunk(0, end_ns=now + 5 * MS)  # a stamp that leads the clock
    assert robot.timeline.merge(early, now) is None
    assert robot.timeline.merge(make_chunk(1, end_ns=now + 4 * MS), now) is None
    robot.timeline.clear()
    robot.feedback.collect()
    robot.feedback.send_reports(robot.send)
    assert [report.age_ns for report in robot.sent] == [0, 0]
    for message in robot.sent:
        assert m.from_robot.decode(encoder.encode(message)) == message


@pytest.mark.parametrize("minor", [WIRE_MINOR, 1])
def test_a_server_that_does_not_know_the_message_is_not_sent_it(minor: int) -> None:
    server = bind_server(ANY_PORT)
    heard: list[Any] = []
    peers: list[bytes] = []

    def hear(kind: type) -> bool:
        for frame in server.drain():
            peers[:] = [frame.peer]
            heard.append(m.from_robot.decode(frame.body))
        return any(isinstance(message, kind) for message in heard)

    try:
        with make_client(server.endpoint) as client:
            with pytest.raises(Exception, match="no answer"):
                client.connect(0.05)
            wait_until(lambda: hear(m.Hello))
            answer = welcome(make_config(), ARM, SESSION, "ready", 5000 * MS)
            answer = msgspec.structs.replace(answer, minor=minor)
            server.send(encoder.encode(answer), peers[0])
            wait_until(lambda: client.connected)
            seqs = count()

            def is_executed() -> bool:  # a chunk that a busy machine brings too late is no action
                end_ns = now_ns() - DT_NS
                times = {"end_ns": end_ns, "expires_ns": end_ns + 40 * MS}
                chunk = make_chunk(next(seqs), session=SESSION, **times)
                server.send(encoder.encode(chunk), peers[0])
                return client.timeline.action_at(now_ns()) is not None

            wait_until(is_executed)
            wait_until(lambda: client.timeline.action_at(now_ns()) is None)  # it holds
            wait_until(lambda: client.timeline.holds(now_ns()).held_ns > 150 * MS)
            client.push("joints", now_ns(), [0, 0, 0])
            wait_until(lambda: hear(m.Samples))
        wait_until(lambda: hear(m.Bye))
    finally:
        server.close()
    assert any(isinstance(message, m.ChunkReport) for message in heard)
    assert any(isinstance(message, m.RobotState) for message in heard) == (minor >= 2)
