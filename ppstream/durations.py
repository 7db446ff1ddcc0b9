"""Durations: the last few thousand durations of one kind, for quantiles; maximum and count of all.

One writer; readers on other threads see a value that may be one add behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

KEEP: Final = 8192  # at 500 Hz: the last 16 s


@dataclass(frozen=True, slots=True)
class Quantiles:
    """What a set of durations looks like. ``p50_ns`` and ``p99_ns`` cover the last ``KEEP``.

    All are 0 when ``count`` is 0.
    """

    count: int
    p50_ns: int
    p99_ns: int
    max_ns: int


class Durations:
    """Takes durations without allocating."""

    def __init__(self, keep: int = KEEP) -> None:
        self._last = np.zeros(keep, dtype=np.int64)
        self._count = 0
        self._max_ns = 0

    def add(self, duration_ns: int) -> None:
        self._last[self._count % len(self._last)] = duration_ns
        self._max_ns = max(self._max_ns, duration_ns) if self._count else duration_ns
        self._count += 1

    def quantiles(self) -> Quantiles:
        """Nearest-rank quantiles: each is a duration that was seen."""
        if not self._count:
            return Quantiles(0, 0, 0, 0)
        seen = np.sort(self._last[: self._count])
        p50, p99 = (int(seen[-(-percent * len(seen) // 100) - 1]) for percent in (50, 99))
        return Quantiles(self._count, p50, p99, self._max_ns)
