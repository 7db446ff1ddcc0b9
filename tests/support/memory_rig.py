"""Both ends of the memory in which large messages lie: one sends, the other receives."""

from __future__ import annotations

import fcntl
import os
import socket

from ppstream.wire.message_memory import (
    CARRIER_BYTES,
    MARK,
    SEALS,
    LargeMessage,
    OwnMemory,
    PeerMemory,
)
from ppstream.wire.message_socket import MAX_FRAME_BYTES

LARGE = bytes(range(256)) * 600
SIZE = 1000


class Wire:
    """``brought``: memories that came; ``fd``: of the newest."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.own = OwnMemory()
        self.fd = -1
        self.brought = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, body: bytes, head: bytes = b"") -> bool:
        return self.own.send(self.near, (head, memoryview(body)))

    def carrier(self) -> bytes:
        """The next carrier, whose memory is ``theirs`` if it brought one."""
        packet, fds, _, _ = socket.recv_fds(self.far, 2 * CARRIER_BYTES, 4)
        for self.fd in fds:
            self.theirs = PeerMemory(self.fd, os.close)
            self.brought += 1
        return packet

    def received(self) -> LargeMessage:
        carrier = self.carrier()  # which may bring the memory
        return self.theirs.message(carrier, MAX_FRAME_BYTES)

    def message(self, body: bytes, head: bytes = b"") -> LargeMessage:
        assert self.send(body, head)
        return self.received()

    def read_mark(self) -> bytes:
        """What the receiver has written: how far it has read."""
        return os.pread(self.fd, MARK.size, 0)

    def close(self) -> None:
        for end in (self.near, self.far, self.own):
            end.close()


def memory(size: int = SIZE, *, seals: int = SEALS, written: int = SIZE) -> int:
    """A descriptor such as a sender's."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(written))
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def reopened(flags: int) -> int:
    """Memory by a descriptor that was opened anew."""
    fd = memory()
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    finally:
        os.close(fd)
