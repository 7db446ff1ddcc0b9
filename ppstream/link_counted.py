"""What the ``peer`` and ``pinned`` links are made of: copies, and counters that devices compare.

A send copies a slot to where the receiver looks for it and then writes the receiver's counter; the
receiver's stream waits for the counter. Counters only grow, and compare cyclically. Where the
memory lies, and who maps it, is the links'.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ppstream.clock import NS_PER_MS, now_ns
from ppstream.cuda_streams import stream
from ppstream.errors import ProtocolError
from ppstream.link_device import Headers, new_device_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.link_device import DeviceSlot
    from ppstream.slots import LinkShape
    from ppstream.specs import SlotLayout

COUNTER_BYTES: Final = 256  # of a counter: a line of its own
FAR_AHEAD: Final = 1 << 30  # of any index that is waited for, and within half the cycle
CYCLE: Final = 1 << 31
RELEASE_LIMIT_NS: Final = 500 * NS_PER_MS  # of each route
POLL_S: Final = 0.0002


class Places(NamedTuple):
    """Addresses that this device can reach."""

    my_counter: int
    their_counter: int
    their_slots: int  # the first slot that this end's sends go to
    landing: int | None = None  # where the peer's sends arrive, if not in the slots themselves


class CountedLink:
    """One end (link_device.DeviceLink).

    Args:
        out: layout of what this end sends.
        shape: of the link.
        device: of this rank; current.
        into: slots that the stages read.
        places: of counters and slots.
    """

    name = "counted"

    def __init__(
        self,
        out: SlotLayout,
        shape: LinkShape,
        device: torch.device,
        into: tuple[DeviceSlot, ...],
        places: Places,
    ) -> None:
        self.into = into
        self.out = new_device_slots(out, len(into), device)
        self._places = places
        self._headers = Headers(out, len(into), shape.generation)
        self._far = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self._sent = self._expected = 0
        torch.cuda.synchronize(device)
        self.sending, self.receiving = stream("sending"), stream("receiving")

    def queue_header(self, index: int, numbers: Sequence[int]) -> None:
        """Into this end's slot, so that it travels in the one copy that sends the slot."""
        header, size = self._headers.write(index, numbers)
        self.sending.copy(self.out[index % len(self.out)].address, header, size)

    def queue_send(self, index: int) -> None:
        """Copy slot ``index`` over, then count it."""
        if index != self._sent:
            raise ProtocolError(f"slot {index} was to be sent, {self._sent} is due")
        place = index % len(self.out)
        slot = self.out[place]
        self.sending.copy(self._places.their_slots + place * slot.size, slot.address, slot.size)
        self._sent += 1
        self.sending.write_value(self._places.their_counter, self._sent)

    def queue_receive(self, index: int) -> None:
        """Wait until the peer has counted ``index``, and fetch the slot from where it landed."""
        if index != self._expected:
            raise ProtocolError(f"slot {index} was to be received, {self._expected} is due")
        self._expected += 1
        self.receiving.wait_value(self._places.my_counter, self._expected)
        if self._places.landing is not None:
            place = index % len(self.into)
            slot = self.into[place]
            self.receiving.copy(slot.address, self._places.landing + place * slot.size, slot.size)

    def close(self) -> bool:
        """Let every wait of this end pass; whether both streams then ran dry."""
        value = (self._expected + FAR_AHEAD) % CYCLE
        self._far.fill_(value)

        def write() -> None:
            stream("release").write_value(self._places.my_counter, value)

        def copy() -> None:
            source = self._far.data_ptr()
            stream("release by copy").copy(self._places.my_counter, source, self._far.nbytes)

        return any(self._moves(route) for route in (write, copy))

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
        return self.receiving.is_idle() and self.sending.is_idle()
