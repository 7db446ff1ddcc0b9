"""Messages too large for a packet: they lie in a memfd, which its sender has sealed.

Nobody can change or shorten sealed memory, so a receiver that has looked at it once may read it
whenever it likes: into the place where it is wanted, or where it lies.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from contextlib import suppress
from typing import Final

from ppstream.core.errors import ProtocolError

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
BLOCK_BYTES: Final = 512  # of st_blocks
READABLE: Final = frozenset({os.O_RDONLY, os.O_RDWR})  # of how a descriptor was opened
SPARES_MAX: Final = 8  # memories that wait to be written: more cameras than a robot has


class SealedMessage:
    """A message in sealed memory, as it arrived; ends with the descriptor, which it owns.

    Args:
        fd: taken over unless the constructor raises.
        length: bytes of the message.

    Raises:
        ProtocolError: the memory could change or end while it is read, may not be read by this
            descriptor, or has another size; in other methods, it cannot be read.
    """

    __slots__ = ("_fd", "_length")

    def __init__(self, fd: int, length: int) -> None:
        self._fd = -1
        self._length = length
        try:
            seals, flags = fcntl.fcntl(fd, fcntl.F_GET_SEALS), fcntl.fcntl(fd, fcntl.F_GETFL)
            found = os.fstat(fd)
        except OSError as error:
            raise ProtocolError("a descriptor that is not shared memory") from error
        if seals & SEALS != SEALS or not 0 < length == found.st_size:
            raise ProtocolError("memory that is not sealed, or of another size")
        if flags & os.O_ACCMODE not in READABLE:
            raise ProtocolError("memory that may not be read by this descriptor")
        if found.st_blocks * BLOCK_BYTES < length:
            raise ProtocolError("memory with holes: reading it would allocate pages here")
        self._fd = fd

    def __len__(self) -> int:
        return self._length

    def head(self, size: int) -> bytes:
        """Returns the first bytes, ``size`` or all."""
        try:
            return os.pread(self._fd, min(size, self._length), 0)
        except OSError as error:  # its pages are gone
            raise ProtocolError("memory that cannot be read") from error

    def read_into(self, into: memoryview, offset: int) -> None:
        """Copy bytes from ``offset`` on until ``into`` is full."""
        while into.nbytes:
            try:
                read = os.preadv(self._fd, (into,), offset)
            except OSError as error:
                raise ProtocolError("memory that cannot be read") from error
            if not read:
                raise EOFError(f"{into.nbytes} bytes are missing behind {offset}")
            into, offset = into[read:], offset + read

    def mapped(self) -> memoryview:
        """The bytes where they lie, for as long as the view is held; not copied.

        Raises:
            ProtocolError: they cannot be mapped.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        try:
            return memoryview(mmap.mmap(self._fd, self._length, flags, mmap.PROT_READ))
        except OSError as error:
            raise ProtocolError("memory that cannot be mapped") from error

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class SpareMemory:
    """Memory that a sender gets ready beforehand: its pages are what takes long. For any thread."""

    def __init__(self) -> None:
        self._wanted: deque[int] = deque(maxlen=SPARES_MAX)  # sizes that were taken
        self._spares: deque[tuple[int, int]] = deque()  # descriptor and size

    def prepare(self) -> None:
        """Gets memory ready for as many messages as were written since, at most ``SPARES_MAX``."""
        while self._wanted:
            try:
                size = self._wanted.popleft()
            except IndexError:  # another thread was faster
                return
            if len(self._spares) >= SPARES_MAX:
                self._drop()
            with suppress(OSError):  # whoever sends will find that out
                self._spares.append((_memory(size, is_filled=True), size))

    def sealed(self, body: bytes, tail: memoryview) -> int:
        """A descriptor, to be closed, of memory that holds both and can never change.

        Raises:
            OSError: there is no memory, or no descriptor.
        """
        size = len(body) + tail.nbytes
        self._wanted.append(size)
        fd = self._take(size)
        try:
            if os.pwritev(fd, (body, tail), 0) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        """Frees what was not taken; more may be prepared."""
        self._wanted.clear()
        while self._spares:
            self._drop()

    def _take(self, size: int) -> int:
        with suppress(IndexError):
            for _ in range(len(self._spares)):
                fd, found = spare = self._spares.popleft()
                if found == size:
                    return fd
                self._spares.append(spare)
        return _memory(size, is_filled=False)

    def _drop(self) -> None:
        with suppress(IndexError):
            os.close(self._spares.popleft()[0])


def _memory(size: int, *, is_filled: bool) -> int:
    fd = os.memfd_create("ppstream-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if is_filled:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            raise
    return fd
