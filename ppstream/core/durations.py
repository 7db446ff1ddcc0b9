"""Durations: quantiles of the last few thousand of one kind, and histograms of all of them.

``Durations`` has one writer; readers on other threads see a value that may be one add behind.
Histograms count many values at a time by bucket: one thread adds, any thread reads, since what a
reader takes is replaced as a whole and never changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppstream.core.quantiles import Quantiles, nearest_rank

PERCENTS: Final = (50, 95, 99)  # as Quantiles has them
KEEP: Final = 8192  # at 500 Hz: the last 16 s
#: Upper ends of the histogram's bins: 1, 2 and 5 of every decade from 1 µs to 1 s.
EDGES_NS: Final = (*(digit * 10**e for e in range(3, 9) for digit in (1, 2, 5)), 10**9)
Values = NDArray[np.float64]  # ns; NaN: none. Exact up to 2^53, and to 2 ns above

#: Upper ends in ms: from a GPU's stage to one that misses every deadline. Dense where stages and
#: ages lie, since a quantile is only as exact as the bucket it falls into.
BUCKETS_MS: Final = (
    *(0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1, 1.5, 2, 3, 5, 7.5),
    *(10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000),
)
BUCKETS_NS: Final = tuple(round(ms * 1e6) for ms in BUCKETS_MS)
RECENT: Final = 1000  # values behind a live quantile, and the p99 needs that many
LABELS_MAX: Final = 64  # different values of one label; what comes later counts as OTHER
OTHER: Final = "other"

_BOUNDS: Final = np.array((*BUCKETS_NS, np.inf))
_BINS: Final = len(_BOUNDS)
_WIDTH: Final = _BINS + 1  # NaN sorts behind infinity: a bin that nobody reads


class Histogram(NamedTuple):
    """Counts by bucket, the last one above every bound, and the sum of all values in ns."""

    counts: NDArray[np.int64]
    sum_ns: int


class _Counted(NamedTuple):
    counts: NDArray[np.int64]  # [rows, _BINS]
    sums_ns: NDArray[np.int64]  # [rows]


class _Rows(dict[str, int]):
    """The row of each label of one family, ``LABELS_MAX`` at most, and OTHER's."""

    def __init__(self, new: Callable[[], int]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, label: str) -> int:
        if len(self) >= LABELS_MAX and label != OTHER:
            return self[OTHER]
        row = self[label] = self._new()
        return row


class Histograms:
    """Families of histograms, one for each value of a family's label if it has one."""

    def __init__(self) -> None:
        self._new = count().__next__
        self._families: dict[str, _Rows] = {}
        self._counted = _Counted(np.zeros((0, _BINS), np.int64), np.zeros(0, np.int64))

    def rows(self, family: str, labels: Iterable[str] = ("",)) -> NDArray[np.intp]:
        """Returns the rows in which ``add`` counts values of these labels."""
        rows = self._families.setdefault(family, _Rows(self._new))
        return np.fromiter(map(rows.__getitem__, labels), np.intp)

    def add(self, rows: NDArray[np.intp], values_ns: Values) -> None:
        """``values_ns [n]`` to ``rows [n]``: all in one go, as numpy's calls cost most."""
        size = max(len(self._counted.counts), int(rows.max(initial=-1)) + 1)
        cells = rows * _WIDTH + _BOUNDS.searchsorted(values_ns)
        counts = np.bincount(cells, minlength=size * _WIDTH).reshape(size, _WIDTH)[:, :_BINS]
        gained = np.fmax(values_ns, 0)  # NaN: 0; below 0 neither: a sum never goes back
        sums = np.bincount(rows, weights=gained, minlength=size)
        old = len(self._counted.counts)
        sums_ns = sums.astype(np.int64)
        counts[:old] += self._counted.counts
        sums_ns[:old] += self._counted.sums_ns
        self._counted = _Counted(counts, sums_ns)

    def of(self, family: str) -> dict[str, Histogram]:
        """By label, sorted; those with a value."""
        counts, sums_ns = self._counted
        rows = sorted(self._families.get(family, {}).copy().items())
        return {
            label: Histogram(counts[row], int(sums_ns[row]))
            for label, row in rows
            if row < len(counts) and counts[row].any()
        }

    def one(self, family: str) -> Histogram:
        """Of a family without a label; zeros before its first value."""
        return self.of(family).get("", Histogram(np.zeros(_BINS, np.int64), 0))


class Recent(dict[str, Values]):
    """The newest ``RECENT`` values by label, in ns."""

    def add(self, label: str, values_ns: Values) -> None:
        """``values_ns [n]``, oldest first."""
        found = values_ns[~np.isnan(values_ns)]
        if found.size:
            self[label] = np.concatenate((self.get(label, found[:0]), found))[-RECENT:]


def quantiles_ns(values_ns: NDArray[Any], percents: Iterable[int] = PERCENTS) -> list[int]:
    """Nearest-rank quantiles; empty without values."""
    ordered = np.sort(values_ns)
    return [int(ordered[nearest_rank(len(ordered), q)]) for q in percents if len(ordered)]


class Bin(NamedTuple):
    """Number of durations above the bin before and at most ``upto_ns``; None: no limit."""

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
        """Quantiles of the last ``keep`` durations; count and maximum of all of them."""
        if not self._count:
            return Quantiles(0, 0, 0, 0, 0)
        p50, p95, p99 = quantiles_ns(self._last[: self._count])
        return Quantiles(self._count, p50, p95, p99, self._max_ns)

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
