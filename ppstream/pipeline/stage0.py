"""THE loops of rank 0, pipelined: stage A and C here, stage B on the policy rank meanwhile.

``run_serial`` has one thread: *send first, then decode*, with one envelope of lead. ``run_split``
gives stage A, the receipt of results, and stage C a thread each. Both take the credit first and
the newest window second. The unpipelined twin is in ``inline.py``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from ppstream.control.watchdog import ProgressMark, stage_b_limit_ns, watched
from ppstream.core.clock import now_ns, thread_cpu_ns
from ppstream.core.cpus import RunDelay
from ppstream.core.errors import ProtocolError
from ppstream.core.waiter import Waiter
from ppstream.links.headers import EPOCH, FAILED, FAILURES, SEQ, read_stage_b
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.flight import Flight
from ppstream.pipeline.rank0 import WAIT_MAX_NS
from ppstream.pipeline.rank0_peer import Paired
from ppstream.pipeline.time_accounting import LINK, TimeAccount

if TYPE_CHECKING:
    from ppstream.control.peer import Peer
    from ppstream.links.protocol import FrontLink

SERIAL_LEAD: Final = (
    2  # envelopes in the system: one thread can use no more (analysis/period_model.py)
)
IDLE_S: Final = 0.1


class Stage0(Paired):
    """Rank 0 with a policy rank behind ``link``; ``run`` is one phase's worth of envelopes."""

    def __init__(self, *parts: Any, link: FrontLink, peer: Peer) -> None:
        super().__init__(*parts, peer=peer)
        self.link = link
        self._committed: deque[Flight] = deque()
        self._received: SimpleQueue[Flight] = SimpleQueue()
        self._room = threading.Event()
        self._failure: BaseException | None = None  # of a thread of run_split
        self._usual_b_ns = 0
        self._thread_marks = {
            name: ProgressMark(f"the {name} thread") for name in ("receive", "decode")
        }
        self.marks = (self.mark, *self._thread_marks.values())
        self._is_split = self.config.pipeline.threads == "split"
        self._lead = sys.maxsize if self._is_split else SERIAL_LEAD
        self._times_c = TimeAccount() if self._is_split else self.times  # of the thread that runs C
        self._run_delay_c = RunDelay() if self._is_split else self.run_delay
        self._thread_cpus: dict[str, list[int]] = {}  # as each thread's newest run ended
        self._results = Waiter() if self._is_split else self.waiter  # who waits for results
        self._result_fds = {peer.fileno(), *link.fds}
        for fd in self._result_fds:
            self._results.register(fd)

    @watched
    def run(self, envelopes: int | None = None) -> None:
        self._start_limit = None if envelopes is None else self.started + envelopes
        self.times.end()
        self.run_delay.begin()
        if self._is_split:
            self.run_split()
        else:
            self.run_serial()
        self._thread_cpus["r0A" if self._is_split else "r0"] = sorted(os.sched_getaffinity(0))

    # ---- one thread: A and C in turn -------------------------------------------------------

    def run_serial(self) -> None:
        while self.may_begin() or self.credits.in_system:
            self.wait_for_work()
            if self.may_start():
                self.start()  # send first,
            if not self._received.empty():
                self.finish(self._received.get())  # then decode

    # ---- three threads: A | receipt | C ------------------------------------------------------

    def run_split(self) -> None:
        ended = threading.Event()
        threads = [
            threading.Thread(target=self._guarded, args=(work, ended), name=name)
            for name, work in (("receive", self.receive_results), ("decode", self.decode_results))
        ]
        for thread in threads:
            thread.start()
        try:
            while (self.may_begin() or self.credits.in_system) and self._failure is None:
                self.wait_for_work()
                if self.may_start():
                    self.start()
        finally:
            ended.set()
            self._results.wake()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def receive_results(self, ended: threading.Event) -> None:
        mark = self._thread_marks["receive"]
        while not ended.is_set():
            mark.turns += 1
            self.observe()
            self.check_peer(now_ns())
            if self.credits.may_receive():
                self._results.wait(WAIT_MAX_NS)
            else:  # what is readable may not be read yet: waiting for it would spin
                self._room.wait(IDLE_S)
                self._room.clear()

    def decode_results(self, ended: threading.Event) -> None:
        mark = self._thread_marks["decode"]
        self._times_c.end()
        self._run_delay_c.begin()
        while not ended.is_set():
            mark.turns += 1
            self._times_c.begin()
            try:
                flight = self._received.get(timeout=IDLE_S)
            except Empty:
                continue
            finally:
                self._times_c.end("result")
            self.finish(flight)
            self.waiter.wake()
        self._thread_cpus["r0C"] = sorted(os.sched_getaffinity(0))

    def _guarded(self, work: Callable[[threading.Event], None], ended: threading.Event) -> None:
        """Top of a thread: what goes wrong in it ends the run on the thread that started it."""
        try:
            with self._thread_marks[threading.current_thread().name]:
                work(ended)
        except BaseException as error:  # noqa: BLE001 - re-raised by run_split
            self._failure = self._failure or error
            ended.set()
            self.waiter.wake()
            self._results.wake()

    # ---- the verbs of both --------------------------------------------------------------------

    def may_start(self) -> bool:
        """True when stage A may begin: wanted, with a credit, and due."""
        return (
            self.may_begin()
            and self.credits.may_commit()
            and self.credits.in_system < self._lead
            and self.pacing.due(now_ns())
        )

    def start(self) -> None:
        """Credit first, newest window second: stage A into the next slot, and off it goes."""
        flight = self.next_flight()
        slot = self.link.envelope(flight.index)
        self.run_delay.enter()
        self.stage_a.build(flight, slot.tensors, self.pacing.started())
        flight.record.delay_a_ns = self.run_delay.leave()
        self.times.stage(flight.record.tA0 or 0, flight.record.tA1 or 0)
        slot.header[EPOCH], slot.header[SEQ] = flight.epoch, flight.seq
        self.book_input_waits(flight)
        self._committed.append(flight)
        flight.sent_ns = flight.record.tSend = now_ns()
        self.credits.commit(flight.sent_ns)
        if nvtx_ranges.on:
            nvtx_ranges.SEND.push(flight.epoch, flight.seq)
        self.link.commit(flight.index)
        if nvtx_ranges.on:
            nvtx_ranges.SEND.pop()

    def look(self) -> None:
        self.take_in()
        # With work in hand the socket can wait: reading it costs as much as a small stage C.
        if not self._is_split and self._received.empty() and not self.may_start():
            self.observe()
            self.check_peer(now_ns())

    def look_at(self, ready: Sequence[int]) -> None:
        # After a pause of some ms one look in vain takes 20 to 50 us: the caches are cold.
        if not ready or not self._source_fds:
            self.look()
            return
        if not self._is_split:  # results first: what robots sent may be much
            if not self._result_fds.isdisjoint(ready):
                self.observe()
            self.check_peer(now_ns())
        if not self._result_fds.issuperset(ready):
            self.take_in()

    def is_idle(self) -> bool:
        has_result = not self._is_split and not self._received.empty()
        if has_result or self.may_start() or self._failure is not None:
            return False
        return bool(self.may_begin() or self.credits.in_system)

    def wait_cause(self) -> str:
        if not self._is_split and (self.credits.in_system >= self._lead or not self.may_begin()):
            return "result"
        return "input" if self.credits.may_commit() else "credit"

    def observe(self) -> None:
        """Read the control socket; each result that D_out has room for returns its credit."""
        self.peer.pump()
        while self.peer.inbox:
            self.take_frame(self.peer.inbox.popleft())
        while self.credits.may_receive():
            index = self.link.receive_nowait()
            if index is None:
                return
            flight = self._committed.popleft()
            if flight.index != index:
                raise ProtocolError(f"result {index} came, {flight.index} is owed next")
            if nvtx_ranges.on:
                nvtx_ranges.RECV.push(flight.epoch, flight.seq)
            self.peer.last_heard_ns = flight.record.tRecv = now_ns()  # a result is a sign of life
            self.credits.receive(flight.record.tRecv)
            if self._is_split:
                self.waiter.wake()  # the credit is another thread's; the next envelope goes first
            self._received.put(flight)
            if nvtx_ranges.on:
                nvtx_ranges.RECV.pop()

    def finish(self, flight: Flight) -> None:
        """Stage C and emit, unless the result is stale or carries no actions."""
        slot = self.link.result(flight.index)
        delay, cpu_ns = self._run_delay_c, thread_cpu_ns()
        delay.enter()
        flight.record.tDecode = self._times_c.begin()
        self.credits.begin_decode(flight.record.tDecode)
        self._room.set()  # a place in D_out is free
        drop = self.read_header(flight, slot.header.tolist())
        if flight.epoch != self.epoch:
            drop = "stale"
        elif drop is None:
            if nvtx_ranges.on:
                nvtx_ranges.C.push(flight.epoch, flight.seq)
            drop = self.decode_and_emit(flight, slot)
            if nvtx_ranges.on:
                nvtx_ranges.C.pop()
        if drop is None:  # the emitter's own time is the link's
            ended_ns = self._times_c.end(at_ns=flight.emit_ns)
        else:  # a dropped envelope has no end of C in the log: its time is not stage C's
            ended_ns = self._times_c.end(LINK)
        flight.record.cpu_c_ns = thread_cpu_ns() - cpu_ns
        flight.record.delay_c_ns = delay.leave()
        flight.record.w_result_ns = self._times_c.take_ns("result")
        if self._is_split:
            flight.record.busy_link_c_ns = self._times_c.take_ns(LINK)
            flight.record.run_delay_c_ns = self._run_delay_c.take_ns()
        self.close_flight(flight, drop, ended_ns)

    def read_header(self, flight: Flight, header: list[int]) -> str | None:
        """Book stage B's durations; returns why the policy gave no actions, or None."""
        if header[EPOCH] != flight.epoch or header[SEQ] != flight.seq:
            raise ProtocolError(
                f"result {flight.index} answers epoch and seq {[header[EPOCH], header[SEQ]]}, "
                f"owed are {[flight.epoch, flight.seq]}"
            )
        read_stage_b(header, flight.record)
        self._usual_b_ns += ((flight.record.B_ns or 0) - self._usual_b_ns) // 8
        return FAILURES[header[FAILED]]

    def measure(self, repeats: int) -> dict[str, Sequence[int]]:
        lead, self._lead = self._lead, 1
        durations = super().measure(repeats)
        self._lead = lead
        self.newest_b(0)
        return durations

    def thread_cpus(self) -> dict[str, list[int]]:
        return self._thread_cpus | super().thread_cpus()

    def check_peer(self, now: int) -> None:
        """As ``check_policy_rank``, of whose results are owed now."""
        limit_ns = stage_b_limit_ns(self.standstill_ns, self._usual_b_ns)
        self.check_policy_rank(now, self._committed[0] if self._committed else None, limit_ns)
