"""Quantiles of durations by nearest rank: each one is a value that was seen.

The one definition for reports, robots, metrics and benchmarks. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

P99_MIN: Final = 1000  # values; fewer say nothing about the 99th percentile


def nearest_rank(n: int, percent: int) -> int:
    """Returns the place of a quantile, from 1 to 100 percent, among ``n`` values in order."""
    return -(-percent * n // 100) - 1


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Summary of a set of durations, in ns; all are 0 when ``count`` is 0."""

    count: int
    p50_ns: int
    p95_ns: int
    p99_ns: int
    max_ns: int

    @property
    def reported_p99_ns(self) -> int | None:
        """``p99_ns``, or None where a report must not show it: fewer than ``P99_MIN`` values."""
        return self.p99_ns if self.count >= P99_MIN else None


def quantiles(values_ns: Sequence[int]) -> Quantiles | None:
    """Returns the quantiles of ``values_ns``, in any order; None without any."""
    if not values_ns:
        return None
    ordered = sorted(values_ns)
    p50, p95, p99 = (ordered[nearest_rank(len(ordered), percent)] for percent in (50, 95, 99))
    return Quantiles(len(ordered), p50, p95, p99, ordered[-1])
