from __future__ import annotations

import pytest

from ppstream.robot_clock import FUTURE_LIMIT_NS, JUMP_SAMPLES, NEVER_NS, RobotClock

S = 1_000_000_000


@pytest.fixture
def jumps() -> list[int]:
    return []


@pytest.fixture
def clock(jumps: list[int]) -> RobotClock:
    return RobotClock(lambda: jumps.append(1))


def test_the_first_stamp_may_be_any_clock_s(clock: RobotClock) -> None:
    assert clock.accepts(-(10**18), 5 * S)
    clock.restart()
    assert clock.accepts(10**18, 5 * S)


def test_a_stamp_may_run_ahead_of_arrival_by_the_limit_and_no_more(clock: RobotClock) -> None:
    clock.accepts(0, 0)
    assert not clock.accepts(S + FUTURE_LIMIT_NS + 1, S)
    assert clock.accepts(S + FUTURE_LIMIT_NS, S)


def test_a_backlog_after_a_stall_is_not_the_future(clock: RobotClock) -> None:
    clock.accepts(0, 0)
    for stamp_ns in range(0, 30 * S, S // 100):  # all of it arrives at once
        assert clock.accepts(stamp_ns, 30 * S)


def test_a_backlog_at_the_very_start_is_not_the_future(clock: RobotClock) -> None:
    for stamp_ns in range(0, 30 * S, S // 100):
        assert clock.accepts(stamp_ns, 30 * S)


def test_a_refused_stamp_does_not_move_the_limit(clock: RobotClock) -> None:
    clock.accepts(0, 0)
    for stamp_ns in range(2 * S, 60 * S, S // 2):
        assert not clock.accepts(stamp_ns, 0)


def test_without_real_time_no_stamp_is_too_new(clock: RobotClock) -> None:
    clock.restart(is_real_time=False)
    assert clock.accepts(0, 0)
    assert clock.accepts(1000 * S, 1)


def test_a_stamp_whose_differences_would_overflow_is_never_accepted(clock: RobotClock) -> None:
    clock.restart(is_real_time=False)
    assert not clock.accepts(-NEVER_NS + 1, 0)
    assert clock.accepts(0, 0)
    assert not clock.accepts((1 << 63) - 1, 0)


def test_implausible_samples_in_a_row_mean_a_new_clock(clock: RobotClock, jumps: list[int]) -> None:
    clock.accepts(0, 0)
    assert [clock.rejects() for _ in range(JUMP_SAMPLES)] == [False] * (JUMP_SAMPLES - 1) + [True]
    assert jumps == [1]
    assert clock.accepts(10**18, 0)


def test_one_plausible_sample_between_them_means_none(clock: RobotClock, jumps: list[int]) -> None:
    clock.accepts(0, 0)
    for _ in range(JUMP_SAMPLES - 1):
        clock.rejects()
    clock.accepts(1, 0)
    assert not clock.rejects()
    assert jumps == []
