"""FrameSender: whole frames into a non-blocking stream socket, from any thread, never for ever.

The counterpart of ``frames.FrameReader``: what is written here is what that one cuts.
"""

from __future__ import annotations

import select
import socket
import threading
from typing import TYPE_CHECKING, Final

from ppstream import messages
from ppstream.clock import NS_PER_MS, NS_PER_S
from ppstream.errors import PeerLostError, ProtocolError
from ppstream.frames import FRAME_BYTES_MAX, LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The frame that carries descriptors has no bytes of its own.
CARRIER: Final = LENGTH.pack(0)


class FrameSender:
    """Sends over ``sock``, which stays the caller's; a lock keeps frames of two threads apart.

    Args:
        sock: a connected stream socket with time-out 0.
        name: how errors call the other side.
        limit_ns: a peer that takes nothing for so long is lost.
    """

    def __init__(self, sock: socket.socket, name: str, limit_ns: int) -> None:
        self._socket = sock
        self._name = name
        self._limit_ns = limit_ns
        self._lock = threading.Lock()
        self._outgoing = bytearray(CARRIER)
        self._broken: PeerLostError | None = None

    def send(self, frame: messages.Control) -> None:
        """Hand one frame to the kernel; waits only while the peer's buffer is full.

        Raises:
            PeerLostError: the peer is gone, or took nothing for ``limit_ns``.
            ProtocolError: the frame is larger than ``FRAME_BYTES_MAX``.
        """
        self._acquire()
        try:
            outgoing = self._outgoing
            messages.encoder.encode_into(frame, outgoing, LENGTH.size)
            length = len(outgoing) - LENGTH.size
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(
                    f"{type(frame).__name__} is {length} bytes, limit {FRAME_BYTES_MAX}: send less"
                )
            LENGTH.pack_into(outgoing, 0, length)
            sent = self._send_some(outgoing)
            if sent < len(outgoing):
                self._send_rest(memoryview(bytes(outgoing))[sent:])
        finally:
            self._lock.release()

    def send_fds(self, fds: Sequence[int]) -> None:
        """Pass descriptors over a UNIX socket.

        Raises:
            PeerLostError: the peer is gone, or its buffer is full.
        """
        self._acquire()
        try:
            socket.send_fds(self._socket, [CARRIER], list(fds))
        except OSError as error:
            raise PeerLostError(f"{self._name} takes no descriptors: {error}") from error
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        if not self._lock.acquire(timeout=self._limit_ns / NS_PER_S):
            raise self._stuck()
        if self._broken is not None:
            self._lock.release()
            raise self._broken

    def _send_some(self, data: bytearray | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerLostError(f"{self._name} is gone: {error}") from error

    def _send_rest(self, rest: memoryview) -> None:
        """The buffer is full: wait for room, within the limit since the peer last took a byte."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while rest:
            if not room.poll(self._limit_ns / NS_PER_MS):
                # Half a frame may be out: nothing behind it could be understood.
                self._broken = self._stuck()
                raise self._broken
            rest = rest[self._send_some(rest) :]

    def _stuck(self) -> PeerLostError:
        limit_s = self._limit_ns / NS_PER_S
        return PeerLostError(f"{self._name} took nothing for {limit_s:.1f} s: stopped or wedged")
