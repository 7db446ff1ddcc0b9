"""Base of the ``peer`` and ``pinned`` links: copies, and counters that devices compare.

A send moves a slot to where the receiver looks for it and then sets the receiver's counter: two
commands of the copy engine, or one kernel (``ppstream_kernels.cuda_put``), which writes the header
on the way. The receiver's streams wait for the counter: the link's own by the driver, those of
stages, and for notes, by a kernel where there is one (``ppstream_kernels.cuda_wait``). Counters
only grow, and compare cyclically.
Where the memory lies, who maps it, and what is sent how, is the links'.

Where kernels do both, they can leave their times, too (``stamps``): a stage's stream then holds a
wait, the stage and a put, which never change from one use of a slot to the next. What does change,
counts and headers, the host writes into pinned memory before it queues them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.errors import ProtocolError
from ppstream.cuda.driver import WRAP
from ppstream.cuda.streams import stream
from ppstream.links.device_link import Headers, new_device_slots
from ppstream.links.headers import FAILED
from ppstream.links.slots import ALIGNMENT_BYTES
from ppstream_kernels.cuda_put import Route, Stamps
from ppstream_kernels.cuda_wait import StampedWait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.cuda.driver import CudaStream
    from ppstream.links.device_link import DeviceSlot
    from ppstream.links.slots import LinkShape, SlotLayout

COUNTER_BYTES: Final = 256  # of a counter: a line of its own
HEADER_WORDS: Final = FAILED + 1  # of either header, that a host writes
COUNTED_BYTES: Final = 4  # of them, that are compared
FAR_AHEAD: Final = 1 << 30  # of any count that is waited for, and within half the cycle
RELEASE_LIMIT_NS: Final = 500 * NS_PER_MS  # of each route
POLL_S: Final = 0.0002


class CounterAddresses(NamedTuple):
    """Addresses that this device can reach."""

    my_counter: int
    their_counter: int
    their_slots: int  # the first slot that this end's sends go to
    landing: int | None = None  # where the peer's sends arrive, if not in the slots themselves


class PutLauncher(Protocol):
    """Sends in one kernel each, as ``cuda_put.Puts``: a message for each slot, and the note."""

    def write_header(self, message: int, numbers: Sequence[int]) -> None: ...

    def queue(self, message: int, count: int, stream: Any) -> None: ...


class WaitLauncher(Protocol):
    """Waits for this end's counter in one kernel each, as ``cuda_wait.Waits``."""

    def queue(self, count: int, stream: Any) -> None: ...


class Launch(Protocol):
    """A kernel that never changes, as ``kernel_launch.KernelLaunch``; a part of graphs, too."""

    def queue(self, stream: Any) -> None: ...

    def add_to(self, graph: Any, after: list[Any]) -> Any: ...


class StampedLauncher(Protocol):
    """Makes such kernels, as ``cuda_stamped.StampedLaunches``."""

    def wait(self, call: StampedWait) -> Launch: ...

    def put(self, route: Route, counter: int, stamps: Stamps, header_words: int) -> Launch: ...


class CountedLink:
    """One end (device_link.DeviceLink).

    Args:
        out: layout of what this end sends.
        shape: of the link.
        device: of this rank; current.
        into: slots that the stages read.
        places: of counters and slots.
        make_puts: given the routes of all messages and the peer's counter; None: sends are copies.
        make_waits: given this end's counter; None: streams of stages wait by the driver, too.
        make_stamped: given how many messages; None: no kernel of this link leaves its times.
    """

    name = "counted"
    note_bytes = ALIGNMENT_BYTES  # the least that a slot has

    def __init__(
        self,
        out: SlotLayout,
        shape: LinkShape,
        device: torch.device,
        into: tuple[DeviceSlot, ...],
        places: CounterAddresses,
        make_puts: Callable[[Sequence[Route], int], PutLauncher] | None = None,
        make_waits: Callable[[int], WaitLauncher] | None = None,
        make_stamped: Callable[[int], StampedLauncher] | None = None,
    ) -> None:
        self.into = into
        self.out = new_device_slots(out, len(into), device)
        self._places = places
        self._generation = shape.generation
        self._headers = Headers(out, len(into), shape.generation)
        self._far = torch.zeros(1, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self._sent = self._expected = 0  # indices due
        self._counted = self._awaited = 0  # counts: of slots and of notes before them
        self._routes = [
            Route(slot.address, places.their_slots + number * slot.size, slot.size)
            for number, slot in enumerate(self.out)
        ]
        self._note = len(self._routes)
        self._routes.append(self._routes[0]._replace(size=self.note_bytes))
        self._puts = None if make_puts is None else make_puts(self._routes, places.their_counter)
        self._waits = None if make_waits is None else make_waits(places.my_counter)
        self.is_short = make_puts is not None
        self.spins = make_waits is not None
        slots = len(into)  # of sends, and as many of copies to the host
        self.stamped = None if make_stamped is None else make_stamped(2 * slots)
        torch.cuda.synchronize(device)
        self.sending, self.receiving = stream("sending"), stream("receiving")
        self._used = {self.sending, self.receiving}  # and stages' streams that send or wait

    def count_from(self, count: int) -> None:
        """Begin anew at index 0, with a counter that stands at ``count`` of its cycle.

        Nothing is in flight; the other end does the same, and neither sends before both are idle.
        """
        self._sent = self._expected = 0
        self._counted = self._awaited = count
        self.sending.write_value(self._places.my_counter, count)

    def queue_header(self, index: int, numbers: Sequence[int]) -> None:
        """With the kernel that sends the slot, or into the slot, so that one copy sends both."""
        number = index % len(self.out)
        if self._puts is not None:
            self._puts.write_header(number, (index, self._generation, *numbers))
            return
        header, size = self._headers.write(index, numbers)
        self.sending.copy(self.out[number].address, header, size)

    def queue_send(self, index: int, stream: CudaStream | None = None) -> None:
        """Bring slot ``index`` over, then count it."""
        if index != self._sent:
            raise ProtocolError(f"slot {index} was to be sent, {self._sent} is due")
        self._sent += 1
        self._send(index % len(self.out), self._stream(stream, self.sending))

    def queue_receive(self, index: int, stream: CudaStream | None = None) -> None:
        """Wait until the peer has counted ``index``, and fetch the slot from where it landed."""
        if index != self._expected:
            raise ProtocolError(f"slot {index} was to be received, {self._expected} is due")
        self._expected += 1
        if stream is None and self._places.landing is None:  # nothing but to wait for the count
            self._awaited += 1
            self.receiving.wait_value(self._places.my_counter, self._awaited)
            return
        number = index % len(self.into)
        spins = stream is not None
        at = self._stream(stream, self.receiving)
        self._receive(number, self.into[number].size, at, spins=spins)

    def queue_wait(self, index: int, stream: CudaStream) -> bool:
        """On the counter itself, unless slots are fetched from where they landed: that is later."""
        if self._places.landing is not None:
            return False
        self._wait(self.count_of(index), self._stream(stream, self.receiving), spins=True)
        return True

    def stamped_wait(self, stream: CudaStream, now: int, ended: int, other: int = 0) -> Launch:
        """Returns the wait of a stage's ``stream`` for a slot, whose count is read at ``now``.

        Args:
            stream: that it will be queued on.
            now: as of ``cuda_wait.StampedWait``, and the others.
            ended: the stamp.
            other: a second counter.
        """
        assert self.stamped is not None, "the link has no stamps"
        self._used.add(stream)
        return self.stamped.wait(StampedWait(self._places.my_counter, now, ended, other))

    def stamped_send(self, slot: int, stream: CudaStream, stamps: Stamps) -> Launch:
        """Returns the sending of ``slot`` on a stage's ``stream``, with count and header there."""
        assert self.stamped is not None, "the link has no stamps"
        self._used.add(stream)
        route, counter = self._routes[slot], self._places.their_counter
        return self.stamped.put(route, counter, stamps, HEADER_WORDS)

    def message_of(self, index: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """Returns what a ``stamped_send`` of the next slot reads: its count, then its header.

        Whoever asks queues it, and nothing before it.
        """
        if index != self._sent:
            raise ProtocolError(f"slot {index} was to be sent, {self._sent} is due")
        self._sent += 1
        self._counted += 1
        return (self._counted % WRAP, index, self._generation, *numbers)

    def count_of(self, index: int) -> int:
        """Returns the count that says that slot ``index`` has arrived; below 0 it stands anyway."""
        return (self._awaited - (self._expected - 1 - index)) % WRAP

    def queue_note(self) -> None:
        """Queues what the first slot holds in the place of its header."""
        self._send(self._note, self.receiving)

    def queue_note_receipt(self) -> None:
        """Into the first slot; no stage is running."""
        self._receive(0, self.note_bytes, self.receiving, spins=True)

    def end_waits(self) -> None:
        """Let every wait of this end pass, unless the peer counts once more behind this."""
        release = stream("release")
        release.write_value(self._places.my_counter, (self._awaited + FAR_AHEAD) % WRAP)
        self._used.add(release)  # before it is through, nothing may be unmapped

    def close(self) -> bool:
        """Let every wait of this end pass; whether all streams then ran dry."""
        self._far.fill_((self._awaited + FAR_AHEAD) % WRAP)

        def copy() -> None:
            source, release = self._far.data_ptr(), stream("release by copy")
            release.copy(self._places.my_counter, source, COUNTED_BYTES)  # the lower half is first
            self._used.add(release)

        return any(self._moves(route) for route in (self.end_waits, copy))

    def _stream(self, given: CudaStream | None, own: CudaStream) -> CudaStream:
        if given is None:
            return own
        self._used.add(given)
        return given

    def _send(self, message: int, stream: CudaStream) -> None:
        self._counted += 1
        if self._puts is not None:
            self._puts.queue(message, self._counted, stream.handle)
            return
        source, target, size = self._routes[message]
        stream.copy(target, source, size)
        stream.write_value(self._places.their_counter, self._counted)

    def _receive(self, number: int, size: int, stream: CudaStream, *, spins: bool) -> None:
        self._awaited += 1
        self._wait(self._awaited, stream, spins=spins)
        if self._places.landing is not None:
            slot = self.into[number]
            stream.copy(slot.address, self._places.landing + number * slot.size, size)

    def _wait(self, count: int, stream: CudaStream, *, spins: bool) -> None:
        """By a kernel where ``spins`` allows it: nothing runs meanwhile that it would hold up."""
        if spins and self._waits is not None:
            self._waits.queue(count, stream.handle)
        else:
            stream.wait_value(self._places.my_counter, count)

    def _moves(self, route: Callable[[], None]) -> bool:
        if self._is_idle():
            return True
        route()
        until_ns = now_ns() + RELEASE_LIMIT_NS
        while now_ns() < until_ns:
            if self._is_idle():
                return True
            time.sleep(POLL_S)
        return False

    def _is_idle(self) -> bool:
        return all(stream.is_idle() for stream in self._used)
