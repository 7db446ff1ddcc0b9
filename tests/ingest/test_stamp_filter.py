from __future__ import annotations

import pytest

from ppstream.ingest.stamp_filter import (
    BEST_NS,
    FUTURE_LIMIT_NS,
    JUMP_SAMPLES,
    NEVER_NS,
    StampFilter,
)

S = 1_000_000_000


@pytest.fixture
def jumps() -> list[int]:
    return []


@pytest.fixture
def clock(jumps: list[int]) -> StampFilter:
    return StampFilter(lambda: jumps.append(1))


def test_the_first_stamp_may_be_any_clock_s(clock: StampFilter) -> None:
    assert clock.accepts(-(10**18), 5 * S)
    clock.restart()
    assert clock.accepts(10**18, 5 * S)


def test_a_stamp_may_run_ahead_of_arrival_by_the_limit_and_no_more(clock: StampFilter) -> None:
    clock.accepts(0, 0)
    assert not clock.accepts(S + FUTURE_LIMIT_NS + 1, S)
    assert clock.accepts(S + FUTURE_LIMIT_NS, S)


def test_a_backlog_after_a_stall_is_not_the_future(clock: StampFilter) -> None:
    clock.accepts(0, 0)
    for stamp_ns in range(0, 30 * S, S // 100):  # all of it arrives at once
        assert clock.accepts(stamp_ns, 30 * S)


def test_a_backlog_at_the_very_start_is_not_the_future(clock: StampFilter) -> None:
    for stamp_ns in range(0, 30 * S, S // 100):
        assert clock.accepts(stamp_ns, 30 * S)


def test_a_refused_stamp_does_not_move_the_limit(clock: StampFilter) -> None:
    clock.accepts(0, 0)
    for stamp_ns in range(2 * S, 60 * S, S // 2):
        assert not clock.accepts(stamp_ns, 0)


def test_without_real_time_no_stamp_is_too_new(clock: StampFilter) -> None:
    clock.restart(is_real_time=False)
    assert clock.accepts(0, 0)
    assert clock.accepts(1000 * S, 1)


def test_a_stamp_whose_differences_would_overflow_is_never_accepted(clock: StampFilter) -> None:
    clock.restart(is_real_time=False)
    assert not clock.accepts(-NEVER_NS + 1, 0)
    assert clock.accepts(0, 0)
    assert not clock.accepts((1 << 63) - 1, 0)


def test_implausible_samples_in_a_row_mean_a_new_clock(
    clock: StampFilter, jumps: list[int]
) -> None:
    clock.accepts(0, 0)
    assert [clock.rejects() for _ in range(JUMP_SAMPLES)] == [False] * (JUMP_SAMPLES - 1) + [True]
    assert jumps == [1]
    assert clock.accepts(10**18, 0)


def test_one_plausible_sample_between_them_means_none(clock: StampFilter, jumps: list[int]) -> None:
    clock.accepts(0, 0)
    for _ in range(JUMP_SAMPLES - 1):
        clock.rejects()
    clock.accepts(1, 0)
    assert not clock.rejects()
    assert jumps == []


STALE_NS = S // 2


@pytest.fixture
def ageing(jumps: list[int]) -> StampFilter:
    return StampFilter(lambda: jumps.append(1), STALE_NS)


def test_what_waited_too_long_on_its_way_is_stale_and_the_newest_of_a_backlog_is_not(
    ageing: StampFilter,
) -> None:
    assert ageing.accepts(0, 0)
    now_ns = 3 * S  # everything since then arrives at once
    verdicts = {stamp: ageing.accepts(stamp, now_ns) for stamp in range(S, 3 * S, S // 4)}
    limit_ns = now_ns - STALE_NS
    assert verdicts == {stamp: stamp >= limit_ns for stamp in verdicts}
    assert [stamp for stamp in verdicts if ageing.is_stale(stamp, now_ns)] == [
        stamp for stamp in verdicts if stamp < limit_ns
    ]


@pytest.mark.parametrize(("late_ns", "taken"), [(-1, True), (0, True), (1, False)])
def test_the_limit_of_staleness_is_exact(ageing: StampFilter, late_ns: int, taken: bool) -> None:
    ageing.accepts(0, 0)
    assert ageing.accepts(S, S + STALE_NS + late_ns) is taken


def test_one_late_sample_after_a_quick_while_makes_no_later_one_good(ageing: StampFilter) -> None:
    """The best lead of the while before counts on when the first of a new one is slow itself."""
    assert ageing.accepts(0, 0)
    rx_ns = BEST_NS
    assert ageing.accepts(rx_ns - STALE_NS + 1, rx_ns)
    stamp_ns, rx_ns = rx_ns - STALE_NS + 2, rx_ns + 4
    assert not ageing.accepts(stamp_ns, rx_ns)
    assert ageing.is_stale(stamp_ns, rx_ns)


def test_samples_that_stay_late_are_the_new_normal(ageing: StampFilter, jumps: list[int]) -> None:
    ageing.accepts(0, 0)
    delay_ns = 2 * STALE_NS  # a suspended robot's clock stood still, or the way became longer
    verdicts = [
        ageing.accepts(stamp, stamp + delay_ns) or not ageing.is_stale(stamp, stamp + delay_ns)
        for stamp in range(S, 3 * S, S // 100)
    ]
    assert verdicts == sorted(verdicts)  # refused at first, then taken for good
    assert 90 <= verdicts.count(False) <= 110  # a second's worth
    assert jumps == []


def test_a_clock_that_drifts_for_a_day_makes_nothing_stale(ageing: StampFilter) -> None:
    for seconds in range(0, 86_400, 5):
        rx_ns = seconds * S
        assert ageing.accepts(rx_ns - rx_ns // 10_000, rx_ns)  # 100 ppm slow


def test_a_recording_at_any_speed_is_never_stale(ageing: StampFilter) -> None:
    ageing.restart(is_real_time=False)
    assert all(ageing.accepts(stamp, 100 * stamp) for stamp in range(0, 10 * S, S // 10))
