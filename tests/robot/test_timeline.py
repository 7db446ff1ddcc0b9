from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from robot_rig import DT_NS, HORIZON, LEASE_NS, MS, make_chunk

from ppstream.core.errors import ReceiverEndedError, SpecError
from ppstream.robot.timeline import MAX_PENDING, ActionTimeline


def timeline_of(*chunks: Any, now_ns: int = 0) -> ActionTimeline:
    timeline = ActionTimeline(2)
    for chunk in chunks:
        assert timeline.merge(chunk, now_ns) is None
    return timeline


def actions_of(chunk: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(chunk.actions, np.float32).reshape(chunk.horizon, -1)


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


@pytest.mark.parametrize("max_age_ms", [0.0, -1.0, float("nan")])
def test_a_maximum_age_that_no_action_could_keep_is_refused(max_age_ms: float) -> None:
    with pytest.raises(SpecError, match=f"max_age_ms is {max_age_ms}, want above 0"):
        ActionTimeline(2, max_age_ms=max_age_ms)


@pytest.mark.parametrize(
    "bad", [(np.nan,), (np.inf,), (-np.inf,), (np.inf, -np.inf), (np.nan, np.inf)]
)
def test_a_small_chunk_with_a_value_that_is_no_number_is_refused(bad: tuple[float, ...]) -> None:
    actions = np.ones(8, np.float32)
    actions[2 : 2 + len(bad)] = bad
    chunk = make_chunk(actions=memoryview(actions.tobytes()))
    assert ActionTimeline(2).merge(chunk, 0) == "non_finite"


def test_the_oldest_action_executed_is_told_beside_what_was_allowed() -> None:
    timeline = ActionTimeline(2, max_age_ms=60.0)
    assert timeline.statistics().oldest_text() == "no action executed"
    timeline.merge(make_chunk(), 0)
    assert timeline.action_at(60 * MS) is not None
    assert timeline.statistics().oldest_text() == "oldest action executed: 60.0 ms of 60"


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


def test_a_chunk_played_by_someone_else_ends_a_hold() -> None:
    chunk = make_chunk()
    timeline = timeline_of(chunk)
    assert timeline.mark_executed(chunk, 11 * MS)
    timeline.held(12 * MS)
    assert timeline.mark_executed(chunk, 15 * MS)
    assert timeline.holds(99 * MS) == (1, 3 * MS, 0, "")


def test_chunks_that_come_much_oftener_than_steps_are_long_do_not_take_the_turn_of_one() -> None:
    """Of those that wait the newest makes room: the oldest begins next, or has begun."""
    timeline, step_ns, every_ns = ActionTimeline(2), 100 * MS, MS
    executed = 0
    for seq in range(300):
        now_ns = seq * every_ns
        times = {"start_ns": now_ns + step_ns, "dt_ns": step_ns, "expires_ns": now_ns + 8 * step_ns}
        chunk = make_chunk(seq, end_ns=now_ns, **times)
        assert timeline.merge(chunk, now_ns) is None
        executed += timeline.action_at(now_ns) is not None
        assert timeline.statistics().pending <= MAX_PENDING
    assert executed == 300 - step_ns // every_ns


def test_chunks_that_ended_are_counted_when_somebody_looks_and_few_wait_for_it() -> None:
    timeline = ActionTimeline(2)
    made: list[weakref.ref[Any]] = []  # actions, which live as long as their chunks
    for seq in range(10 * MAX_PENDING):
        end_ns = 2 * seq * DT_NS
        actions = np.zeros((HORIZON, 2), np.float32)
        made.append(weakref.ref(actions))
        chunk = make_chunk(seq, end_ns=end_ns, actions=memoryview(actions).cast("B"))
        assert timeline.merge(chunk, end_ns) is None
        del chunk, actions
        assert sum(one() is not None for one in made) <= MAX_PENDING + 2
        if seq % 100 == 99:
            found = timeline.statistics()
            assert (found.received, found.superseded, found.pending) == (seq + 1, seq - 1, 2)
    outcomes = timeline.pop_outcomes(end_ns)
    assert [outcome.seq for outcome in outcomes] == list(range(10 * MAX_PENDING - 2))
