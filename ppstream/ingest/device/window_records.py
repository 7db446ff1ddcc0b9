"""Contents of a window on a GPU, from the table that it went by; accounts for it in the ledgers.

The host reads it when the envelope is complete: the rings have moved on since, may have been
emptied, and their row may be another robot's.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from ppstream.core.clock import NS_PER_MS
from ppstream.ingest.device.sample_blocks import NEWEST, RING_WORDS, ROW_WORDS
from ppstream.ingest.window import WindowInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.ring import SensorRing
    from ppstream.ingest.rows import RowInput
    from ppstream.ingest.window import Ages


class TakenWindow(NamedTuple):
    """Contents of a complete envelope."""

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
        self._rows = len(rows)
        self._rings = {
            stream.name: [row.rings[stream.name] for row in rows] for stream in config.streams
        }
        rings_at = len(ROW_WORDS) * len(rows)
        words = len(RING_WORDS) * len(rows)  # of a stream
        self._streams_at = range(rings_at, rings_at + words * len(config.streams), words)
        self._reference_at = self._streams_at[reference]
        self._span_ns = (config.window.steps - 1) * round(config.window.dt_ms * NS_PER_MS)

    def account(self, words: list[int], limit: int | None = None) -> TakenWindow:
        """Returns what the window with this table used; settles the rings' ledgers.

        Robots of the first ``limit`` rows alone are present in it; None: of all.
        """
        limit = self._rows if limit is None else limit
        ends: list[int | None] = []  # None: the row was absent
        episodes, received_ns = [], []
        for row in range(self._rows):
            session, session_epoch, end_ns, rx_ns, *_ = _numbers(words, 0, row, ROW_WORDS)
            _, count, newest_ns = _numbers(words, self._reference_at, row, RING_WORDS)
            if session == 0 or count == 0 or row >= limit:
                ends.append(None)
            else:
                ends.append(newest_ns if end_ns == NEWEST else end_ns)
            episodes.append((session, session_epoch))
            received_ns.append(rx_ns)
        present = [end is not None for end in ends]
        info = WindowInfo(
            [end or 0 for end in ends],
            max(compress(received_ns, present), default=0),
            self._ages(words, ends),
        )
        return TakenWindow(info, present, episodes, received_ns)

    def _ages(self, words: list[int], ends: list[int | None]) -> Ages:
        ages: dict[str, Any] = {}
        for (name, rings), at in zip(self._rings.items(), self._streams_at, strict=True):
            found = [
                self._account_ring(ring, _numbers(words, at, row, RING_WORDS), ends[row])
                for row, ring in enumerate(rings)
            ]
            ages[name] = found if len(found) > 1 else found[0]
        return ages

    def _account_ring(self, ring: SensorRing, told: list[int], end_ns: int | None) -> int | None:
        """Account for what the window used of a ring; returns the age of its newest sample."""
        sent, count, newest_ns = told
        if end_ns is None or count == 0:
            return None
        used_ns = None
        if ring.settled < sent:  # else it, or an earlier window, has accounted for its samples
            reach_ns = min(end_ns, newest_ns)  # what came since may lie before the first target
            used_ns = ring.settle(min(end_ns - self._span_ns, reach_ns), reach_ns)
        if newest_ns <= end_ns:
            return end_ns - newest_ns
        return None if used_ns is None else end_ns - used_ns


def _numbers(words: list[int], begin: int, row: int, names: Sequence[str]) -> list[int]:
    """Those of one row that ``names`` names, as ``sample_blocks.py`` lays them out."""
    at = begin + len(names) * row
    return words[at : at + len(names)]
