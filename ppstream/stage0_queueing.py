"""What rank 0 queues for one envelope, on four streams; the picture stands in ``stage0_device.py``.

Nothing here waits, and nothing looks at what has happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ppstream import trace
from ppstream.link_device import pinned_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.control import Peer
    from ppstream.device_clock import DeviceClock
    from ppstream.flight import Flight
    from ppstream.link_device import DeviceLink, DeviceSlot
    from ppstream.memops import CudaStream, Event
    from ppstream.simulate_gpu import GpuWork
    from ppstream.slots import LinkShape, Slot
    from ppstream.stage_a_device import DeviceStageA
    from ppstream.underway import Marks, Underway


class Streams(NamedTuple):
    """Rank 0's own; the link has two more."""

    a: CudaStream  # torch's current one
    c: torch.cuda.Stream
    c_raw: CudaStream


class Parts(NamedTuple):
    """What the loop needs besides Rank0's parts."""

    link: DeviceLink
    peer: Peer
    shape: LinkShape
    streams: Streams
    clock: DeviceClock[Event]
    work_a: GpuWork
    work_c: GpuWork


class Queueing:
    """For the thread whose current stream is stage A's.

    Args:
        parts: streams and link.
        stage_a: queues windows.
        underway: the events of envelopes.
        is_fresh: A takes the credit; else the copy does.
    """

    def __init__(
        self, parts: Parts, stage_a: DeviceStageA, underway: Underway, *, is_fresh: bool
    ) -> None:
        self._parts = parts
        self._link = parts.link
        self._stage_a = stage_a
        self._underway = underway
        self._is_fresh = is_fresh
        self._d_in, self._d_out = parts.shape.d_in, parts.shape.d_out
        self._results = pinned_slots(parts.shape.result, len(parts.link.into))

    def result(self, index: int) -> Slot:
        """Where the result of ``index`` is in host memory once its last event is done."""
        return self._results[index % len(self._results)]

    def envelope(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """Queue everything that will happen to ``flight``."""
        marks = self._underway.marks(flight.index)
        if trace.on:
            trace.A.push(flight.epoch, flight.seq)
        self._queue_a(flight, marks, ends_ns)
        if trace.on:
            trace.A.pop()
            trace.SEND.push(flight.epoch, flight.seq)
        self._queue_send(flight, marks)
        if trace.on:
            trace.SEND.pop()
            trace.RECV.push(flight.epoch, flight.seq)
        self._queue_receipt(flight.index, marks)
        if trace.on:
            trace.RECV.pop()
            trace.C.push(flight.epoch, flight.seq)
        self._parts.streams.c_raw.wait_for(marks.received)
        self.stage_c(flight.index, marks)
        if trace.on:
            trace.C.pop()

    def stage_a(self, flight: Flight, marks: Marks, ends_ns: Sequence[int | None]) -> None:
        """Stage A alone, between its two events."""
        stream = self._parts.streams.a
        stream.record(marks.a0)
        self._stage_a.enqueue(flight, self._slot(flight.index), ends_ns)
        self._parts.work_a.queue()
        stream.record(marks.a1)

    def stage_c(self, index: int, marks: Marks) -> None:
        """Stage C alone, between its two events."""
        stream, source = self._parts.streams.c_raw, self._link.into[index % len(self._link.into)]
        stream.record(marks.c0)
        stream.copy(self.result(index).raw.data_ptr(), source.address, source.size)
        self.work_c()
        stream.record(marks.c1)

    def work_c(self) -> None:
        """What stands in for stage C."""
        if self._parts.work_c.products:
            with torch.cuda.stream(self._parts.streams.c):
                self._parts.work_c.queue()

    def _queue_a(self, flight: Flight, marks: Marks, ends_ns: Sequence[int | None]) -> None:
        behind = self._d_in if self._is_fresh else 1
        if (earlier := self._underway.earlier(flight.index, behind)) is not None:
            self._parts.streams.a.wait_for(earlier.received if self._is_fresh else earlier.sent)
        self.stage_a(flight, marks, ends_ns)

    def _queue_send(self, flight: Flight, marks: Marks) -> None:
        link = self._link
        link.queue_header(flight.index, (flight.epoch, flight.seq))
        giver = self._underway.earlier(flight.index, self._d_in)
        if giver is not None and not self._is_fresh:
            link.sending.wait_for(giver.received)
        link.sending.wait_for(marks.a1)
        link.sending.record(marks.committed)
        link.queue_send(flight.index)
        link.sending.record(marks.sent)

    def _queue_receipt(self, index: int, marks: Marks) -> None:
        self._link.queue_receive(index)
        if (freed := self._underway.earlier(index, self._d_out)) is not None:
            self._link.receiving.wait_for(freed.c0)
        self._link.receiving.record(marks.received)

    def _slot(self, index: int) -> DeviceSlot:
        return self._link.out[index % len(self._link.out)]
