"""Executors on the host's own clock: stage A and C here, stage B on the policy rank meanwhile.

``HostExecutor`` has one thread: *send first, then decode*, with one envelope of lead.
``SplitExecutor`` gives stage A, the receipt of results, and stage C a thread each, and the policy's
front parts one, too. ``OnHost`` is what they share with the unpipelined twin in
``inline_executor.py``.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import torch

from ppstream.control.watchdog import ProgressMark, stage_b_limit_ns
from ppstream.core.clock import now_ns, thread_cpu_ns
from ppstream.core.cpus import RunDelay, StageCost
from ppstream.core.errors import ProtocolError
from ppstream.core.waiter import Waiter
from ppstream.links.headers import EPOCH, FAILED, FAILURES, SEQ, read_stage_b
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.credits import NO_LEAD
from ppstream.pipeline.policy_rank_peer import instruct_all, thread_cpus
from ppstream.pipeline.rank0 import WAIT_MAX_NS
from ppstream.pipeline.time_accounting import LINK, TimeAccount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ppstream.links.protocol import Hops
    from ppstream.links.slots import Slot
    from ppstream.pipeline.flight import Flight
    from ppstream.pipeline.loop import Rank0Loop
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer

#: Envelopes in the system besides one at each policy rank: one thread can use no more
#: (analysis/period_model.py).
SERIAL_LEAD: Final = 1
IDLE_S: Final = 0.1


class OnHost(ABC):
    """Stages and waits of threads that sleep on descriptors, stamped as they happen."""

    def attach(self, loop: Rank0Loop) -> None:
        """As ``Executor``."""
        self._loop = loop
        self._waiter = loop.waiter
        self._times, self._run_delay = loop.times, loop.run_delay
        self._times_c, self._run_delay_c = loop.times, loop.run_delay  # of the thread that runs C
        self._cost_a, self._cost_c = StageCost(loop.run_delay), StageCost(loop.run_delay)
        self._thread_cpus: dict[str, list[int]] = {}  # as each thread's newest run ended

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

    def _build(self, flight: Flight, slot: Slot, ends_ns: Sequence[int | None]) -> None:
        """Stage A into ``slot``, with the waits before it."""
        record = flight.record
        self._cost_a.enter()
        self._loop.stage_a.build(flight, slot, ends_ns)
        began_ns, ended_ns = record.tA0 or 0, record.tA1 or 0
        self._cost_a.leave(ended_ns - began_ns)
        record.cpu_a_ns, record.delay_a_ns = self._cost_a.cpu_ns, self._cost_a.delay_ns
        self._times.stage(began_ns, ended_ns)
        self._loop.book_input_waits(flight)

    def _begin_c(self, flight: Flight) -> None:
        self._cost_c.enter()
        flight.record.tDecode = self._times_c.begin()
        self._loop.credits.begin_decode(flight.record.tDecode)
        if nvtx_ranges.on:
            nvtx_ranges.C.push(flight.epoch, flight.seq)

    def settle(self, flight: Flight, drop: str | None) -> int:
        """As ``Executor``."""
        if nvtx_ranges.on:
            nvtx_ranges.C.pop()
        record, times = flight.record, self._times_c
        # The emitter's own time is the link's. A dropped envelope has no end of C in the log: its
        # time is the link's, too.
        ended_ns = times.end(at_ns=flight.emit_ns) if drop is None else times.end(LINK)
        self._cost_c.leave(ended_ns - (record.tDecode or 0))
        record.cpu_c_ns, record.delay_c_ns = self._cost_c.cpu_ns, self._cost_c.delay_ns
        record.w_result_ns = times.take_ns("result")
        return ended_ns

    # ---- waits -------------------------------------------------------------------------------

    def wait(self, *, worked: bool) -> None:
        """As ``Executor``. One blocking call, timed as one.

        What arrives while it lasts, and looking at it, is part of the wait and booked under its
        cause. Finding work at once is no wait but the link's time. What costs a system call is
        looked at when the call has named it, and before an envelope begins.
        """
        loop, times = self._loop, self._times
        times.begin()
        cause = self._wait_cause()
        self._glance()
        if not self._is_idle():
            if loop.may_start():
                loop.take_in()  # the newest samples
            times.end(LINK)
            return
        while self._is_idle():
            limit_ns = WAIT_MAX_NS
            if cause == "input":  # only then can the clock alone give work
                dues = (loop.source.next_due_ns(), loop.pacing.due_ns())
                now = now_ns()
                limit_ns = min([limit_ns, *(max(0, due - now) for due in dues if due is not None)])
            self._look_at(self._waiter.wait(limit_ns))
        times.end(cause)

    def _glance(self) -> None:  # noqa: B027 - not all have something there
        """Look at what costs no system call."""

    def _look_at(self, ready: Sequence[int]) -> None:
        """Look again after a wait, at least at these descriptors; at everything when none is."""
        self._loop.take_in()

    @abstractmethod
    def _is_idle(self) -> bool:
        """True when there is nothing to do now, and something to wait for."""

    @abstractmethod
    def _wait_cause(self) -> str:
        """Returns the cause of a wait that begins now: ``input``, ``credit`` or ``result``."""


class HostExecutor(OnHost):
    """Over a hop to the policy rank and one back, one thread."""

    def __init__(self, hops: Hops, policy_ranks: tuple[PolicyRankPeer, ...]) -> None:
        self.out, self.into = hops.out, hops.into
        self.policy_ranks = policy_ranks
        self.lead = SERIAL_LEAD + len(policy_ranks)
        self._answers = policy_ranks[-1].peer  # where results come from
        self._committed: deque[Flight] = deque()
        self._received: deque[Flight] = deque()
        self._hand_over: Callable[[Flight], None] = self._received.append
        self._result_fds: frozenset[int] = frozenset()  # of policy ranks and of the hop

    def attach(self, loop: Rank0Loop) -> None:
        """As ``Executor``."""
        super().attach(loop)
        for policy_rank in self.policy_ranks:
            policy_rank.attach(loop)
        self._credits = loop.credits
        self._watch_results(self._waiter)

    def _watch_results(self, waiter: Waiter) -> None:
        fds = {found.peer.fileno() for found in self.policy_ranks}
        for fd in fds:
            waiter.register(fd)
        self._result_fds = self.into.watch(waiter) | fds

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
        self._build(flight, slot, ends_ns)
        slot.header[EPOCH], slot.header[SEQ] = flight.epoch, flight.seq
        # stamped first: who receives looks at the oldest that is there, from a thread of its own
        flight.sent_ns = flight.record.tSend = now_ns()
        self._committed.append(flight)
        self._credits.commit(flight.sent_ns)
        if nvtx_ranges.on:
            nvtx_ranges.SEND.push(flight.epoch, flight.seq)
        self.out.commit(flight.index)
        if nvtx_ranges.on:
            nvtx_ranges.SEND.pop()

    def finished(self) -> Flight | None:
        """As ``Executor``."""
        return self._received.popleft() if self._received else None

    def result(self, flight: Flight) -> tuple[Slot, str | None]:
        """As ``Executor``."""
        slot = self.into.slot(flight.index)
        self._begin_c(flight)
        header = slot.header.tolist()
        if header[EPOCH] != flight.epoch or header[SEQ] != flight.seq:
            raise ProtocolError(
                f"result {flight.index} answers epoch and seq {[header[EPOCH], header[SEQ]]}, "
                f"owed are {[flight.epoch, flight.seq]}"
            )
        read_stage_b(header, flight.record)
        loop = self._loop
        loop.usual_b_ns += ((flight.record.B_ns or 0) - loop.usual_b_ns) >> 3
        return slot, FAILURES[header[FAILED]]

    # ---- between envelopes -----------------------------------------------------------------------

    def hear(self, ready: Sequence[int]) -> None:
        """Read the control sockets that a wait has named; all of them when it named none."""
        for policy_rank in self.policy_ranks:
            if not ready or policy_rank.peer.fileno() in ready:
                policy_rank.peer.pump()
        self.into.hear(ready)

    def observe(self) -> None:
        """Take what was heard; each result that D_out has room for returns its credit."""
        self._take_frames()
        while self._credits.may_receive():
            if (arrival := self.into.receive_nowait()) is None:
                if not self._take_frames():
                    return
                continue
            index, _ = arrival
            if self.into.slot(index).header[FAILED]:  # why was said before, by any of them
                self.hear(())
                self._take_frames()
            flight = self._committed.popleft()
            if flight.index != index:
                raise ProtocolError(f"result {index} came, {flight.index} is owed next")
            if nvtx_ranges.on:
                nvtx_ranges.RECV.push(flight.epoch, flight.seq)
            self._answers.last_heard_ns = flight.record.tRecv = (
                now_ns()
            )  # a result is a sign of life
            self._credits.receive(flight.record.tRecv)
            self._hand_over(flight)
            if nvtx_ranges.on:
                nvtx_ranges.RECV.pop()

    def _take_frames(self) -> bool:
        """Returns True if there were any."""
        found = False
        for policy_rank in self.policy_ranks:
            inbox = policy_rank.peer.inbox
            while inbox:
                policy_rank.take_frame(inbox.popleft())
                found = True
        return found

    def check_policy_ranks(self) -> None:
        """Raises as ``PolicyRankPeer.check``, of the results that are owed now."""
        limit_ns = stage_b_limit_ns(self._loop.standstill_ns, self._loop.usual_b_ns)
        oldest = self._committed[0] if self._committed else None
        now = now_ns()
        for policy_rank in self.policy_ranks:
            policy_rank.check(now, oldest, limit_ns)

    def _glance(self) -> None:
        if not self._received and not self._loop.may_start():  # results can wait behind work
            self.observe()

    def _look_at(self, ready: Sequence[int]) -> None:
        # After a pause of some ms one look in vain takes 20 to 50 us: the caches are cold.
        if not ready or not self._result_fds.isdisjoint(ready):
            self.hear(ready)
            self.observe()  # results first: what robots sent may be much
        self.check_policy_ranks()
        if not self._result_fds.issuperset(ready) or not (ready and self._loop.source_fds):
            self._loop.take_in()

    def _is_idle(self) -> bool:
        loop = self._loop
        if self._received or loop.may_start():
            return False
        return bool(self._credits.in_system or loop.may_begin())

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
        places = {f"place{found.rank}": found.newest_b(repeats) for found in self.policy_ranks}
        return durations if len(places) == 1 else {**durations, **places}

    def thread_cpus(self) -> dict[str, list[int]]:
        """As ``Executor``."""
        return self._thread_cpus | thread_cpus(self.policy_ranks)

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        """As ``Executor``."""
        instruct_all(self.policy_ranks, self._loop.stage_a.front, number, text, done)


class SplitExecutor(HostExecutor):
    """The same on three threads: A | receipt | C. The credits alone bound how far A leads.

    Front parts are stage A's, on a fourth: meanwhile stage A's own thread takes in what comes.
    """

    def attach(self, loop: Rank0Loop) -> None:
        """As ``Executor``."""
        self.lead = NO_LEAD
        self._results = Waiter()  # who waits for results
        self._to_decode: SimpleQueue[Flight] = SimpleQueue()
        self._room = threading.Event()  # there is a place in D_out
        self._failure: BaseException | None = None  # of one of the threads
        super().attach(loop)
        self._hand_over = self._queue_to_decode
        self._times_c, self._run_delay_c = TimeAccount(), RunDelay()
        self._cost_c = StageCost(self._run_delay_c)
        names = ("receive", "decode", "front")
        self._marks = {name: ProgressMark(f"the {name} thread") for name in names}
        loop.marks = (loop.mark, *self._marks.values())
        self._delay_front = RunDelay()
        self._front_costs_ns = 0, 0  # CPU time and run delay of its newest call
        self._told: list[tuple[int, str, Callable[[int, str], None]]] | None = None

    def _watch_results(self, waiter: Waiter) -> None:
        super()._watch_results(self._results)

    @contextmanager
    def running(self) -> Iterator[None]:
        """As ``Executor``: with the threads that receive and that decode."""
        ended = threading.Event()
        threads = [
            threading.Thread(target=self._guarded, args=(work, ended), name=name)
            for name, work in (("receive", self._receive), ("decode", self._decode))
        ]
        self._begin_run()
        for thread in threads:
            thread.start()
        try:
            with self._front_thread():
                yield
        finally:
            ended.set()
            self._results.wake()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        self._thread_cpus["r0A"] = sorted(os.sched_getaffinity(0))

    @contextmanager
    def _front_thread(self) -> Iterator[None]:
        """A thread for front parts, which computes gradients only if this one does."""
        if (front := self._loop.stage_a.front) is None:
            yield
            return

        def begin(grad: bool) -> None:  # noqa: FBT001 - called by the pool
            torch.set_grad_enabled(grad)
            self._delay_front.begin()

        grad = (torch.is_grad_enabled(),)
        with ThreadPoolExecutor(1, "front", begin, grad) as self._pool:
            here, front.carry_out = front.carry_out, self._carry_out
            try:
                yield
            finally:
                front.carry_out = here

    def _carry_out(self, call: Callable[[], None]) -> BaseException | None:
        """As ``FrontParts``; texts for the policy wait until it is done."""
        self._told = []
        done = self._pool.submit(self._call, call)
        done.add_done_callback(lambda _: self._waiter.wake())
        while not done.done():
            self._waiter.wait(WAIT_MAX_NS)
            self._loop.take_in()
        told, self._told = self._told, None
        for number, text, heard in told:
            super().instruct(number, text, heard)
        return done.exception()

    def _call(self, call: Callable[[], None]) -> None:
        mark = self._marks["front"]
        mark.turns += 1
        cpu_ns = thread_cpu_ns()
        delay_ns = self._delay_front.read_ns()
        try:
            with mark:
                call()
        finally:
            late_ns = (self._delay_front.read_ns() or 0) - (delay_ns or 0)
            self._front_costs_ns = thread_cpu_ns() - cpu_ns, late_ns

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        """As ``Executor``."""
        if self._told is None:
            super().instruct(number, text, done)
        else:
            self._told.append((number, text, done))

    def _build(self, flight: Flight, slot: Slot, ends_ns: Sequence[int | None]) -> None:
        super()._build(flight, slot, ends_ns)
        record, (cpu_ns, delay_ns) = flight.record, self._front_costs_ns
        record.cpu_a_ns = (record.cpu_a_ns or 0) + cpu_ns
        for name in ("delay_a_ns", "run_delay_ns"):  # None where the kernel does not count it
            if (waited_ns := getattr(record, name)) is not None:
                setattr(record, name, waited_ns + delay_ns)

    def _receive(self, ended: threading.Event) -> None:
        mark = self._marks["receive"]
        while not ended.is_set():
            mark.turns += 1
            self.observe()
            self.check_policy_ranks()
            if self._credits.may_receive():
                self.hear(self._results.wait(WAIT_MAX_NS))
            else:  # what is readable may not be read yet: waiting for it would spin
                self._room.wait(IDLE_S)
                self._room.clear()

    def _decode(self, ended: threading.Event) -> None:
        mark, times = self._marks["decode"], self._times_c
        times.end()
        self._run_delay_c.begin()
        while not ended.is_set():
            mark.turns += 1
            times.begin()
            try:
                flight = self._to_decode.get(timeout=IDLE_S)
            except Empty:
                continue
            finally:
                times.end("result")
            self._loop.finish(flight)
            self._waiter.wake()
        self._thread_cpus["r0C"] = sorted(os.sched_getaffinity(0))

    def _guarded(self, work: Callable[[threading.Event], None], ended: threading.Event) -> None:
        """Top of a thread: what goes wrong in it ends the run on the thread that started it."""
        try:
            with self._marks[threading.current_thread().name]:
                work(ended)
        except BaseException as error:  # noqa: BLE001 - raised again by the loop's thread
            self._failure = self._failure or error
            ended.set()
            self._waiter.wake()
            self._results.wake()

    def _queue_to_decode(self, flight: Flight) -> None:
        self._waiter.wake()  # the credit is another thread's; the next envelope goes first
        self._to_decode.put(flight)

    def _begin_c(self, flight: Flight) -> None:
        super()._begin_c(flight)
        self._room.set()

    def settle(self, flight: Flight, drop: str | None) -> int:
        """As ``Executor``."""
        ended_ns = super().settle(flight, drop)
        flight.record.busy_link_c_ns = self._times_c.take_ns(LINK)
        flight.record.run_delay_c_ns = self._run_delay_c.take_ns()
        return ended_ns

    def wait(self, *, worked: bool) -> None:
        """As ``Executor``. Raises what another thread has raised."""
        super().wait(worked=worked)
        if self._failure is not None:
            raise self._failure

    def _glance(self) -> None:
        """Results are another thread's."""

    def _look_at(self, ready: Sequence[int]) -> None:
        self._loop.take_in()

    def _is_idle(self) -> bool:
        return self._failure is None and super()._is_idle()

    def _wait_cause(self) -> str:
        return "input" if self._credits.may_commit() else "credit"
