"""Work that rank 0 queues for one envelope, on four streams; the picture stands in ``executor.py``.

Nothing here waits or polls. What is the same each time a slot is
used, which is nearly all of it, is put together once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ppstream.cuda.driver import CudaEvent, LaunchSequence
from ppstream.links.device_link import pinned_slots, run_ahead
from ppstream.links.headers import EnvelopeStatus
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.device.in_flight import Marks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.cuda.busy_kernel import GpuWork
    from ppstream.cuda.device_clock import DeviceClock
    from ppstream.cuda.driver import CudaStream
    from ppstream.links.device_counters import CountedLink
    from ppstream.links.device_link import DeviceLink, DeviceSlot
    from ppstream.links.slots import LinkShape, Slot
    from ppstream.pipeline.device.stage_a import DeviceStageA
    from ppstream.pipeline.flight import Flight


class Streams(NamedTuple):
    """Rank 0's own; the link has two more."""

    a: CudaStream  # torch's current one
    c: CudaStream


class Rank0Device(NamedTuple):
    """Rank 0's GPU: what its executor works with."""

    link: DeviceLink
    shape: LinkShape
    streams: Streams
    clock: DeviceClock[Any]  # of the kind of its marks
    work_a: GpuWork
    work_c: GpuWork
    stamps: CountedLink | None = None  # ``link``, if its kernels leave the times; else events do

    def nodes(self, stage_a: DeviceStageA) -> int | None:
        """Returns kernels, copies and memsets of a stage A, with all that it simulates."""
        return None if stage_a.nodes is None else stage_a.nodes + self.work_a.products

    def run_ahead(self, stage_a: DeviceStageA) -> int:
        """As ``device_link.run_ahead``; of nodes, those of the window alone are launches."""
        front, nodes = stage_a.front, self.nodes(stage_a)
        graphs = self.work_a.products + (0 if front is None else front.nodes or 0)
        launches = 1 + (nodes or graphs) - graphs
        stage_ns = stage_a.front_ns + self.work_a.mean_ns
        return run_ahead(nodes, stage_ns, self.shape.d_in, launches=launches)


class EventMarks(NamedTuple):
    """As ``Marks``, of a slot's events."""

    a0: CudaEvent
    a1: CudaEvent
    sent: CudaEvent
    received: CudaEvent
    c0: CudaEvent
    c1: CudaEvent


class _LaunchPlan(NamedTuple):
    """One slot of either direction, and what is queued each time, stage A and the link aside."""

    envelope: DeviceSlot
    result: Slot  # in host memory
    before_a: LaunchSequence
    begin_a: LaunchSequence
    behind_a: LaunchSequence
    before_send: LaunchSequence
    behind_send: LaunchSequence
    before_receipt: LaunchSequence
    behind_receipt: LaunchSequence
    c: LaunchSequence


class Queueing:
    """For the thread whose current stream is stage A's.

    Args:
        parts: streams and link.
        stage_a: queues windows.
        is_fresh: A takes the credit; else the copy does.

    Attributes:
        marks: events, one set for each slot: those of an envelope are the slot's.
    """

    def __init__(self, parts: Rank0Device, stage_a: DeviceStageA, *, is_fresh: bool) -> None:
        self._parts = parts
        self._link = parts.link
        self._stage_a = stage_a
        self._a = parts.streams.a
        self._is_fresh = is_fresh
        self._d_in = parts.shape.d_in
        is_lone = is_fresh and self._d_in == 1
        # Between two stages A a send takes time that only a lone envelope has no other use for.
        self._sends_from_a = parts.link.is_short and is_lone
        # A kernel that spins slows A down, unless it comes before A in its stream, or behind a lone
        # one; a C that runs while A spins on its credit is short.
        self._a_spins = parts.link.spins and is_fresh
        # A receipt on C's stream would come late behind a C that works: its copy alone is short.
        c_copies = not parts.work_c.calls(parts.streams.c)
        is_received_by_c = parts.link.spins and is_lone and c_copies
        self._receives_on = parts.streams.c if is_received_by_c else None
        self._results = pinned_slots(parts.shape.result, len(parts.link.out))
        self.line_up()

    def line_up(self) -> None:
        """Put together what each slot of the link has queued: they are new, or fewer than before.

        Nothing is under way.
        """
        parts = self._parts
        events = [EventMarks(*(CudaEvent() for _ in EventMarks._fields)) for _ in parts.link.out]
        self.marks = [Marks(*each) for each in events]
        self._plans = [
            self._plan(parts, events, number, result)
            for number, result in enumerate(self._results[: len(events)])
        ]

    def _plan(
        self, parts: Rank0Device, marks: Sequence[EventMarks], number: int, result: Slot
    ) -> _LaunchPlan:
        """The picture in ``executor.py``, from top to bottom.

        Whoever is behind another by ``n`` envelopes has the events of ``n`` slots before. An event
        that was never recorded holds nobody up: the first envelopes need no exception.
        """
        link, (a, c), mine = parts.link, parts.streams, marks[number]
        d_in, d_out = parts.shape.d_in, parts.shape.d_out
        slot, source = link.out[number], link.into[number]

        if not self._is_fresh:
            before_a = [a.to_wait_for(marks[number - 1].sent)]
        elif self._a_spins:  # for the count; a receipt also waits for a slot among the results
            before_a = [a.to_wait_for(marks[number - d_in - d_out].c0)]
        else:
            before_a = [a.to_wait_for(marks[number - d_in].received)]
        begin_a = [a.to_record(mine.a0)]
        behind_a = [*parts.work_a.calls(a), a.to_record(mine.a1)]

        sending, before_send, behind_send = link.sending, [], []
        if not self._is_fresh:
            before_send.append(sending.to_wait_for(marks[number - d_in].received))
            behind_send.append(sending.to_record(mine.sent))
        if not self._sends_from_a:
            before_send.append(sending.to_wait_for(mine.a1))

        before_receipt = []
        if self._receives_on is not None:
            before_receipt.append(self._receives_on.to_wait_for(mine.a1))
        receiving = self._receives_on or link.receiving
        freed = marks[number - d_out]  # whose C left a slot among the results
        behind_receipt = [receiving.to_wait_for(freed.c0), receiving.to_record(mine.received)]

        stage_c = [
            c.to_wait_for(mine.received),
            c.to_record(mine.c0),
            c.to_copy(result.raw.data_ptr(), source.address, source.size),
            *parts.work_c.calls(c),
            c.to_record(mine.c1),
        ]
        return _LaunchPlan(
            slot,
            result,
            before_a=LaunchSequence(*before_a),
            begin_a=LaunchSequence(*begin_a),
            behind_a=LaunchSequence(*behind_a),
            before_send=LaunchSequence(*before_send),
            behind_send=LaunchSequence(*behind_send),
            before_receipt=LaunchSequence(*before_receipt),
            behind_receipt=LaunchSequence(*behind_receipt),
            c=LaunchSequence(*stage_c),
        )

    def result(self, index: int) -> Slot:
        """Returns the result of ``index`` in host memory; valid once its last event is done."""
        return self._plans[index % len(self._plans)].result

    def envelope(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """Queue everything that will happen to ``flight``."""
        plan = self._plans[flight.index % len(self._plans)]
        if nvtx_ranges.on:
            nvtx_ranges.A.push(flight.epoch, flight.seq)
        self._queue_a(plan, flight, ends_ns)
        if nvtx_ranges.on:
            nvtx_ranges.A.pop()
            nvtx_ranges.SEND.push(flight.epoch, flight.seq)
        self._queue_send(plan, flight)
        if nvtx_ranges.on:
            nvtx_ranges.SEND.pop()
            nvtx_ranges.RECV.push(flight.epoch, flight.seq)
        plan.before_receipt()
        self._link.queue_receive(flight.index, self._receives_on)
        plan.behind_receipt()
        if nvtx_ranges.on:
            nvtx_ranges.RECV.pop()
            nvtx_ranges.C.push(flight.epoch, flight.seq)
        plan.c()
        if nvtx_ranges.on:
            nvtx_ranges.C.pop()

    def stage_a(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """Stage A alone, between its two events."""
        self._queue_a(self._plans[flight.index % len(self._plans)], flight, ends_ns)

    def stage_c(self, index: int) -> None:
        """Stage C alone, between its two events."""
        self._plans[index % len(self._plans)].c()

    def _queue_a(self, plan: _LaunchPlan, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        plan.before_a()
        if self._a_spins and flight.index >= self._d_in:
            self._link.queue_wait(flight.index - self._d_in, self._a)
        plan.begin_a()
        flight.failed = self._stage_a.enqueue(flight, plan.envelope, ends_ns)
        plan.behind_a()

    def _queue_send(self, plan: _LaunchPlan, flight: Flight) -> None:
        status = EnvelopeStatus(epoch=flight.epoch, seq=flight.seq, failed=flight.failed)
        self._link.queue_header(flight.index, status)
        plan.before_send()
        self._link.queue_send(flight.index, self._a if self._sends_from_a else None)
        plan.behind_send()
