"""The ``pinned`` link: GPUs of one host that do not reach each other's memory.

Slots and a counter of each hop lie in host memory that both its ends map and reach. A send copies
to the host and counts there; the receiver's stream waits for the count, and fetches the slot. No
CPU on the path. The memory has no name: who sends opens the receiver's descriptor, and nothing is
left behind by a kill. Rules of ``peer_memory.py`` apply as they are.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from ppstream.core.errors import ConfigError, PeerLostError, ProtocolError
from ppstream.cuda.driver import register_host, unregister_host
from ppstream.links.device_counters import COUNTER_BYTES, CountedLink, CounterAddresses
from ppstream.links.device_link import layouts, new_device_slots, slot_count

if TYPE_CHECKING:
    from ppstream.control.rendezvous import Store
    from ppstream.links.slots import LinkShape, Position

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


class PinnedLink(CountedLink):
    """Both hops of a rank (device_link.DeviceLink). Arguments and errors as ``PeerLink``.

    Raises:
        ConfigError: there is not enough memory for the slots.
    """

    name = "pinned"

    def __init__(
        self,
        position: Position,
        store: Store,
        shape: LinkShape,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        count = slot_count(shape)
        out, into = layouts(shape, position)
        sizes = [COUNTER_BYTES + count * layout.slot_bytes for layout in (into, out)]
        self._memories = _mapped(position, store, sizes[0], sizes[1], timeout_s)
        mine, theirs = (
            register_host(memory.ctypes.data, size)
            for memory, size in zip(self._memories, sizes, strict=True)
        )
        self._is_pinned = True
        places = CounterAddresses(
            my_counter=mine,
            their_counter=theirs,
            their_slots=theirs + COUNTER_BYTES,
            landing=mine + COUNTER_BYTES,
        )
        super().__init__(out, shape, device, new_device_slots(into, count, device), places)

    def close(self) -> bool:
        """Release, wait for all streams, unpin; False when a stream does not move.

        Memory that is unmapped while it is pinned would spoil what is mapped there next.
        """
        if not super().close():
            return False
        if self._is_pinned:
            for memory in self._memories:
                unregister_host(memory.ctypes.data)
            self._is_pinned = False
        return True


def _mapped(
    position: Position, store: Store, size: int, their_size: int, timeout_s: float
) -> tuple[Memory, Memory]:
    """The memory that this rank receives in, zero at first, and that of the place behind it."""
    fd = os.memfd_create("ppstream-hop", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
        mine = mmap.mmap(fd, size)
        store.set(f"pinned/{position.place}", f"{os.getpid()} {fd} {size}")
        theirs = _theirs(store.get(f"pinned/{position.behind}", timeout_s), their_size)
        store.set(f"pinned/{position.behind}/taken", "1")
        store.get(f"pinned/{position.place}/taken", timeout_s)
    except OSError as error:
        raise ConfigError(
            [f"link: the slots need {size} bytes of shared memory: {error}"]
        ) from error
    finally:
        os.close(fd)
    return np.frombuffer(mine, dtype=np.uint8), np.frombuffer(theirs, dtype=np.uint8)


def _theirs(offer: str, wanted: int) -> mmap.mmap:
    """Maps what the place behind offers."""
    pid, descriptor, size = offer.split()
    if int(size) != wanted:
        raise ProtocolError(
            f"the next rank's slots are {size} bytes, this rank's layout has {wanted}: the ranks "
            "disagree on the policy's tensors or the queue bounds"
        )
    try:
        fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerLostError(f"the next rank's shared memory cannot be opened: {error}") from error
    try:
        return mmap.mmap(fd, wanted)
    finally:
        os.close(fd)
