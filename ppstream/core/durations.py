"""Durations: the last few thousand durations of one kind, for quantiles; histogram of all of them.

One writer; readers on other threads see a value that may be one add behind.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

KEEP: Final = 8192  # at 500 Hz: the last 16 s
#: Upper ends of the histogram's bins: 1, 2 and 5 of every decade from 1 µs to 1 s.
EDGES_NS: Final = (*(digit * 10**e for e in range(3, 9) for digit in (1, 2, 5)), 10**9)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """What a set of durations looks like. ``p50_ns`` and ``p99_ns`` cover the last ``KEEP``.

    All are 0 when ``count`` is 0.
    """

    count: int
    p50_ns: int
    p99_ns: int
    max_ns: int


class Bin(NamedTuple):
    """How many durations were above the bin before and at most ``upto_ns``; None: no limit."""

    upto_ns: int | None
    n: int


class Durations:
    """Takes durations without allocating."""

    def __init__(self, keep: int = KEEP) -> None:
        self._last = np.zeros(keep, dtype=np.int64)
        self._count = 0
        self._max_ns = 0
        self._bins = [0] * (len(EDGES_NS) + 1)

    def add(self, duration_ns: int) -> None:
        self._last[self._count % len(self._last)] = duration_ns
        self._max_ns = max(self._max_ns, duration_ns) if self._count else duration_ns
        self._bins[bisect_left(EDGES_NS, duration_ns)] += 1
        self._count += 1

    def quantiles(self) -> Quantiles:
        """Nearest-rank quantiles: each is a duration that was seen."""
        if not self._count:
            return Quantiles(0, 0, 0, 0)
        seen = np.sort(self._last[: self._count])
        p50, p99 = (int(seen[-(-percent * len(seen) // 100) - 1]) for percent in (50, 99))
        return Quantiles(self._count, p50, p99, self._max_ns)

    def histogram(self) -> tuple[Bin, ...]:
        """Counts of all durations since the start, from the first used bin to the last."""
        counts = list(self._bins)
        used = [index for index, count in enumerate(counts) if count]
        if not used:
            return ()
        return tuple(
            Bin(EDGES_NS[index] if index < len(EDGES_NS) else None, counts[index])
            for index in range(used[0], used[-1] + 1)
        )
