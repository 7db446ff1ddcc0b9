"""Hops between GPUs, as the loops see them: all ends alike, ordered by the devices alone.

A rank's link is its two hops: one to the place behind it, one from the place before; of two ranks
both lead to the same peer. It owns the slots that the rank before writes, and sends from its own.
The host queues sends and receipts ahead of the data; who waits for whom is decided on the devices,
by counters. Which slot an index uses follows from the credits, as in ``slots.py``, with one count
of slots for all hops. The links themselves are ``peer_memory.py``, ``pinned_memory.py`` and
``nccl.py``; what ends a wait for a peer that is gone is the control socket's owner, who calls
``close``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ppstream.core.clock import NS_PER_MS
from ppstream.links.slots import GENERATION, INDEX, make_slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from ppstream.cuda.driver import CudaStream
    from ppstream.links.slots import LinkShape, Position, Slot, SlotLayout

#: Envelopes that a host queues beyond D_in, at most: it may be late by as many periods.
AHEAD: Final = 6
#: Launches that one stream's queue may hold while it waits for the other rank. A full queue holds
#: up the host inside a launch: seen at 1,020 launches, of kernels and of graphs alike,
LAUNCHES_AHEAD: Final = 900
#: and at some 5,000 nodes of graphs whose kernels differ.
NODES_AHEAD: Final = 2_000
EVENT_LAUNCHES: Final = 12  # of an envelope besides its stage: waits, events, copies, episodes
LONG_STAGE_NS: Final = NS_PER_MS  # beside such a stage the host is quick enough without run-ahead
WORD_BYTES: Final = 8  # of a header


class DeviceSlot(NamedTuple):
    """One slot in device memory.

    Attributes:
        tensors: by name, ``[rows, *shape]``, sharing its memory.
        header: int64, the layout's fields in order.
        raw: the whole slot, uint8.
        address: of its first byte.
        size: in bytes.
    """

    tensors: Mapping[str, Tensor]
    header: Tensor
    raw: Tensor
    address: int
    size: int


class DeviceLink(Protocol):
    """Both hops of a rank. One thread queues; the loops put events and header copies there, too.

    Attributes:
        name: the kind, for the log and the report.
        out: slots that this rank sends from; index n is in slot ``n % len(out)``.
        into: slots that the sends of the rank before arrive in.
        sending, receiving: the streams.
        is_short: a send of this end is one short kernel. In the stream that fills the slot it saves
            a hop (some 5 µs of latency), but takes its time from the next use of that stream.
        spins: a stage's stream that waits here does so by a kernel of its own: sooner than over
            ``receiving`` and an event, but it slows down what fills the device meanwhile.
        note_bytes: of a note, a message without an index.
    """

    name: str
    out: tuple[DeviceSlot, ...]
    into: tuple[DeviceSlot, ...]
    sending: CudaStream
    receiving: CudaStream
    is_short: bool
    spins: bool
    note_bytes: int

    def queue_header(self, index: int, numbers: Sequence[int]) -> None:
        """Before anything of ``index`` is waited for: what its header says behind the generation.

        To be called again for a slot only when its last send is known to be over.
        """

    def queue_send(self, index: int, stream: CudaStream | None = None) -> None:
        """Send slot ``index`` when ``stream`` comes to it: the next index, in order.

        Args:
            index: of the slot.
            stream: default ``sending``.
        """

    def queue_receive(self, index: int, stream: CudaStream | None = None) -> None:
        """Hold ``stream`` until slot ``index`` has arrived in full: the next index, in order.

        Args:
            index: of the slot.
            stream: default ``receiving``.
        """

    def queue_wait(self, index: int, stream: CudaStream) -> bool:
        """Hold ``stream``, too, until slot ``index`` has arrived: its receipt stands queued.

        It saves the way from ``receiving`` over an event. False: this link cannot, nothing is held.
        """

    def queue_note(self) -> None:
        """Send a note when ``receiving`` comes to it; only before the first slot."""

    def queue_note_receipt(self) -> None:
        """Hold ``receiving`` until a note has arrived; only before the first slot."""

    def close(self) -> bool:
        """End every wait of this end and give up the peer's memory; False: a stream still waits.

        After False nothing may free memory or synchronise; leave the process with ``os._exit``.
        Results behind a wait that was ended so mean nothing.
        """


class Headers:
    """Pinned headers of the slots of one end, each written before its slot is sent."""

    def __init__(self, layout: SlotLayout, count: int, generation: int) -> None:
        import torch

        self._fields = len(layout.header)
        memory = torch.zeros(
            count, self._fields, dtype=torch.int64, pin_memory=torch.cuda.is_available()
        )
        memory[:, GENERATION] = generation
        self._count = count
        self._memory, self._address = memory, memory.data_ptr()
        self._words: memoryview = memory.view(-1).numpy().data

    def write(self, index: int, numbers: Sequence[int]) -> tuple[int, int]:
        """Fill the header of ``index``; returns its address and its size in bytes."""
        begin = index % self._count * self._fields
        self._words[begin + INDEX] = index
        for at, number in enumerate(numbers, begin + GENERATION + 1):
            self._words[at] = number
        return self._address + begin * WORD_BYTES, self._fields * WORD_BYTES


def device_slots(memory: Tensor, layout: SlotLayout, count: int) -> tuple[DeviceSlot, ...]:
    """``count`` slots side by side in ``memory``, uint8 on a device."""
    slots = []
    for start in range(0, count * layout.slot_bytes, layout.slot_bytes):
        raw = memory[start : start + layout.slot_bytes]
        view = DeviceSlot(
            layout.views(raw), layout.header_view(raw), raw, raw.data_ptr(), layout.slot_bytes
        )
        slots.append(view)
    return tuple(slots)


def slot_count(shape: LinkShape) -> int:
    """Returns the slots of either direction: for the one that needs more, and for queued envelopes.

    A graph that writes a slot is never started again while it is queued. One more, since the host
    may hear of a receipt before it hears of the commit that took the credit of that slot's last.
    """
    return max(shape.result_slots, most_queued(shape)) + 1


def most_queued(shape: LinkShape) -> int:
    """Returns how many envelopes may be queued on a rank; one beyond the credits costs nothing."""
    return shape.d_in + max(1, shape.ahead)


def may_await(nodes: int | None) -> bool:
    """True when one stage of ``nodes`` fits into the driver's queue while it waits there."""
    return nodes is not None and nodes <= NODES_AHEAD


def run_ahead(nodes: int | None, stage_ns: int, d_in: int, *, launches: int = 1) -> int:
    """Returns how many envelopes beyond ``d_in`` a host may queue a stage for, before they exist.

    While its input is missing, all that is queued waits for the other rank. It must fit into the
    driver's queue, or a launch waits for the other rank, too.

    Args:
        nodes: kernels, copies and memsets of one call of the stage; None: not known.
        stage_ns: its usual duration.
        d_in: of the link.
        launches: that queue these; a graph is one.

    Returns:
        0: the stage may be queued only when its input was seen.
    """
    if nodes is None or stage_ns >= LONG_STAGE_NS:
        return 0
    fitting = min(LAUNCHES_AHEAD // (launches + EVENT_LAUNCHES), NODES_AHEAD // max(1, nodes))
    return max(0, min(AHEAD, fitting - d_in))


def layouts(shape: LinkShape, position: Position) -> tuple[SlotLayout, SlotLayout]:
    """Returns the layouts that the rank at ``position`` sends and receives."""
    both = shape.envelope, shape.result
    return both if position.is_front else (shape.result, shape.envelope)


def new_device_slots(
    layout: SlotLayout, count: int, device: torch.device
) -> tuple[DeviceSlot, ...]:
    """``count`` zeroed slots of this process's own."""
    import torch

    memory = torch.zeros(count * layout.slot_bytes, dtype=torch.uint8, device=device)
    return device_slots(memory, layout, count)


def pinned_slots(layout: SlotLayout, count: int) -> tuple[Slot, ...]:
    """``count`` zeroed slots in pinned host memory, for copies from a device."""
    import torch

    memory = torch.zeros(
        count * layout.slot_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
    )
    return make_slots(memory, layout, count)
