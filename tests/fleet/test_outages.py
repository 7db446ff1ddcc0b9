"""Failures against what is known in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from ppstream.fleet.outages import S_PER_H, Failures, simulate

FAILURES = Failures(mtbf_h=10.0, repair_s=3600.0, move_s=30.0)


def held(robots: int, pipelines: int, rows: int, failures: Failures = FAILURES):
    return simulate(robots, pipelines, rows, failures, np.random.default_rng(3))


def test_without_a_free_row_robots_wait_for_the_repair() -> None:
    found = held(40, 10, 4)
    assert found.without_row_share == pytest.approx(1 / 11, rel=0.1)  # repair / (repair + between)


def test_with_free_rows_they_hold_for_the_move_alone() -> None:
    found = held(4, 10, 4, Failures(mtbf_h=1000.0, repair_s=60.0, move_s=30.0))
    assert found.without_row_share == 0
    # each of four robots fails over as often as its pipeline fails
    assert found.share == pytest.approx(30 / (1000 * S_PER_H), rel=0.25)


def test_robots_that_are_moved_all_the_time_hold_all_the_time() -> None:
    assert held(8, 3, 8, Failures(mtbf_h=0.01, repair_s=1.0, move_s=100.0)).share == 1.0


def test_a_spare_takes_most_of_the_wait_away() -> None:
    bare, spare = held(8, 2, 4), held(8, 3, 4)
    assert spare.without_row_share < 0.4 * bare.without_row_share
    assert spare.without_row_share > 0  # two may be down at once


def test_robots_that_have_no_rows_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="2 pipelines of 4 rows hold no 9 robots"):
        held(9, 2, 4)
