import statistics

import pytest

from ppstream.core.clock import now_ns
from ppstream.core.simulated_delay import Delay


@pytest.mark.parametrize("law", ["constant", "uniform", "tail"])
def test_draws_have_the_asked_mean(law):
    delay = Delay(2.0, law=law, seed=1)
    draws = [delay.draw_ns() for _ in range(20_000)]
    assert statistics.fmean(draws) == pytest.approx(2e6, rel=0.02)


def test_same_seed_draws_the_same():
    one, two = Delay(2.0, law="uniform", seed=3), Delay(2.0, law="uniform", seed=3)
    assert [one.draw_ns() for _ in range(9)] == [two.draw_ns() for _ in range(9)]


@pytest.mark.parametrize("kind", ["sleep", "spin"])
def test_spending_takes_at_least_the_drawn_time(kind):
    delay = Delay(1.0, kind)
    began = now_ns()
    delay.spend()
    assert now_ns() - began >= 1_000_000


def test_zero_costs_nothing():
    Delay(0.0).spend()
