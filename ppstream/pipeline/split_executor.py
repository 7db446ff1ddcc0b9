"""SplitExecutor: stage A, the receipt of results, and stage C have a thread each."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import torch

from ppstream.control.watchdog import ProgressMark
from ppstream.core.clock import thread_cpu_ns
from ppstream.core.cpus import RunDelay, StageCost
from ppstream.core.waiter import Waiter
from ppstream.pipeline.credits import NO_LEAD
from ppstream.pipeline.host_executor import HostExecutor
from ppstream.pipeline.rank0 import WAIT_MAX_NS
from ppstream.pipeline.time_accounting import LINK, TimeAccount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ppstream.pipeline.flight import Flight
    from ppstream.pipeline.loop import Rank0Loop

IDLE_S: Final = 0.1


class SplitExecutor(HostExecutor):
    """The same on three threads: A | receipt | C. The credits alone bound how far A leads.

    Front parts are stage A's, on a fourth: meanwhile stage A's own thread takes in what comes.
    """

    _books_first = True

    def attach(self, loop: Rank0Loop) -> None:
        """As ``Executor``."""
        self.lead = NO_LEAD
        self._results = Waiter(loop.waiter.spin_ns)  # who waits for results
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
            self._loop.drain_inputs()
        found, self._told = self._told, None
        for number, text, heard in found:
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

    def _account_a(self, flight: Flight) -> None:
        super()._account_a(flight)
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
                self.read_control(self._results.wait(WAIT_MAX_NS))
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
        flight.record.busy_link_c_ns = self._times_c.pop_ns(LINK)
        flight.record.run_delay_c_ns = self._run_delay_c.pop_ns()
        return ended_ns

    def wait(self, *, worked: bool) -> bool:
        """As ``Executor``. Raises what another thread has raised."""
        begins = super().wait(worked=worked)
        if self._failure is not None:
            raise self._failure
        return begins

    def _rest(self) -> None:
        self._loop.tidy()

    def _glance(self) -> None:
        """Results are another thread's."""

    def _poll_after_wait(self, ready: Sequence[int]) -> bool:
        self._loop.drain_inputs()
        return True

    def _is_idle(self) -> bool:
        return self._failure is None and super()._is_idle()

    def _wait_cause(self) -> str:
        return "input" if self._credits.may_commit() else "credit"
