from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from robot_rig import ACTIONS, LEASE_NS, MS, make_chunk

from ppstream.core.clock import ManualClock
from ppstream.core.errors import SpecError
from ppstream.robot.session import RETRY_NS, STUCK_NS, RobotSession
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import MAX_INSTRUCTION

SILENCE_NS = 4000 * MS
PHASES = ("warming", "proving", "ready", "degraded", "draining")

phases = st.sampled_from(PHASES)
sessions = st.integers(1, 3)  # few: answers of sessions that are over come often


class RobotSessionIsAskedForUntilItIsHeldAndThenKept(RuleBasedStateMachine):
    """The model is what the server said last and what was sent, as a robot's log would have it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1000 * MS)
        self.opened: list[m.Welcome] = []
        declared = (m.StreamDeclaration("joints", 3, "float32"),)
        self.robot = RobotSession("arm", declared, ACTIONS, on_open=self.opened.append)
        self.phase, self.session, self.held = "connecting", 0, 0
        self.granted_ns = 0
        self.episode, self.opens, self.asked = 0, 0, 0
        self.refused: m.Refused | None = None
        self.conditioned: m.Conditioned | None = None
        self.text, self.texts = "", 0
        self.tell_ns: int | None = None  # when the server of this session is told the text
        self.heard_ns: int | None = None  # when anything was last sent in this session
        self.stuck_ns: int | None = None  # since when nothing could be
        self.outage_ns: int | None = None
        self.outages: list[int] = []
        self.pause_ns, self.next_hello_ns = RETRY_NS[0], 0
        self.told_ns = RETRY_NS[0]  # the pause before the next Hello
        self.refused_ns = RETRY_NS[0]  # the pause behind a refusal

    # ---- time and sending ----------------------------------------------------------------------

    @rule(span=st.integers(0, 3000 * MS))
    def time_passes(self, span: int) -> None:
        self.clock.advance(span)

    @rule(sent=st.booleans(), early=st.sampled_from([0, 0, 1]))
    def wait_for_what_is_due(self, *, sent: bool, early: int) -> None:
        now = max(self.clock(), self.robot.due_ns - early)
        self.clock.advance(now - self.clock())
        message = self.robot.due(now)
        assert (message is None) == (now < self.robot.due_ns)
        if message is None:
            return
        if self.session:
            assert message == self._said()
            self._ping(now, sent=sent)
        else:
            assert now >= self.next_hello_ns
            self._hello(message, now, sent=sent)

    @rule(tries=st.sampled_from([2, 25]), is_pushing=st.booleans())
    def nothing_can_be_sent_for_long(self, tries: int, *, is_pushing: bool) -> None:
        for _ in range(tries):
            self.wait_for_what_is_due(sent=False, early=0)
            if is_pushing:
                self.samples_cannot_be_sent()
            self.nothing_is_due_before_its_time_and_no_session_goes_silent()

    @rule()
    def samples_are_sent(self) -> None:
        self.robot.on_sent(self.clock())
        self.heard_ns, self.stuck_ns = self.clock(), None

    @rule()
    def samples_cannot_be_sent(self) -> None:
        self.robot.doubt()
        if self.session and self.stuck_ns is None:
            assert self.robot.due(self.clock()) == self._said()
            self.heard_ns = None  # asked at once, whatever was sent before

    # ---- what the server says ------------------------------------------------------------------

    @rule(session=sessions, phase=phases, lease_ns=st.sampled_from([LEASE_NS, LEASE_NS // 2]))
    def welcome(self, session: int, phase: str, lease_ns: int) -> None:
        now = self.clock()
        answer = m.Welcome(1, 0, session, phase, SILENCE_NS, lease_ns, 4, 10 * MS, (), ())
        is_new = session != self.session
        assert self.robot.on_answer(answer, now) == is_new
        self.phase = phase
        if not is_new:
            return
        self.session, self.granted_ns, self.refused = session, lease_ns, None
        self.conditioned = None  # what another session's policy said
        self.opens += 1
        self.episode = self.asked = 0
        self.heard_ns, self.stuck_ns, self.pause_ns = now, None, RETRY_NS[0]
        self.refused_ns = RETRY_NS[0]
        if self.outage_ns is not None:
            self.outages.append(now - self.outage_ns)
            self.outage_ns = None
        self.tell_ns = now if self.texts else None
        assert self.robot.welcome is answer is self.opened[-1]

    @rule(reason=st.sampled_from(["version", "contract", "full", "draining"]))
    def refuse(self, reason: str) -> None:
        self.refused = m.Refused(reason, ())
        assert not self.robot.on_answer(self.refused, self.clock())
        if self.clock() + self.refused_ns > self.next_hello_ns:
            self.next_hello_ns, self.told_ns = self.clock() + self.refused_ns, self.refused_ns
        self.refused_ns = min(2 * self.refused_ns, RETRY_NS[1])

    @rule(phase=phases)
    def change_phase(self, phase: str) -> None:
        assert not self.robot.on_answer(m.Phase(phase), self.clock())
        self.phase = phase

    @rule(session=st.integers(0, 3))
    def say_that_it_is_lost(self, session: int) -> None:
        assert not self.robot.on_answer(m.Lost(session), self.clock())
        if session == self.session:
            self._lost()

    @rule(epoch=st.integers(0, 3))
    def condition(self, epoch: int) -> None:
        self.conditioned = m.Conditioned(epoch, "")
        assert not self.robot.on_answer(self.conditioned, self.clock())

    # ---- what the robot does -------------------------------------------------------------------

    @rule()
    def lose(self) -> None:
        self.robot.on_lost(self.clock())
        self._lost()

    @precondition(lambda self: self.session)
    @rule()
    def reset(self) -> None:
        self.robot.session_epoch += 1
        self.episode += 1

    @rule(text=st.sampled_from(["", "fold it", "x" * MAX_INSTRUCTION]))
    def instruct(self, text: str) -> None:
        self.text, self.texts, self.tell_ns = text, self.texts + 1, None
        assert self.robot.instruct(text) == m.Instruct(self.session, self.texts, text)

    @rule(
        wrong=st.sampled_from(
            [
                ("x" * (MAX_INSTRUCTION + 1), "of 1025 characters, want at most 1024$"),
                ("\ud800", "of a character that is none: .*surrogates not allowed$"),
            ]
        )
    )
    def instruct_what_cannot_be_sent(self, wrong: tuple[str, str]) -> None:
        text, said = wrong
        with pytest.raises(SpecError, match=f"an instruction {said}"):
            self.robot.instruct(text)

    @rule(
        other=st.sampled_from([0, 0, 0, 1]),
        ahead=st.sampled_from([0, 0, 0, 1, -1]),
        over_ns=st.sampled_from([0, 1]),
    )
    def judge_a_chunk(self, other: int, ahead: int, over_ns: int) -> None:
        session = self.session + other
        episode, expires_ns = max(0, self.episode + ahead), max(1, self.granted_ns + over_ns)
        chunk = make_chunk(session=session, episode=episode, expires_ns=expires_ns)
        reasons = {
            "session": other != 0 or not self.session,
            "episode": episode != self.episode,
            "lease": expires_ns > self.granted_ns,
        }
        first = next((reason for reason, applies in reasons.items() if applies), None)
        assert self.robot.reject(chunk) == first

    # ---- promises ------------------------------------------------------------------------------

    @invariant()
    def it_is_what_was_said(self) -> None:
        robot = self.robot
        assert (robot.session, robot.session_epoch, robot.opened) == (
            self.session,
            self.episode if self.session else robot.session_epoch,
            self.opens,
        )
        assert len(self.opened) == self.opens
        assert (robot.phase, robot.executable) == (
            self.phase,
            self.phase in ("ready", "degraded"),
        )
        assert robot.refused is self.refused
        assert robot.is_hopeless == (
            self.refused is not None and self.refused.reason in ("version", "contract")
        )
        assert robot.conditioned is self.conditioned

    @invariant()
    def nothing_is_due_before_its_time_and_no_session_goes_silent(self) -> None:
        due_ns = self.robot.due_ns
        if not self.session:
            assert due_ns == self.next_hello_ns
        elif self.tell_ns is not None:
            assert due_ns == self.tell_ns
        elif self.stuck_ns is not None:
            assert due_ns == self.next_try_ns
        elif self.heard_ns is not None:
            assert due_ns == self.heard_ns + SILENCE_NS // 4

    @invariant()
    def it_tells_how_it_reconnects(self) -> None:
        told = self.robot.reconnecting()
        assert told.attempts == self.asked
        assert told.refusal == (
            None if self.session or self.refused is None else self.refused.reason
        )
        assert RETRY_NS[0] <= told.pause_ns <= RETRY_NS[1]
        assert told.pause_ns == self.told_ns
        assert told.outage.count == len(self.outages)
        assert told.outage.max_ns == max(self.outages, default=0)

    def _said(self) -> m.Ping | m.Instruct:
        if self.tell_ns is None:
            return m.Ping(self.session)
        return m.Instruct(self.session, self.texts, self.text)

    def _ping(self, now: int, *, sent: bool) -> None:
        self.robot.was_sent(now, sent=sent)
        if sent:
            self.heard_ns, self.stuck_ns, self.tell_ns = now, None, None
            return
        self.next_try_ns = now + RETRY_NS[0]
        if self.tell_ns is not None:
            self.tell_ns = self.next_try_ns
        self.stuck_ns = now if self.stuck_ns is None else self.stuck_ns
        if now - self.stuck_ns >= STUCK_NS:
            self._lost()

    def _hello(self, message: m.Hello | m.Ping | None, now: int, *, sent: bool) -> None:
        assert isinstance(message, m.Hello)
        assert message.resumes == self.held
        assert (message.instruction, message.conditioning_epoch) == (self.text, self.texts)
        self.robot.was_sent(now, sent=sent)
        self.asked += 1
        self.next_hello_ns, self.told_ns = now + self.pause_ns, self.pause_ns
        self.pause_ns = min(2 * self.pause_ns, RETRY_NS[1]) if sent else RETRY_NS[0]

    def _lost(self) -> None:
        if self.session:
            self.held, self.session = self.session, 0
            self.outage_ns = self.next_hello_ns = self.clock()
            self.pause_ns = self.refused_ns = RETRY_NS[0]
            assert isinstance(self.robot.due(self.clock()), m.Hello)


TestRobotSessionIsAskedForUntilItIsHeldAndThenKept = (
    RobotSessionIsAskedForUntilItIsHeldAndThenKept.TestCase
)
TestRobotSessionIsAskedForUntilItIsHeldAndThenKept.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
