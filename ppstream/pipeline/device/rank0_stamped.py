"""Work that rank 0 queues for one envelope where kernels leave the times: two streams, no events.

    stage A      wait for the credit, stamp · A · put the slot, stamp and count
    receiving    wait for the peer's count · copy the result to pinned memory, between two stamps

With D_in = 1 all of it is in stage A's stream, one after the other: nothing could run beside it.
A credit is the count of the result ``d_in`` envelopes earlier, and a place in D_out the count of
the copies: A's wait looks at both. Every kernel and its arguments are the same each time a slot is
used; the host writes counts and headers into pinned memory first, and reads the stamps there. So
what stands in stage A's stream is one graph, where stage A is made of graphs alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ppstream.cuda.device_stamps import DeviceStamp, SlotWords
from ppstream.cuda.driver import WRAP, LaunchSequence
from ppstream.cuda.linear_graph import LinearGraph
from ppstream.links.device_counters import HEADER_WORDS
from ppstream.links.device_link import pinned_slots
from ppstream.links.headers import EnvelopeStatus
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.device.in_flight import Marks
from ppstream_kernels.cuda_put import Route, Stamps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.cuda.linear_graph import GraphPart
    from ppstream.ingest.intake import Intake
    from ppstream.links.device_counters import CountedLink, Launch
    from ppstream.links.device_link import DeviceSlot
    from ppstream.links.slots import Slot
    from ppstream.pipeline.device.rank0_queue import Rank0Device
    from ppstream.pipeline.device.stage_a import DeviceStageA
    from ppstream.pipeline.flight import Flight

#: Words of a slot: its stamps, then what its kernels read.
_A0, _A1, _C0, _C1 = range(4)
_STAMPS: Final = 4
_WAIT: Final = _STAMPS  # counts of the credit and of the place
_TAKE: Final = _WAIT + 2  # the copies' count
_SEND: Final = _TAKE + 1  # the slots' count, then the header
_NO_STAMPS: Final = (0,) * _STAMPS
_WIDTH: Final = -(-(_SEND + 1 + HEADER_WORDS) // 8) * 8


class _Kernels(NamedTuple):
    """Of one slot of either direction."""

    envelope: DeviceSlot
    result: Slot  # in host memory
    begin_a: Launch
    end_a: Launch  # of an A that is timed alone, in place of ``send``
    send: Launch
    take: LinearGraph  # of one kernel, which by itself costs the host more to launch


class StampMarks(Marks):
    """As ``Marks``, of a slot's stamps."""

    words: memoryview  # the four of the slot

    @classmethod
    def of(cls, slots: SlotWords, number: int) -> StampMarks:
        a0, a1, c0, c1 = (slots.stamp(number, at) for at in range(_STAMPS))
        # nothing is sent by a copy that takes the credit, and a result is received where C begins
        marks = cls(a0, a1, a1, c0, c0, c1)
        begin = number * slots.width
        marks.words = slots.words[begin : begin + _STAMPS]
        return marks

    def ns_since(self, earlier: DeviceStamp) -> Sequence[int]:
        """As ``Marks``."""
        base_ns = earlier.ns
        a0, a1, c0, c1 = self.words
        return a0 - base_ns, a1 - base_ns, c0 - base_ns, c0 - base_ns, c1 - base_ns


class StampedQueueing:
    """As ``Queueing``, over a link whose kernels stamp; A takes the credit.

    Args:
        parts: streams.
        link: with stamps.
        stage_a: queues windows.

    Attributes:
        marks: stamps of each slot.
    """

    def __init__(self, parts: Rank0Device, link: CountedLink, stage_a: DeviceStageA) -> None:
        self._link, self._stage_a, self._a = link, stage_a, parts.streams.a
        self._d_in, self._d_out = parts.shape.d_in, parts.shape.d_out
        self._receives_on = self._a if self._d_in == 1 else None
        self._takes_on = self._receives_on or link.receiving
        self._work_a = LaunchSequence(*parts.work_a.calls(self._a))
        slots = len(link.out)
        self._slots = SlotWords(slots, _WIDTH)
        self._taken = torch.zeros(1, dtype=torch.int32, device=link.into[0].raw.device)
        self._taken_count = 0  # of the newest envelope
        results = pinned_slots(parts.shape.result, slots)
        self._kernels = [self._of(number, result) for number, result in enumerate(results)]
        self._wholes: list[Callable[[], None]] = []  # of each slot; empty: stage A is calls
        self._work_parts = parts.work_a.parts()
        self._made_for: Intake | None = None
        self.marks = [StampMarks.of(self._slots, number) for number in range(slots)]

    def _of(self, number: int, result: Slot) -> _Kernels:
        link, a, stamped = self._link, self._a, self._link.stamped
        assert stamped is not None, "the link has no stamps"
        source, taken = link.into[number], self._taken.data_ptr()

        def at(word: int) -> int:
            return self._slots.address(number, word)

        taking = Route(source.address, result.raw.data_ptr(), source.size)
        take = stamped.put(taking, taken, Stamps(at(_TAKE), at(_C0), at(_C1)), 0)
        return _Kernels(
            link.out[number],
            result,
            begin_a=link.stamped_wait(a, at(_WAIT), at(_A0), taken),
            end_a=link.stamped_wait(a, at(_WAIT), at(_A1), taken),
            send=link.stamped_send(number, a, Stamps(at(_SEND), at(_A1))),
            take=LinearGraph((take,)),
        )

    def prepare(self) -> bool:
        """Make the graph of each slot, if the intake has changed; whether it has.

        Nothing is queued then.
        """
        if self._stage_a.intake is self._made_for:
            return False
        self._made_for = self._stage_a.intake
        self._wholes = [] if self._work_parts is None else self._made(self._work_parts)
        return True

    def _made(self, work: Sequence[GraphPart]) -> list[Callable[[], None]]:
        wholes: list[Callable[[], None]] = []
        for kernels in self._kernels:
            window = self._stage_a.graph(kernels.envelope)
            if window is None:
                return []
            graph = LinearGraph((kernels.begin_a, window, *work, kernels.send))
            wholes.append(partial(graph.queue, self._a.handle))
        return wholes

    @property
    def graphs(self) -> int:
        """Of slots; 0: stage A is queued by calls."""
        return len(self._wholes)

    def result(self, index: int) -> Slot:
        """As ``Queueing``."""
        return self._kernels[index % len(self._kernels)].result

    def envelope(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """As ``Queueing``."""
        kernels = self._kernels[flight.index % len(self._kernels)]
        if nvtx_ranges.on:
            nvtx_ranges.A.push(flight.epoch, flight.seq)
        self._taken_count = (flight.index + 1) % WRAP
        if self._wholes:
            self._queue_whole(kernels, flight, ends_ns)
        else:
            self._queue_a(kernels, flight, ends_ns)
        if nvtx_ranges.on:
            nvtx_ranges.A.pop()
            nvtx_ranges.SEND.push(flight.epoch, flight.seq)
        if not self._wholes:
            self._write_message(flight)
            kernels.send.queue(self._a.handle)
        if nvtx_ranges.on:
            nvtx_ranges.SEND.pop()
            nvtx_ranges.RECV.push(flight.epoch, flight.seq)
        self._link.queue_receive(flight.index, self._receives_on)
        if nvtx_ranges.on:
            nvtx_ranges.RECV.pop()
            nvtx_ranges.C.push(flight.epoch, flight.seq)
        kernels.take.queue(self._takes_on.handle)
        if nvtx_ranges.on:
            nvtx_ranges.C.pop()

    def stage_a(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """Stage A alone, between its two stamps."""
        kernels = self._kernels[flight.index % len(self._kernels)]
        self._queue_a(kernels, flight, ends_ns)
        kernels.end_a.queue(self._a.handle)

    def stage_c(self, index: int) -> None:
        """Stage C alone, between its two stamps."""
        number = index % len(self._kernels)
        begin = number * _WIDTH
        words = self._slots.words
        words[begin + _C0] = words[begin + _C1] = 0
        words[begin + _TAKE] = self._taken_count  # which stays as it is
        self._kernels[number].take.queue(self._takes_on.handle)

    def _queue_a(self, kernels: _Kernels, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        self._write_counts(flight.index)
        kernels.begin_a.queue(self._a.handle)
        flight.failed = self._stage_a.enqueue(flight, kernels.envelope, ends_ns)
        self._work_a()

    def _queue_whole(
        self, kernels: _Kernels, flight: Flight, ends_ns: Sequence[int | None]
    ) -> None:
        """Stage A and its sending, as one graph; what it is made of cannot fail while queued."""
        index, link = flight.index, self._link
        number = index % len(self._wholes)
        giver = index - self._d_in
        self._slots.write(
            number,
            0,
            *_NO_STAMPS,
            link.count_of(giver),
            (giver - self._d_out + 1) % WRAP,
            self._taken_count,
            *link.message_of(index, (flight.epoch, flight.seq, 0)),
        )
        self._stage_a.enqueue(flight, kernels.envelope, ends_ns, self._wholes[number])

    def _write_counts(self, index: int) -> None:
        """Clear the slot's stamps, and write the words that its wait reads."""
        number, giver = index % len(self._kernels), index - self._d_in
        place = (giver - self._d_out + 1) % WRAP
        self._slots.write(number, 0, *_NO_STAMPS, self._link.count_of(giver), place)

    def _write_message(self, flight: Flight) -> None:
        """Write the words that the slot's sending and the copy of its result read."""
        status = EnvelopeStatus(epoch=flight.epoch, seq=flight.seq, failed=flight.failed)
        message = self._link.message_of(flight.index, status)
        number = flight.index % len(self._kernels)
        self._slots.write(number, _TAKE, self._taken_count, *message)
