"""Quantiles of durations by nearest rank: each one is a value that was seen.

The one definition for reports, robots, metrics and benchmarks. Standard library only. Durations
that are too many to keep are counted by bin (``bin_of``); counts of several times add up, and a
quantile of them is the upper end of its bin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

P99_MIN: Final = 1000  # values; fewer say nothing about the 99th percentile
BIN_RATIO: Final = 1.02  # upper end of a bin over its lower end: a quantile is at most 2 % too long
BINS: Final = 2000  # the last one ends above 10^17 ns

_LOG_RATIO: Final = math.log(BIN_RATIO)


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


def bin_of(value_ns: int) -> int:
    """Returns the bin that counts a duration, from 0 to ``BINS - 1``."""
    return min(BINS - 1, math.ceil(math.log(value_ns) / _LOG_RATIO)) if value_ns > 1 else 0


def binned_quantiles(counts: Mapping[int, int], max_ns: int) -> Quantiles | None:
    """Returns the quantiles of durations that ``bin_of`` counted; None without any.

    Args:
        counts: durations in each bin, none of them negative.
        max_ns: the longest duration, which no quantile exceeds.
    """
    count = sum(counts.values())
    if not count:
        return None
    found: list[int] = []
    ranks = [nearest_rank(count, percent) for percent in (50, 95, 99)]
    below = 0
    for index, n in sorted(counts.items()):
        below += n
        while len(found) < len(ranks) and ranks[len(found)] < below:
            found.append(min(max_ns, round(BIN_RATIO**index)))
    p50, p95, p99 = found
    return Quantiles(count, p50, p95, p99, max_ns)
