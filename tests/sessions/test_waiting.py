"""Robots that found no row: who is next, and that no robot waits for ever beside others."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from robot_rig import Server, make_client, make_config, serving, wait_until
from session_desk import Desk, hello, open_desk

from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.errors import PeerLostError
from ppstream.robot import session as robot_session
from ppstream.sessions.table import SILENCE_NS
from ppstream.sessions.waiting import PATIENCE_NS, WAITING_MAX, WaitingList
from ppstream.wire import robot_messages as m
from ppstream.wire.message_socket import MessageSocket

ROWS: Final = 2
ROBOTS: Final = ("a", "b", "c", "d")
ROUNDS: Final = 40
SHARE_MAX: Final = 3  # times another robot's visits; threads do not begin or count at one moment
LIMIT_S: Final = 60.0


class Spoke(NamedTuple):
    """When a robot last spoke, and on which connection."""

    socket: MessageSocket
    at_ns: int


def no_name_is_in_use(name: str) -> bool:
    return False


def names(waiting: WaitingList, now_ns: int = 0) -> list[str]:
    """Those that are next, in order; nothing is left."""
    found = []
    while (robot := waiting.pop(now_ns, no_name_is_in_use)) is not None:
        found.append(robot.hello.robot)
    return found


def test_a_robot_keeps_its_place_however_often_it_asks_and_wherever() -> None:
    waiting = WaitingList()
    asked = ((b"1", "a"), (b"2", "b"), (b"1", "a"), (b"9", "a"), (b"3", "c"))
    places = [waiting.add(peer, hello(robot=name), 0) for peer, name in asked]
    assert places == [0, 1, 0, 0, 2]
    first = waiting.pop(0, no_name_is_in_use)
    assert first is not None
    assert (first.peer, first.hello.robot) == (b"9", "a")
    assert names(waiting) == ["b", "c"]


def test_a_connection_has_one_place_whatever_it_calls_itself() -> None:
    waiting = WaitingList()
    for name in ("a", "b", "c"):
        waiting.add(b"1", hello(robot=name), 0)
    assert names(waiting) == ["c"]


def test_a_name_that_is_in_use_is_passed_over_and_keeps_its_place() -> None:
    waiting = WaitingList()
    for peer, name in ((b"1", "a"), (b"2", "b")):
        waiting.add(peer, hello(robot=name), 0)
    found = waiting.pop(0, lambda name: name == "a")
    assert found is not None
    assert found.hello.robot == "b"
    assert names(waiting) == ["a"]


@pytest.mark.parametrize(("early_ns", "left"), [(1, ["a"]), (0, [])])
def test_a_robot_that_stops_asking_loses_its_place(early_ns: int, left: list[str]) -> None:
    waiting = WaitingList()
    waiting.add(b"1", hello(robot="a"), 7)
    assert names(waiting, 7 + PATIENCE_NS - early_ns) == left


def test_so_many_robots_wait_and_no_more_until_one_has_gone() -> None:
    waiting = WaitingList()
    for n in range(WAITING_MAX):
        assert waiting.add(b"%d" % n, hello(robot=f"r{n}"), n) == n
    assert waiting.add(b"more", hello(robot="more"), 0) == WAITING_MAX
    assert len(waiting) == WAITING_MAX
    assert waiting.add(b"more", hello(robot="more"), PATIENCE_NS) == WAITING_MAX - 1
    assert len(waiting) == WAITING_MAX


class ARowThatBecomesFreeGoesToTheRobotThatHasWaitedLongest(RuleBasedStateMachine):
    """Real sessions on real sockets; the model is a line of robots, and who of them has a row."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.desk = Desk(make_config(f"unix://{self.folder.name}/robots", rows=ROWS))
        self.sockets = {name: self.desk.robot() for name in ROBOTS}
        self.sessions = dict.fromkeys(ROBOTS, 0)  # that each was told of last
        self.rows: dict[str, Spoke] = {}  # of those that have one
        self.line: dict[str, Spoke] = {}  # of those that wait, in order

    def teardown(self) -> None:
        self.desk.close()
        self.folder.cleanup()

    # ---- what happens --------------------------------------------------------------------------

    @rule(name=st.sampled_from(ROBOTS))
    def ask(self, name: str) -> None:
        self._ask(name)

    @rule(name=st.sampled_from(ROBOTS))
    def begin_anew_without_a_word(self, name: str) -> None:
        """Its process ends; the next one knows of no session."""
        self._connect_anew(name)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def come_back_on_another_connection(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        self._connect_anew(name)
        self.line.pop(name, None)
        self.desk.send(self.sockets[name], hello(robot=name, resumes=self.sessions[name]))
        self._is_welcome(name)

    @precondition(lambda self: self._connected())
    @rule(data=st.data())
    def speak(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._connected()))
        self.desk.send(self.sockets[name], m.Ping(self.sessions[name]))
        self.rows[name] = Spoke(self.sockets[name], self.desk.now_ns)

    @precondition(lambda self: self._connected())
    @rule(data=st.data(), asks_again=st.booleans())
    def leave(self, data: st.DataObject, *, asks_again: bool) -> None:
        name = data.draw(st.sampled_from(self._connected()))
        self.desk.send(self.sockets[name], m.Bye(self.sessions[name]))
        del self.rows[name]
        self._serve_the_line()
        if asks_again:
            self._ask(name)

    @rule(span_ns=st.sampled_from([50 * NS_PER_MS, 2 * NS_PER_S, SILENCE_NS]))
    def time_passes(self, span_ns: int) -> None:
        self.desk.now_ns += span_ns
        self.desk.sessions.drain(self.desk.now_ns)
        self.rows = {
            name: spoke
            for name, spoke in self.rows.items()
            if self.desk.now_ns - spoke.at_ns < SILENCE_NS
        }
        self._serve_the_line()

    # ---- promises ------------------------------------------------------------------------------

    @invariant()
    def rows_are_held_by_those_whose_turn_it_was(self) -> None:
        assert sorted(row.robot for row in self.desk.rows if row.session) == sorted(self.rows)

    @invariant()
    def every_robot_was_told_all_of_it(self) -> None:
        for socket in self.sockets.values():
            assert socket.drain() == []

    # ---- the model -----------------------------------------------------------------------------

    def _connected(self) -> list[str]:
        """Robots with a row that speak on the connection of it."""
        return sorted(name for name, spoke in self.rows.items() if self._is_there(name, spoke))

    def _is_there(self, name: str, spoke: Spoke) -> bool:
        return spoke.socket is self.sockets[name]

    def _connect_anew(self, name: str) -> None:
        self.sockets[name].close()
        self.sockets[name] = self.desk.robot()

    def _ask(self, name: str) -> None:
        self.desk.send(self.sockets[name], hello(robot=name))
        is_held = name in self.rows
        if is_held and self._is_there(name, self.rows[name]):
            self._is_welcome(name)
        elif is_held or len(self.rows) == ROWS:
            answer = self.desk.receive(self.sockets[name])
            assert answer.reason == ("name_in_use" if is_held else "full")
            self.line[name] = Spoke(self.sockets[name], self.desk.now_ns)
        else:
            self.line.pop(name, None)
            self._is_welcome(name)

    def _serve_the_line(self) -> None:
        """Those that wait get the rows that are free, in order, unless they are not there."""
        now_ns = self.desk.now_ns
        self.line = {
            n: spoke for n, spoke in self.line.items() if now_ns - spoke.at_ns < PATIENCE_NS
        }
        for name, spoke in [*self.line.items()]:
            if len(self.rows) < ROWS and name not in self.rows:
                del self.line[name]
                if self._is_there(name, spoke):
                    self._is_welcome(name)

    def _is_welcome(self, name: str) -> None:
        answer = self.desk.receive(self.sockets[name])
        assert isinstance(answer, m.Welcome), answer
        self.sessions[name] = answer.session
        self.rows[name] = Spoke(self.sockets[name], self.desk.now_ns)


TestARowThatBecomesFreeGoesToTheRobotThatHasWaitedLongest = (
    ARowThatBecomesFreeGoesToTheRobotThatHasWaitedLongest.TestCase
)
TestARowThatBecomesFreeGoesToTheRobotThatHasWaitedLongest.settings = settings(
    max_examples=60, stateful_step_count=30, derandomize=True, deadline=None, database=None
)


# ---- robots that connect again and again --------------------------------------------------------


def visit(endpoint: str, name: str, visits: Counter[str], is_over: threading.Event) -> None:
    """Has a row again and again, each time as a process that has just begun."""
    while not is_over.is_set():
        with make_client(endpoint, robot=name) as robot:  # it leaves with a goodbye
            robot.connect(LIMIT_S)
            visits[name] += 1


@pytest.mark.usefixtures("either_socket")
def test_three_robots_that_reconnect_all_the_time_share_two_rows_alike() -> None:
    server = Server(make_config(rows=ROWS))
    visits: Counter[str] = Counter()
    is_over = threading.Event()
    with closing(server), ThreadPoolExecutor(3) as threads:
        endpoint = server.sessions.endpoint
        visiting = [threads.submit(visit, endpoint, name, visits, is_over) for name in "abc"]
        try:
            wait_until(lambda: min(visits[name] for name in "abc") >= ROUNDS, seconds=LIMIT_S)
            assert max(visits.values()) <= SHARE_MAX * min(visits.values()), visits
        finally:
            is_over.set()
        for one in visiting:
            one.result(LIMIT_S)


@pytest.mark.usefixtures("either_socket")
def test_a_robot_that_waits_has_the_next_row_before_it_asks_again() -> None:
    with open_desk(rows=1) as desk:
        first, second, third = (desk.robot() for _ in range(3))
        session = desk.admit(first, robot="first").session
        for socket, name in ((second, "second"), (third, "third")):
            desk.send(socket, hello(robot=name))
        told = "the only row is taken; raise batch.rows"
        assert desk.receive(second).details == (told,)
        assert desk.receive(third).details == (f"{told}; robots that wait before this one: 1",)
        desk.send(first, m.Bye(session), hello(robot="first"))  # which comes too late
        assert isinstance(desk.receive(second), m.Welcome)
        assert desk.rows[0].robot == "second"
        assert desk.receive(first).reason == "full"


def test_a_robot_that_waits_has_the_row_of_one_that_falls_silent() -> None:
    with open_desk(rows=1) as desk:
        first, second = desk.robot(), desk.robot()
        desk.admit(first, robot="first")
        desk.now_ns += SILENCE_NS // 2
        desk.send(second, hello(robot="second"))
        assert desk.receive(second).reason == "full"
        desk.now_ns += SILENCE_NS // 2
        desk.sessions.drain(desk.now_ns)
        assert isinstance(desk.receive(second), m.Welcome)


def test_a_robot_that_has_got_its_row_back_waits_no_more() -> None:
    with open_desk(rows=1) as desk:
        before = desk.admit(desk.robot(), robot="arm").session
        again = desk.robot()
        desk.send(again, hello(robot="arm"))
        assert desk.receive(again).reason == "name_in_use"
        session = desk.admit(again, robot="arm", resumes=before).session
        desk.send(again, m.Bye(session))
        assert desk.sessions.statistics().open == 0


def test_the_row_of_a_session_that_a_refused_hello_has_ended_is_given_on() -> None:
    with open_desk(rows=2) as desk:
        first, second, third = (desk.robot() for _ in range(3))
        desk.admit(first, robot="first")
        desk.admit(second, robot="second")
        desk.send(third, hello(robot="third"))
        assert desk.receive(third).reason == "full"
        desk.send(first, hello(robot="second"))  # it calls itself as another one
        assert desk.receive(first).reason == "name_in_use"
        assert isinstance(desk.receive(third), m.Welcome)


def test_no_row_is_given_to_a_robot_that_waits_once_the_run_ends() -> None:
    with open_desk(rows=1) as desk:
        first, second = desk.robot(), desk.robot()
        session = desk.admit(first, robot="first").session
        desk.send(second, hello(robot="second"))
        desk.sessions.set_phase("draining")
        desk.send(first, m.Bye(session))
        assert desk.sessions.statistics().open == 0


def test_an_instruction_that_is_given_while_a_robot_waits_in_line_is_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its row is given to the Hello that it said before; it says no other meanwhile."""
    monkeypatch.setattr(robot_session, "RETRY_NS", (3600 * NS_PER_S, 3600 * NS_PER_S))
    config = make_config(f"unix://{tmp_path}/here")
    policy = msgspec.structs.replace(config.policy, instructions=True)
    told: list[str] = []

    def teach(number: int, text: str, done: Callable[[int, str], None]) -> None:
        told.append(text)
        done(number, "")

    with serving(msgspec.structs.replace(config, policy=policy)) as server:
        requests = server.sessions.requests
        server.order(lambda: requests.attach(teach, lambda name, **fields: None))
        first, second = (make_client(server.sessions.endpoint, robot=name) for name in "ab")
        first.connect()
        with suppress(PeerLostError):
            second.connect(0.0)
        wait_until(lambda: server.sessions.statistics().refused == {"full": 1})
        epoch = second.instruct("stop at the red line")
        first.close()
        second.connect()
        answer = second.wait_conditioned(epoch, 10)
        second.close()
    assert told == ["stop at the red line"]
    assert answer is not None
    assert (answer.conditioning_epoch, answer.fault) == (epoch, "")
