"""The simulation of one pipeline against what is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ppstream.analysis.period_model import PipelineForm, StageTimes, period
from ppstream.fleet.service_times import Duration, ServiceTimes
from ppstream.fleet.simulation import RobotGroup, Shape, SimulatedService, ages_at, simulate

ms = Duration.constant
PLAIN = Shape()


def times_of(
    a: float, places: list[float], c: float, *, d_in: int = 2, rows: int = 8, hop: float = 0.0
) -> ServiceTimes:
    hops = (ms(hop),) * (len(places) + 1)
    return ServiceTimes(ms(a), tuple(map(ms, places)), ms(c), hops, d_in, rows)


def serve(
    times: ServiceTimes, robots: RobotGroup, shape: Shape = PLAIN, s: float = 20.0
) -> SimulatedService:
    return simulate(times, robots, shape, s, np.random.default_rng(7))


def test_one_slow_robot_waits_for_every_stage_and_both_ways() -> None:
    found = serve(times_of(3, [11], 2, hop=0.5), RobotGroup(1, 20.0, net_ms=4.0))
    latency = 4 + 3 + 0.5 + 11 + 0.5 + 2 + 4
    assert found.latencies_ms == pytest.approx(latency)
    assert found.period_ms == pytest.approx(50.0)
    # the age rises from the latency by one period of the robot, evenly
    assert found.ages_ms.min() >= latency - 1e-6
    assert found.ages_ms.max() <= latency + 50
    assert np.percentile(found.ages_ms, 50) == pytest.approx(latency + 25, rel=0.1)
    assert np.percentile(found.ages_ms, 99) == pytest.approx(latency + 49.5, rel=0.02)


@pytest.mark.parametrize("threads", ["serial", "split"])
@pytest.mark.parametrize(
    ("a", "places", "c", "d_in"),
    [(5, [20], 1, 2), (5, [20], 1, 1), (9, [4], 8, 2), (2, [10, 10], 1, 3), (2, [10, 6], 1, 2)],
)
def test_many_robots_keep_it_at_the_period_of_the_model(
    a: float, places: list[float], c: float, d_in: int, threads: str
) -> None:
    found = serve(times_of(a, places, c, d_in=d_in), RobotGroup(8, 200.0), Shape(threads=threads))
    form = PipelineForm(threads=threads, d_in=d_in)
    model = StageTimes.of_chain(a, places, c)
    assert found.period_ms == pytest.approx(period(model, form), rel=0.02)


def test_samples_at_random_find_the_bulk_queue_with_constant_service() -> None:
    """One service takes all who wait: its mean cycle is D + exp(-lambda D) / lambda."""
    service_ms, rate_hz, robots = 20.0, 10.0, 8
    found = serve(
        times_of(0, [service_ms], 0, d_in=1), RobotGroup(robots, rate_hz, arrivals="poisson"), s=600
    )
    per_ms = robots * rate_hz / 1000
    cycle_ms = service_ms + math.exp(-per_ms * service_ms) / per_ms
    assert found.period_ms == pytest.approx(cycle_ms, rel=0.01)


def test_rows_share_an_envelope_so_its_rate_is_that_of_one_robot() -> None:
    alone = serve(times_of(2, [30], 1), RobotGroup(1, 100.0))
    full = serve(times_of(2, [30], 1), RobotGroup(8, 100.0))
    assert full.period_ms == pytest.approx(alone.period_ms, rel=0.01)
    assert full.latencies_ms.size == pytest.approx(8 * alone.latencies_ms.size, rel=0.05)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_replicas_divide_the_policy_s_time_until_another_stage_limits(replicas: int) -> None:
    found = serve(
        times_of(5, [24], 1, d_in=replicas + 1), RobotGroup(8, 200.0), Shape(replicas=replicas)
    )
    assert found.period_ms == pytest.approx(max(6.0, 24 / replicas), rel=0.05)


def test_a_slow_replica_holds_the_others_results_back() -> None:
    times = ServiceTimes(
        ms(1), (Duration((5, 5, 80, 80), (0.0, 0.8, 0.8, 1.0)),), ms(0), (ms(0),) * 2, 4, 8
    )
    found = serve(times, RobotGroup(4, 100.0), Shape(replicas=3))
    assert np.percentile(found.latencies_ms, 50) > 35  # 22 if results could overtake one another


def test_pacing_rows_waits_for_robots_that_ask_apart() -> None:
    apart = serve(times_of(1, [5], 1), RobotGroup(2, 20.0), Shape(pacing="sample"))
    together = serve(times_of(1, [5], 1), RobotGroup(2, 20.0), Shape(pacing="rows", gather_ms=60.0))
    assert apart.period_ms == pytest.approx(25.0, rel=0.05)
    assert together.period_ms == pytest.approx(50.0, rel=0.05)


def test_the_age_at_a_moment_is_that_of_the_newest_window_there() -> None:
    found = ages_at(np.array([5.0, 10.0, 19.9, 20.0]), np.array([10.0, 20.0]), np.array([2.0, 9.0]))
    assert found.tolist() == [8.0, pytest.approx(17.9), 11.0]


def test_the_same_seed_gives_the_same_service() -> None:
    first, again = (serve(times_of(2, [9], 1), RobotGroup(3, 30.0)) for _ in range(2))
    assert first.ages_ms.tolist() == again.ages_ms.tolist()


def test_more_robots_than_rows_are_no_pipeline_s() -> None:
    with pytest.raises(ValueError, match="got 9 robots, want 1 to 8"):
        serve(times_of(1, [5], 1), RobotGroup(9, 20.0))
