import math

import pytest

from ppstream.core.clock import (
    ENDLESS_NS,
    NS_PER_MS,
    NS_PER_S,
    UNIT_LOOKS,
    ManualClock,
    Ticker,
    UnitCheck,
    limit_ns,
)
from ppstream.core.errors import SpecError


@pytest.mark.parametrize("sign", [1, -1])
def test_a_time_out_is_a_whole_number_however_long_it_is(sign):
    assert limit_ns(sign * 1.5) == sign * 1_500_000_000
    for longest in (math.inf, 1e300, 1e10):
        assert limit_ns(sign * longest) == sign * ENDLESS_NS
    with pytest.raises(SpecError, match="timeout_s: got nan, want seconds, or"):
        limit_ns(math.nan)


def test_late_tick_does_not_shift_the_ones_behind_it():
    ticker = Ticker(period_ns=10, start_ns=0)
    assert ticker.consume(9) == 0
    assert ticker.consume(17) == 1
    assert ticker.due_ns == 20


def test_missed_ticks_are_counted_once():
    ticker = Ticker(period_ns=10, start_ns=0)
    assert ticker.consume(35) == 3
    assert ticker.consume(35) == 0
    assert ticker.due_ns == 40


def test_manual_clock_never_goes_back():
    clock = ManualClock(5)
    clock.advance(2)
    assert clock() == 7
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def looks_at(clock, *, seconds=10.0):
    """How often a clock, given the monotonic one, is looked at; it may raise."""
    now = [10**15]
    check, begun = UnitCheck(lambda: clock(now[0])), now[0]
    count = 0
    while now[0] - begun < seconds * NS_PER_S:
        count += check.due_ns <= now[0]
        if check.is_over(now[0]):
            return count
        now[0] += 20 * NS_PER_MS
    return count


@pytest.mark.parametrize(
    ("factor", "unit"), [(10**3, "microseconds"), (10**6, "milliseconds"), (10**9, "seconds")]
)
def test_a_clock_of_another_unit_is_told_with_its_speed(factor, unit):
    with pytest.raises(SpecError) as refused:
        looks_at(lambda at_ns: at_ns // factor + 7)
    assert str(refused.value).startswith("clock() must return nanoseconds: it advanced by ")
    assert f"counts {unit}: multiply by {factor}" in str(refused.value)


def test_a_clock_in_nanoseconds_is_looked_at_a_few_times_whatever_its_speed():
    for speed in (-1, 1, 0.01, 0.1, 30):
        assert looks_at(lambda at_ns, speed=speed: int(at_ns * speed)) == UNIT_LOOKS
    stumbling = iter([0, 0, 0, 0, 0, 0, 0, 2 * NS_PER_MS])  # a simulation that loads its scene
    assert looks_at(lambda _: next(stumbling)) == 8
    assert looks_at(lambda _: 5, seconds=10) == 39  # it stands
