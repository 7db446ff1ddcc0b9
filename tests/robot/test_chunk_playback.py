from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from robot_rig import DT_NS, LEASE_NS, MS, make_chunk

from ppstream.robot.timeline import ActionTimeline

BLEND_NS = 20 * MS


def constant(seq: int, value: float, *, end_ns: int = 0, **changes: Any) -> Any:
    """A chunk of eight equal steps."""
    actions = np.full((8, 2), value, np.float32)
    changes = {"horizon": 8, "actions": memoryview(actions.tobytes()), **changes}
    return make_chunk(seq, end_ns=end_ns, **changes)


def blending(*, max_age_ms: float | None = None, discrete: tuple[int, ...] = ()) -> ActionTimeline:
    timeline = ActionTimeline(2, blend_ms=BLEND_NS / MS, max_age_ms=max_age_ms)
    timeline.adopt(discrete=discrete, max_age_ns=0)
    return timeline


def value_at(timeline: ActionTimeline, now_ns: int) -> float:
    action = timeline.action_at(now_ns)
    assert action is not None
    return float(action[0])


def test_a_blend_begins_at_the_older_chunk_and_ends_at_the_newer_one() -> None:
    timeline = blending()
    timeline.merge(constant(0, 1.0), 0)
    assert value_at(timeline, 15 * MS) == 1.0
    timeline.merge(constant(1, 3.0, end_ns=5 * MS), 30 * MS)
    shares = [value_at(timeline, 30 * MS + late) for late in range(0, 25 * MS, 5 * MS)]
    np.testing.assert_allclose(shares, [1.0, 1.5, 2.0, 2.5, 3.0])


def test_a_blend_is_over_before_the_older_chunk_expires() -> None:
    timeline = blending()
    timeline.merge(constant(0, 1.0), 0)
    value_at(timeline, DT_NS)
    late = LEASE_NS - 10 * MS
    assert value_at(timeline, late - 1) == 1.0
    timeline.merge(constant(1, 3.0, end_ns=late - 20 * MS), late)
    assert value_at(timeline, late + 5 * MS) == pytest.approx(2.0)
    assert value_at(timeline, LEASE_NS) == 3.0


def test_a_new_episode_begins_at_its_own_action_though_one_was_blended_before() -> None:
    timeline = blending()
    timeline.merge(constant(0, 1.0), 0)
    value_at(timeline, 15 * MS)
    timeline.merge(constant(1, 3.0, end_ns=5 * MS), 30 * MS)
    assert value_at(timeline, 35 * MS) == pytest.approx(1.5)
    timeline.clear()
    timeline.merge(constant(0, 9.0, end_ns=36 * MS, episode=1), 46 * MS)
    assert value_at(timeline, 46 * MS) == 9.0


arrivals = st.lists(
    st.tuples(
        st.integers(1, 30 * MS),  # since the one before
        st.integers(0, 60 * MS),  # age of its window
        st.floats(-1, 1, width=32),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100)
@given(arrivals=arrivals, max_age_ms=st.sampled_from([None, 45.0, 90.0]))
def test_a_blend_never_leaves_its_chunks_never_jumps_and_never_executes_what_is_too_old(
    arrivals: list[tuple[int, int, float]], max_age_ms: float | None
) -> None:
    timeline = blending(max_age_ms=max_age_ms)
    tick_ns = MS // 2
    merges: dict[int, list[Any]] = {}
    now = 0
    for seq, (passed, age, value) in enumerate(arrivals):
        now += passed
        merges.setdefault(now // tick_ns, []).append(constant(seq, value, end_ns=now - age))
    previous: float | None = None
    for tick in range((now + 40 * MS) // tick_ns):
        at_ns = tick * tick_ns
        for chunk in merges.get(tick, ()):
            timeline.merge(chunk, at_ns)
        action = timeline.action_at(at_ns)
        if action is None:
            previous = None  # the robot was held: what follows starts anew
            continue
        values = [value for _, _, value in arrivals]
        assert min(values) <= action[0] <= max(values)
        assert timeline.executing is not None
        assert timeline.executing.age_ns <= (LEASE_NS if max_age_ms is None else max_age_ms * MS)
        if previous is not None and max_age_ms is None:  # else a short blend may be steep
            width = max(values) - min(values)
            steepest = len(arrivals) * tick_ns / BLEND_NS  # every one of them still blending
            assert abs(action[0] - previous) <= width * steepest + 1e-5
        previous = float(action[0])


@settings(max_examples=100)
@given(
    points=st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8),
    late=st.integers(DT_NS, 60 * MS),
)
def test_a_plan_is_what_is_then_executed(points: list[float], late: int) -> None:
    timeline = blending()
    timeline.merge(constant(0, 0.5), 0)
    timeline.action_at(late)
    actions = np.repeat(np.array(points, np.float32)[:, None], 2, axis=1)
    timeline.merge(constant(1, 0.0, end_ns=MS, actions=memoryview(actions.tobytes())), late)
    plan = timeline.plan(late)
    assert plan is not None
    assert plan.start_ns <= late < plan.start_ns + plan.dt_ns or len(plan.actions) in (1, 8)
    for row, planned in enumerate(plan.actions):
        at_ns = plan.start_ns + row * plan.dt_ns
        if at_ns >= late:
            executed = timeline.action_at(at_ns)
            assert executed is not None
            assert planned.tobytes() == executed.tobytes()


def test_more_chunks_than_can_fade_at_once_still_make_no_jump() -> None:
    timeline = blending()
    timeline.merge(constant(0, 0.0), 0)
    previous = value_at(timeline, DT_NS)
    for seq in range(1, 60):  # one every 50 µs: 400 in a blend
        at_ns = 20 * MS + seq * MS // 20
        timeline.merge(constant(seq, float(seq % 2), end_ns=seq * 1000), at_ns)
        value = value_at(timeline, at_ns)
        assert abs(value - previous) < 0.1
        previous = value
