from __future__ import annotations

import dataclasses
import sys
from types import FrameType
from typing import Any

import pytest
from robot_rig import make_chunk

from ppstream.core.clock import NS_PER_MS
from ppstream.robot.outbox import Outbox
from ppstream.robot.rehearsal import AHEAD_NS, EARLY_NS, LATE_NS, AnswerWait, AskRehearsal
from ppstream.robot.session import RobotSession
from ppstream.robot.timeline import ActionTimeline
from ppstream.wire.robot_messages import ActionChunk

STEP, BEGIN, ASKS = 20 * NS_PER_MS, 10**12, 9
DUE_NS = BEGIN + ASKS * STEP - AHEAD_NS


class CountingSession(RobotSession):
    """Counts the chunks that it is asked about."""

    asked = 0

    def reject(self, chunk: ActionChunk) -> str | None:
        self.asked += 1
        return super().reject(chunk)


class Rig:
    def __init__(self) -> None:
        outbox = Outbox([("joints", 2)], 0)
        self.session = CountingSession("robot", outbox.declarations, ("x", "y"))
        self.timeline = ActionTimeline(2)
        self.rehearsal = AskRehearsal(self.session, self.timeline)

    def turn(self, now: int) -> int | None:
        return self.rehearsal.turn(now)

    def ask(self, *at_ns: int) -> None:
        for at in at_ns:
            self.rehearsal.asked(at)


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.ask(*(BEGIN + index * STEP for index in range(ASKS)))
    rig.rehearsal.newest = chunk = make_chunk(end_ns=BEGIN)
    assert rig.timeline.merge(chunk, BEGIN) is None
    return rig


def test_shortly_before_the_next_ask_one_is_gone_through_and_nothing_changes(rig: Rig) -> None:
    before = dataclasses.asdict(rig.timeline.statistics())
    assert rig.turn(DUE_NS - STEP // 2) == DUE_NS
    assert rig.session.asked == 0
    assert rig.turn(DUE_NS + 1) == DUE_NS + STEP
    assert rig.session.asked == 1
    assert dataclasses.asdict(rig.timeline.statistics()) == before
    assert rig.timeline.pop_outcomes(BEGIN) == []


@pytest.mark.parametrize("late_ns", [AHEAD_NS, STEP])
def test_a_turn_that_comes_too_late_for_it_does_without(rig: Rig, late_ns: int) -> None:
    rig.turn(DUE_NS - STEP // 2)
    rig.turn(DUE_NS + late_ns)
    assert rig.session.asked == 0


def test_before_a_chunk_has_come_and_of_asks_out_of_step_there_is_none(rig: Rig) -> None:
    fresh = Rig()
    fresh.ask(*(BEGIN + index * STEP for index in range(ASKS)))
    assert fresh.turn(DUE_NS - STEP // 2) == DUE_NS
    fresh.turn(DUE_NS)
    assert fresh.session.asked == 0
    rig.ask(BEGIN + ASKS * STEP - 7 * NS_PER_MS)
    assert rig.turn(DUE_NS - STEP // 2) is None


def test_a_chunk_of_another_length_does_not_matter(rig: Rig) -> None:
    rig.ask(BEGIN + ASKS * STEP)
    rig.rehearsal.newest = make_chunk(horizon=1, end_ns=BEGIN)
    due_ns = rig.turn(DUE_NS + STEP // 2)
    assert due_ns == DUE_NS + STEP
    rig.turn(due_ns)
    assert rig.session.asked == 1


def test_a_second_thread_may_take_a_turn_between_any_two_lines_of_the_first() -> None:
    for line in range(ASKS):
        rig = Rig()
        rig.ask(BEGIN)
        lines = 0

        def interrupt(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code is not AskRehearsal.turn.__code__:
                return None
            if event == "line":
                lines += 1
                if lines == line:  # noqa: B023 - the trace ends within the loop
                    rig.turn(BEGIN)  # noqa: B023
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            rig.turn(BEGIN)
        finally:
            sys.settrace(before)
        assert lines >= min(line, 2)


class Arrivals:
    """A waiter on whose clock an answer comes at ``at_ns``; ``awake`` are spans without sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = self.at_ns = BEGIN
        self.awake: list[tuple[int, int]] = []
        monkeypatch.setattr("ppstream.robot.rehearsal.now_ns", lambda: self.now_ns)

    def wait(self, limit_ns: int) -> list[int]:
        is_there = self.at_ns <= self.now_ns + limit_ns
        self.now_ns = max(self.now_ns, min(self.at_ns, self.now_ns + limit_ns))
        return [7] if is_there else []

    def wait_awake(self, limit_ns: int, look_ns: int) -> list[int]:
        began_ns, found = self.now_ns, self.wait(limit_ns)
        self.awake.append((began_ns, self.now_ns))
        return found


@pytest.mark.parametrize("has_cpus", [False, True])
@pytest.mark.parametrize("took_ms", [1, 5])
def test_before_a_long_answer_its_thread_gets_ready_and_stays_awake_where_it_may(
    monkeypatch: pytest.MonkeyPatch, took_ms: int, *, has_cpus: bool
) -> None:
    monkeypatch.setattr("ppstream.robot.rehearsal.has_spare_cpus", lambda: has_cpus)
    arrivals, answers = Arrivals(monkeypatch), AnswerWait()
    waiter: Any = arrivals
    ready: list[int] = []
    answers.get_ready = lambda: ready.append(arrivals.now_ns)

    def ask(took_ns: int) -> int:
        begin_ns = arrivals.now_ns
        arrivals.at_ns = begin_ns + took_ns
        answers.begin(begin_ns)
        while arrivals.now_ns < arrivals.at_ns:
            answers.wait(waiter, 10 * NS_PER_MS)  # the link's thread looks in between
        answers.end(arrivals.now_ns)
        return begin_ns

    usual_ns = took_ms * NS_PER_MS
    ask(usual_ns)
    assert not ready, "of the first one nothing is known"
    due_ns = ask(usual_ns) + usual_ns
    assert ready == ([due_ns - EARLY_NS] if took_ms > 1 else [])
    assert arrivals.awake == ([(due_ns - EARLY_NS, due_ns)] if ready and has_cpus else [])
    ready.clear()
    due_ns = ask(40 * usual_ns) + usual_ns
    assert arrivals.awake[1:] == (
        [(due_ns - EARLY_NS, due_ns + LATE_NS)] if ready and has_cpus else []
    )
    assert len(ready) == (took_ms > 1), "once an answer"
    ready.clear()
    ask(usual_ns)
    assert len(ready) == (took_ms > 1), "a late one hardly counts"
