"""Envelopes that rank 0 has queued on a GPU and not finished, and their events or stamps.

They finish in order, each when its last event is done, and are settled later, in order, too: then
the host may know queue transitions of later envelopes. ``QueueReplay`` puts transitions in
device-time order, so that the ledger's counts at each emit match what the GPU saw.
``CompletionEstimate`` estimates from earlier completions when the next envelope is done: an event
has no descriptor to sleep on, so the loop sleeps until then, and only then polls, which saves a
wake-up each 20 µs.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ppstream.core.clock import now_ns
from ppstream.pipeline.credits import QueueTransition
from ppstream.pipeline.device.event_times import Rank0Times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.cuda.device_clock import DeviceClock
    from ppstream.pipeline.credits import CreditLedger
    from ppstream.pipeline.flight import Flight

SHIFT: Final = 2  # a quarter of what is new: one late envelope moves little
#: A stage A that is not queued ahead is queued so long before its credit should come: about as long
#: the host takes to see a credit and to queue a stage A. So much older is what it reads.
EARLY_NS: Final = 150_000
LEAST_NS: Final = 1_000  # so that what is usually nothing can grow
UNSETTLED_MAX: Final = 16  # envelopes that are finished and not settled
_EMIT, _DECODE, _RECEIVE, _COMMIT = map(int, QueueTransition)


class CompletionEstimate:
    """Of envelopes that are queued and done in order."""

    def __init__(self) -> None:
        self._done_ns = 0  # the newest one was
        self._gap_ns = 0  # usually, between two of which the second stood queued
        self._alone_ns = 0  # usually, from queueing one behind nothing until it is done

    def done(self, queued_ns: int, done_ns: int) -> None:
        """The envelope that was queued at ``queued_ns`` was done at ``done_ns``."""
        if queued_ns < self._done_ns:
            self._gap_ns = towards(self._gap_ns, done_ns - self._done_ns)
        else:
            self._alone_ns = towards(self._alone_ns, done_ns - queued_ns)
        self._done_ns = done_ns

    def due_ns(self, queued_ns: int) -> int:
        """When the oldest that is not done, which was queued at ``queued_ns``, should be."""
        if queued_ns < self._done_ns:
            return self._done_ns + self._gap_ns
        return queued_ns + self._alone_ns


def towards(usual_ns: int, seen_ns: int) -> int:
    """A share of what is new; an outlier counts for twice the usual, or others would come late."""
    if not usual_ns:
        return seen_ns
    most_ns = 2 * usual_ns + LEAST_NS
    return usual_ns + (((seen_ns if seen_ns < most_ns else most_ns) - usual_ns) >> SHIFT)


class QueueReplay:
    """Moves that are known and not yet applied.

    Attributes:
        known: a heap of pairs, an instant and a ``QueueTransition``.
    """

    def __init__(self) -> None:
        self.known: list[tuple[int, int]] = []

    def add(self, at_ns: int, move: int) -> None:
        """``move`` happened at ``at_ns``."""
        heappush(self.known, (at_ns, move))

    def pop_until(self, until_ns: int) -> list[tuple[int, int]]:
        """Returns every known move up to ``until_ns``, oldest first, for ``CreditLedger.apply``."""
        known, due = self.known, []
        while known and known[0][0] <= until_ns:
            due.append(heappop(known))
        return due


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

    def ns_since(self, earlier: Any) -> Sequence[int]:
        """Device times since a mark that was passed, of an envelope that is over: of ``Passed``."""
        a1, received, c0, c1 = (
            mark.ns_since(earlier) or 0 for mark in (self.a1, self.received, self.c0, self.c1)
        )
        # the difference of two long times of events is some 0.1 µs off
        return a1 - (self.a1.ns_since(self.a0) or 0), a1, received, c0, c1


class Passed(NamedTuple):
    """Moments of one envelope that is over, host clock, ns."""

    a0: int
    a1: int
    received: int
    c0: int
    c1: int


class Queued:
    """One envelope, and what is known of it; used again for a later one.

    Attributes:
        giver: the envelope that gives this one its credit.
        taker: the one that takes its place among the results.
        queued_ns: when the host had queued it.
        passed: once it is finished.
        received_ns: when its result was; until that is known, the one's before it.
        credit_ns: when the result was received whose credit it took; 0: none needed.
    """

    __slots__ = (
        "a1_ns",
        "committed_ns",
        "credit_ns",
        "flight",
        "giver",
        "marks",
        "passed",
        "queued_ns",
        "received_ns",
        "taker",
    )
    flight: Flight
    giver: Queued
    taker: Queued
    marks: Marks
    passed: Passed

    def __init__(self) -> None:
        self.queued_ns = self.a1_ns = self.committed_ns = self.credit_ns = self.received_ns = 0


class InFlight:
    """For the thread that queues, finishes and settles.

    An event is asked for its time only, once it should be done: that says whether it is.

    Args:
        ledger: of the link.
        clock: of rank 0's device.
        marks: of each slot, which come again; more slots than envelopes are ever under way.
        a_spins: A's stream sees a credit by itself, sooner than the receipt's event comes.
        first: envelope of the run that comes next; those before it are finished.
        early_ns: as the attribute.

    Attributes:
        early_ns: how long before its credit should come a stage A may be queued.
    """

    def __init__(
        self,
        ledger: CreditLedger,
        clock: DeviceClock[Any],
        marks: Sequence[Marks],
        *,
        a_spins: bool = False,
        first: int = 0,
        early_ns: int = 0,
    ) -> None:
        self._clock = clock
        self._a_spins = a_spins
        self._apply, self._history = ledger.apply, QueueReplay()
        self._d_in, self._d_out = ledger.d_in, ledger.d_out
        self._marks = marks
        kept = len(marks) + UNSETTLED_MAX + self._d_in + self._d_out
        self._all = [Queued() for _ in range(kept)]
        for number, one in enumerate(self._all):
            one.giver = self._all[number - self._d_in]
            one.taker = self._all[(number + self._d_out) % kept]
        self._queued = self._finished = self._settled = first  # envelopes
        self._oldest = self._all[first % kept]  # of those that are not finished
        self._committed = self._received = first  # moves of theirs that are known
        self._committed_ns = self._received_ns = 0  # the newest of these
        self._rhythm = CompletionEstimate()
        self.early_ns = early_ns

    def __len__(self) -> int:
        return self._queued - self._finished

    @property
    def oldest(self) -> Flight:
        return self._oldest.flight

    @property
    def lead_ns(self) -> int:
        """``early_ns`` if the oldest gives the next envelope its credit, else 0."""
        return self.early_ns if self._queued - self._d_in == self._finished else 0

    @property
    def unsettled(self) -> int:
        """Envelopes that are finished and not settled."""
        return self._finished - self._settled

    def marks(self, index: int) -> Marks:
        """The marks of envelope ``index``."""
        return self._marks[index % len(self._marks)]

    def add(self, flight: Flight, queued_ns: int) -> None:
        """Everything of ``flight``, the next envelope, is queued."""
        index = self._queued
        one = self._all[index % len(self._all)]
        one.marks = self._marks[index % len(self._marks)]
        one.flight, one.queued_ns, one.committed_ns = flight, queued_ns, 0
        self._queued = index + 1

    def is_oldest_done(self) -> bool:
        return self._finished != self._queued and self._clock.is_past(self._oldest.marks.c1)

    def may_begin_now(self, *, is_fresh: bool) -> bool:
        """True when stage A of the next envelope has all it waits for, but one A before it at most,
        or will have it in ``early_ns``.

        Args:
            is_fresh: A waits for its credit; else for the copy of the one before, which does.
        """
        index, host_ns = self._queued, self._clock.host_ns
        if index - self._finished >= 2 and host_ns(self.marks(index - 2).a1) is None:
            return False
        if not is_fresh:
            return index == self._finished or host_ns(self.marks(index - 1).sent) is not None
        giver = index - self._d_in
        if giver < self._finished or host_ns(self.marks(giver).received) is not None:
            return True
        lead_ns = self.lead_ns
        return lead_ns > 0 and now_ns() >= self.oldest_due_ns() - lead_ns

    def unreceived(self) -> list[int]:
        """The envelopes whose results are not here, oldest first."""
        known, host_ns = range(self._finished, self._queued), self._clock.host_ns
        return [index for index in known if host_ns(self.marks(index).received) is None]

    def oldest_due_ns(self) -> int:
        """When the oldest should be done."""
        return self._rhythm.due_ns(self._oldest.queued_ns)

    def finish(self, now_ns: int) -> Queued:
        """Pop the oldest, which is done: its marks may be used again, and the next one's turn
        begins, for the watchdog.

        At most ``UNSETTLED_MAX`` may be finished and not settled.
        """
        one = self._oldest
        one.passed = passed = Passed(*self._clock.all_past_ns(one.marks))
        one.flight.record.tA0 = passed.a0  # until it is settled
        self._finished += 1
        self._oldest = self._all[self._finished % len(self._all)]
        if self._finished < self._queued:
            self._oldest.flight.sent_ns = now_ns
        self._rhythm.done(one.queued_ns, passed.c1)
        return one

    def settle(self) -> tuple[Queued, Rank0Times]:
        """Returns the oldest one that is not settled, and its times; it is finished.

        Every move up to its end is applied, the emit last.
        """
        index = self._settled
        one = self._all[index % len(self._all)]
        a0_ns, a1_ns, _, c0_ns, c1_ns = one.passed
        self._learn(c1_ns)
        self._settled = index + 1
        # what was learned by an older anchor of the clock may be some µs off against these
        if index + self._d_out < self._received:  # the place freed here was taken
            c0_ns = min(c0_ns, one.taker.received_ns)
        c0_ns = max(c0_ns, one.received_ns + 1)
        c1_ns = max(c0_ns, c1_ns)
        a0_ns += one.a1_ns - a1_ns  # a duration knows no anchor
        self._history.add(c0_ns, _DECODE)
        self._apply([*self._history.pop_until(c1_ns), (c1_ns, _EMIT)])
        times = Rank0Times(a0_ns, one.a1_ns, one.committed_ns, one.received_ns, c0_ns, c1_ns)
        return one, times

    def _learn(self, until_ns: int) -> None:
        """Hear of the moves of the one that is settled, and of later ones' up to ``until_ns``."""
        every, kept, settled, finished = self._all, len(self._all), self._settled, self._finished
        host_ns, moves = self._clock.host_ns, self._history.known
        while self._received < self._queued:
            number = self._received
            if number > settled and self._received_ns > until_ns:
                break
            one = every[number % kept]
            at_ns = one.passed.received if number < finished else host_ns(one.marks.received)
            if at_ns is None:
                break
            if self._a_spins:
                at_ns = self._seen_ns(at_ns)
            # an older anchor may have put its commit later, or the receipt before
            at_ns = max(at_ns, one.committed_ns + 1, self._received_ns + 1)
            one.received_ns = self._received_ns = at_ns
            self._received = number + 1
            heappush(moves, (at_ns, _RECEIVE))
        while self._committed < self._queued:
            number = self._committed
            if number > settled and self._committed_ns > until_ns:
                break
            if number - self._d_in >= self._received:  # its credit is not known
                break
            one = every[number % kept]
            at_ns = one.passed.a1 if number < finished else host_ns(one.marks.a1)
            if at_ns is None:
                break
            one.a1_ns, one.credit_ns = at_ns, one.giver.received_ns
            one.committed_ns = self._committed_ns = max(at_ns, one.credit_ns)
            self._committed = number + 1
            heappush(moves, (one.committed_ns, _COMMIT))

    def _seen_ns(self, at_ns: int) -> int:
        """When the result whose receipt's event was at ``at_ns``, the next one, was seen first.

        By the A that waited for it, if that began sooner: where other programs share the GPU, the
        event may come a time slice later. ``audits.credit`` asks the policy rank's own stamps
        whether A waited.
        """
        number = self._received + self._d_in
        if number >= self._queued:
            return at_ns
        taker = self._all[number % len(self._all)]
        is_over = number < self._finished
        a0_ns = taker.passed.a0 if is_over else self._clock.host_ns(taker.marks.a0)
        return at_ns if a0_ns is None else min(at_ns, a0_ns)
