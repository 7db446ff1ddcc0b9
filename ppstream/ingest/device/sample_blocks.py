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
PACK_ROW: Final = Struct(f"={len(ROW_WORDS)}q").pack_into
PACK_RING: Final = Struct(f"={len(RING_WORDS)}q").pack_into
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
        self._committed: list[Commitment | None] = [None] * len(rows)
        self.reference = list(banks).index(reference)
        feeds = [
            _Feed(stream, row, served.rings[name], bank)
            for stream, (name, bank) in enumerate(banks.items())
            for row, served in enumerate(rows)
        ]
        self._places = [
            _Place(served, feeds[row :: len(rows)], feeds[self.reference * len(rows) + row])
            for row, served in enumerate(rows)
        ]
        #: of a table, those that say what a window used; then a commitment of each row
        self.told_words = len(ROW_WORDS) * len(rows) + len(RING_WORDS) * len(feeds)
        action_bytes = VALUE_BYTES * self._points * self._action_dim
        self.commitment_words = (
            COMMITMENT_WORDS + -(-action_bytes // WORD_BYTES) if commitment else 0
        )
        self.table_words = self.told_words + self.commitment_words * len(rows)
        self._pieces_at = HEADER_WORDS + self.table_words
        self._samples_at = self._pieces_at + PIECE_WORDS * len(feeds)
        largest = max(feed.sample_words for feed in feeds)
        everything = sum(feed.capacity * feed.sample_words for feed in feeds)
        room = max(largest, min(everything, BLOCK_BYTES // WORD_BYTES))
        self.block_words = self._samples_at + room
        self._told: memoryview[Any] = np.zeros(self.told_words, np.int64).data  # the newest

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
        changed = [
            place
            for place, end_ns in zip(self._places, ends_ns, strict=True)
            if (place.is_taken or place.served.session) and place.has_changed(end_ns)
        ]
        if not changed and not (self._points and self._has_new_commitment()):
            return NOTHING
        at = self._samples_at
        pieces: list[int] = []
        frames: list[FramePiece] = []
        words: memoryview[Any] = block.data
        floats = words.cast("B").cast("f")
        is_all = True
        for place in changed:
            for feed in place.behind:
                at = feed.pack(words, floats, at, pieces, frames)
            is_all = place.tell(self._told) and is_all
        words[0], words[1] = sequence, len(pieces) // PIECE_WORDS
        words[HEADER_WORDS : HEADER_WORDS + self.told_words] = self._told
        if self._points:
            self._commit(block[HEADER_WORDS + self.told_words : self._pieces_at])
        pack_into(f"={len(pieces)}q", words, self._pieces_at * WORD_BYTES, *pieces)
        return Packed(at, frames, is_all)

    def repeat(self) -> None:
        """Have the next block bring the newest sample of each ring again, to where it lies.

        Not of a camera's: its pixels may be gone.
        """
        for place in self._places:
            if place.is_taken:
                place.repeat()

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


class _Place:
    """One row: what the newest table says of it, and its rings.

    Args:
        served: as follows.
        feeds: of its rings, by stream.
        reference: the one whose newest stamp ends a window.

    Attributes:
        is_taken: so says the newest table. While nobody has the row, nothing of it travels.
        behind: feeds of rings that have changed since.
    """

    def __init__(self, served: RowInput, feeds: Sequence[_Feed], reference: _Feed) -> None:
        self.served, self.is_taken = served, False
        self.behind: Sequence[_Feed] = ()
        self._feeds, self._reference = feeds, reference
        self._told_at = WORD_BYTES * len(ROW_WORDS) * feeds[0].row
        self._newest_rx_ns = 0
        self._source: tuple[Any, ...] = ()  # what is told of it besides

    def has_changed(self, end_ns: int | None) -> bool:
        """True when the table does not say what is the case now, with this end of its window."""
        served, before = self.served, self._source
        self.behind = [
            feed
            for feed in self._feeds
            if feed.ring.accepted != feed.sent or feed.ring.count != feed.held
        ]
        self._source = (
            served.session,
            served.session_epoch,
            end_ns,
            served.instruction_id,
            served.conditioning_epoch,
            served.awaits_text,
        )
        return bool(self.behind) or self._source != before

    def repeat(self) -> None:
        """As ``BlockWriter``."""
        for feed in self._feeds:
            feed.sent -= not feed.is_image

    def tell(self, table: memoryview[Any]) -> bool:
        """Write its words of a table; False: not all that its rings hold is sent yet."""
        session, epoch, end_ns, text, conditioning, awaits_text = self._source
        is_all = all(feed.sent == feed.ring.accepted for feed in self.behind)
        is_hidden = awaits_text
        if self.served.needs:  # what is needed may not be there yet
            is_hidden = is_hidden or not is_all or self.served.lacks_samples(end_ns)
        reference = self._reference
        if reference.sent == reference.ring.accepted:
            self._newest_rx_ns = reference.ring.newest_rx_ns
        end = NEWEST if end_ns is None else end_ns
        told = session, epoch, end, self._newest_rx_ns, text, conditioning
        PACK_ROW(table, self._told_at, *told)
        for feed in self._feeds:
            feed.tell(table, is_hidden=is_hidden)
        self.is_taken = session != 0
        return is_all


class _Feed:
    """One ring, and how much of it the GPU was given: samples before number ``sent``."""

    def __init__(self, stream: int, row: int, ring: SensorRing, bank: RingBank) -> None:
        self.ring = ring
        self.sent = ring.accepted - ring.count
        self.held = 0  # by the ring, when it was last looked at
        self.newest_ns = ring.newest_ns
        self.capacity = bank.capacity
        self.stream, self.row = stream, row
        rows = len(bank.values)
        told_at = len(ROW_WORDS) * rows + len(RING_WORDS) * (stream * rows + row)
        self._told_at = WORD_BYTES * told_at
        self._stamps: memoryview[Any] = bank.stamps_ns[row].numpy().data
        self.is_image = bank.is_image
        self._values: memoryview[Any] = bank.values[row].view(-1).numpy().data
        self._dim = 0 if self.is_image else bank.stream.dim  # values in a block
        value_bytes = VALUE_BYTES * self._dim
        self.sample_words = 1 + -(-value_bytes // WORD_BYTES)

    def tell(self, table: memoryview[Any], *, is_hidden: bool) -> None:
        """Write its words of a table; of a hidden ring none of the samples may be used."""
        sent, ring = self.sent, self.ring
        shown = sent - ring.accepted + ring.count
        if is_hidden or shown < 0:
            shown = 0
        PACK_RING(table, self._told_at, sent, shown, self.newest_ns)

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
        ring, capacity = self.ring, self.capacity
        accepted, self.held = ring.accepted, ring.count
        first = self.sent
        if first < accepted - self.held:  # those before are overwritten
            self.sent = first = accepted - self.held
        n = accepted - first
        if n > (fit := (len(words) - at) // self.sample_words):
            n = fit
        if n <= 0:
            return at
        begin = first % capacity
        until_wrap = n if begin + n <= capacity else capacity - begin
        self._copy(words, floats, at, at + n, begin, until_wrap)
        if until_wrap < n:
            self._copy(words, floats, at + until_wrap, at + n, 0, n - until_wrap, until_wrap)
        stream, row = self.stream, self.row
        if self.is_image:
            frames += [FramePiece(stream, row, number) for number in range(first, first + n)]
        pieces += (stream, row, first, n, at * WORD_BYTES)
        self.sent = end = first + n
        self.newest_ns = ring.newest_ns if end == accepted else self._stamps[(end - 1) % capacity]
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
