"""What rank 0 remembers of robots: one record per open session, and the counts of all of them.

Plain records; ``sessions.py`` decides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ppstream.messages import Hello
    from ppstream.ring import RowInput, SensorRing


class SessionStream:
    """Where the samples of one declared stream go, and how many bytes one has."""

    __slots__ = ("dim", "dtype", "ring", "sample_bytes")

    def __init__(self, ring: SensorRing) -> None:
        self.ring = ring
        self.dim = ring.stream.dim
        self.dtype: np.dtype[Any] = np.dtype(ring.stream.dtype)
        self.sample_bytes = self.dim * self.dtype.itemsize


@dataclass(slots=True)
class Session:
    """One robot's session. It is serving once its row is open: samples and actions may flow."""

    id: int
    peer: bytes  # ZeroMQ's address of the connection
    place: int  # index of the row
    row: RowInput
    hello: Hello
    streams: list[SessionStream]  # as Hello declared them
    heard_ns: int
    episode: int = 0
    is_serving: bool = False

    def serve(self) -> None:
        """Take the row over."""
        self.is_serving = True
        self.row.open(self.id, is_real_time=self.hello.real_time)
        self.row.session_epoch = self.episode  # a robot may reset while it waits for *ready*

    def begin_episode(self) -> None:
        self.episode += 1
        if self.is_serving:
            self.row.new_episode()

    def end(self) -> None:
        """Free the row."""
        if self.is_serving:
            self.is_serving = False
            self.row.close()


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Counts since the start.

    Frames: ``frames_received = frames_handled + frames_dropped`` by reason. Samples that reached a
    ring are in that ring's ledger; ``samples_early`` came before the run was ready.
    Chunks: given to ``emit`` = ``chunks_sent + chunks_dropped`` by reason.
    """

    open: int
    opened: int
    closed: dict[str, int]
    refused: dict[str, int]
    frames_received: int
    frames_handled: int
    frames_dropped: dict[str, int]
    samples_early: int
    resets: int
    reports_lost: int
    chunks_sent: int
    chunks_dropped: dict[str, int]


@dataclass(slots=True)
class SessionCounts:
    """The running counts. Chunks are counted by the thread that emits, all else by the owner."""

    opened: int = 0
    frames_handled: int = 0
    samples_early: int = 0
    resets: int = 0
    reports_lost: int = 0
    chunks_sent: int = 0
    closed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    frames_dropped: Counter[str] = field(default_factory=Counter)
    chunks_dropped: Counter[str] = field(default_factory=Counter)

    def statistics(self, sessions_open: int) -> SessionStatistics:
        """A copy; from any thread."""
        dropped = dict(self.frames_dropped)
        return SessionStatistics(
            open=sessions_open,
            opened=self.opened,
            closed=dict(self.closed),
            refused=dict(self.refused),
            frames_received=self.frames_handled + sum(dropped.values()),
            frames_handled=self.frames_handled,
            frames_dropped=dropped,
            samples_early=self.samples_early,
            resets=self.resets,
            reports_lost=self.reports_lost,
            chunks_sent=self.chunks_sent,
            chunks_dropped=dict(self.chunks_dropped),
        )
