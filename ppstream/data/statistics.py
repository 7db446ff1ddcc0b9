"""Statistics of columns that are seen once, part by part: mean, spread, range, then quantiles.

Parts are merged exactly but for rounding. Quantiles need the range first: a second pass counts the
values in fine bins, so a quantile is right to one bin's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.config.schema import CHANNELS

if TYPE_CHECKING:
    from numpy.typing import NDArray

QUANTILES: Final = (0.01, 0.1, 0.5, 0.9, 0.99)
LEVELS: Final = 256  # of a pixel's value
BINS: Final = 4096  # of the range of each column


class ColumnStatistics:
    """Count, mean, squared deviation, least and greatest of each column of ``[n, ...]``."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: NDArray[np.float64] = np.zeros(())
        self._deviation: NDArray[np.float64] = np.zeros(())  # sum of squares around the mean
        self.low: NDArray[np.float64] = np.full((), np.inf)
        self.high: NDArray[np.float64] = np.full((), -np.inf)

    def add(self, values: NDArray[Any]) -> None:
        """Takes in rows ``[n, ...]`` of any dtype."""
        if len(values):
            wide = values.astype(np.float64)
            mean = wide.mean(0)
            deviation = ((wide - mean) ** 2).sum(0)
            self._merge(len(wide), mean, deviation, wide.min(0), wide.max(0))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, and for ``merge``."""
        return {
            "count": self.count,
            "mean": self._mean.tolist(),
            "deviation": self._deviation.tolist(),
            "min": self.low.tolist(),
            "max": self.high.tolist(),
        }

    def merge(self, other: dict[str, Any]) -> None:
        """Takes in what another one's ``as_dict`` gave."""
        if other["count"]:
            arrays = (np.array(other[key]) for key in ("mean", "deviation", "min", "max"))
            self._merge(other["count"], *arrays)

    def add_result(self, found: dict[str, Any]) -> None:
        """Takes in what another one's ``result`` gave; KeyError, TypeError, ValueError: nothing."""
        count = int(np.ravel(found["count"])[0])
        mean, std, low, high = (
            np.array(found[key], np.float64) for key in ("mean", "std", "min", "max")
        )
        self._merge(count, mean, std**2 * count, low, high)

    def result(self) -> dict[str, Any]:
        """As ``stats.json`` has it; a column that is one number is a list of one."""
        std = np.sqrt(self._deviation / max(1, self.count))
        named = {"min": self.low, "max": self.high, "mean": self._mean, "std": std}
        return {k: np.atleast_1d(v).tolist() for k, v in named.items()} | {"count": [self.count]}

    def _merge(
        self,
        count: int,
        mean: NDArray[np.float64],
        deviation: NDArray[np.float64],
        low: NDArray[np.float64],
        high: NDArray[np.float64],
    ) -> None:
        both = self.count + count
        apart = mean - self._mean
        self._deviation = self._deviation + deviation + apart**2 * (self.count * count / both)
        self._mean = self._mean + apart * (count / both)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        self.count = both


class QuantileBins:
    """Counts of values between the least and the greatest, whose statistics are known."""

    def __init__(self, statistics: ColumnStatistics) -> None:
        self._shape = statistics.low.shape
        self._low, self._high = statistics.low.ravel(), statistics.high.ravel()
        self._width = np.where(self._high > self._low, (self._high - self._low) / BINS, 1.0)
        self._counts = np.zeros((self._low.size, BINS), np.int64)

    def add(self, values: NDArray[Any]) -> None:
        """Rows ``[n, ...]``, the same that the statistics were made of."""
        flat = values.reshape(len(values), -1).astype(np.float64)
        bins = np.clip((flat - self._low) / self._width, 0, BINS - 1).astype(np.int64)
        bins += np.arange(flat.shape[1]) * BINS
        self._counts += np.bincount(bins.ravel(), minlength=self._counts.size).reshape(-1, BINS)

    def result(self) -> dict[str, Any]:
        """``q01`` and so on, each as the statistics' columns."""
        below = self._counts.cumsum(1)
        found = {}
        for share in QUANTILES:
            rank = share * below[:, -1:]
            bins = np.minimum((below < rank).sum(1), BINS - 1)[:, None]
            inside = np.take_along_axis(self._counts, bins, 1)
            before = np.take_along_axis(below, bins, 1) - inside
            part = ((rank - before) / np.maximum(inside, 1)).clip(0, 1)
            value = self._low + (bins + part)[:, 0] * self._width
            value = np.minimum(np.maximum(value, self._low), self._high)
            found[f"q{round(share * 100):02d}"] = np.atleast_1d(value.reshape(self._shape)).tolist()
        return found


class PixelStatistics:
    """Counts of the values 0 to 255 of each channel: all that there is to know of them, exactly."""

    def __init__(self) -> None:
        self._frames = 0
        self._counts = np.zeros((CHANNELS, LEVELS), np.int64)

    def add(self, frame: NDArray[np.uint8]) -> None:
        """Takes in a frame ``[height, width, 3]``."""
        self._frames += 1
        for channel, counts in enumerate(self._counts):
            counts += np.bincount(frame[..., channel].ravel(), minlength=LEVELS)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, and for ``merge``."""
        return {"frames": self._frames, "counts": self._counts.tolist()}

    def merge(self, other: dict[str, Any]) -> None:
        """Takes in what another one's ``as_dict`` gave."""
        self._frames += other["frames"]
        self._counts += np.array(other["counts"], np.int64)

    def result(self) -> dict[str, Any]:
        """As ``stats.json`` has it: pixels scaled to 0..1, ``[3, 1, 1]``."""
        values = np.arange(LEVELS) / (LEVELS - 1)
        total = np.maximum(1, self._counts.sum(1))
        mean = self._counts @ values / total
        square = self._counts @ values**2 / total
        below = self._counts.cumsum(1)
        found = {
            "min": values[(self._counts > 0).argmax(1)],
            "max": values[LEVELS - 1 - (self._counts[:, ::-1] > 0).argmax(1)],
            "mean": mean,
            "std": np.sqrt(np.maximum(0, square - mean**2)),
        }
        for share in QUANTILES:
            rank = share * total[:, None]
            found[f"q{round(share * 100):02d}"] = values[(below >= rank).argmax(1)]
        of_channels = {name: one.reshape(CHANNELS, 1, 1).tolist() for name, one in found.items()}
        return of_channels | {"count": [self._frames]}


def merged(parts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, ColumnStatistics]:
    """Statistics by column over several parts' ``as_dict`` by column."""
    whole: dict[str, ColumnStatistics] = {}
    for part in parts:
        for name, one in part.items():
            whole.setdefault(name, ColumnStatistics()).merge(one)
    return whole
