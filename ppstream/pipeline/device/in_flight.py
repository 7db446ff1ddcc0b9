"""Envelopes that rank 0 has queued on a GPU and not finished, and their events or stamps.

They finish in order, each when its last event is done; by then the host may know queue transitions
of later envelopes, too. ``QueueReplay`` applies transitions in device-time order, so that the
ledger's counts at each emit match what the GPU saw. ``CompletionEstimate`` estimates from earlier
completions when the next envelope is done: an event has no descriptor to sleep on, so the loop
sleeps until then, and only then polls, which saves a wake-up each 20 µs.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ppstream.pipeline.device.event_times import Rank0Times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.cuda.device_clock import DeviceClock
    from ppstream.pipeline.credits import CreditLedger
    from ppstream.pipeline.flight import Flight

SIGHT_NS: Final = 20_000  # A that began sooner before the receipt's event did not wait for it
SHIFT: Final = 2  # a quarter of what is new: one late envelope moves little
LEAST_NS: Final = 1_000  # so that what is usually nothing can grow


class CompletionEstimate:
    """Of envelopes that are queued and done in order."""

    def __init__(self) -> None:
        self._done_ns = 0  # the newest one was
        self._gap_ns = 0  # usually, between two of which the second stood queued
        self._alone_ns = 0  # usually, from queueing one behind nothing until it is done

    def done(self, queued_ns: int, done_ns: int) -> None:
        """The envelope that was queued at ``queued_ns`` was done at ``done_ns``."""
        if queued_ns < self._done_ns:
            self._gap_ns = _towards(self._gap_ns, done_ns - self._done_ns)
        else:
            self._alone_ns = _towards(self._alone_ns, done_ns - queued_ns)
        self._done_ns = done_ns

    def due_ns(self, queued_ns: int) -> int:
        """When the oldest that is not done, which was queued at ``queued_ns``, should be."""
        if queued_ns < self._done_ns:
            return self._done_ns + self._gap_ns
        return queued_ns + self._alone_ns


def _towards(usual_ns: int, seen_ns: int) -> int:
    """A share of what is new; an outlier counts for twice the usual, or others would come late."""
    if not usual_ns:
        return seen_ns
    most_ns = 2 * usual_ns + LEAST_NS
    return usual_ns + (((seen_ns if seen_ns < most_ns else most_ns) - usual_ns) >> SHIFT)


class QueueTransition(IntEnum):
    """Kinds of queue transitions; of two at one instant, the one that makes room goes first."""

    EMIT = 0
    DECODE = 1
    RECEIVE = 2
    COMMIT = 3


class QueueReplay:
    """Moves that are known and not yet applied."""

    def __init__(self, ledger: CreditLedger) -> None:
        self._book = (ledger.emit, ledger.begin_decode, ledger.receive, ledger.commit)  # by Move
        self._known: list[tuple[int, QueueTransition]] = []

    def add(self, at_ns: int, move: QueueTransition) -> None:
        """``move`` happened at ``at_ns``."""
        heappush(self._known, (at_ns, move))

    def apply_until(self, until_ns: int) -> None:
        """Apply every known move up to ``until_ns``, oldest first.

        Raises:
            ProtocolError: a bound was exceeded, or a move had no envelope to move.
        """
        known = self._known
        while known and known[0][0] <= until_ns:
            at_ns, move = heappop(known)
            self._book[move](at_ns)


class Mark(Protocol):
    """A moment of a device: ``driver.CudaEvent``, or ``device_stamps.DeviceStamp``."""

    def wait(self) -> bool: ...

    def ns_since(self, earlier: Any) -> int | None: ...


class Marks(NamedTuple):
    """Moments of one envelope; used again for a later one."""

    a0: Mark
    a1: Mark
    sent: Mark  # where the next A waits for it: a copy that is behind its credit
    received: Mark
    c0: Mark
    c1: Mark


class Queued:
    """The envelope of one slot, and what is known of it; used again for a later one.

    Attributes:
        giver: of the slot whose envelope gives this one its credit.
        taker: of the slot whose envelope takes its place among the results.
        queued_ns: when the host had queued it.
        received_ns: when its result was; until that is known, the one's before it.
        credit_ns: when the result was received whose credit it took; 0: none needed.
        times: once it is finished.
    """

    __slots__ = (
        "a1_ns",
        "committed_ns",
        "credit_ns",
        "flight",
        "giver",
        "marks",
        "queued_ns",
        "received_ns",
        "taker",
        "times",
    )
    flight: Flight
    giver: Queued
    taker: Queued
    times: Rank0Times

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.queued_ns = self.a1_ns = self.committed_ns = self.credit_ns = self.received_ns = 0


class InFlight:
    """For the thread that queues and finishes.

    An event is asked for its time only, once it should be done: that says whether it is.

    Args:
        ledger: of the link.
        clock: of rank 0's device.
        marks: of each slot, which come again; more slots than envelopes are ever under way.
        a_spins: A's stream sees a credit by itself, sooner than the receipt's event comes.
        first: envelope of the run that comes next; those before it are finished.
    """

    def __init__(
        self,
        ledger: CreditLedger,
        clock: DeviceClock[Any],
        marks: Sequence[Marks],
        *,
        a_spins: bool = False,
        first: int = 0,
    ) -> None:
        self._clock = clock
        self._a_spins = a_spins
        self._history = QueueReplay(ledger)
        self._d_in, self._d_out = ledger.d_in, ledger.d_out
        self._slots = [Queued(of_slot) for of_slot in marks]
        slots = len(self._slots)
        for number, one in enumerate(self._slots):
            one.giver = self._slots[(number - self._d_in) % slots]
            one.taker = self._slots[(number + self._d_out) % slots]
        self._queued = self._finished = first  # envelopes
        self._oldest = self._at(first)  # of those that are not finished
        self._committed = self._received = first  # moves of theirs that are known
        self._committed_ns = self._received_ns = 0  # the newest of these
        self._rhythm = CompletionEstimate()
        self._done_ns = 0  # the oldest was done, as ``is_oldest_done`` has found

    def __len__(self) -> int:
        return self._queued - self._finished

    @property
    def oldest(self) -> Flight:
        return self._oldest.flight

    def marks(self, index: int) -> Marks:
        """The marks of envelope ``index``."""
        return self._at(index).marks

    def add(self, flight: Flight, queued_ns: int) -> None:
        """Everything of ``flight``, the next envelope, is queued."""
        one = self._at(self._queued)
        one.flight, one.queued_ns, one.committed_ns = flight, queued_ns, 0
        self._queued += 1

    def is_oldest_done(self) -> bool:
        if self._finished == self._queued:
            return False
        done_ns = self._clock.host_ns(self._oldest.marks.c1)
        if done_ns is None:
            return False
        self._done_ns = done_ns
        return True

    def may_begin_now(self, *, is_fresh: bool) -> bool:
        """True when stage A of the next envelope has all it waits for, but one A before it at most.

        Args:
            is_fresh: A waits for its credit; else for the copy of the one before, which does.
        """
        index, host_ns = self._queued, self._clock.host_ns
        if index - self._finished >= 2 and host_ns(self.marks(index - 2).a1) is None:
            return False
        if not is_fresh:
            return index == self._finished or host_ns(self.marks(index - 1).sent) is not None
        giver = index - self._d_in
        return giver < self._finished or host_ns(self.marks(giver).received) is not None

    def unreceived(self) -> list[int]:
        """The envelopes whose results are not here, oldest first."""
        known, host_ns = range(self._finished, self._queued), self._clock.host_ns
        return [index for index in known if host_ns(self.marks(index).received) is None]

    def oldest_due_ns(self) -> int:
        """When the oldest should be done."""
        return self._rhythm.due_ns(self._oldest.queued_ns)

    def finish(self) -> Queued:
        """Pop the oldest, which is done; every move up to its end is applied, except the emit."""
        one, index = self._oldest, self._finished
        self._learn(self._done_ns)
        self._finished += 1
        self._oldest = self._at(self._finished)
        # what was learned by an older anchor of the clock may be some µs off against these
        c0_ns = self._clock.past_ns(one.marks.c0)
        if index + self._d_out < self._received:  # the place freed here was taken
            c0_ns = min(c0_ns, one.taker.received_ns)
        c0_ns = max(c0_ns, one.received_ns + 1)
        c1_ns = max(c0_ns, self._done_ns)
        a0_ns = one.a1_ns - (one.marks.a1.ns_since(one.marks.a0) or 0)  # both are done
        one.times = Rank0Times(a0_ns, one.a1_ns, one.committed_ns, one.received_ns, c0_ns, c1_ns)
        self._history.add(c0_ns, QueueTransition.DECODE)
        self._history.apply_until(c1_ns)
        self._rhythm.done(one.queued_ns, c1_ns)
        return one

    def _learn(self, until_ns: int) -> None:
        """Hear of the oldest one's moves, and of those of later ones up to ``until_ns``."""
        slots, host_ns, add = self._slots, self._clock.host_ns, self._history.add
        while self._received < self._queued:
            if self._received > self._finished and self._received_ns > until_ns:
                break
            one = slots[self._received % len(slots)]
            at_ns = host_ns(one.marks.received)
            if at_ns is None:
                break
            if self._a_spins:
                at_ns = self._seen_ns(at_ns)
            # an older anchor may have put its commit later, or the receipt before
            at_ns = max(at_ns, one.committed_ns + 1, self._received_ns + 1)
            one.received_ns = self._received_ns = at_ns
            self._received += 1
            add(one.received_ns, QueueTransition.RECEIVE)
        while self._committed < self._queued:
            if self._committed > self._finished and self._committed_ns > until_ns:
                break
            if self._committed - self._d_in >= self._received:  # its credit is not known
                break
            one = slots[self._committed % len(slots)]
            at_ns = host_ns(one.marks.a1)
            if at_ns is None:
                break
            one.a1_ns, one.credit_ns = at_ns, one.giver.received_ns
            one.committed_ns = self._committed_ns = max(at_ns, one.credit_ns)
            self._committed += 1
            add(one.committed_ns, QueueTransition.COMMIT)

    def _seen_ns(self, at_ns: int) -> int:
        """When the result whose receipt's event was at ``at_ns``, the next one, was seen first."""
        taker = self._received + self._d_in
        a0_ns = self._clock.host_ns(self.marks(taker).a0) if taker < self._queued else None
        return at_ns if a0_ns is None or a0_ns < at_ns - SIGHT_NS else min(at_ns, a0_ns)

    def _at(self, index: int) -> Queued:
        return self._slots[index % len(self._slots)]
