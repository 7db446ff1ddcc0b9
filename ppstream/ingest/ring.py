"""SensorRing: the newest history of one stream of one robot, in the memory of a RingBank.

A ring has one writer and one reader, the same thread: there are no locks. Which samples a ring
takes is decided here; who may send them is ``sessions/server.py``'s, which slice is used
``window.py``'s. A bank holds one stream's rings side by side for all rows: it is one argument of
the resampling call, which so serves every row at once and reads the rings in place.
"""

from __future__ import annotations

import sys
from operator import lt
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from ppstream import native
from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import ProtocolError
from ppstream.ingest.sample_ledger import (
    DUPLICATE,
    FUTURE,
    LATE,
    NON_FINITE,
    OVERWRITTEN,
    SHAPE,
    STALE,
    SampleLedger,
)
from ppstream.ingest.stamp_filter import NEVER_NS, StampFilter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig
    from ppstream.native.core import Line
    from ppstream.recording.items import RowTap
    from ppstream.wire.message_memory import LargeMessage

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_INT64: Final = np.dtype(np.int64)


class RingBank:
    """Memory of one stream for all rows; the tensors go to the resampling call as they are.

    Values are float32 whatever the stream's dtype, since windows are: a float64 sample is rounded
    once, on arrival. A camera's frames stay uint8.

    Args:
        stream: gives the width D.
        rows: B, robots of one envelope.
        capacity: N, samples kept per row.
    """

    def __init__(self, stream: StreamConfig, rows: int, capacity: int) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"a bank needs rows and capacity above 0, got {rows} and {capacity}")
        self.stream = stream
        self.capacity = capacity
        self.is_image = stream.image is not None
        dtype = torch.uint8 if self.is_image else torch.float32
        self.values = torch.zeros(rows, capacity, stream.dim, dtype=dtype)
        self.stamps_ns = torch.zeros(rows, capacity, dtype=torch.int64)
        self.count = torch.zeros(rows, dtype=torch.int64)  # samples held
        self.head = torch.zeros(rows, dtype=torch.int64)  # slot of the oldest


class FrameKeeper(Protocol):
    """Keeps frames of one ring at their senders until a GPU has copied them."""

    def keep(self, number: int, message: LargeMessage, offset: int) -> bool:
        """Keep the frame of this number, which lies at ``offset``; False: it cannot stay there."""

    def clear(self) -> None:
        """Keep none: the ring is empty, and nobody will ask for them."""


class SensorRing(native.Ring):
    """One row of a bank. Its samples are finite, and their stamps strictly increase.

    Of equal stamps the first sample counts; resampling rests on both (``window.py``).

    Samples are numbered from 0 in order of arrival: sample i lies in slot ``i % capacity``, and
    ``count`` samples before number ``accepted`` are held. They lie in row ``row`` of ``bank``. A
    ``tap`` is told what arrives.
    ``newest_ns`` (robot clock) and ``newest_rx_ns`` (rank 0's) are ``NEVER_NS`` while it is empty.
    ``refused_ns`` and ``refused_rx_ns``: the same of the newest sample since then whose stamp was
    refused.
    Where a GPU reads frames in their senders' memory, a ``keeper`` has them: their places in the
    bank hold no pixels of theirs.
    """

    keeper: FrameKeeper | None = None

    def __init__(self, bank: RingBank, row: int, clock: StampFilter) -> None:
        self.bank = bank
        self.stream = bank.stream
        self.ledger = SampleLedger()
        self.accepted = 0  # samples ever accepted; never goes back
        self.count = 0
        self.settled = 0  # samples below this number are accounted for
        self.newest_ns = NEVER_NS
        self.newest_rx_ns = NEVER_NS
        self.refused_ns = self.refused_rx_ns = NEVER_NS
        self._tap: RowTap | None = None
        self._clock = clock
        self._capacity = bank.capacity
        self._dim = bank.stream.dim
        self._dtype = np.dtype(bank.stream.dtype)
        self._is_image = bank.is_image
        self._gap_ns = round(bank.stream.max_gap_ms * NS_PER_MS)
        self.row = row
        self._values: NDArray[np.float32] = bank.values[row].numpy()
        self._stamps: NDArray[np.int64] = bank.stamps_ns[row].numpy()
        self._counts: NDArray[np.int64] = bank.count.numpy()
        self._heads: NDArray[np.int64] = bank.head.numpy()
        self._is_compiled = native.is_used
        if native.is_used:
            self.bind(
                self._capacity,
                self._dim,
                None if self._is_image else self._values,
                self._stamps,
                self._counts[row : row + 1],
                self._heads[row : row + 1],
                self._gap_ns,
            )
        self._is_plain = native.is_used and not self._is_image and self._dtype == np.float32
        self._takes = self._is_plain  # the core does

    @property
    def reach_ns(self) -> int | None:
        """From the oldest sample that is kept to the newest; None while there is room for more."""
        if self.count < self._capacity:
            return None
        return self.newest_ns - self._stamp_of(self.accepted - self.count)

    @property
    def tap(self) -> RowTap | None:
        """Told of what arrives; set by who records."""
        return self._tap

    @tap.setter
    def tap(self, tap: RowTap | None) -> None:
        self._tap = tap
        self._takes = self._is_plain and tap is None

    def append(self, stamps: NDArray[np.int64], values: NDArray[Any], rx_ns: int) -> int:
        """Take in the samples of one message; nothing bad is raised, all of it is counted.

        Of a message longer than the ring only the newest samples are looked at.

        Args:
            stamps: ``[n]`` int64 ns of the robot's clock, copied.
            values: ``[n, dim]`` in the stream's dtype, copied.
            rx_ns: when the message arrived, rank 0's clock.

        Returns:
            How many samples were accepted; the ledger says why others were not.
        """
        if self._takes:
            n = self.try_append(stamps, values, rx_ns, self.ledger, self._clock)
            if n:
                return n
        if not self._fits(stamps, values):
            self.refuse(SHAPE, max(1, stamps.size))
            return 0
        n = len(stamps)
        if n == 0:
            return 0
        if self._tap is not None:
            self._tap.samples(self.stream.name, stamps, values, rx_ns)
        if n > self._capacity:
            self.refuse(OVERWRITTEN, n - self._capacity)
            n = self._capacity
            stamps, values = stamps[-n:], values[-n:]
        self.ledger.received += n
        newest_ns: int = stamps.item(n - 1)
        flat = values.reshape(-1)
        if (
            stamps.item(0) > self.newest_ns
            and (self._is_image or np.count_nonzero(_representable(flat)) == flat.size)
            and (n == 1 or _increases(stamps.tolist()))
            and self._clock.accepts(newest_ns, rx_ns)
        ):
            self._store(stamps, values, rx_ns)
            return n
        return self._append_some(stamps, values, rx_ns)

    def append_message(self, stamps: memoryview, values: memoryview, rx_ns: int) -> int:
        """As ``append``: int64 stamps and their values as bytes of exactly these samples."""
        if self._takes:
            n = self.try_append(stamps, values, rx_ns, self.ledger, self._clock)
            if n:
                return n
        n = len(stamps) // _INT64.itemsize
        return self.append(
            np.ndarray((n,), _INT64, stamps),
            np.ndarray((n, self._dim), self._dtype, values),
            rx_ns,
        )

    def append_frame(self, stamp: bytes, frame: LargeMessage, offset: int, rx_ns: int) -> int:
        """As ``append_message``, of one frame of a camera that lies at ``offset`` of ``frame``.

        A good frame is copied from there to its place, and nowhere else; or a GPU will copy it.

        Raises:
            ProtocolError: it cannot be read; it is not counted, and the ring may be empty now.
        """
        stamp_ns = int.from_bytes(stamp, sys.byteorder, signed=True)
        is_newer = self._tap is None and stamp_ns > self.newest_ns
        if is_newer and self._clock.accepts(stamp_ns, rx_ns):
            if (keeper := self.keeper) is None or not keeper.keep(self.accepted, frame, offset):
                try:
                    frame.read_into(self._values[self.accepted % self._capacity].data, offset)
                except ProtocolError:  # the oldest frame may lie there, half overwritten
                    self.clear(OVERWRITTEN)
                    raise
            self.ledger.received += 1
            self._note_one(stamp_ns, rx_ns)
            return 1
        stamps = np.ndarray((1,), _INT64, stamp)
        values = self._frame(frame, offset)
        if is_newer:
            self.ledger.received += 1
            return self._append_some(stamps, values, rx_ns)
        return self.append(stamps, values, rx_ns)

    def _frame(self, frame: LargeMessage, offset: int) -> NDArray[Any]:
        values = np.empty((1, self._dim), self._dtype)
        frame.read_into(values.reshape(-1).data, offset)
        return values

    def line(self, prefix: bytes) -> Line:
        """Returns what ``native.receive`` takes this ring's packets by.

        ``prefix`` is that of ``Samples`` of this stream in its session, up to their stamps.
        """
        return prefix, self, self.ledger, self._clock

    def refuse(self, reason: str, samples: int) -> None:
        """Count ``samples`` that arrived for this stream and cannot be accepted."""
        self.ledger.received += samples
        self.ledger.reject(reason, samples)

    def settle(self, first_target_ns: int, end_ns: int) -> int | None:
        """Account for a window with targets from ``first_target_ns`` to ``end_ns``.

        Samples not newer than the end are used if they are at or after the one that brackets the
        first target from below, and passed over if older. Newer ones stay in flight: a later window
        will use them.

        Returns:
            The stamp of the newest sample used, None when there is none.
        """
        if self._is_compiled:
            return self.account(first_target_ns, end_ns, self.ledger)
        stop = self.accepted if self.newest_ns <= end_ns else self._number_after(end_ns)
        if stop == self.accepted - self.count:
            return None
        if stop > self.settled:
            used_from = self.settled
            if self._stamp_of(used_from) < first_target_ns:
                used_from = max(used_from, self._number_after(first_target_ns) - 1)
            self.ledger.account_used(stop - used_from, used_from - self.settled)
            self.settled = stop
        return self._stamp_of(stop - 1)

    def newest_at(self, end_ns: int, samples: int) -> int:
        """Returns the stamp of the newest sample that is not newer than ``end_ns``.

        ``NEVER_NS`` where it holds fewer than ``samples``, 1 or more, of these.
        """
        held, stop = self.count, self.accepted
        if self.newest_ns > end_ns:
            stop -= 1  # mostly: one that came behind the window's end
            if held > 1 and self._stamp_of(stop - 1) > end_ns:
                stop = self._number_after(end_ns)
        return self._stamp_of(stop - 1) if stop - self.accepted + held >= samples else NEVER_NS

    def clear(self, reason: str) -> None:
        """Empty the ring; what no window has used yet is dropped for ``reason``."""
        if self._tap is not None:
            self._tap.cleared(self.stream.name, reason)
        if self.keeper is not None:
            self.keeper.clear()
        self._drop_before(self.accepted, reason)
        self._counts[self.row] = self.count = 0
        self.newest_ns = self.newest_rx_ns = NEVER_NS
        self.refused_ns = self.refused_rx_ns = NEVER_NS

    def check(self) -> None:
        """Raises AssertionError unless the ledger balances and agrees with what the ring holds."""
        self.ledger.check()
        waiting = self.accepted - self.settled
        assert self.ledger.in_flight == waiting, f"{waiting} samples wait, {self.ledger}"
        assert 0 <= waiting <= self.count <= self._capacity, f"{waiting} wait, {self.count} held"

    def _fits(self, stamps: NDArray[np.int64], values: NDArray[Any]) -> bool:
        is_typed = stamps.dtype == _INT64 and values.dtype == self._dtype
        return is_typed and stamps.ndim == 1 and values.shape == (len(stamps), self._dim)

    def _append_some(self, stamps: NDArray[np.int64], values: NDArray[Any], rx_ns: int) -> int:
        """The careful way, for a message in which something is wrong: by arrays, too."""
        if stamps.item(-1) > self.newest_ns and self._clock.is_stale(stamps.item(-1), rx_ns):
            self.ledger.reject(STALE, len(stamps))
            self.refused_ns, self.refused_rx_ns = stamps.item(-1), rx_ns
            return 0
        if not self._is_image:
            finite = _representable(values).all(axis=1)
            if bad := len(stamps) - int(np.count_nonzero(finite)):
                self.ledger.reject(NON_FINITE, bad)
                stamps, values = stamps[finite], values[finite]
        taken = 0
        while len(stamps):
            judged = self._clock.judge(stamps, self.newest_ns, rx_ns)
            n = len(judged.good)
            taken += self._store(stamps[:n][judged.good], values[:n][judged.good], rx_ns)
            for reason, count in zip((LATE, DUPLICATE, FUTURE, STALE), judged[1:], strict=True):
                if count:
                    self.ledger.reject(reason, count)
                    self.refused_ns = stamps[:n][~judged.good].item(-1)
                    self.refused_rx_ns = rx_ns
            if n < len(stamps):
                taken += self._append_one(stamps[n : n + 1], values[n : n + 1], rx_ns)
            stamps, values = stamps[n + 1 :], values[n + 1 :]
        return taken

    def _append_one(self, stamp: NDArray[np.int64], value: NDArray[Any], rx_ns: int) -> int:
        """A sample that changes how the next ones are judged."""
        reason = self._fault(stamp.item(), rx_ns)
        if reason is None:
            return self._store(stamp, value, rx_ns)
        self.ledger.reject(reason, 1)
        self.refused_ns, self.refused_rx_ns = stamp.item(), rx_ns
        if reason in (LATE, FUTURE):
            self._clock.rejects()
        return 0

    def _fault(self, stamp_ns: int, rx_ns: int) -> str | None:
        if stamp_ns <= self.newest_ns:
            return DUPLICATE if stamp_ns == self.newest_ns else LATE
        if self._clock.is_stale(stamp_ns, rx_ns):  # first: it may end a backlog
            return STALE
        return None if self._clock.accepts(stamp_ns, rx_ns) else FUTURE

    def _store(self, stamps: NDArray[np.int64], values: NDArray[Any], rx_ns: int) -> int:
        """Write good samples behind the newest, at most a ring full; returns how many."""
        n = len(stamps)
        if n == 0:
            return 0
        capacity = self._capacity
        begin = self.accepted % capacity
        end = begin + n
        if end <= capacity:
            self._values[begin:end] = values
        else:
            first = capacity - begin
            self._values[begin:], self._values[: end - capacity] = values[:first], values[first:]
        self._note(stamps, rx_ns)
        return n

    def _note(self, stamps: NDArray[np.int64], rx_ns: int) -> None:
        """Account for good samples whose values lie behind the newest, at most a ring full."""
        n, capacity = len(stamps), self._capacity
        begin = self.accepted % capacity
        if (end := begin + n) <= capacity:
            self._stamps[begin:end] = stamps
        else:
            first = capacity - begin
            self._stamps[begin:], self._stamps[: end - capacity] = stamps[:first], stamps[first:]
        before_ns = stamps.item(0) if self.newest_ns == NEVER_NS else self.newest_ns
        self._advance(n, stamps.item(n - 1), rx_ns)
        if self.newest_ns - before_ns > self._gap_ns:
            steps_ns = np.diff(stamps, prepend=before_ns)
            holes_ns = steps_ns[steps_ns > self._gap_ns]
            if len(holes_ns):
                self.ledger.add_holes(len(holes_ns), int(holes_ns.max()))

    def _note_one(self, stamp_ns: int, rx_ns: int) -> None:
        """As ``_note``, of one: without arrays, which cost more than all else."""
        self._stamps[self.accepted % self._capacity] = stamp_ns
        before_ns = stamp_ns if self.newest_ns == NEVER_NS else self.newest_ns
        self._advance(1, stamp_ns, rx_ns)
        if (step_ns := stamp_ns - before_ns) > self._gap_ns:
            self.ledger.add_holes(1, step_ns)

    def _advance(self, n: int, newest_ns: int, rx_ns: int) -> None:
        self.accepted += n
        self.ledger.in_flight += n
        if self.count < self._capacity:
            self._counts[self.row] = self.count = min(self._capacity, self.count + n)
        oldest = self.accepted - self.count
        self._heads[self.row] = oldest % self._capacity
        if self.settled < oldest:
            self._drop_before(oldest, OVERWRITTEN)
        self.newest_ns, self.newest_rx_ns = newest_ns, rx_ns

    def _drop_before(self, number: int, reason: str) -> None:
        if self.settled < number:
            self.ledger.drop(reason, number - self.settled)
            self.settled = number

    def _stamp_of(self, number: int) -> int:
        return int(self._stamps[number % self._capacity])

    def _number_after(self, stamp_ns: int) -> int:
        """The number of the first sample held that is newer than ``stamp_ns``."""
        oldest = self.accepted - self.count
        head = oldest % self._capacity
        until_wrap = self._stamps[head : head + self.count]
        if head + self.count > self._capacity and until_wrap[-1] <= stamp_ns:
            wrapped = self._stamps[: head + self.count - self._capacity]
            return oldest + len(until_wrap) + int(wrapped.searchsorted(stamp_ns, "right"))
        return oldest + int(until_wrap.searchsorted(stamp_ns, "right"))


def _representable(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks values that float32 can hold: finite, and not too large."""
    is_float32 = values.itemsize == 4
    fits: NDArray[np.bool_] = np.isfinite(values) if is_float32 else np.abs(values) <= FLOAT32_MAX
    return fits


def _increases(stamps: list[int]) -> bool:
    return all(map(lt, stamps, stamps[1:]))
