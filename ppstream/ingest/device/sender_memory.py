"""Frames that a GPU copies out of the memory of who sent them: rank 0's CPU does not touch them.

The first ``LOCKED_BYTES`` of a robot's memory (``wire/message_memory.py``) are mapped and
page-locked when its first frame comes. A frame further behind, or of a memory that cannot be
locked, is read into the host's ring. The CPU never reads the mapping.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ppstream.core.errors import ProtocolError
from ppstream.cuda.driver import DeviceError, register_host, unregister_host
from ppstream.ingest.sample_ledger import OVERWRITTEN

if TYPE_CHECKING:
    import mmap

    from ppstream.ingest.ring import SensorRing
    from ppstream.wire.message_memory import LargeMessage, PeerMemory

LOCKED_BYTES: Final = 4 << 20  # of each; what waits to be read by a GPU seldom needs more
LOCKED_MAX: Final = 64  # memories, with those that are gone and not unlocked yet
REFUSED: Final = 0  # no address


class KeptFrame(NamedTuple):
    """A frame in its sender's memory, which leaves it alone as long as ``message`` exists."""

    number: int
    address: int  # for the GPU
    message: LargeMessage


class SenderMemories:
    """Page-locked memories of robots; for the thread that writes the rings."""

    def __init__(self) -> None:
        self._addresses: weakref.WeakKeyDictionary[PeerMemory, int] = weakref.WeakKeyDictionary()
        self._locked: dict[int, mmap.mmap] = {}  # by address
        self._gone: list[int] = []  # addresses: nobody sends there any more
        self._is_closed = False

    def frame(self, number: int, message: LargeMessage, offset: int, size: int) -> KeptFrame | None:
        """Returns ``size`` bytes at ``offset`` of ``message``; None: the GPU cannot read them.

        Raises:
            ProtocolError: they are not there.
        """
        memory, at = message.place(offset, size)
        if at + size > LOCKED_BYTES:
            return None
        address = self._addresses.get(memory)
        if address is None:
            address = self._addresses[memory] = self._lock(memory)
        if address == REFUSED:
            return None
        if at + size > len(self._locked[address]):
            raise ProtocolError("memory that ends too early")
        return KeptFrame(number, address + at, message)

    def unlock_gone(self) -> None:
        """Unlock what nobody sends to; to be called while nothing is queued on the GPU.

        The driver may wait for all that is, and hold up every launch meanwhile.
        """
        while self._gone:
            self._unlock(self._gone.pop())

    def close(self) -> None:
        """Unlock everything; no copy is under way."""
        self._is_closed = True
        self._addresses.clear()
        while self._locked:
            self._unlock(next(iter(self._locked)))

    def _lock(self, memory: PeerMemory) -> int:
        if self._is_closed or len(self._locked) >= LOCKED_MAX:
            return REFUSED
        try:
            mapping = memory.map(LOCKED_BYTES)
            address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
            register_host(address, len(mapping))
        except (OSError, ValueError, DeviceError):  # it is read by the CPU instead
            return REFUSED
        self._locked[address] = mapping
        weakref.finalize(memory, self._gone.append, address).atexit = False
        return address

    def _unlock(self, address: int) -> None:
        if (mapping := self._locked.pop(address, None)) is not None:
            unregister_host(address)
            # the last to refer to a stranger's memory frees it: 256 MiB in 77 ms
            threading.Thread(target=mapping.close, daemon=True).start()


class KeptFrames:
    """Frames of one ring that are not in its bank but at their senders.

    Args:
        ring: tells of each frame from now on. If it told another GPU's rings before, it begins
            anew: those pixels are in no bank.
        senders: as follows.
    """

    def __init__(self, ring: SensorRing, senders: SenderMemories) -> None:
        if ring.keeper is not None:
            ring.clear(OVERWRITTEN)
        self._senders, self._size_bytes = senders, ring.stream.dim
        self._frames: list[KeptFrame | None] = [None] * ring.bank.capacity  # by place in the ring
        ring.keeper = self

    def take(self, number: int) -> KeptFrame | None:
        """Returns the frame of this number, which is kept no longer; None: the bank has it."""
        place = number % len(self._frames)
        found = self._frames[place]
        if found is None or found.number != number:
            return None
        self._frames[place] = None
        return found

    def keep(self, number: int, message: LargeMessage, offset: int) -> bool:
        """As ``FrameKeeper``."""
        found = self._senders.frame(number, message, offset, self._size_bytes)
        self._frames[number % len(self._frames)] = found
        return found is not None

    def clear(self) -> None:
        """As ``FrameKeeper``; a copy that is under way has its frame itself."""
        self._frames = [None] * len(self._frames)
