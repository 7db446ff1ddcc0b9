"""When stage A may begin, once it holds a credit.

A pacing is asked by the thread that owns the input, right after it took in what had arrived.
It decides the moment only; which data is used is always the newest (or, scheduled, the window's).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol

from ppstream.core.clock import NS_PER_S, Ticker

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.rows import RowInput
    from ppstream.ingest.sources import RecordedSource


_is_present: Final = attrgetter("present")


class Pacing(Protocol):
    """A rule for starting stage A."""

    name: str  # as the log writes it: saturated | tick | sample | free

    def due(self, now_ns: int) -> bool:
        """True when A may begin now."""

    def started(self) -> Sequence[int | None]:
        """A begins now. Returns each row's window end; None: the newest reference stamp."""

    def due_ns(self) -> int | None:
        """When A falls due by the clock alone; None when only input can make it due."""


class Saturated:
    """A begins whenever any row has data; a window may repeat the newest. For bring-up."""

    name = "saturated"

    def __init__(self, rows: Sequence[RowInput]) -> None:
        self._rows = rows
        self._newest = (None,) * len(rows)

    def due(self, now_ns: int) -> bool:
        return any(map(_is_present, self._rows))

    def started(self) -> Sequence[int | None]:
        return self._newest

    def due_ns(self) -> int | None:
        return None


class OnSample:
    """A begins on a new sample of one stream (``sample``) or of any stream (``free``)."""

    def __init__(self, rows: Sequence[RowInput], stream: str | None) -> None:
        self.name = "free" if stream is None else "sample"
        self._rows = rows
        self._newest = (None,) * len(rows)
        self._stream = stream
        self._seen = 0

    def due(self, now_ns: int) -> bool:
        return self._accepted() > self._seen

    def started(self) -> Sequence[int | None]:
        self._seen = self._accepted()
        return self._newest

    def due_ns(self) -> int | None:
        return None

    def _accepted(self) -> int:
        total = 0
        for row in self._rows:
            rings = row.rings
            if self._stream is not None:
                total += rings[self._stream].accepted
            else:
                total += sum(ring.accepted for ring in rings.values())
        return total


class OnTick:
    """A begins on absolute ticks; ticks that pass while it cannot are skipped and counted."""

    name = "tick"

    def __init__(self, rows: Sequence[RowInput], tick_hz: float, start_ns: int) -> None:
        self._rows = rows
        self._newest = (None,) * len(rows)
        self._ticker = Ticker(round(NS_PER_S / tick_hz), start_ns)
        self._owed = False
        self.missed = 0

    def due(self, now_ns: int) -> bool:
        ticks = self._ticker.take(now_ns)
        self.missed += max(0, ticks - 1) + (1 if ticks and self._owed else 0)
        self._owed = self._owed or ticks > 0
        return self._owed and any(map(_is_present, self._rows))

    def started(self) -> Sequence[int | None]:
        self._owed = False
        return self._newest

    def due_ns(self) -> int | None:
        return self._ticker.due_ns


class Scheduled:
    """Window k ends at a fixed time of a recording; A begins once the recording is past it."""

    name = "free"

    def __init__(self, source: RecordedSource) -> None:
        self._source = source
        self._window = 0

    def due(self, now_ns: int) -> bool:
        return self._source.window_ready(self._window)

    def started(self) -> Sequence[int | None]:
        ends_ns = self._source.window_ends_ns(self._window)
        self._window += 1
        return ends_ns

    def due_ns(self) -> int | None:
        return None


def service_pacing(config: PipelineConfig, rows: Sequence[RowInput], now_ns: int) -> Pacing:
    """The pacing that the configuration names for service."""
    kind, _, stream = config.pipeline.pacing.partition(":")
    if kind == "saturated":
        return Saturated(rows)
    if kind == "tick":
        assert config.pipeline.tick_hz is not None, "checked with the configuration"
        return OnTick(rows, config.pipeline.tick_hz, now_ns)
    if kind == "free":
        return OnSample(rows, None)
    return OnSample(rows, stream or config.reference.name)
