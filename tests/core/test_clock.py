import math

import pytest

from ppstream.core.clock import ENDLESS_NS, ManualClock, Ticker, limit_ns
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
