from __future__ import annotations

from typing import Any

import pytest
from robot_rig import ACTIONS, LEASE_NS, MS, make_chunk

from ppstream.core.errors import SpecError
from ppstream.robot.session import RETRY_NS, STUCK_NS, RobotSession
from ppstream.wire import robot_messages as m

STREAMS = (m.StreamDeclaration("joints", 3, "float32"),)
SILENCE_NS = 4000 * MS


def session() -> RobotSession:
    return RobotSession("arm", STREAMS, ACTIONS)


def welcome(number: int = 7, phase: str = "ready") -> m.Welcome:
    return m.Welcome(1, 0, number, phase, SILENCE_NS, LEASE_NS, 4, 10 * MS, (), ())


def test_it_says_hello_until_it_is_welcome_and_pings_from_then_on() -> None:
    robot = session()
    assert isinstance(robot.due(0), m.Hello)
    robot.was_sent(0, sent=True)
    assert robot.due(RETRY_NS[0] - 1) is None
    assert isinstance(robot.due(RETRY_NS[0]), m.Hello)
    assert robot.on_answer(welcome(), 100 * MS)
    assert robot.due(100 * MS + SILENCE_NS // 4 - 1) is None
    assert robot.due(100 * MS + SILENCE_NS // 4) == m.Ping(7)


def test_the_pause_between_hellos_doubles_up_to_its_limit() -> None:
    robot, now, pauses = session(), 0, []
    for _ in range(8):
        robot.was_sent(now, sent=True)
        pauses.append(robot.due_ns - now)
        now = robot.due_ns
    assert pauses[:3] == [50 * MS, 100 * MS, 200 * MS]
    assert pauses[-1] == RETRY_NS[1]


def test_while_nobody_is_connected_the_pause_stays_short() -> None:
    robot = session()
    for now in range(5):
        robot.was_sent(now, sent=False)
        assert robot.due_ns == now + RETRY_NS[0]


def test_servers_that_refuse_in_turn_are_asked_more_and_more_seldom() -> None:
    robot, now, pauses = session(), 0, []
    for _ in range(8):
        robot.was_sent(now, sent=True)
        robot.on_answer(m.Refused("full", ()), now)
        pauses.append(robot.due_ns - now)
        now = robot.due_ns
        robot.moved(now)
        assert robot.due_ns == now  # each is asked at once
    assert pauses[:3] == [50 * MS, 100 * MS, 200 * MS]
    assert pauses[-1] == RETRY_NS[1]
    robot.was_sent(now, sent=True)
    assert robot.due_ns == now + RETRY_NS[0]  # one that does not answer is soon left
    robot.moved(now)
    robot.was_sent(now, sent=True)
    assert robot.due_ns == now + RETRY_NS[0]
    robot.on_answer(welcome(), now)
    robot.on_lost(now)
    robot.was_sent(now, sent=True)
    robot.on_answer(m.Refused("full", ()), now)
    assert robot.due_ns == now + RETRY_NS[0]


def test_samples_put_a_ping_off() -> None:
    robot = session()
    robot.on_answer(welcome(), 0)
    robot.on_sent(500 * MS)
    assert robot.due_ns == 500 * MS + SILENCE_NS // 4


def test_a_lost_session_is_asked_for_again_at_once_and_named() -> None:
    robot = session()
    robot.on_answer(welcome(7), 0)
    robot.on_answer(m.Lost(6), 5)
    assert robot.session == 7
    robot.on_answer(m.Lost(7), 9)
    hello = robot.due(9)
    assert isinstance(hello, m.Hello)
    assert hello.resumes == 7
    assert robot.on_answer(welcome(8), 20)
    assert (robot.session, robot.opened) == (8, 2)


def test_a_connection_that_takes_nothing_for_long_ends_the_session() -> None:
    robot = session()
    robot.on_answer(welcome(), 0)
    robot.doubt()
    now, asked = 1, 0
    while robot.session:
        assert robot.due(now) == m.Ping(7)
        robot.was_sent(now, sent=False)
        robot.doubt()  # pushes go on failing, too
        now, asked = robot.due_ns, asked + 1
    assert STUCK_NS <= now <= STUCK_NS + RETRY_NS[0]
    assert asked == STUCK_NS // RETRY_NS[0] + 1
    assert isinstance(robot.due(now), m.Hello)


def test_a_full_connection_that_moves_again_keeps_its_session() -> None:
    robot = session()
    robot.on_answer(welcome(), 0)
    robot.doubt()
    for now in range(0, 10 * STUCK_NS, STUCK_NS // 2):
        robot.was_sent(now + 1, sent=False)
        robot.on_sent(now + 2)
    assert robot.session == 7


def test_the_phase_outlives_the_session() -> None:
    robot = session()
    assert not robot.executable
    robot.on_answer(welcome(phase="warming"), 0)
    assert not robot.executable
    robot.on_answer(m.Phase("degraded"), 0)
    robot.on_lost(1)
    assert robot.executable


def test_the_second_answer_to_a_hello_opens_nothing() -> None:
    robot = session()
    assert robot.on_answer(welcome(), 0)
    robot.session_epoch = 2
    assert not robot.on_answer(welcome(), 1)
    assert (robot.session_epoch, robot.opened) == (2, 1)


def test_an_instruction_is_told_whatever_hello_was_answered_and_samples_put_it_off_not() -> None:
    robot = session()
    robot.was_sent(0, sent=True)
    robot.instruct("stop at the red line")
    robot.on_answer(welcome(), 5)
    robot.on_sent(6)
    told = m.Instruct(7, 1, "stop at the red line")
    assert robot.due(6) == told
    robot.was_sent(6, sent=False)
    robot.on_sent(7)
    assert robot.due(6 + RETRY_NS[0] - 1) is None
    assert robot.due(6 + RETRY_NS[0]) == told
    robot.was_sent(6 + RETRY_NS[0], sent=True)
    assert robot.due(6 + RETRY_NS[0] + SILENCE_NS // 4) == m.Ping(7)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"session": 6}, "session"),
        ({"episode": 1}, "episode"),
        ({"expires_ns": LEASE_NS + 1}, "lease"),
    ],
)
def test_a_chunk_must_be_for_this_robot_as_it_is(changes: Any, reason: str | None) -> None:
    robot = session()
    assert robot.reject(make_chunk(session=7)) == "session"
    robot.on_answer(welcome(7), 0)
    assert robot.reject(make_chunk(**{"session": 7, **changes})) == reason


@pytest.mark.parametrize("name", ["", "x" * 65, "\ud800"])
def test_a_name_the_wire_does_not_take_is_refused_here(name: str) -> None:
    with pytest.raises(SpecError, match="1 to 64 characters"):
        RobotSession(name, STREAMS, ACTIONS)
