"""When stage A may begin, once it holds a credit.

A pacing is asked by the thread that owns the input, right after it took in what had arrived.
It decides the moment only; which data is used is always the newest (or, scheduled, the window's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol

from ppstream.core.clock import NS_PER_MS, NS_PER_S, Ticker

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.rows import RowInput
    from ppstream.ingest.sources import RecordedSource


_is_present: Final = attrgetter("present")


class Pacing(Protocol):
    """A rule for starting stage A."""

    name: str  # as the log writes it: saturated | tick | sample | rows | free

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
    """A begins on a new sample of one stream (``sample``) or of any stream (``free``).

    Samples of a row of which no window can be cut, for want of a text or of another stream, are
    new until one can.
    """

    def __init__(self, rows: Sequence[RowInput], stream: str | None) -> None:
        self.name = "free" if stream is None else "sample"
        self._newest = (None,) * len(rows)
        self._rings = [
            (row, ring)
            for row in rows
            for name, ring in row.rings.items()
            if stream is None or name == stream
        ]
        self._seen = [0] * len(self._rings)

    def due(self, now_ns: int) -> bool:
        for (row, ring), seen in zip(self._rings, self._seen, strict=True):
            if ring.accepted > seen and row.present:
                return True
        return False

    def started(self) -> Sequence[int | None]:
        for index, (row, ring) in enumerate(self._rings):
            if row.present:
                self._seen[index] = ring.accepted
        return self._newest

    def due_ns(self) -> int | None:
        return None


class OnRows:
    """A begins once each robot has sent a new sample of the reference stream: one batch for all.

    ``gather_ns`` behind the first of these samples A begins without the rest. A robot whose answer
    is still under way may be waiting for it before it sends again: then the time counts from that
    answer, which A could not overtake anyway. A robot that was silent for a lease is not waited
    for.

    Args:
        rows: places of robots; free ones, and those without a sample, are not waited for.
        gather_ns: see above.
        lease_ns: of actions.
        finished: counts the envelopes that were emitted or dropped; none is in flight now.
    """

    name = "rows"

    def __init__(
        self,
        rows: Sequence[RowInput],
        gather_ns: int,
        lease_ns: int,
        finished: Callable[[], int],
    ) -> None:
        self._rows = rows
        self._newest = (None,) * len(rows)
        self._gather_ns, self._lease_ns = gather_ns, lease_ns
        self._finished = finished
        self._begun = finished()
        self._seen = [0] * len(rows)  # samples that a window has had
        self._owed = [0] * len(rows)  # the answer is out once so many envelopes are finished
        self._was_owed = False
        self._until_ns: int | None = None  # who comes later comes too late

    def due(self, now_ns: int) -> bool:
        finished = self._finished()
        first_ns: int | None = None
        is_owed = is_missing = False
        for row, seen, owed in zip(self._rows, self._seen, self._owed, strict=True):
            if not row.present:
                continue
            received_ns = row.reference.newest_rx_ns
            if row.reference.accepted > seen:
                first_ns = received_ns if first_ns is None else min(first_ns, received_ns)
            elif owed > finished:
                is_owed = True
            elif now_ns - received_ns < self._lease_ns:
                is_missing = True
        if first_ns is None or is_owed:
            self._was_owed = is_owed
            self._until_ns = None
            return False
        if self._until_ns is None:
            self._until_ns = (now_ns if self._was_owed else first_ns) + self._gather_ns
        return not is_missing or now_ns >= self._until_ns

    def started(self) -> Sequence[int | None]:
        self._begun += 1
        for index, row in enumerate(self._rows):
            if row.present and row.reference.accepted > self._seen[index]:
                self._seen[index] = row.reference.accepted
                self._owed[index] = self._begun
        self._was_owed, self._until_ns = False, None
        return self._newest

    def due_ns(self) -> int | None:
        return self._until_ns


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
        ticks = self._ticker.consume(now_ns)
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


def service_pacing(
    config: PipelineConfig, rows: Sequence[RowInput], now_ns: int, finished: Callable[[], int]
) -> Pacing:
    """The pacing that the configuration names for service.

    Args:
        config: of the run.
        rows: of service's intake.
        now_ns: when it begins.
        finished: counts the envelopes that were emitted or dropped; none is in flight now.
    """
    shape = config.pipeline
    kind, _, stream = shape.pacing.partition(":")
    if kind == "saturated":
        return Saturated(rows)
    if kind == "tick":
        assert shape.tick_hz is not None, "checked with the configuration"
        return OnTick(rows, shape.tick_hz, now_ns)
    if kind == "rows":
        assert shape.gather_ms is not None, "checked with the configuration"
        gather_ns, lease_ns = (
            round(ms * NS_PER_MS) for ms in (shape.gather_ms, config.actions.lease_ms)
        )
        return OnRows(rows, gather_ns, lease_ns, finished)
    if kind == "free":
        return OnSample(rows, None)
    return OnSample(rows, stream or config.reference.name)
