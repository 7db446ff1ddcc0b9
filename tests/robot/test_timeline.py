from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from robot_rig import DT_NS, HORIZON, LEASE_NS, MS, make_chunk

from ppstream.core.errors import ReceiverEndedError
from ppstream.robot.timeline import ActionTimeline


def timeline_of(*chunks: Any, now_ns: int = 0) -> ActionTimeline:
    timeline = ActionTimeline(2)
    for chunk in chunks:
        assert timeline.merge(chunk, now_ns) is None
    return timeline


def actions_of(chunk: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(chunk.actions, np.float32).reshape(chunk.horizon, -1)


def test_nothing_is_due_before_the_first_step_and_after_the_lease() -> None:
    timeline = timeline_of(make_chunk())
    assert timeline.action_at(DT_NS - 1) is None
    assert timeline.action_at(DT_NS) is not None
    assert timeline.action_at(LEASE_NS) is not None
    assert timeline.action_at(LEASE_NS + 1) is None
    assert timeline.expires_ns == LEASE_NS


def test_without_a_chunk_nothing_is_due() -> None:
    timeline = ActionTimeline(2)
    assert timeline.action_at(0) is None
    assert timeline.expires_ns is None


finite = st.floats(-(2.0**100), 2.0**100, width=32)


@given(points=st.lists(st.tuples(finite, finite), min_size=1, max_size=8), start=st.integers())
def test_policy_points_are_exact(points: list[tuple[float, float]], start: int) -> None:
    actions = np.array(points, np.float32)
    chunk = make_chunk(end_ns=start, horizon=len(points), actions=memoryview(actions.tobytes()))
    timeline = timeline_of(chunk, now_ns=start)
    for step, point in enumerate(actions):
        due = timeline.action_at(start + DT_NS + step * DT_NS)
        assert due is not None
        assert due.tobytes() == point.tobytes()


@given(ends=st.tuples(finite, finite), within=st.integers(0, DT_NS - 1))
def test_between_points_an_action_is_linear_and_never_outside(
    ends: tuple[float, float], within: int
) -> None:
    actions = np.array([[ends[0]] * 2, [ends[1]] * 2], np.float32)
    chunk = make_chunk(horizon=2, actions=memoryview(actions.tobytes()))
    due = timeline_of(chunk).action_at(DT_NS + within)
    assert due is not None
    assert actions.min() <= due[0] <= actions.max()
    expected = np.interp(within, [0, DT_NS], actions[:, 0].astype(np.float64))
    np.testing.assert_allclose(due[0], expected, rtol=1e-6, atol=1e-30)


def test_behind_the_last_step_it_is_held_until_the_lease_ends() -> None:
    chunk = make_chunk()
    timeline = timeline_of(chunk)
    late = timeline.action_at(LEASE_NS)
    assert late is not None
    np.testing.assert_array_equal(late, actions_of(chunk)[-1])


def test_a_newer_chunk_replaces_everything_from_now_on() -> None:
    older, newer = make_chunk(0), make_chunk(1, end_ns=5 * MS)
    timeline = timeline_of(older, now_ns=0)
    now = 25 * MS  # step 1.5 of the older one
    assert timeline.merge(newer, now) is None
    due = timeline.action_at(now)
    assert due is not None
    np.testing.assert_array_equal(due, actions_of(newer)[1])


def test_until_a_newer_chunk_begins_the_older_one_plays_on() -> None:
    # chunks come faster than their first step falls due: none of them may be starved
    timeline = ActionTimeline(2)
    arrivals = [(seq * 4 * MS + MS, seq, False) for seq in range(6)]
    starts = [(seq * 4 * MS + DT_NS, seq, True) for seq in range(6)]
    for now, seq, starts_now in sorted(arrivals + starts):
        if not starts_now:
            timeline.merge(make_chunk(seq, end_ns=seq * 4 * MS), now)
            continue
        due = timeline.action_at(now)
        assert due is not None
        assert due[0] == np.float32(seq / 1000)
    assert timeline.statistics().superseded == 0


def test_a_replaced_chunk_that_was_never_executed_is_superseded() -> None:
    timeline = timeline_of(make_chunk(0), make_chunk(1, start_ns=DT_NS))
    timeline.action_at(DT_NS)
    statistics = timeline.statistics()
    assert (statistics.received, statistics.superseded, statistics.pending) == (2, 1, 1)
    (outcome,) = timeline.take_outcomes(0)
    assert (outcome.seq, outcome.executed) == (0, 0)


def test_steps_already_past_are_skipped_and_counted() -> None:
    timeline = ActionTimeline(2)
    now = DT_NS + 2 * DT_NS  # steps 0 and 1 are over
    assert timeline.merge(make_chunk(), now) is None
    due = timeline.action_at(now)
    assert due is not None
    assert due[0] == 2
    timeline.clear()
    statistics = timeline.statistics()
    assert (statistics.steps_executed, statistics.steps_skipped) == (1, 2)


def test_a_chunk_whose_steps_are_all_past_is_superseded() -> None:
    timeline = ActionTimeline(2)
    over = DT_NS + HORIZON * DT_NS
    assert timeline.merge(make_chunk(), over) == "superseded"
    assert timeline.action_at(over) is None
    assert timeline.merge(make_chunk(), over - 1) is None


def test_age_runs_from_the_windows_end_to_the_first_execution() -> None:
    timeline = timeline_of(make_chunk(end_ns=10**18), now_ns=10**18)
    for late in (12 * MS, 14 * MS, 30 * MS):
        assert timeline.action_at(10**18 + late) is not None
    timeline.clear()
    (outcome,) = timeline.take_outcomes(0)
    assert (outcome.age_ns, outcome.executed, outcome.skipped) == (12 * MS, 2, 1)


def test_age_of_a_chunk_not_executed_runs_to_its_receipt() -> None:
    timeline = timeline_of(make_chunk(), now_ns=7 * MS)
    timeline.clear()
    (outcome,) = timeline.take_outcomes(0)
    assert (outcome.age_ns, outcome.executed) == (7 * MS, 0)


@pytest.mark.parametrize(
    ("reason", "chunk", "now_ns"),
    [
        ("malformed", make_chunk(5, horizon=4, actions=memoryview(b"\0" * 31)), 0),
        ("non_finite", make_chunk(5, horizon=1, actions=memoryview(b"\xff" * 8)), 0),
        ("out_of_order", make_chunk(3), 0),
        ("out_of_order", make_chunk(2), 0),
        ("expired", make_chunk(5), LEASE_NS + 1),
        ("future", make_chunk(5, end_ns=LEASE_NS + 1), 0),
    ],
)
def test_a_chunk_that_may_not_be_used_is_refused(reason: str, chunk: Any, now_ns: int) -> None:
    timeline = timeline_of(make_chunk(3), now_ns=0)
    assert timeline.merge(chunk, now_ns) == reason
    assert timeline.statistics().refused == {reason: 1}


def test_a_chunk_of_a_new_session_counts_from_zero_again() -> None:
    timeline = timeline_of(make_chunk(300, session=9))
    assert timeline.merge(make_chunk(0, session=4, end_ns=MS), 2 * MS) is None


def test_a_clock_set_back_executes_nothing() -> None:
    timeline = timeline_of(make_chunk(end_ns=10**15), now_ns=10**15)
    assert timeline.action_at(10**15 + DT_NS) is not None
    assert timeline.action_at(10**15 - 3600 * 10**9) is None


def test_a_chunk_played_by_someone_else_is_marked() -> None:
    chunk = make_chunk()
    timeline = timeline_of(chunk)
    assert timeline.mark_executed(chunk, 11 * MS)
    timeline.held(12 * MS)
    assert timeline.mark_executed(chunk, 15 * MS)
    assert timeline.holds(99 * MS) == (1, 3 * MS, 0, "")  # that ended the hold
    timeline.clear()
    assert not timeline.mark_executed(chunk, 12 * MS)
    (outcome,) = timeline.take_outcomes(0)
    assert (outcome.age_ns, outcome.executed) == (11 * MS, 1)


events = st.lists(
    st.tuples(
        st.integers(0, 40 * MS),  # time passes
        st.booleans(),  # a chunk arrives
        st.integers(0, 250 * MS),  # its window's age on arrival
        st.integers(0, 12),  # its seq
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(events=events)
def test_nothing_is_executed_outside_its_lease_and_every_chunk_is_accounted_for(
    events: list[tuple[int, bool, int, int]],
) -> None:
    timeline = ActionTimeline(2)
    now = 0
    merged: dict[float, Any] = {}
    for passed, arrives, age, seq in events:
        now += passed
        if arrives:
            chunk = make_chunk(seq, end_ns=now - age)
            if timeline.merge(chunk, now) is None:
                merged[seq] = chunk
        due = timeline.action_at(now)
        if due is not None:
            # an action says which chunk it is of: x + y = 2 * seq / 1000
            chunk = merged[round(float(due[0] + due[1]) * 500)]
            assert chunk.start_ns <= now <= chunk.expires_ns
    timeline.clear()
    counts = timeline.statistics()
    outcomes = timeline.take_outcomes(now)
    assert counts.received == sum(counts.refused.values()) + counts.executed + counts.superseded
    assert counts.steps_executed == sum(outcome.executed for outcome in outcomes)
    assert all(outcome.executed + outcome.skipped <= HORIZON for outcome in outcomes)


def test_no_action_is_executed_beyond_the_maximum_age_and_the_oldest_one_is_told() -> None:
    timeline = ActionTimeline(2, max_age_ms=60.0)
    assert timeline.statistics().oldest_text() == "no action executed"
    timeline.merge(make_chunk(), 0)
    assert timeline.action_at(60 * MS) is not None
    assert timeline.action_at(60 * MS + 1) is None
    statistics = timeline.statistics()
    assert (statistics.oldest_ns, statistics.too_old) == (60 * MS, 1)
    assert statistics.oldest_text() == "oldest action executed: 60.0 ms of 60"
    assert timeline.merge(make_chunk(1, end_ns=10 * MS), 71 * MS) == "too_old"
    assert timeline.merge(make_chunk(2), LEASE_NS + 1) == "expired"


def test_the_smaller_maximum_age_counts() -> None:
    for own, servers, expected in ((60.0, 40 * MS, 40), (60.0, 80 * MS, 60), (None, 0, 0)):
        timeline = ActionTimeline(2, max_age_ms=own)
        timeline.adopt(discrete=(), max_age_ns=servers)
        assert timeline.statistics().max_age_ns == expected * MS


def test_the_delay_told_to_the_policy_is_the_longest_of_the_last_few() -> None:
    timeline = ActionTimeline(2)
    assert timeline.delay_ns == 0
    for seq, late in enumerate([30 * MS, 12 * MS, *[7 * MS] * 8]):
        timeline.merge(make_chunk(seq, end_ns=seq * 100 * MS), seq * 100 * MS + late)
    assert timeline.delay_ns == 30 * MS
    timeline.merge(make_chunk(99, end_ns=10**10), 10**10 + MS)
    assert timeline.delay_ns == 12 * MS


def test_an_outcome_says_how_old_the_oldest_action_was_and_how_long_it_waited() -> None:
    timeline = timeline_of(make_chunk(), now_ns=4 * MS)
    for late in (12 * MS, 30 * MS):
        timeline.action_at(late)
    timeline.clear()
    (outcome,) = timeline.take_outcomes(0)
    assert (outcome.age_ns, outcome.oldest_ns, outcome.dispatch_ns) == (12 * MS, 30 * MS, 8 * MS)


moves = st.lists(
    st.tuples(
        st.integers(-60 * MS, 60 * MS),  # the clock goes on, or is set back
        st.sampled_from(["chunk", "chunk", "session", "clear", "adopt", "plan", "nothing"]),
        st.integers(-250 * MS, 250 * MS),  # its window's end, from the clock
        st.integers(-20 * MS, 120 * MS),  # its first step, from the window's end
        st.integers(-20 * MS, 200 * MS),  # its lease
        st.integers(1, 6),  # its steps
    ),
    max_size=40,
)


@settings(max_examples=500, deadline=None)
@given(
    moves=moves,
    blend_ms=st.sampled_from([0.0, 5.0, 40.0, 300.0]),
    max_age_ms=st.none() | st.just(70.0),
)
def test_nothing_is_executed_past_its_lease_or_maximum_age_whatever_comes_in_whatever_order(
    moves: list[tuple[int, str, int, int, int, int]], blend_ms: float, max_age_ms: float | None
) -> None:
    """Each chunk's actions are a unit vector of its own: an action shows all it is mixed from."""
    timeline = ActionTimeline(len(moves), blend_ms=blend_ms, max_age_ms=max_age_ms)
    own_ns = None if max_age_ms is None else round(max_age_ms * MS)
    limit_ns, session, now, latest = own_ns, 1, 10**12, 0
    deadlines: dict[int, int] = {}
    starts: dict[int, int] = {}
    for seq, (step_ns, what, end, start, lease, horizon) in enumerate(moves):
        now += step_ns
        latest = max(latest, now)
        if what == "session":
            session += 1
        elif what == "clear":
            timeline.clear()
        elif what == "adopt":
            timeline.adopt(discrete=[seq], max_age_ns=abs(lease))
            limits = [one for one in (own_ns, abs(lease)) if one]
            limit_ns = min(limits, default=None)
        elif what == "plan":
            timeline.plan(now)
        elif what == "chunk":
            actions = np.zeros((horizon, len(moves)), np.float32)
            actions[:, seq] = 1
            end_ns = now + end
            chunk = make_chunk(
                seq,
                session=session,
                end_ns=end_ns,
                start_ns=end_ns + start,
                expires_ns=end_ns + lease,
                horizon=horizon,
                actions=memoryview(actions.tobytes()),
            )
            timeline.merge(chunk, now)
            starts[seq] = chunk.start_ns
            age_ns = lease if limit_ns is None else min(lease, limit_ns)
            deadlines[seq] = end_ns + age_ns
        due = timeline.action_at(now)
        if due is not None:
            shares = np.flatnonzero(due).tolist()
            assert shares, "an action of nothing"
            for share in shares:
                assert now <= deadlines[share], f"{now - deadlines[share]} ns past its deadline"
                assert starts[share] <= latest, "it has never begun"


def test_holds_are_counted_for_those_who_ask_the_timeline_themselves() -> None:
    timeline, told = ActionTimeline(2), []
    timeline.on_trouble = lambda: told.append("trouble")
    assert timeline.action_at(5) is None  # nothing was executed yet: nothing is owed
    assert timeline.holds(5) == (0, 0, 0, "")
    timeline.merge(make_chunk(), 0)
    timeline.action_at(DT_NS)
    for late in (1, 5, 9):
        assert timeline.action_at(LEASE_NS + late) is None
    assert timeline.holds(LEASE_NS + 11) == (1, 10, 0, "")
    timeline.merge(make_chunk(1, end_ns=LEASE_NS), LEASE_NS)
    timeline.action_at(LEASE_NS + DT_NS)
    assert timeline.holds(2 * LEASE_NS) == (1, DT_NS - 1, 0, "")
    assert told == ["trouble"]
    timeline.clear()  # a new episode: nothing is owed until its first action
    timeline.action_at(2 * LEASE_NS)
    assert timeline.holds(3 * LEASE_NS) == (1, DT_NS - 1, 0, "")


def test_a_hold_counts_only_while_the_run_is_ready_and_faults_count_once() -> None:
    timeline, ready, told = ActionTimeline(2), [True], []
    timeline.is_ready = lambda: ready[0]
    timeline.on_trouble = lambda: told.append("trouble")
    timeline.merge(make_chunk(), 0)
    timeline.action_at(DT_NS)
    timeline.held(20 * MS, "lease")
    timeline.held(25 * MS, "lease")
    ready[0] = False
    timeline.held(30 * MS, "lease")
    timeline.held(90 * MS, "lease")
    assert timeline.holds(99 * MS) == (1, 10 * MS, 1, "lease")
    ready[0] = True
    timeline.held(100 * MS, "lease")
    assert timeline.holds(101 * MS) == (2, 11 * MS, 1, "lease")
    timeline.held(102 * MS)  # somebody cleared the fault, and nothing came yet
    timeline.held(103 * MS, "lease")
    assert timeline.holds(103 * MS) == (2, 13 * MS, 2, "lease")
    assert len(told) == 3  # a hold and its fault in one, a hold, a fault


def test_what_is_under_way_when_a_session_begins_belongs_to_it() -> None:
    timeline = ActionTimeline(2)
    timeline.merge(make_chunk(), 0)
    timeline.action_at(DT_NS)
    timeline.held(20 * MS, "lease")
    timeline.begin_session()
    assert timeline.holds(50 * MS) == (1, 30 * MS, 1, "lease")
    timeline.merge(make_chunk(1, end_ns=50 * MS), 50 * MS)
    timeline.action_at(60 * MS)
    timeline.begin_session()
    assert timeline.holds(70 * MS) == (0, 0, 0, "")


def test_a_timeline_that_nothing_can_come_to_says_so() -> None:
    timeline = timeline_of(make_chunk())
    assert timeline.action_at(DT_NS) is not None
    timeline.fail("the receiving thread ended: KeyError", "client: ended")
    with pytest.raises(ReceiverEndedError, match="ended: KeyError"):
        timeline.action_at(DT_NS + 1)
    assert timeline.holds(DT_NS + 1).fault == "client: ended"
