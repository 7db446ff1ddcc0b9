"""History: every sample of one episode, and the aligned window that ends at any instant of it.

For training and lock-step runs, in plain numpy. It promises the values, validity and ages of the
runtime's own windows (a test compares them); it is not bounded and knows no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from ppstream_stages.cartpole.layout import STREAMS, WINDOW_DT_NS, WINDOW_STEPS
from ppstream_stages.cartpole.physics import Reading

Array = np.ndarray[Any, Any]

_OFFSETS_NS: Final = (np.arange(WINDOW_STEPS) - (WINDOW_STEPS - 1)) * WINDOW_DT_NS


class Window(NamedTuple):
    """``values [T, D]`` float32, ``valid [T, S]`` bool, ``age_s [T, S]`` float32."""

    values: Array
    valid: Array
    age_s: Array


class History:
    """Grows with every sample; ``window`` sees only what was captured up to its end."""

    def __init__(self, capacity: int = 4096) -> None:
        self._counts = [0] * len(STREAMS)
        self._stamps_ns = [np.zeros(capacity, dtype=np.int64) for _ in STREAMS]
        self._values = [np.zeros((capacity, len(s.fields)), dtype=np.float32) for s in STREAMS]

    @property
    def newest_ns(self) -> int:
        """The newest stamp of the reference stream, the encoder."""
        return int(self._stamps_ns[0][self._counts[0] - 1])

    def extend(self, samples: Iterable[Reading]) -> None:
        """Append samples, each newer than the last one of its stream."""
        for stream, stamp_ns, values in samples:
            count = self._counts[stream]
            if count == len(self._stamps_ns[stream]):
                self._stamps_ns[stream] = np.resize(self._stamps_ns[stream], 2 * count)
                old = self._values[stream]
                self._values[stream] = np.resize(old, (2 * count, old.shape[1]))
            self._stamps_ns[stream][count] = stamp_ns
            self._values[stream][count] = values
            self._counts[stream] = count + 1

    def window(self, end_ns: int) -> Window:
        """The window whose last step is at ``end_ns``."""
        targets_ns = end_ns + _OFFSETS_NS
        parts = [self._resample(index, targets_ns) for index in range(len(STREAMS))]
        return Window(
            np.concatenate([part.values for part in parts], axis=1),
            np.stack([part.valid for part in parts], axis=1),
            np.stack([part.age_s for part in parts], axis=1),
        )

    def _resample(self, stream: int, targets_ns: Array) -> Window:
        recorded_ns = self._stamps_ns[stream][: self._counts[stream]]
        known = int(np.searchsorted(recorded_ns, targets_ns[-1], "right"))
        stamps_ns, values = self._stamps_ns[stream][:known], self._values[stream][:known]
        if known == 0:
            shape = (len(targets_ns), values.shape[1])
            nothing = np.zeros(len(targets_ns))
            return Window(np.zeros(shape, np.float32), nothing > 0, nothing.astype(np.float32))
        before = np.searchsorted(stamps_ns, targets_ns, "right") - 1
        lower = np.maximum(before, 0)
        if STREAMS[stream].interpolation == "linear":
            upper = np.minimum(before + 1, known - 1)
            span_ns = np.maximum(stamps_ns[upper] - stamps_ns[lower], 1)
            weight = np.clip((targets_ns - stamps_ns[lower]) / span_ns, 0.0, 1.0)
            weight = weight.astype(np.float32)[:, None]
            out, used = values[lower] + weight * (values[upper] - values[lower]), upper
        else:
            out, used = values[lower], lower
        age_s = (np.maximum(targets_ns - stamps_ns[used], 0) * 1e-9).astype(np.float32)
        return Window(out, before >= 0, age_s)
