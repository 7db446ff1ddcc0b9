"""The ``pinned`` link: two GPUs of one host that do not reach each other's memory.

Slots and counters lie in host memory that both processes map and both devices reach. A send copies
to the host and counts there; the receiver's stream waits for the count, and fetches the slot. No
CPU on the path. The memory has no name: the policy rank opens rank 0's descriptor, and nothing is
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
from ppstream.links.device_counters import COUNTER_BYTES, CountedLink, Places
from ppstream.links.device_link import layouts, new_device_slots, slot_count
from ppstream.links.slots import FRONT

if TYPE_CHECKING:
    from ppstream.control.rendezvous import Store
    from ppstream.links.slots import LinkShape

OFFER, TAKEN = "pinned/offer", "pinned/taken"


class PinnedLink(CountedLink):
    """One end (link_device.DeviceLink). Arguments and errors as ``PeerLink``.

    Raises:
        ConfigError: there is not enough memory for the slots.
    """

    name = "pinned"

    def __init__(
        self,
        side: str,
        store: Store,
        shape: LinkShape,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        count = slot_count(shape)
        out, into = layouts(shape, side)
        size = 2 * COUNTER_BYTES + count * (out.slot_bytes + into.slot_bytes)
        self._memory = _mapped(side, store, size, timeout_s)
        base = register_host(self._memory.ctypes.data, size)
        self._is_pinned = True
        counters = base, base + COUNTER_BYTES
        envelopes = base + 2 * COUNTER_BYTES
        results = envelopes + count * shape.envelope.slot_bytes
        is_front = side == FRONT
        places = Places(
            my_counter=counters[not is_front],
            their_counter=counters[is_front],
            their_slots=envelopes if is_front else results,
            landing=results if is_front else envelopes,
        )
        super().__init__(out, shape, device, new_device_slots(into, count, device), places)

    def close(self) -> bool:
        """Release, wait for all streams, unpin; False when a stream does not move.

        Memory that is unmapped while it is pinned would spoil what is mapped there next.
        """
        if not super().close():
            return False
        if self._is_pinned:
            unregister_host(self._memory.ctypes.data)
            self._is_pinned = False
        return True


def _mapped(
    side: str, store: Store, size: int, timeout_s: float
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The memory that both ends share, ``size`` bytes, zero at first."""
    if side == FRONT:
        fd = os.memfd_create("ppstream-link", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
            store.set(OFFER, f"{os.getpid()} {fd} {size}")
            store.get(TAKEN, timeout_s)
        except OSError as error:
            raise ConfigError(
                [f"link: the slots need {size} bytes of shared memory: {error}"]
            ) from error
        finally:
            os.close(fd)
        return np.frombuffer(memory, dtype=np.uint8)
    pid, theirs, their_size = store.get(OFFER, timeout_s).split()
    if int(their_size) != size:
        raise ProtocolError(
            f"rank 0's slots are {their_size} bytes, this rank's layout has {size}: the ranks "
            "disagree on the policy's tensors or the queue bounds"
        )
    try:
        fd = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerLostError(f"rank 0's shared memory cannot be opened: {error}") from error
    try:
        memory = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    store.set(TAKEN, "1")
    return np.frombuffer(memory, dtype=np.uint8)
