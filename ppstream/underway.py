"""Underway: envelopes that rank 0 has queued and not finished, their events, and what is known.

Finished in order, each when its last event is done; by then moves of later envelopes may be known,
too. They are booked on the ledger by time: its counts at each emit are those of the devices.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ppstream.memops import Event
from ppstream.queue_history import Move, QueueHistory
from ppstream.stage_events import Rank0Times

if TYPE_CHECKING:
    from ppstream.credits import CreditLedger
    from ppstream.device_clock import DeviceClock
    from ppstream.flight import Flight


class Marks(NamedTuple):
    """The events of one envelope; used again for a later one."""

    a0: Event
    a1: Event
    committed: Event  # A is over, and the credit is there
    sent: Event
    received: Event
    c0: Event
    c1: Event


class Finished(NamedTuple):
    """An envelope all of whose events are done, and what they say."""

    flight: Flight
    times: Rank0Times
    credit_ns: int  # when the result was received whose credit it took; 0: none needed
    queued_ns: int  # when the host had queued it


class _One:
    """One envelope, and which of its moves are booked."""

    __slots__ = ("committed_ns", "flight", "marks", "queued_ns", "received_ns")

    def __init__(self, flight: Flight, marks: Marks, queued_ns: int) -> None:
        self.flight = flight
        self.marks = marks
        self.queued_ns = queued_ns
        self.committed_ns: int | None = None
        self.received_ns: int | None = None


class Underway:
    """For the thread that queues and finishes.

    Args:
        ledger: of the link.
        clock: of rank 0's device.
        ring: envelopes whose events may be asked for at one time.
    """

    def __init__(self, ledger: CreditLedger, clock: DeviceClock[Event], ring: int) -> None:
        self._clock = clock
        self._history = QueueHistory(ledger)
        self._ring = [Marks(*(Event() for _ in Marks._fields)) for _ in range(ring)]
        self._queued: deque[_One] = deque()
        self._receipts_ns: deque[int] = deque([0] * ledger.d_in, maxlen=ledger.d_in)

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def oldest(self) -> Flight:
        return self._queued[0].flight

    def marks(self, index: int) -> Marks:
        """The events of envelope ``index``."""
        return self._ring[index % len(self._ring)]

    def earlier(self, index: int, behind: int) -> Marks | None:
        """Events of the envelope so many before; None: there was none."""
        return self.marks(index - behind) if index >= behind else None

    def add(self, flight: Flight, queued_ns: int) -> None:
        """Everything of ``flight`` is queued."""
        self._queued.append(_One(flight, self.marks(flight.index), queued_ns))

    def is_oldest_done(self) -> bool:
        return bool(self._queued) and self._queued[0].marks.c1.is_done()

    def finish(self) -> Finished:
        """Take the oldest, which is done; every move up to its end is booked, but the emit."""
        one = self._queued.popleft()
        host_ns, marks = self._clock.host_ns, one.marks
        self._book_known(one)
        for later in self._queued:
            if not self._book_known(later):
                break
        assert one.committed_ns is not None, "C is over"
        assert one.received_ns is not None, "C is over"
        times = Rank0Times(
            host_ns(marks.a0),
            host_ns(marks.a1),
            one.committed_ns,
            one.received_ns,
            host_ns(marks.c0),
            host_ns(marks.c1),
        )
        self._history.add(times.c0, Move.DECODE)
        self._history.book_until(times.c1)
        finished = Finished(one.flight, times, self._receipts_ns[0], one.queued_ns)
        self._receipts_ns.append(times.received)
        return finished

    def _book_known(self, one: _One) -> bool:
        """Book what is new of one envelope; returns whether a later one may have moved at all."""
        if one.committed_ns is None:
            if not one.marks.committed.is_done():
                return False
            one.committed_ns = self._clock.host_ns(one.marks.committed)
            self._history.add(one.committed_ns, Move.COMMIT)
        if one.received_ns is None and one.marks.received.is_done():
            one.received_ns = self._clock.host_ns(one.marks.received)
            self._history.add(one.received_ns, Move.RECEIVE)
        return True
