"""SampleColumn: one stream's samples of a recording, and the part of them that each window sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppstream.recording.recording import RecordedFrames, Track

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SampleColumn(NamedTuple):
    """One stream's samples, and of each window the first and behind-last one that it needs."""

    stamps_ns: NDArray[np.int64]  # [n], rising from begin to end of every window
    values: NDArray[np.float32]  # [n, D]; of a camera [n, 0]
    begin: NDArray[np.int64]  # [W]
    end: NDArray[np.int64]  # [W]
    numbers: NDArray[np.int64]  # [n] of a camera: number of the frame in its track; else empty


def column_of(track: Track, begin: NDArray[np.int64], end: NDArray[np.int64]) -> SampleColumn:
    """A column of all samples of a track."""
    if isinstance(track.values, RecordedFrames):
        count = len(track.stamps_ns)
        empty = np.zeros((count, 0), np.float32)
        return SampleColumn(track.stamps_ns, empty, begin, end, np.arange(count))
    values = np.ascontiguousarray(track.values, np.float32)
    return SampleColumn(track.stamps_ns, values, begin, end, np.zeros(0, np.int64))
