"""Transfer of the rings to a GPU: blocks of new samples, and tables of what a window may use.

A block is one piece of pinned memory that the GPU takes over at once: the table, then what is new
in every ring, piece by piece. Nothing here touches a GPU: ``rings.py`` sends blocks, and
``ppstream_kernels/rings.cu`` reads them; the layouts stand in both places.

Rings on the GPU are ``GUARD`` times as long as here, so that what arrives while a window reads its
rings overwrites none of the samples it may use.
"""

from __future__ import annotations

from struct import Struct, pack_into
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ppstream.config.schema import ActionConfig
    from ppstream.ingest.ring import RingBank, SensorRing
    from ppstream.ingest.rows import Commitment, RowInput

GUARD: Final = 2
NEWEST: Final = -(2**63)  # of a row's end: at the newest sample of the reference stream

#: Words of a table: these for each row, then those for each ring, all rows of a stream together.
ROW_WORDS: Final = (
    "session",
    "session_epoch",
    "end_ns",
    "newest_rx_ns",
    "instruction_id",
    "conditioning_epoch",
)
COMMITMENT_WORDS: Final = 5  # points, start_ns, dt_ns, expires_ns, delay_ns; actions behind them
RING_WORDS: Final = ("sent", "count", "newest_ns")  # samples [sent - count, sent) may be used
POINTS_PER_STEP: Final = 2  # of a commitment, per step of a chunk: a robot may blend two chunks

HEADER_WORDS: Final = 2  # sequence, pieces
PIECE_WORDS: Final = 5  # stream, row, number of the first sample, samples, where they begin
WORD_BYTES: Final = 8
VALUE_BYTES: Final = 4  # float32; of a camera's frames only the stamps are in a block
BLOCK_BYTES: Final = 1 << 20  # of samples; a backlog takes several blocks


class FramePiece(NamedTuple):
    """Samples that are too large for a block: copied from the host's ring to the GPU's, alone."""

    stream: int
    row: int
    number: int


class Packed(NamedTuple):
    """New samples, or as many of them as fit one block."""

    words: int  # of the block that count; 0: there is nothing to send
    frames: list[FramePiece]  # to be copied beside it
    is_all: bool  # no backlog is left


NOTHING: Final = Packed(0, [], is_all=True)


def commitment_shape(actions: ActionConfig) -> tuple[int, int] | None:
    """Points and width of a commitment that windows may need; None: they ask for none."""
    if not actions.prefix_steps:
        return None
    return POINTS_PER_STEP * max(actions.horizon, actions.prefix_steps), len(actions.names)


class BlockWriter:
    """Packs what the rings have taken in since the last block; for the thread that writes them.

    Args:
        rows: B places of robots.
        banks: the memory of their rings, by stream, in the order in which streams are numbered.
        reference: the stream whose newest stamp ends a window.
        commitment: the most points, and the width, of what a robot says it executes; None: windows
            do not ask for it.
    """

    def __init__(
        self,
        rows: Sequence[RowInput],
        banks: Mapping[str, RingBank],
        reference: str,
        commitment: tuple[int, int] | None = None,
    ) -> None:
        self._rows = rows
        self._points, self._action_dim = commitment or (0, 0)
        self._committed: list[Commitment | None] = []
        self.reference = list(banks).index(reference)
        self._newest_rx_ns = [0] * len(rows)
        self._feeds = [
            _Feed(stream, row, served.rings[name], bank)
            for stream, (name, bank) in enumerate(banks.items())
            for row, served in enumerate(rows)
        ]
        #: of a table, those that say what a window used; then a commitment of each row
        self.told_words = len(ROW_WORDS) * len(rows) + len(RING_WORDS) * len(self._feeds)
        action_bytes = VALUE_BYTES * self._points * self._action_dim
        self.commitment_words = (
            COMMITMENT_WORDS + -(-action_bytes // WORD_BYTES) if commitment else 0
        )
        self.table_words = self.told_words + self.commitment_words * len(rows)
        self._pieces_at = HEADER_WORDS + self.table_words
        self._samples_at = self._pieces_at + PIECE_WORDS * len(self._feeds)
        largest = max(feed.sample_words for feed in self._feeds)
        everything = sum(feed.capacity * feed.sample_words for feed in self._feeds)
        room = max(largest, min(everything, BLOCK_BYTES // WORD_BYTES))
        self.block_words = self._samples_at + room
        self._front = Struct(f"={HEADER_WORDS + self.told_words}q")
        self._sources: Sequence[tuple[Any, ...]] = ()  # of each row, by the newest table

    def write(
        self, block: NDArray[np.int64], sequence: int, ends_ns: Sequence[int | None]
    ) -> Packed:
        """Fill ``block``, ``[block_words]``, with what is new.

        Args:
            block: written from its start.
            sequence: of the table; one more each time.
            ends_ns: where each row's window ends, robot clock; None: at its newest sample.

        Returns:
            What to send; nothing when nothing has changed since the last block.
        """
        sources = [
            (
                served.session,
                served.session_epoch,
                end_ns,
                served.instruction_id,
                served.conditioning_epoch,
                served.awaits_text or served.lacks_samples,
            )
            for served, end_ns in zip(self._rows, ends_ns, strict=True)
        ]
        behind = [feed for feed in self._feeds if feed.is_behind]
        is_same = not behind and sources == self._sources
        if is_same and not (self._points and self._has_new_commitment()):
            return NOTHING
        self._sources = sources
        at = self._samples_at
        pieces: list[int] = []
        frames: list[FramePiece] = []
        words: memoryview[Any] = block.data
        floats = words.cast("B").cast("f")
        for feed in behind:
            at = feed.pack(words, floats, at, pieces, frames)
        is_all = not any(feed.is_behind for feed in behind)
        header = sequence, len(pieces) // PIECE_WORDS
        hidden = [
            is_hidden or (bool(served.needs) and not is_all)  # what is needed may not be there yet
            for served, (*_, is_hidden) in zip(self._rows, sources, strict=True)
        ]
        self._front.pack_into(words, 0, *header, *self._table(sources, hidden))
        if self._points:
            self._commit(block[HEADER_WORDS + self.told_words : self._pieces_at])
        pack_into(f"={len(pieces)}q", words, self._pieces_at * WORD_BYTES, *pieces)
        return Packed(at, frames, is_all)

    def repeat(self) -> None:
        """Have the next block bring the newest sample of each ring again, to where it lies.

        Not of a camera's: its pixels may be gone.
        """
        for feed in self._feeds:
            feed.sent -= not feed.is_image

    def _has_new_commitment(self) -> bool:
        pairs = zip(self._rows, self._committed, strict=True)
        return any(served.commitment is not known for served, known in pairs)

    def _commit(self, words: NDArray[np.int64]) -> None:
        """Of a commitment with too many points the first count; the last of them is then held."""
        self._committed = [served.commitment for served in self._rows]
        for row, commitment in enumerate(self._committed):
            at = row * self.commitment_words
            if commitment is None:
                words[at] = 0
                continue
            n = min(len(commitment.actions), self._points)
            numbers = (
                n,
                commitment.start_ns,
                commitment.dt_ns,
                commitment.expires_ns,
                commitment.delay_ns,
            )
            words[at : at + COMMITMENT_WORDS] = numbers
            actions = words[at + COMMITMENT_WORDS : at + self.commitment_words].view(np.float32)
            actions[: n * self._action_dim] = commitment.actions[:n].ravel()

    def _table(self, sources: Sequence[tuple[Any, ...]], hidden: Sequence[bool]) -> list[int]:
        table: list[int] = []
        rows, newest_rx_ns = len(sources), self._newest_rx_ns
        references = self._feeds[self.reference * rows :]
        for row, (session, session_epoch, end_ns, text, conditioning, _) in enumerate(sources):
            ring = references[row].ring
            if references[row].sent == ring.accepted:
                newest_rx_ns[row] = ring.newest_rx_ns
            end = NEWEST if end_ns is None else end_ns
            table += session, session_epoch, end, newest_rx_ns[row], text, conditioning
        for number, feed in enumerate(self._feeds):
            sent, ring = feed.sent, feed.ring
            shown = sent - ring.accepted + ring.count
            if shown < 0 or hidden[number % rows]:
                shown = 0
            table += sent, shown, feed.newest_ns
        return table


class _Feed:
    """One ring, and how much of it the GPU was given: samples before number ``sent``."""

    def __init__(self, stream: int, row: int, ring: SensorRing, bank: RingBank) -> None:
        self.ring = ring
        self.sent = ring.accepted - ring.count
        self.held = 0  # by the ring, when it was last looked at
        self.newest_ns = ring.newest_ns
        self.capacity = bank.capacity
        self._place = (stream, row)
        self._stamps: memoryview[Any] = bank.stamps_ns[row].numpy().data
        self.is_image = bank.is_image
        self._values: memoryview[Any] = bank.values[row].view(-1).numpy().data
        self._dim = 0 if self.is_image else bank.stream.dim  # values in a block
        value_bytes = VALUE_BYTES * self._dim
        self.sample_words = 1 + -(-value_bytes // WORD_BYTES)

    @property
    def is_behind(self) -> bool:
        """The ring has taken in samples since, or was emptied."""
        ring = self.ring
        return ring.accepted != self.sent or ring.count != self.held

    def pack(
        self,
        words: memoryview[Any],
        floats: memoryview[Any],
        at: int,
        pieces: list[int],
        frames: list[FramePiece],
    ) -> int:
        """Append what fits of the new samples at word ``at``; returns where the next may begin.

        ``floats`` is the same block as ``words``.
        """
        ring = self.ring
        accepted, self.held = ring.accepted, ring.count
        first = max(self.sent, accepted - self.held)
        n = min(accepted - first, (len(words) - at) // self.sample_words)
        self.sent = first
        if n <= 0:
            return at
        begin = first % self.capacity
        until_wrap = min(n, self.capacity - begin)
        self._copy(words, floats, at, at + n, begin, until_wrap)
        if until_wrap < n:
            self._copy(words, floats, at + until_wrap, at + n, 0, n - until_wrap, until_wrap)
        if self.is_image:
            frames += [FramePiece(*self._place, number) for number in range(first, first + n)]
        pieces += (*self._place, first, n, at * WORD_BYTES)
        self.sent = first + n
        is_all = self.sent == accepted
        self.newest_ns = ring.newest_ns if is_all else self._stamps[(self.sent - 1) % self.capacity]
        return at + n * self.sample_words

    def _copy(
        self,
        words: memoryview[Any],
        floats: memoryview[Any],
        stamps_at: int,
        values_at: int,
        begin: int,
        n: int,
        behind: int = 0,
    ) -> None:
        """Samples that lie side by side; values ``behind`` so many of an earlier part."""
        words[stamps_at : stamps_at + n] = self._stamps[begin : begin + n]
        if dim := self._dim:
            to = values_at * (WORD_BYTES // VALUE_BYTES) + behind * dim
            floats[to : to + n * dim] = self._values[begin * dim : (begin + n) * dim]
