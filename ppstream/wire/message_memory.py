"""Messages too large for a packet: they lie in a memory that one end of a connection shares.

The sender writes each message into memory of its own and sends a *carrier*, the packet that says
where it lies; the first carrier brings the memory's descriptor. The receiver writes into the first
bytes how far it has read, and only what is read is written over, so the same few pages serve every
frame: none is allocated, mapped or freed for a message. Both ends read and write by system calls,
which no page that is missing can kill.

A stranger may change its memory at any time. A receiver therefore decides by copies of its own, and
reads what needs no decision, as pixels, straight to where it stays; a GPU may do that, too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from typing import TYPE_CHECKING, Final

from ppstream.core.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: Bytes of a carrier, most of them zeros, so that SO_SNDBUF has room for about 50.
CARRIER_BYTES: Final = 3072
#: No message of ours begins so: msgpack has no type 0xC1. Then where it lies, bytes, and its mark.
CARRIER: Final = struct.Struct("<8sQQQ")
MAGIC: Final = b"\xc1ppstrm\0"
MARK: Final = struct.Struct("<QQ")  # twice: one that is written meanwhile reads as two numbers
PAGE_BYTES: Final = 4096  # before the messages: the mark of the newest one that was read
ROOM_BYTES: Final = 128 << 20  # for messages that wait; memory is taken where one was written
WAITING_MAX: Final = 1 << 14  # messages whose sender has not heard that they were read
KEPT_BYTES: Final = 32 << 20  # a memory that was ever fuller is replaced once all of it is read


class OwnMemory:
    """The memory of one connection's sender. For one thread at a time.

    Raises:
        OSError: there is no memory, or no descriptor; in ``send`` as well.
    """

    def __init__(self) -> None:
        self._end = 0  # of what was sent; only grows: each multiple of the room is the first place
        self._read = 0  # of that
        self._fd = -1
        self._is_new = True
        self._fullest = 0
        self._renew()

    def send(self, connection: socket.socket, parts: Sequence[bytes | memoryview]) -> bool:
        """Send ``parts`` as one message; False: what waits to be read leaves no room."""
        size = sum(memoryview(part).nbytes for part in parts)
        begin = self._begin(size)
        if begin is None:
            return False
        at, end = PAGE_BYTES + begin % ROOM_BYTES, begin + size
        if os.pwritev(self._fd, parts, at) != size:
            return False
        carrier = CARRIER.pack(MAGIC, at, size, end).ljust(CARRIER_BYTES, b"\0")
        if self._is_new:
            socket.send_fds(connection, (carrier,), (self._fd,))
            self._is_new = False
        else:
            connection.send(carrier)
        self._end = end
        self._fullest = max(self._fullest, at + size)
        return True

    def close(self) -> None:
        """Twice is fine; what was sent can still be read."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin(self, size: int) -> int | None:
        """Returns where the next message begins, counted as ``_end`` is; None: there is no room."""
        mark, again = MARK.unpack(os.pread(self._fd, MARK.size, 0))
        if mark == again and self._read < mark <= self._end:
            self._read = mark
        start = -(-self._end // ROOM_BYTES) * ROOM_BYTES
        if self._read == self._end:  # the pages that were used last are in the caches
            if self._fullest > KEPT_BYTES:
                self._renew()
            self._read = self._end = start
        begin = self._end if self._end + size <= start else start
        return begin if begin + size - self._read <= ROOM_BYTES else None

    def _renew(self) -> None:
        fd = os.memfd_create("ppstream-messages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES + ROOM_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd, self._is_new, self._fullest = fd, True, 0


class PeerMemory:
    """The memory that the other end of a connection shares. For the thread that receives.

    Args:
        fd: taken over unless the constructor raises; ``close`` gets it when nobody needs it.

    Raises:
        ProtocolError: it is no memory, its size can change, or it may not be read and written.
    """

    __slots__ = ("__weakref__", "_close", "_fd", "_read", "_size", "_waits")

    def __init__(self, fd: int, close: Callable[[int], None]) -> None:
        self._fd = -1
        self._read = 0
        self._waits: dict[int, bool] = {}  # by mark, in order: of a message, if it is needed
        self._close = close
        try:
            seals, flags = fcntl.fcntl(fd, fcntl.F_GET_SEALS), fcntl.fcntl(fd, fcntl.F_GETFL)
            self._size = os.fstat(fd).st_size
        except OSError as error:
            raise ProtocolError("a descriptor that is not shared memory") from error
        if seals & SEALS != SEALS:
            raise ProtocolError("memory whose size may change")
        if flags & os.O_ACCMODE != os.O_RDWR:
            raise ProtocolError("memory that may not be read and written by this descriptor")
        self._fd = fd

    def message(self, carrier: bytes, size_max: int) -> LargeMessage:
        """The message that ``carrier`` tells of.

        Raises:
            ProtocolError: it tells of nothing that can be there, or too many wait.
            EOFError: of more than ``size_max`` bytes.
        """
        magic, at, size, mark = CARRIER.unpack_from(carrier)
        if size > size_max:
            raise EOFError
        if magic != MAGIC or not size or at + size > self._size:
            raise ProtocolError("a carrier of no message")
        if len(self._waits) >= WAITING_MAX:
            raise ProtocolError("more messages than a sender has room for")
        self._waits[mark] = True
        return LargeMessage(self, at, size, mark)

    def read(self, at: int, size: int) -> bytes:
        """A copy of what lies at ``at``; raises ProtocolError when it cannot be read."""
        try:
            found = os.pread(self._fd, size, at)
        except OSError as error:  # its pages are gone
            raise ProtocolError("memory that cannot be read") from error
        if len(found) != size:
            raise ProtocolError("memory that ends too early")
        return found

    def read_into(self, into: memoryview, at: int) -> None:
        """As ``read``, into ``into``."""
        try:
            read = os.preadv(self._fd, (into,), at)
        except OSError as error:
            raise ProtocolError("memory that cannot be read") from error
        if read != into.nbytes:
            raise ProtocolError("memory that ends too early")

    def map(self, size: int) -> mmap.mmap:
        """Its first ``size`` bytes, or all; a CPU that touches a page that is missing is killed.

        Raises:
            OSError, ValueError: it cannot be mapped.
        """
        return mmap.mmap(self._fd, min(size, self._size))

    def note_read(self, mark: int) -> None:
        """The message of ``mark`` is not needed any more; its sender hears once none before is."""
        waits, read = self._waits, self._read
        waits[mark] = False
        while waits and not waits[first := next(iter(waits))]:
            del waits[first]
            read = max(read, first)
        if read > self._read:
            self._read = mark = read
            try:
                os.pwrite(self._fd, MARK.pack(mark, mark), 0)
            except OSError:  # its sender will run out of room, and nobody else
                return

    def __del__(self) -> None:
        if self._fd >= 0:
            self._close(self._fd)


class LargeMessage:
    """A message in its sender's memory, which may be written over once this object ends.

    Methods raise ProtocolError when it cannot be read.
    """

    __slots__ = ("_at", "_mark", "_memory", "_size")

    def __init__(self, memory: PeerMemory, at: int, size: int, mark: int) -> None:
        self._memory, self._at, self._size, self._mark = memory, at, size, mark

    def __len__(self) -> int:
        return self._size

    def head(self, size: int) -> bytes:
        """A copy of the first bytes, ``size`` or all."""
        return self._memory.read(self._at, min(size, self._size))

    def read_into(self, into: memoryview, offset: int) -> None:
        """Copy bytes from ``offset`` on until ``into`` is full."""
        memory, at = self.place(offset, into.nbytes)
        memory.read_into(into, at)

    def place(self, offset: int, size: int) -> tuple[PeerMemory, int]:
        """Returns where bytes from ``offset`` on lie, which stay as long as this object does."""
        if offset + size > self._size:
            raise ProtocolError(f"{offset + size - self._size} bytes are missing")
        return self._memory, self._at + offset

    def __del__(self) -> None:
        self._memory.note_read(self._mark)
