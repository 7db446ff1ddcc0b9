"""Slots: the memory an envelope or a result sits in while it travels, and the order they travel in.

Which slot an index uses follows from the credits alone, so none is ever released by a message:
committing envelope n needs fewer than ``d_in`` outstanding, so the results up to n - d_in were
received, and the slot of envelope n - d_in - 1 is free. A result is received only while fewer than
``d_out`` wait and C is serial, so whoever writes result n knows those up to n - d_in - d_out - 1
were emitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.core.errors import ProtocolError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor

    from ppstream.core.specs import TensorSpec


class Position(NamedTuple):
    """Place of a rank in the chain of ranks, which ends where it begins.

    Attributes:
        place: rank 0 is place 0.
        places: policy ranks in all.
    """

    place: int
    places: int = 1

    @property
    def is_front(self) -> bool:
        """True on rank 0."""
        return self.place == 0

    @property
    def relays(self) -> bool:
        """True on a policy rank of several: what it sends carries names that its host knows not."""
        return self.places > 1 and not self.is_front

    @property
    def behind(self) -> int:
        """The place that this rank's hop leads to."""
        return (self.place + 1) % (self.places + 1)


FRONT: Final = Position(0)  # of two ranks: rank 0
BACK: Final = Position(1)  # and the policy rank
#: Both headers begin with these; a link writes them when it sends, checks them when it receives.
INDEX = 0
GENERATION = 1
ALIGNMENT_BYTES = 64
NOT_IN_NUMPY: Final = (torch.bfloat16, torch.float8_e4m3fn)


class SlotLayout:
    """Offsets of the header and each tensor in a slot of ``slot_bytes`` bytes.

    One contiguous block: a header row of int64 first, then the tensors, each on a boundary of
    ``ALIGNMENT_BYTES``.

    Args:
        header: names of the int64 header fields, in order.
        tensors: the envelope's tensors, in order.
        rows: the batch dimension B that is put before each spec's shape.
    """

    def __init__(self, header: tuple[str, ...], tensors: tuple[TensorSpec, ...], rows: int) -> None:
        names = [spec.name for spec in tensors]
        if len(set(names)) != len(names):
            raise SpecError(f"tensor names of an envelope must be unique, got {names}")
        self.header = header
        self.tensors = tensors
        self.rows = rows
        self.offsets: dict[str, int] = {}
        position = aligned(len(header) * 8)
        for spec in tensors:
            self.offsets[spec.name] = position
            position = aligned(position + spec.bytes_for(rows))
        self.slot_bytes = position

    def views(self, slot: Tensor) -> Mapping[str, Tensor]:
        """Named tensors ``[rows, *shape]`` that share memory with ``slot``, a uint8 tensor.

        Read-only: a name cannot be bound to other memory.
        """
        views: dict[str, Tensor] = {}
        for spec in self.tensors:
            start = self.offsets[spec.name]
            flat = slot[start : start + spec.bytes_for(self.rows)].view(getattr(torch, spec.dtype))
            views[spec.name] = flat.view(self.rows, *spec.shape)
        return MappingProxyType(views)

    def header_view(self, slot: Tensor) -> Tensor:
        """The header as an int64 tensor ``[len(header)]`` that shares memory with ``slot``."""
        return slot[: len(self.header) * 8].view(torch.int64)


def aligned(position: int) -> int:
    """The next boundary of ``ALIGNMENT_BYTES``, or this one."""
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class Slot:
    """Views of one slot: valid while the link is open, and to be used while its index is due.

    Attributes:
        header: int64, the fields of the layout in order.
        words: the same, read and written as ints: no array stands between.
        tensors: by name, ``[rows, *shape]``, sharing the slot's memory.
        arrays: the same as numpy arrays, those whose dtype numpy has.
        raw: the whole slot, uint8.
    """

    header: np.ndarray[Any, np.dtype[np.int64]]
    words: memoryview
    tensors: Mapping[str, Tensor]
    arrays: Mapping[str, np.ndarray[Any, Any]]
    raw: Tensor


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Shape of a link that both its ends must agree on.

    Args:
        envelope: layout from rank 0 to the policy rank.
        result: layout of the way back.
        d_in: bound of envelopes committed and not yet answered.
        d_out: bound of results received and not yet decoding.
        generation: of this start of the run; anything else on the link is a protocol error.
        ahead: envelopes beyond ``d_in`` that stage B may be queued for on a GPU before they exist;
            0: it is queued once its envelope was seen.
        is_first_hop: the hop in front of the policy rank comes from rank 0.

    On a policy rank of a chain ``envelope`` is the layout of the hop in front of it, ``result``
    that of the hop behind it; on rank 0 they are those of the first and of the last hop.
    """

    envelope: SlotLayout
    result: SlotLayout
    d_in: int
    d_out: int
    generation: int = 0
    ahead: int = 0
    is_first_hop: bool = True

    @property
    def envelope_slots(self) -> int:
        """Slots that keep any envelope from being overwritten before it is answered."""
        return self.d_in + 1 if self.is_first_hop else self.result_slots

    @property
    def result_slots(self) -> int:
        """Slots that keep any result from being overwritten before it is emitted."""
        return self.d_in + self.d_out + 1


def make_slots(memory: Tensor, layout: SlotLayout, count: int) -> tuple[Slot, ...]:
    """``count`` slots side by side in ``memory``, a uint8 tensor of at least that many bytes."""
    slots = []
    for start in range(0, count * layout.slot_bytes, layout.slot_bytes):
        raw = memory[start : start + layout.slot_bytes]
        tensors = layout.views(raw)
        arrays = {
            name: tensor.numpy()
            for name, tensor in tensors.items()
            if tensor.dtype not in NOT_IN_NUMPY
        }
        header = layout.header_view(raw).numpy()
        slots.append(Slot(header, header.data, tensors, arrays, raw))
    return tuple(slots)


def new_slots(layout: SlotLayout, count: int) -> tuple[Slot, ...]:
    """``count`` zeroed slots in this process's own memory."""
    return make_slots(torch.zeros(count * layout.slot_bytes, dtype=torch.uint8), layout, count)


def orders_of(at: Position, generation: int) -> tuple[Order, Order]:
    """Returns the orders of the hops out of the rank at a position and into it."""
    place, places = at
    names = ["envelope", *(f"output of place {k}" for k in range(1, places)), "result"]
    return Order(names[place], generation), Order(names[place - 1], generation)


class Order:
    """Indices that must come one after the other from 0, as one end of one direction sees them."""

    def __init__(self, what: str, generation: int) -> None:
        self.next = 0
        self._what = what
        self._generation = generation

    def send(self, index: int, slot: Slot) -> None:
        """Account for ``index`` being sent, and write it and the generation into its header.

        Raises:
            ProtocolError: another index is due.
        """
        if index != self.next:
            raise ProtocolError(f"{self._what} {index} was to be sent, {self.next} is due")
        words = slot.words
        words[INDEX], words[GENERATION] = index, self._generation
        self.next += 1

    def receive(self, index: int, slot: Slot) -> int:
        """Account for ``index`` having arrived in ``slot``; returns it.

        Raises:
            ProtocolError: another index is due, or the header names another index or generation.
        """
        if index != self.next:
            raise ProtocolError(f"{self._what} {index} was announced, {self.next} is due")
        words = slot.words
        found, generation = words[INDEX], words[GENERATION]
        if found != index or generation != self._generation:
            raise ProtocolError(
                f"slot of {self._what} {index} (generation {self._generation}) "
                f"holds {found} (generation {generation})"
            )
        self.next += 1
        return index
