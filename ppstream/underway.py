"""Underway: envelopes that rank 0 has queued and not finished, their events, and what is known.

Finished in order, each when its last event is done; by then moves of later envelopes may be known,
too. They are booked on the ledger by time: its counts at each emit are those of the devices.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ppstream.memops import Event
from ppstream.queue_history import Move, QueueHistory
from ppstream.rhythm import Rhythm
from ppstream.stage_events import Rank0Times

if TYPE_CHECKING:
    from ppstream.credits import CreditLedger
    from ppstream.device_clock import DeviceClock
    from ppstream.flight import Flight


class Marks(NamedTuple):
    """The events of one envelope; used again for a later one."""

    a0: Event
    a1: Event
    sent: Event  # where the next A waits for it: a copy that is behind its credit
    received: Event
    c0: Event
    c1: Event


class Queued:
    """One envelope, and what is known of it.

    Attributes:
        queued_ns: when the host had queued it.
        credit_ns: when the result was received whose credit it took; 0: none needed.
        times: once it is finished.
    """

    __slots__ = ("a1_ns", "committed_ns", "credit_ns", "flight", "marks", "queued_ns", "times")
    times: Rank0Times

    def __init__(self, flight: Flight, marks: Marks, queued_ns: int) -> None:
        self.flight = flight
        self.marks = marks
        self.queued_ns = queued_ns
        self.a1_ns = self.committed_ns = self.credit_ns = 0


class Underway:
    """For the thread that queues and finishes.

    An event is asked for its time only, once it should be done: that says whether it is.

    Args:
        ledger: of the link.
        clock: of rank 0's device.
        slots: whose events come again; more than envelopes are ever under way.

    Attributes:
        ring: the events of each slot.
    """

    def __init__(self, ledger: CreditLedger, clock: DeviceClock[Event], slots: int) -> None:
        self._clock = clock
        self._history = QueueHistory(ledger)
        self._d_in, self._d_out = ledger.d_in, ledger.d_out
        self.ring = [Marks(*(Event() for _ in Marks._fields)) for _ in range(slots)]
        self._queued: deque[Queued] = deque()
        self._uncommitted: deque[Queued] = deque()  # of those, as far as is known
        self._unreceived: deque[Queued] = deque()
        self._received_ns = [0] * slots  # by index; of those whose receipt is known
        self._committed_ns = 0  # the newest commit that is known, and the newest receipt
        self._newest_received_ns = 0
        self._received = 0  # receipts that are known
        self._rhythm = Rhythm()
        self._done_ns = 0  # the oldest was done, as ``is_oldest_done`` has found

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def oldest(self) -> Flight:
        return self._queued[0].flight

    def marks(self, index: int) -> Marks:
        """The events of envelope ``index``."""
        return self.ring[index % len(self.ring)]

    def add(self, flight: Flight, queued_ns: int) -> None:
        """Everything of ``flight`` is queued."""
        one = Queued(flight, self.marks(flight.index), queued_ns)
        self._queued.append(one)
        self._uncommitted.append(one)
        self._unreceived.append(one)

    def is_oldest_done(self) -> bool:
        if not self._queued:
            return False
        done_ns = self._clock.host_ns(self._queued[0].marks.c1)
        if done_ns is None:
            return False
        self._done_ns = done_ns
        return True

    def oldest_due_ns(self) -> int:
        """When the oldest should be done."""
        return self._rhythm.due_ns(self._queued[0].queued_ns)

    def finish(self) -> Queued:
        """Take the oldest, which is done; every move up to its end is booked, but the emit."""
        one = self._queued[0]
        self._learn(one, self._done_ns)
        self._queued.popleft()
        received_ns = self._received_ns[one.flight.index % len(self.ring)]
        # what was learned by an older anchor of the clock may be some µs off against these
        c0_ns = self._clock.past_ns(one.marks.c0)
        if (taker := one.flight.index + self._d_out) < self._received:  # of the place freed here
            c0_ns = min(c0_ns, self._received_ns[taker % len(self.ring)])
        c0_ns = max(received_ns + 1, c0_ns)
        c1_ns = max(c0_ns, self._done_ns)
        a0_ns = one.a1_ns - (one.marks.a1.ns_since(one.marks.a0) or 0)  # both are done
        one.times = Rank0Times(a0_ns, one.a1_ns, one.committed_ns, received_ns, c0_ns, c1_ns)
        self._history.add(c0_ns, Move.DECODE)
        self._history.book_until(c1_ns)
        self._rhythm.done(one.queued_ns, c1_ns)
        return one

    def _learn(self, oldest: Queued, until_ns: int) -> None:
        """Hear of the oldest one's moves, and of those of later ones up to ``until_ns``."""
        while self._unreceived:
            one = self._unreceived[0]
            if one is not oldest and self._newest_received_ns > until_ns:
                break
            at_ns = self._clock.host_ns(one.marks.received)
            if at_ns is None:
                break
            at_ns = max(at_ns, one.committed_ns + 1)  # which an older anchor may have put later
            self._received_ns[one.flight.index % len(self.ring)] = at_ns
            self._received = one.flight.index + 1
            self._newest_received_ns = at_ns
            self._history.add(at_ns, Move.RECEIVE)
            self._unreceived.popleft()
        while self._uncommitted:
            one = self._uncommitted[0]
            if one is not oldest and self._committed_ns > until_ns:
                break
            giver = one.flight.index - self._d_in
            if self._unreceived and giver >= self._unreceived[0].flight.index:
                break
            at_ns = self._clock.host_ns(one.marks.a1)
            if at_ns is None:
                break
            one.a1_ns = at_ns
            one.credit_ns = self._received_ns[giver % len(self.ring)] if giver >= 0 else 0
            one.committed_ns = self._committed_ns = max(at_ns, one.credit_ns)
            self._history.add(self._committed_ns, Move.COMMIT)
            self._uncommitted.popleft()
