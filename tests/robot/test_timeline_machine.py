from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from robot_rig import DT_NS, MS, make_chunk

from ppstream.core.clock import ManualClock
from ppstream.robot.chunk_playback import ChunkOutcome
from ppstream.robot.timeline import DELAYS, ActionTimeline
from ppstream.wire.robot_messages import ActionChunk

CHUNKS = 60  # a chunk's actions have a 1 at a place of their own: they show what they are mixed of
SLOPE, SWITCH = CHUNKS, CHUNKS + 1  # and a value that changes by step, and one that is switched
DIM = CHUNKS + 2

RARELY = st.sampled_from([False, False, True])
orders = st.sampled_from([(0, 0, 1), (0, 0, 1), (0, 1, -5), (1, -5, -5), (0, 0, 0), (0, -1, 5)])
PAST = 61  # a pause until the chunk's lease is over
leases, pauses = st.sampled_from([90, 90, 40]), st.sampled_from([0, 2, 15, 30])
usual = st.tuples(st.sampled_from([-5, -5, -20]), leases, pauses)
odd = st.tuples(st.sampled_from([0, -60, -90, 40, 90, 91]), leases, st.just(PAST) | pauses)
HOLD_IN_A_BLEND = st.just([(-5, 90, 15), (-20, 40, PAST), (-5, 90, 2)])
has_chunks = precondition(lambda self: self.taken)


@dataclass(eq=False)
class Taken:
    """A chunk that was accepted, and what the robot did with it."""

    chunk: ActionChunk
    place: int
    received_ns: int
    deadline_ns: int
    is_switched: bool
    last_step: int = -1
    executed: int = 0
    skipped: int = 0
    first_ns: int = 0
    oldest_ns: int = 0

    def step_at(self, at_ns: int) -> int:
        step: int = (at_ns - self.chunk.start_ns) // DT_NS
        return min(step, self.chunk.horizon - 1)

    def slope_at(self, at_ns: int) -> float:
        points = np.frombuffer(self.chunk.actions, np.float32).reshape(-1, DIM)[:, SLOPE]
        since = (at_ns - self.chunk.start_ns) / DT_NS
        return float(np.interp(since, range(len(points)), points))

    def play(self, step: int, at_ns: int, age_ns: int) -> None:
        self.first_ns = self.first_ns if self.executed else at_ns
        self.oldest_ns = max(self.oldest_ns, age_ns)
        if step > self.last_step:
            self.skipped += step - self.last_step - 1
            self.executed += 1
            self.last_step = step

    def fate(self) -> ChunkOutcome:
        chunk, until_ns = self.chunk, self.first_ns if self.executed else self.received_ns
        age_ns, dispatch_ns = until_ns - chunk.window_end_ns, until_ns - self.received_ns
        counts = (age_ns, self.executed, self.skipped, self.oldest_ns, dispatch_ns)
        return ChunkOutcome(chunk.session, chunk.epoch, chunk.seq, *counts)


class TimelineGivesWhatIsDueAndNothingPastItsLease(RuleBasedStateMachine):
    """The model is the chunks accepted since the last clear: due is the newest that has begun.

    Once the robot's clock was set back, only leases and counts are promised until the next clear.
    """

    @initialize(blend_ms=st.sampled_from([0, 5, 40]), max_age_ms=st.sampled_from([None, None, 70]))
    def begin(self, blend_ms: int, max_age_ms: int | None) -> None:
        self.clock = ManualClock()
        self.blend_ns, self.own_ns = blend_ms * MS, (max_age_ms or 0) * MS
        self.limit_ns = self.own_ns
        self.timeline = ActionTimeline(DIM, blend_ms=blend_ms, max_age_ms=max_age_ms)
        self.is_switched = self.is_set_back = False
        self.latest_ns = -MS
        self.taken: list[Taken] = []  # since the last clear, as they were accepted
        self.every: list[Taken] = []
        self.before_hold: list[Taken] = []
        self.newest: ActionChunk | None = None
        self.session, self.order = 99, (100, 100, 100)  # of the newest, by episode, epoch and seq
        self.delays: list[int] = []
        self.received = self.oldest_ns = self.too_old = 0
        self.refused: dict[str, int] = {}
        self.late: list[ChunkOutcome] = []  # of refused chunks that rank 0 is told of
        self.told: list[ChunkOutcome] = []
        self.last: tuple[int, Any, list[Taken]] | None = None

    # ---- chunks --------------------------------------------------------------------------------

    @precondition(lambda self: len(self.every) < CHUNKS - 5)
    @rule(
        opens=st.sampled_from([0, 0, 0, 0, 1]),
        order=orders,
        steps=st.lists(usual, max_size=5) | st.lists(usual | odd, max_size=3) | HOLD_IN_A_BLEND,
        start=st.sampled_from([0, 10, 30, 60, None]),
        horizon=st.integers(1, 9),
        is_asked=st.booleans(),
    )
    def chunks_arrive(self, *, opens: int, order: Any, is_asked: bool, **kind: Any) -> None:
        for end, lease, pause in kind.pop("steps"):
            if is_asked:
                self._ask()
            self._arrives(opens, order, end=end, lease=lease, **kind)
            opens, order = 0, (0, 0, 1)
            span_ns = pause * MS if pause != PAST else max(0, end + lease) * MS + 3
            for _ in range(3):
                if is_asked:
                    self._ask()
                self.clock.advance(span_ns // 3)

    @has_chunks
    @rule(damage=st.sampled_from(["short", "long", "nan", "inf"]))
    def a_damaged_chunk_arrives(self, damage: str) -> None:
        actions = np.zeros((2, DIM), np.float32)
        if damage in ("nan", "inf"):
            actions[1, 3] = float(damage)
        data = {"short": actions.tobytes()[:-1], "long": actions.tobytes() + b"\0" * 4}
        whole = memoryview(data.get(damage, actions.tobytes()))
        chunk = make_chunk(10**6, end_ns=self.clock(), horizon=2, actions=whole)
        refusal = self.timeline.merge(chunk, self.clock())
        assert refusal == ("non_finite" if damage in ("nan", "inf") else "malformed")
        self.received += 1
        self.refused[refusal] = self.refused.get(refusal, 0) + 1

    @rule(discrete=st.sampled_from([(), (SWITCH,), (SWITCH, DIM)]), limit=st.sampled_from([0, 50]))
    def adopt(self, discrete: tuple[int, ...], limit: int) -> None:
        self.timeline.adopt(discrete=discrete, max_age_ns=limit * MS)
        self.is_switched = SWITCH in discrete
        self.limit_ns = min((one for one in (self.own_ns, limit * MS) if one), default=0)

    @has_chunks
    @rule(is_cleared=RARELY)
    def clear(self, *, is_cleared: bool) -> None:
        if is_cleared:
            self.timeline.clear()
            self.taken, self.newest, self.last = [], None, None
            self.order = (self.order[0] + 1, 100, 100)
            self.is_set_back, self.too_old = False, self.timeline.statistics().too_old

    # ---- the robot -----------------------------------------------------------------------------

    @rule(span=st.sampled_from([0, 1, 2 * MS, DT_NS]) | st.integers(0, 30 * MS), ticks=RARELY)
    def time_passes(self, span: int, ticks: bool) -> None:
        for _ in range(1 + 4 * ticks):
            self.clock.advance(span)
            self._ask()

    @has_chunks
    @rule(beyond_ns=st.integers(0, 1))
    def the_newest_is_at_its_deadline(self, beyond_ns: int) -> None:
        self.clock.advance(max(0, self.taken[-1].deadline_ns + beyond_ns - self.clock()))
        self._ask()

    @has_chunks
    @rule(span=st.integers(1, 60 * MS), is_set_back=RARELY)
    def the_clock_is_set_back(self, span: int, *, is_set_back: bool) -> None:
        if is_set_back:
            self.clock, self.is_set_back = ManualClock(self.clock() - span), True

    @precondition(lambda self: self.every)
    @rule(back=st.integers(1, 3), span=st.integers(0, 30 * MS))
    def somebody_executed(self, back: int, span: int) -> None:
        taken = self.every[-min(back, len(self.every))]
        self.clock.advance(max(span, taken.chunk.start_ns - self.clock()))
        now = self.clock()
        self.latest_ns = max(self.latest_ns, now)
        if self.timeline.mark_executed(taken.chunk, now):
            newer = self.taken[self.taken.index(taken) + 1 :]
            assert all(one.chunk.start_ns > taken.chunk.start_ns for one in newer)
            taken.play(max(taken.last_step, 0), now, now - taken.chunk.window_end_ns)
            self.oldest_ns = max(self.oldest_ns, now - taken.chunk.window_end_ns)
        elif not self.is_set_back:
            assert taken not in self._alive()

    @precondition(lambda self: not self.is_set_back)
    @rule()
    def follow_the_plan(self) -> None:
        self._ask()
        plan, alive = self.timeline.plan(self.clock()), self._alive()
        assert (plan is None) == (not alive)
        if plan is None:
            return
        newest = alive[-1]
        first = max(0, newest.step_at(self.clock()))
        start_ns = newest.chunk.start_ns + first * DT_NS
        assert plan[:3] == (start_ns, DT_NS, newest.deadline_ns)
        assert len(plan.actions) == newest.chunk.horizon - first
        rows = {start_ns + row * DT_NS: action for row, action in enumerate(plan.actions)}
        starts = {one.chunk.start_ns for one in alive}
        for at_ns in sorted(at for at in rows.keys() | starts if self.clock() <= at):
            if at_ns <= plan.expires_ns:
                self.clock.advance(at_ns - self.clock())
                action = self._ask()
                assert at_ns not in rows or action.tobytes() == rows[at_ns].tobytes()

    @rule()
    def pop_outcomes(self) -> None:
        self.told += self.timeline.pop_outcomes(self.clock())
        if not self.is_set_back:
            alive = self._alive()
            assert all(one.fate() in self.told for one in self.every if one not in alive)

    def teardown(self) -> None:
        if hasattr(self, "timeline"):
            self.timeline.clear()
            self.told += self.timeline.pop_outcomes(self.clock())
            fates = [one.fate() for one in self.every]
            assert sorted(map(repr, self.told)) == sorted(map(repr, fates + self.late))
            counts = self.timeline.statistics()
            assert counts.pending == 0
            assert counts.steps_executed == sum(one.executed for one in self.every)
            assert counts.steps_skipped == sum(one.skipped for one in self.every)
            assert counts.executed == sum(one.executed > 0 for one in self.every)

    # ---- promises ------------------------------------------------------------------------------

    @invariant()
    def every_chunk_is_counted_once_and_how_long_chunks_take_is_told(self) -> None:
        counts, newest = self.timeline.statistics(), self.newest
        refused = sum(counts.refused.values())
        assert counts.received == refused + counts.executed + counts.superseded + counts.pending
        assert (counts.received, counts.refused) == (self.received, self.refused)
        assert counts.pending <= len(self.taken)
        assert (counts.oldest_ns, counts.max_age_ns) == (self.oldest_ns, self.limit_ns)
        assert self.is_set_back or counts.too_old == self.too_old
        assert self.timeline.expires_ns == (None if newest is None else newest.expires_ns)
        assert self.timeline.delay_ns == max(self.delays[-DELAYS:], default=0)

    def _arrives(
        self, opens: int, order: Any, *, end: int, lease: int, start: int | None, horizon: int
    ) -> None:
        now, newest, place = self.clock(), self.newest, len(self.every)
        before = (0, 10, 10) if opens else self.order  # a new session, of any number, counts anew
        episode, epoch, seq = (max(0, a + b) for a, b in zip(before, order, strict=True))
        actions = np.zeros((horizon, DIM), np.float32)
        actions[:, place] = 1
        actions[:, SLOPE] = place + np.arange(horizon) % 3
        actions[:, SWITCH] = place * 10 + np.arange(horizon)
        end_ns = now + end * MS
        start_ns = newest.start_ns if start is None and newest else end_ns + (start or 0) * MS
        identity = {"session": self.session - opens, "episode": episode, "epoch": epoch}
        times = {"end_ns": end_ns, "start_ns": start_ns, "expires_ns": end_ns + lease * MS}
        data = memoryview(actions.tobytes())
        chunk = make_chunk(seq, horizon=horizon, actions=data, **identity, **times)
        deadline_ns = chunk.expires_ns
        if self.limit_ns:
            deadline_ns = min(deadline_ns, end_ns + self.limit_ns)
        taken = Taken(chunk, place, now, deadline_ns, self.is_switched)
        is_newer, is_late = (episode, epoch, seq) > self.order, now > chunk.expires_ns
        reasons = {
            "out_of_order": newest is not None and not opens and not is_newer,
            "expired": is_late,
            "too_old": now > deadline_ns and not is_late,
            "superseded": now >= start_ns + horizon * DT_NS,
            "future": end > lease,
        }
        self.received += 1
        refusal = self.timeline.merge(chunk, now)
        if refusal is not None:
            assert reasons[refusal]
            self.refused[refusal] = self.refused.get(refusal, 0) + 1
            self.late += [taken.fate()] * (refusal in ("expired", "too_old", "superseded"))
            return
        assert not any(reasons.values())
        self.newest = chunk
        self.session, self.order = chunk.session, (episode, epoch, seq)
        self.delays.append(now - end_ns)
        self.taken.append(taken)
        self.every.append(taken)

    def _alive(self) -> list[Taken]:
        """Those due or to come: a chunk is over once a newer one has begun, or it cannot be due."""
        now, alive = self.clock(), list[Taken]()
        for index, one in enumerate(self.taken):
            begun_ns = max(now, one.chunk.start_ns)
            is_replaced = any(new.chunk.start_ns <= begun_ns for new in self.taken[index + 1 :])
            if not is_replaced and (alive or now <= one.deadline_ns):
                alive.append(one)
        return alive

    def _ask(self) -> Any:
        now = self.clock()
        self.latest_ns = max(self.latest_ns, now)
        action = self.timeline.action_at(now)
        due = next((one for one in self._alive() if one.chunk.start_ns <= now), None)
        assert self.is_set_back or (action is None) == (due is None)
        if action is None:
            if self.newest and self.newest.start_ns <= now <= self.newest.expires_ns:
                self.too_old += now > self.taken[-1].deadline_ns
            self.before_hold = [one for one in self.every if one.executed and not self.is_set_back]
            return None
        executing = self.timeline.executing
        assert executing is not None
        playing = next(one for one in self.taken if one.chunk is executing.chunk)
        mixed = [one for one in self.taken if action[one.place] > 0]
        shares = [float(action[one.place]) for one in mixed]
        slope = sum(s * one.slope_at(now) for s, one in zip(shares, mixed, strict=True))
        np.testing.assert_allclose([sum(shares), action[SLOPE]], [1.0, slope], rtol=1e-4)
        for one in {*mixed, playing}:
            assert now <= one.deadline_ns, f"{now - one.deadline_ns} ns past its deadline"
            assert one.executed or one is playing, "it was never executed"
            assert one.chunk.start_ns <= self.latest_ns, "it has never begun"
            assert one not in self.before_hold, "it was executed before the robot held"
        step = playing.step_at(now)
        assert executing == (playing.chunk, step, now, executing.age_ns, playing.received_ns)
        if playing.is_switched:
            assert action[SWITCH] == playing.place * 10 + step
        oldest_ns = max(now - one.chunk.window_end_ns for one in [*mixed, playing])
        assert oldest_ns <= executing.age_ns
        since_ns = now - max(playing.chunk.start_ns, playing.received_ns)
        if since_ns >= self.blend_ns:
            assert mixed == [playing]
            assert executing.age_ns == now - playing.chunk.window_end_ns
        if not self.is_set_back:
            assert playing is due
            assert since_ns == 0 or executing.age_ns == oldest_ns
            self._goes_on(now, action)
        self.last = (now, action, mixed)
        playing.play(step, now, executing.age_ns)
        self.oldest_ns = max(self.oldest_ns, executing.age_ns)
        return action

    def _goes_on(self, now: int, action: Any) -> None:
        """At one instant a newer chunk changes nothing: a blend begins where the robot is."""
        at_ns, before, mixed = self.last or (-1, action, [])
        if self.blend_ns and at_ns == now and all(one.deadline_ns > now for one in mixed):
            np.testing.assert_allclose(action[:SWITCH], before[:SWITCH], rtol=1e-5, atol=1e-6)


TestTimeline = TimelineGivesWhatIsDueAndNothingPastItsLease.TestCase
TestTimeline.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
