"""Executors on the host's own clock: stage A and C here, stage B on the policy rank meanwhile.

``HostExecutor`` has one thread: *send first, then decode*, with one envelope of lead.
``split_executor.py`` gives its stages a thread each. ``OnHost`` is what they share with the
unpipelined twin in ``inline_executor.py``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import now_ns
from ppstream.core.cpus import StageCost
from ppstream.core.errors import MeshSplitError, PeerLostError, ProtocolError, WatchdogError
from ppstream.core.waiter import Waiter
from ppstream.links.headers import EPOCH, FAILED, FAILURES, REPLICA_LOST, SEQ, read_stage_b
from ppstream.links.replicas import ReplicasIn
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.keep_warm import KeepWarm
from ppstream.pipeline.policy_rank_peer import instruct_all, thread_cpus
from ppstream.pipeline.rank0 import WAIT_MAX_NS
from ppstream.pipeline.time_accounting import LINK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ppstream.links.protocol import Hops
    from ppstream.links.slots import Slot
    from ppstream.pipeline.flight import Flight
    from ppstream.pipeline.loop import Rank0Loop
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
    from ppstream.pipeline.replica_losses import ReplicaLosses

#: Rank 0 looks so long for the result of a stage B that usually takes less than the next: being
#: woken takes each rank some 20 us.
LINGER_NS: Final = 150_000
SHORT_B_NS: Final = 200_000
VAIN_MAX: Final = 8  # waits for input in a row that an executor remembers
#: Envelopes in the system besides one at each policy rank: one thread can use no more
#: (analysis/period_model.py).
SERIAL_LEAD: Final = 1


class OnHost(ABC):
    """Stages and waits of threads that sleep on descriptors, stamped as they happen."""

    _books_first = False  # credits and stage A: another thread looks at them, once it is sent

    def attach(self, loop: Rank0Loop) -> None:
        """As ``Executor``."""
        self._loop = loop
        self._waiter = loop.waiter
        self._times, self._run_delay = loop.times, loop.run_delay
        self._times_c, self._run_delay_c = loop.times, loop.run_delay  # of the thread that runs C
        self._cost_a, self._cost_c = StageCost(loop.run_delay), StageCost(loop.run_delay)
        loop.on_decoded = self._end_c
        self._thread_cpus: dict[str, list[int]] = {}  # as each thread's newest run ended
        self._keep_warm = KeepWarm(loop.log, self._get_ready, loop.stage_a.ahead_ns)

    @contextmanager
    def running(self) -> Iterator[None]:
        """As ``Executor``."""
        self._begin_run()
        yield
        self._thread_cpus["r0"] = sorted(os.sched_getaffinity(0))

    def _begin_run(self) -> None:
        self._times.end()
        self._run_delay.begin()

    def thread_cpus(self) -> dict[str, list[int]]:
        """As ``Executor``."""
        return self._thread_cpus

    # ---- stages ------------------------------------------------------------------------------

    def _account_a(self, flight: Flight) -> None:
        """Account for stage A and the waits before it; ``_cost_a`` was entered."""
        record = flight.record
        self._loop.stage_a.settle(flight)
        began_ns, ended_ns = record.tA0 or 0, record.tA1 or 0
        self._keep_warm.began(began_ns)
        self._cost_a.leave(ended_ns - began_ns)
        record.cpu_a_ns, record.delay_a_ns = self._cost_a.cpu_ns, self._cost_a.delay_ns
        self._times.stage(began_ns, ended_ns)
        self._loop.record_input_waits(flight)

    def _begin_c(self, flight: Flight) -> None:
        self._cost_c.enter()
        flight.record.tDecode = self._times_c.begin()
        if self._books_first:
            self._loop.credits.begin_decode(flight.record.tDecode)
        if nvtx_ranges.on:
            nvtx_ranges.C.push(flight.epoch, flight.seq)

    def _end_c(self) -> None:
        """C's time ends here: what its thread computes to send the chunk is the emitter's."""
        self._cost_c.end()

    def settle(self, flight: Flight, drop: str | None) -> int:
        """As ``Executor``."""
        if nvtx_ranges.on:
            nvtx_ranges.C.pop()
        record, times = flight.record, self._times_c
        if not self._books_first:
            self._loop.credits.begin_decode(record.tDecode or 0)
        # The emitter's own time is the link's. A dropped envelope has no end of C in the log: its
        # time is the link's, too.
        ended_ns = times.end(at_ns=flight.emit_ns) if drop is None else times.end(LINK)
        self._cost_c.leave(ended_ns - (record.tDecode or 0))
        record.cpu_c_ns, record.delay_c_ns = self._cost_c.cpu_ns, self._cost_c.delay_ns
        record.w_result_ns = times.pop_ns("result")
        return ended_ns

    # ---- waits -------------------------------------------------------------------------------

    def wait(self, *, worked: bool) -> bool:
        """As ``Executor``. One blocking call, timed as one.

        What arrives while it lasts, and looking at it, is part of the wait and booked under its
        cause. Finding work at once is no wait but the link's time. What costs a system call is
        looked at when the call has named it, and before an envelope begins.
        """
        loop, times = self._loop, self._times
        times.begin()
        cause = self._wait_cause()
        self._glance()
        slept = is_fresh = False
        while not (begins := loop.may_start()) and self._is_idle():
            self._rest()
            if not self._is_idle():
                break
            slept = True
            limit_ns = WAIT_MAX_NS
            if cause == "input" and loop.may_begin():  # only then can the clock alone give work
                dues = (loop.source.next_due_ns(), loop.pacing.due_ns())
                now = now_ns()
                limit_ns = min([limit_ns, *(max(0, due - now) for due in dues if due is not None)])
            is_fresh = self._poll_after_wait(
                self._keep_warm.wait(self._waiter, limit_ns, loop.phase)
            )
        times.end(cause if slept else LINK)
        if begins and not is_fresh:
            loop.drain_inputs()  # the newest samples
            begins = loop.may_start()
        return begins

    def _glance(self) -> None:  # noqa: B027 - not all have something there
        """Look at what costs no system call."""

    def _get_ready(self) -> None:
        """An envelope is expected: what it takes on this rank is brought into the caches."""
        self._loop.stage_a.rehearse()
        if not self._books_first:  # else stage C is another thread's
            self._loop.stage_c.rehearse()
        self._loop.may_start()

    def _rest(self) -> None:
        """Do what no envelope is to wait for, before a sleep."""
        self._loop.tidy()

    def _poll_after_wait(self, ready: Sequence[int]) -> bool:
        """Look again after a wait, at least at these descriptors; at everything when none is.

        Returns True when samples were received.
        """
        self._loop.drain_inputs()
        return True

    @abstractmethod
    def _is_idle(self) -> bool:
        """True when nothing is to be finished now, and there is something to wait for."""

    @abstractmethod
    def _wait_cause(self) -> str:
        """Returns the cause of a wait that begins now: ``input``, ``credit`` or ``result``."""


class HostExecutor(OnHost):
    """Over a hop to the policy rank and one back, one thread."""

    def __init__(
        self,
        hops: Hops,
        policy_ranks: tuple[PolicyRankPeer, ...],
        members: tuple[PolicyRankPeer, ...] = (),
        losses: ReplicaLosses | None = None,
    ) -> None:
        self.out, self.into = hops.out, hops.into
        self._rouse = hops.rouse
        self._in_vain = 0  # waits that input ended and that led to no envelope, with some grace
        self._has_cpus = False  # for both ranks at once
        self._members = members  # of a mesh: they pass no envelopes on
        self._losses = losses
        self.lead = SERIAL_LEAD + len(policy_ranks)
        self._turns = hops.into.turns if isinstance(hops.into, ReplicasIn) else None
        self._ranks = policy_ranks  # as they were at the start
        self._all_ranks = (*policy_ranks, *members)  # as well
        self._control_fds: frozenset[int] = frozenset()  # of their sockets
        self._committed: deque[Flight] = deque()
        self._received: deque[Flight] = deque()
        self._hand_over: Callable[[Flight], None] = self._received.append
        self._header: Sequence[int] = ()  # of the result that is being decoded
        self._result_fds: frozenset[int] = frozenset()  # of policy ranks and of the hop

    @property
    def policy_ranks(self) -> tuple[PolicyRankPeer, ...]:
        """As ``Executor``; of replicas those that are left."""
        return self._ranks if self._losses is None else self._losses.policy_ranks

    @property
    def all_ranks(self) -> tuple[PolicyRankPeer, ...]:
        """As ``Executor``."""
        return self._all_ranks if self._losses is None else self._losses.all_ranks

    def attach(self, loop: Rank0Loop) -> None:
        """As ``Executor``."""
        super().attach(loop)
        for policy_rank in self.all_ranks:
            policy_rank.attach(loop)
        if self._losses is not None:
            self._losses.rank0 = loop
        self._credits = loop.credits
        self._tells_provenance = loop.config.actions.provenance
        self._watch_results(self._waiter)

    def _watch_results(self, waiter: Waiter) -> None:
        if self._losses is not None:
            self._losses.waiter = waiter
        self._control_fds = frozenset(found.peer.fileno() for found in self.all_ranks)
        for fd in self._control_fds:
            waiter.register(fd)
        self._result_fds = self.into.register_with(waiter) | self._control_fds

    def _begin_run(self) -> None:
        super()._begin_run()
        if self._rouse is not None:
            cpus = (os.sched_getaffinity(0), *thread_cpus(self.policy_ranks).values())
            self._has_cpus = len(set().union(*cpus)) > 1

    @property
    def in_flight(self) -> int:
        """As ``Executor``."""
        return self._credits.in_system

    def has_room(self) -> bool:
        """As ``Executor``."""
        return self._credits.may_commit(self.lead)

    def begin(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """As ``Executor``: stage A into the next slot, and off it goes."""
        slot = self.out.slot(flight.index)
        self._in_vain = max(0, self._in_vain - 2)
        self._cost_a.enter()
        self._loop.stage_a.build(flight, slot, ends_ns)
        self._cost_a.end()  # what sends it is the link's
        if self._books_first:
            self._account_a(flight)
        slot.words[EPOCH], slot.words[SEQ] = flight.epoch, flight.seq
        if self._turns is not None:
            flight.record.replica = self._turns.of(flight.index).replica + 1
        # stamped first: who receives looks at the oldest that is there, from a thread of its own
        flight.sent_ns = flight.record.tSend = now_ns()
        if self._books_first:
            self._commit(flight)
        if nvtx_ranges.on:
            nvtx_ranges.SEND.push(flight.epoch, flight.seq)
        self.out.commit(flight.index)
        if nvtx_ranges.on:
            nvtx_ranges.SEND.pop()
        if not self._books_first:
            self._commit(flight)
            self._account_a(flight)

    def _commit(self, flight: Flight) -> None:
        sent_ns = flight.sent_ns  # who receives may move it from now on
        self._committed.append(flight)
        if self._has_cpus and not self._books_first:  # else another thread awaits it
            self._keep_warm.sent_ns = sent_ns if len(self._committed) == 1 else None
        self._credits.commit(sent_ns)

    def finished(self) -> Flight | None:
        """As ``Executor``."""
        return self._received.popleft() if self._received else None

    def result(self, flight: Flight) -> tuple[Slot, str | None]:
        """As ``Executor``."""
        slot = self.into.slot(flight.index)
        self._begin_c(flight)
        header = self._header = slot.words
        if header[EPOCH] != flight.epoch or header[SEQ] != flight.seq:
            raise ProtocolError(
                f"result {flight.index} answers epoch and seq {[header[EPOCH], header[SEQ]]}, "
                f"owed are {[flight.epoch, flight.seq]}"
            )
        if self._tells_provenance:  # the chunk will tell
            read_stage_b(header, flight.record)
        return slot, FAILURES[header[FAILED]]

    def settle(self, flight: Flight, drop: str | None) -> int:
        """As ``Executor``, behind ``result``."""
        loop, record = self._loop, flight.record
        ended_ns = super().settle(flight, drop)
        if self._header[FAILED] == REPLICA_LOST:  # nobody has measured anything
            return ended_ns
        read_stage_b(self._header, record)
        loop.usual_b_ns += ((record.B_ns or 0) - loop.usual_b_ns) >> 3
        return ended_ns

    # ---- between envelopes -----------------------------------------------------------------------

    def read_control(self, ready: Sequence[int]) -> None:
        """Read the control sockets that a wait has named; all of them when it named none."""
        if not ready or not self._control_fds.isdisjoint(ready):
            for policy_rank in self.all_ranks:
                if not ready or policy_rank.peer.fileno() in ready:
                    self._bear(policy_rank, policy_rank.peer.pump)
        self.into.on_ready(ready)

    def observe(self) -> None:
        """Take what was heard; each result that D_out has room for returns its credit."""
        self._read_frames()
        while self._credits.may_receive():
            if (arrival := self.into.receive_nowait()) is None:
                if self._lost_hops() or self._read_frames():
                    continue
                return
            index, _ = arrival
            if self.into.slot(index).words[FAILED]:  # why was said before, by any of them
                self.read_control(())
                self._read_frames()
            flight = self._committed.popleft()
            if flight.index != index:
                raise ProtocolError(f"result {index} came, {flight.index} is owed next")
            if nvtx_ranges.on:
                nvtx_ranges.RECV.push(flight.epoch, flight.seq)
            flight.record.tRecv = now_ns()
            owner = self._ranks[-1] if self._turns is None else self._owner(index)
            owner.peer.last_heard_ns = flight.record.tRecv  # a result is a sign of life
            self._keep_warm.answered(flight.record.tRecv)
            self._credits.receive(flight.record.tRecv)
            self._hand_over(flight)
            if nvtx_ranges.on:
                nvtx_ranges.RECV.pop()
            if not self._committed:  # no other is owed: a look in vain would cost as much
                return
            self._committed[0].sent_ns = flight.record.tRecv  # its turn begins, for the watchdog

    def _lost_hops(self) -> bool:
        """True when a hop has broken, and the run goes on without it."""
        losses, turns = self._losses, self._turns
        return losses is not None and turns is not None and losses.check_hops(turns.broken)

    def _read_frames(self) -> bool:
        """Returns True if there were any."""
        found = False
        for policy_rank in self._all_ranks if self._losses is None else self.all_ranks:
            inbox = policy_rank.peer.inbox
            while inbox:
                frame = inbox.popleft()
                self._bear(policy_rank, policy_rank.on_control_frame, frame)
                found = True
        return found

    def check_policy_ranks(self) -> None:
        """Raises as ``PolicyRankPeer.check``, of the results that are owed now."""
        limit_ns = self._loop.result_limit_ns
        oldest = self._committed[0] if self._committed else None
        owner = None if oldest is None else self._owner(oldest.index)
        now = now_ns()
        for policy_rank in self.all_ranks:
            owes = self._turns is None or policy_rank is owner
            self._bear(policy_rank, policy_rank.check, now, oldest if owes else None, limit_ns)

    def _bear(self, policy_rank: PolicyRankPeer, ask: Callable[..., None], *about: object) -> None:
        """Ask it; the run ends as ``ask`` raises, unless replicas enough are left without it."""
        try:
            ask(*about)
        except (PeerLostError, ProtocolError, WatchdogError, MeshSplitError) as error:
            if self._losses is None:
                raise
            self._losses.accept(policy_rank, error)

    def _owner(self, index: int) -> PolicyRankPeer:
        """Returns the policy rank that has the result: the last of a chain, or a replica."""
        return self._ranks[-1 if self._turns is None else self._turns.of(index).replica]

    def _glance(self) -> None:
        if not self._received and not self._loop.may_start():  # results can wait behind work
            self.observe()

    def _rest(self) -> None:
        super()._rest()
        self.check_policy_ranks()
        if self._has_cpus and self._committed and self._loop.usual_b_ns < SHORT_B_NS:
            until_ns = now_ns() + LINGER_NS
            while not self._received and now_ns() < until_ns:
                self.observe()

    def _poll_after_wait(self, ready: Sequence[int]) -> bool:
        # After a pause of some ms one look in vain takes 20 to 50 us: the caches are cold.
        if not ready or not self._result_fds.isdisjoint(ready):
            self.read_control(ready)
            self.observe()  # results first: what robots sent may be much
        elif self._rouse is not None:
            self._rouse_early(self._rouse)
        if ready and self._result_fds.issuperset(ready):
            return False
        self._loop.drain_inputs()
        return True

    def _rouse_early(self, rouse: Callable[[], None]) -> None:
        """Input ended a wait: if that leads to an envelope as a rule, both ranks wake at once."""
        if not self._in_vain and self._has_cpus:
            rouse()
        self._in_vain = min(self._in_vain + 1, VAIN_MAX)

    def _is_idle(self) -> bool:
        return not self._received and bool(self._credits.in_system or self._loop.may_begin())

    def _wait_cause(self) -> str:
        if self._credits.in_system >= self.lead or not self._loop.may_begin():
            return "result"
        return "input" if self._credits.may_commit() else "credit"

    # ---- for bring-up --------------------------------------------------------------------------

    def measure(self, repeats: int) -> dict[str, Sequence[int]]:
        """As ``Executor``."""
        lead, self.lead = self.lead, 1
        durations = self._loop.time_in_turn(repeats)
        self.lead = lead
        names = "place" if self._turns is None else "replica"
        places = {f"{names}{found.rank}": found.newest_b(repeats) for found in self.policy_ranks}
        return durations if len(places) == 1 else {**durations, **places}

    def thread_cpus(self) -> dict[str, list[int]]:
        """As ``Executor``."""
        return self._thread_cpus | thread_cpus(self.policy_ranks)

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        """As ``Executor``."""
        instruct_all(self.all_ranks, self._loop.stage_a.front, number, text, done)
