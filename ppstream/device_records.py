"""What a window on a GPU was made of, from the table that it went by; books it on the ledgers.

The host reads it when the envelope is complete: the rings have moved on since, may have been
emptied, and their row may be another robot's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ppstream.clock import NS_PER_MS
from ppstream.device_blocks import NEWEST, RING_WORDS, ROW_WORDS
from ppstream.window import WindowInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.config import PipelineConfig
    from ppstream.ring import RowInput, SensorRing
    from ppstream.window import Ages


class TakenWindow(NamedTuple):
    """What a complete envelope was made of."""

    info: WindowInfo
    present: list[bool]  # per row
    episodes: list[tuple[int, int]]  # per row: session and session_epoch
    received_ns: list[int]  # per row: arrival of its newest reference sample, rank 0's clock


class WindowBook:
    """Reads tables; for the thread that writes the rings.

    Args:
        config: streams and window.
        rows: B places of robots.
        reference: the number of the stream whose newest stamp ends a window.
    """

    def __init__(self, config: PipelineConfig, rows: Sequence[RowInput], reference: int) -> None:
        self._rows = rows
        self._reference = reference
        self._streams = [stream.name for stream in config.streams]
        self._span_ns = (config.window.steps - 1) * round(config.window.dt_ms * NS_PER_MS)

    def take(self, words: list[int]) -> TakenWindow:
        """What the window with this table used; settles the rings' ledgers."""
        table = _Table(words, len(self._rows))
        ends = [table.end_ns(row, self._reference) for row in range(len(self._rows))]
        rows = [table.row(row) for row in range(len(self._rows))]
        rx_ns = [row[3] for row, end in zip(rows, ends, strict=True) if end is not None]
        info = WindowInfo(
            [0 if end is None else end for end in ends],
            max(rx_ns, default=0),
            self._ages(table, ends),
        )
        return TakenWindow(
            info,
            [end is not None for end in ends],
            [(row[0], row[1]) for row in rows],
            [row[3] for row in rows],
        )

    def _ages(self, table: _Table, ends: Sequence[int | None]) -> Ages:
        if len(ends) == 1:
            return {
                name: self._settle(s, 0, table, ends[0]) for s, name in enumerate(self._streams)
            }
        return {
            name: [self._settle(s, row, table, end) for row, end in enumerate(ends)]
            for s, name in enumerate(self._streams)
        }

    def _settle(self, s: int, row: int, table: _Table, end_ns: int | None) -> int | None:
        """Book what the window used of a ring; returns the age of its newest sample."""
        sent, count, newest_ns = table.ring(s, row)
        if end_ns is None or count == 0:
            return None
        ring = self._rows[row].rings[self._streams[s]]
        used_ns = _settled(ring, sent, end_ns - self._span_ns, min(end_ns, newest_ns))
        if newest_ns <= end_ns:
            return end_ns - newest_ns
        return None if used_ns is None else end_ns - used_ns


def _settled(ring: SensorRing, sent: int, first_target_ns: int, until_ns: int) -> int | None:
    """The newest stamp used; None when the ring has moved on and accounted for its samples."""
    if ring.accepted - ring.count >= sent:
        return None
    return ring.settle(first_target_ns, until_ns)


class _Table:
    """The numbers that a window went by, as ``device_blocks.py`` lays them out."""

    def __init__(self, words: list[int], rows: int) -> None:
        self._words = words
        self._rings_at = len(ROW_WORDS) * rows
        self._rows = rows

    def row(self, row: int) -> list[int]:
        """The words that ``ROW_WORDS`` names."""
        return self._words[row * len(ROW_WORDS) : (row + 1) * len(ROW_WORDS)]

    def ring(self, s: int, row: int) -> list[int]:
        """The words that ``RING_WORDS`` names."""
        at = self._rings_at + len(RING_WORDS) * (s * self._rows + row)
        return self._words[at : at + len(RING_WORDS)]

    def end_ns(self, row: int, reference: int) -> int | None:
        """Where the row's window ended; None: it was absent."""
        session, _, end_ns = self.row(row)[:3]
        _, count, newest_ns = self.ring(reference, row)
        if session == 0 or count == 0:
            return None
        return newest_ns if end_ns == NEWEST else end_ns
