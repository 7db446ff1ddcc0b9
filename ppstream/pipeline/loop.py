"""THE loop of rank 0: begin an envelope, finish one, wait; the same on every executor.

An executor carries an envelope from stage A to a result in host memory: ``host_executor.py`` over
a link between CPUs, ``device/executor.py`` on a GPU's streams, ``inline_executor.py`` in turn in
this process. What else a run is on rank 0 stands in ``rank0.py``.

*Leave first, account later.* Behind a pause each call costs several times what it costs back to
back. So between a receipt and the send that it leads to stand the stamps and what decides whether
that may leave (who speaks and how much, session, episode, epoch, lease, finite values, limits),
nothing else. Names, ledgers, counters, costs, reports, the fill of memory that the policy writes
next, and the log's line come behind the send, on the same thread, before that takes up its next
work. A process that dies in between loses counts that lived in its memory alone, and a line of its
log: of a chunk that left, the robot tells what became of it. The other order would lose the chunk
and count it as sent. This holds for both ranks and the robot's client. One case accounts first:
with split threads another thread may finish the envelope that was just sent. Two account still
later: ``device/executor.py`` for several envelopes at once, and a policy rank between CPUs in a
pause behind the envelope, since the robot may want that CPU to receive its chunk.

*Get ready while others work.* To be woken, and to run code that has left the caches, takes longer
than the work itself. So between two ranks of one host input rouses the policy rank before the
window is cut, if input leads to envelopes as a rule; that one goes through what it is about to do
without the policy, and looks for the envelope. Of a short stage B rank 0 awaits the result the same
way, of a longer one about when it is due. Each of these waits awake takes 0.4 ms or less, and
nothing is accounted for by a rehearsal.
Where envelopes come at even distances (``core/rhythm.py``), both ranks (``keep_warm.py``) and the
robot's client (``robot/rehearsal.py``) rehearse a millisecond or less before the next is expected,
and rank 0 and the client before a result that takes long; on a host with CPUs to spare they stay
awake from there on.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Protocol

from ppstream.control.watchdog import stage_b_limit_ns, with_watchdog
from ppstream.core.clock import now_ns
from ppstream.core.realtime import timeouts_on_time
from ppstream.pipeline.rank0 import Rank0

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ppstream.links.slots import Slot
    from ppstream.observe.log_writer import EnvelopeRecord
    from ppstream.pipeline.flight import Flight
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer

#: How an envelope ends whose chunk was made, in time or not.
MADE: Final = (None, "expired")


class Executor(Protocol):
    """Carries envelopes from stage A to a result in host memory, in order.

    All is called by the loop's thread.
    """

    @property
    def policy_ranks(self) -> tuple[PolicyRankPeer, ...]:
        """In the order of the chain; none: the policy runs in this process."""

    @property
    def all_ranks(self) -> tuple[PolicyRankPeer, ...]:
        """These, and the other members of a mesh."""

    @property
    def in_flight(self) -> int:
        """Envelopes that have begun and are not finished."""

    def attach(self, loop: Rank0Loop) -> None:
        """Serve this loop, from before its first phase on."""

    def running(self) -> AbstractContextManager[None]:
        """Around one run of the loop: what it needs besides the loop's own thread."""

    def has_room(self) -> bool:
        """True when one more may begin: there is a credit, or a place in a queue."""

    def begin(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """Stage A, and off it goes: done now, or queued."""

    def finished(self) -> Flight | None:
        """Takes the oldest whose result is here; None: not yet, or another thread finishes."""

    def result(self, flight: Flight) -> tuple[Slot, str | None]:
        """Stage C begins: the result in host memory, and why it carries no actions, or None.

        Raises:
            ProtocolError: it answers another envelope.
        """

    def settle(self, flight: Flight, drop: str | None) -> int:
        """Stage C has ended: its stamps and waits go into the record. Returns when it ended."""

    def wait(self, *, worked: bool) -> bool:
        """Take in what has come; sleep until an envelope may begin or is finished.

        Args:
            worked: the loop has just begun or finished one: perhaps it may go on at once.

        Returns:
            What ``Rank0Loop.may_start`` says now.
        """

    def measure(self, repeats: int) -> dict[str, Sequence[int]]:
        """Durations of A, B and C with nothing beside them, in ns; nothing is in flight."""

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        """Send a text to the policy; ``done`` gets the number and the fault, on any thread."""

    def thread_cpus(self) -> dict[str, list[int]]:
        """CPUs that each thread of the run may use, by the resource that it is, if known."""


class Rank0Loop(Rank0):
    """Rank 0, whatever executes."""

    def __init__(self, *parts: Any, executor: Executor) -> None:
        super().__init__(*parts)
        self.executor = executor
        self._start_limit: int | None = None
        self._alone: list[tuple[int, int, int]] | None = None  # stage times, while they are asked
        executor.attach(self)

    @with_watchdog
    def run(self, envelopes: int | None = None) -> None:
        """Run until ``envelopes`` more have begun, a stop is asked for, or the source has ended.

        Returns when nothing is in flight. Raises what ends a run (``PeerLostError`` ...).
        """
        executor = self.executor
        self._start_limit = None if envelopes is None else self.started + envelopes
        with timeouts_on_time(), executor.running():  # of this thread, and of those it starts
            begins = executor.wait(worked=True)
            while begins or self.may_begin() or executor.in_flight:
                if begins:
                    self.start()  # send first,
                if (flight := executor.finished()) is not None:
                    self.finish(flight)  # then decode
                begins = executor.wait(worked=begins or flight is not None)

    def begin_no_more(self) -> None:
        """Let ``run`` finish what has begun; from any thread, while it runs."""
        self._start_limit = self.started
        self.waiter.wake()

    def may_begin(self) -> bool:
        """True when further envelopes are wanted at all."""
        return (
            self.stop_reason is None
            and (self._start_limit is None or self.started < self._start_limit)
            and not self.source.exhausted
        )

    def may_start(self) -> bool:
        """True when stage A may begin: wanted, in bounds, and due."""
        return self.may_begin() and self.executor.has_room() and self.pacing.due(now_ns())

    def start(self) -> None:
        """Credit first, newest window second."""
        flight = self.next_flight()
        self.executor.begin(flight, self.pacing.started())

    def finish(self, flight: Flight) -> None:
        """Drop it with a reason (stale, failed), or decode, check and emit."""
        result, drop = self.executor.result(flight)
        if flight.epoch != self.epoch:
            drop = "stale"
        elif drop is None:
            drop = self.decode_and_emit(flight, result)
        at_ns = self.executor.settle(flight, drop)
        if self._alone is not None and drop in MADE:
            self._alone.append(_stage_times(flight, at_ns))
        self.close_flight(flight, drop, at_ns)

    @property
    def standstill_ns(self) -> int:
        """Time that a thread of the loop may stand still, as of now."""
        limit_ns = super().standstill_ns
        if self.executor.policy_ranks:
            return limit_ns
        return stage_b_limit_ns(limit_ns, self.usual_b_ns)

    # ---- for bring-up --------------------------------------------------------------------------

    def measure(self, repeats: int) -> dict[str, Sequence[int]]:
        """Durations of A, B and C with nothing beside them, in ns; nothing is in flight."""
        durations = self.executor.measure(repeats)
        if durations["B"] and not self.usual_b_ns:  # of a GPU: results do not tell it
            self.usual_b_ns = round(fmean(durations["B"]))
        return durations

    def time_in_turn(self, repeats: int) -> dict[str, Sequence[int]]:
        """The same, of envelopes of the running stream that go through one by one.

        A policy gets what it gets in the run. The executor allows one in flight.
        """
        self._alone = []
        self.run(repeats)
        columns: list[Sequence[int]] = list(zip(*self._alone, strict=True))
        self._alone = None
        return dict(zip("ABC", columns or ((), (), ()), strict=True))

    def thread_cpus(self) -> dict[str, list[int]]:
        """CPUs that each thread of the run may use, by the resource that it is, if known."""
        return self.executor.thread_cpus()

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        """Send a text to the policy; ``done`` gets the number and the fault, on any thread."""
        self.executor.instruct(number, text, done)


def _stage_times(flight: Flight, ended_ns: int) -> tuple[int, int, int]:
    """Of an envelope whose chunk was made: A, B and C."""
    record: EnvelopeRecord = flight.record
    begun, built, decoding = (stamp or 0 for stamp in (record.tA0, record.tA1, record.tDecode))
    return built - begun, record.B_ns or 0, ended_ns - decoding
