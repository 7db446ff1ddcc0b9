"""SyntheticSource: samples of the declared streams, at their rates and jitter, for bring-up.

Values are smooth and mean nothing; they are a function of seed, stream and time alone. The stamps
are of another clock than rank 0's, as a robot's are. Not a robot: nothing reacts to actions. Of a
stream on request there is one sample a look, since robots ask no sooner than they have an answer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.ingest.sources import OWN_SESSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ppstream.config.schema import PipelineConfig, StreamConfig
    from ppstream.ingest.rows import RowInput

BLOCK: Final = 256  # samples invented at a time
FRAMES: Final = 8  # of a camera
JITTER_MAX: Final = 0.45  # of a period, so that stamps keep their order
WAVES_HZ: Final = (0.1, 2.0)
CLOCK_OFFSET_NS: Final = 7_777_777 * NS_PER_S  # the robot's clock minus rank 0's


class SyntheticSource:
    """Fills one row. A sample is due at its stamp; none ever falls out of order.

    Args:
        config: the streams.
        row: a free place; opened here, given back by ``close``.
        seed: of values and jitter.
        start_ns: when the first samples fall due, rank 0's clock.
    """

    fds: tuple[int, ...] = ()
    exhausted = False

    def __init__(self, config: PipelineConfig, row: RowInput, seed: int, start_ns: int) -> None:
        self._row = row
        self._signals = [
            _Signal(stream, np.random.default_rng((seed, index)), start_ns)
            for index, stream in enumerate(config.streams)
        ]
        row.open(OWN_SESSION)

    def drain(self, now_ns: int) -> int:
        """Append all samples due by now; returns how many."""
        return sum(self._drain_signal(signal, now_ns) for signal in self._signals)

    def next_due_ns(self) -> int | None:
        return min((signal.next_due_ns for signal in self._signals if signal.is_due), default=None)

    def close(self) -> None:
        """Give the row back, empty."""
        self._row.close()

    def _drain_signal(self, signal: _Signal, now_ns: int) -> int:
        samples = 0
        while signal.next_due_ns <= now_ns:
            stamps_ns, values = signal.pop_due(now_ns)
            self._row.rings[signal.name].append(stamps_ns, values, now_ns)
            samples += len(stamps_ns)
        return samples


class SyntheticRobots:
    """One SyntheticSource for each row: a batch at work, every robot at its own moments."""

    fds: tuple[int, ...] = ()
    exhausted = False

    def __init__(
        self, config: PipelineConfig, rows: Sequence[RowInput], seed: int, start_ns: int
    ) -> None:
        step_ns = round(NS_PER_S / config.reference.most_hz / len(rows))
        self._sources = [
            SyntheticSource(config, row, seed + number, start_ns + number * step_ns)
            for number, row in enumerate(rows)
        ]

    def drain(self, now_ns: int) -> int:
        return sum(source.drain(now_ns) for source in self._sources)

    def next_due_ns(self) -> int | None:
        dues = (source.next_due_ns() for source in self._sources)
        return min((due for due in dues if due is not None), default=None)

    def close(self) -> None:
        for source in self._sources:
            source.close()


class _Signal:
    """One stream's samples, invented block by block."""

    def __init__(self, stream: StreamConfig, rng: np.random.Generator, start_ns: int) -> None:
        self.name = stream.name
        self._stream = stream
        self._rng = rng
        self._start_ns = start_ns
        self._period_ns = NS_PER_S / stream.most_hz
        self._jitter_ns = min(stream.jitter_ms * NS_PER_MS, JITTER_MAX * self._period_ns)
        self._block = BLOCK
        if stream.image is not None:
            self._block = FRAMES
            self._picture = rng.integers(0, 256, stream.dim, np.uint8)
        else:
            self._waves_hz = rng.uniform(*WAVES_HZ, stream.dim)
            self._phases = rng.uniform(0, 2 * np.pi, stream.dim)
        self._blocks = 0
        self._taken = 0
        self._is_on_request = stream.is_on_request
        self.is_due = True  # at ``next_due_ns`` somebody has to look
        if self._is_on_request:
            self.next_due_ns = start_ns
        else:
            self._invent()

    def pop_due(self, now_ns: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Stamps and values of this block's samples that are due by now and were not taken yet.

        On request only the newest.
        """
        if self._is_on_request:
            return self._pop_newest(now_ns)
        begin, end = self._taken, int(self._due_ns.searchsorted(now_ns, "right"))
        taken = self._due_ns[begin:end] + CLOCK_OFFSET_NS, self._values[begin:end]
        self._taken = end
        if end == self._block:
            self._invent()
        else:
            self.next_due_ns = int(self._due_ns[end])
        return taken

    def _pop_newest(self, now_ns: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        numbers = np.array([int((now_ns - self._start_ns) / self._period_ns)])
        offsets_ns = numbers * self._period_ns
        self.is_due = False
        next_ns = self._start_ns + math.ceil(offsets_ns.item() + self._period_ns)
        self.next_due_ns = max(next_ns, now_ns + 1)  # the division may round below a whole number
        stamps_ns = offsets_ns.astype(np.int64) + (self._start_ns + CLOCK_OFFSET_NS)
        return stamps_ns, self._values_of(numbers, offsets_ns)

    def _invent(self) -> None:
        numbers = np.arange(self._blocks * self._block, (self._blocks + 1) * self._block)
        jitter_ns = self._rng.uniform(-self._jitter_ns, self._jitter_ns, self._block)
        offsets_ns = np.maximum(numbers * self._period_ns + jitter_ns, 0)
        self._due_ns = offsets_ns.astype(np.int64) + self._start_ns
        self._values = self._values_of(numbers, offsets_ns)
        self._taken = 0
        self._blocks += 1
        self.next_due_ns = int(self._due_ns[0])

    def _values_of(
        self, numbers: NDArray[np.int64], offsets_ns: NDArray[np.float64]
    ) -> NDArray[Any]:
        if self._stream.image is not None:  # brighter from frame to frame, and round again
            pixels: NDArray[np.uint8] = self._picture + numbers.astype(np.uint8)[:, None]
            return pixels
        return self._smooth(offsets_ns / NS_PER_S).astype(self._stream.dtype)

    def _smooth(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        turns = 2 * np.pi * self._waves_hz * at_s[:, None] + self._phases
        if self._stream.interpolation == "angle":
            return np.pi - (turns % (2 * np.pi))
        values = np.sin(turns)
        if self._stream.interpolation == "slerp":
            values += np.array([0, 0, 0, 2])  # never zero
            values /= np.linalg.norm(values, axis=1, keepdims=True)
        return values
