"""Frames on a byte stream: a 4-byte little-endian length, and that many bytes.

``FrameReader`` owns the receive buffer and cuts frames out of it; ``FrameSender`` writes whole
frames into a non-blocking stream socket, from any thread, within a bounded time. Neither knows the
meaning of a frame.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S, POLL_NS_MAX
from ppstream.core.errors import PeerLostError, ProtocolError
from ppstream.wire import rank_messages
from ppstream.wire.fields import encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LENGTH: Final = struct.Struct("<I")
FRAME_BYTES_MAX: Final = 1 << 20  # checked before anything is allocated for the frame
BUFFER_BYTES: Final = 1 << 16
#: The frame that carries descriptors has no bytes of its own.
CARRIER: Final = LENGTH.pack(0)


class FrameSender:
    """Sends over ``sock``, which stays the caller's; a lock keeps frames of two threads apart.

    Attributes:
        frames_sent: frames that the kernel has whole.

    Args:
        sock: a connected stream socket with time-out 0.
        name: how errors call the other side.
        limit_ns: a peer that takes nothing for so long is lost, unless it is known to live.
    """

    def __init__(self, sock: socket.socket, name: str, limit_ns: int) -> None:
        self._socket = sock
        self._name = name
        self._limit_ns = limit_ns
        self._lock = threading.Lock()
        self._outgoing = bytearray(CARRIER)
        self._rest = b""  # of a frame that was offered: it goes first
        self._broken: PeerLostError | None = None
        self.frames_sent = 0

    def send(
        self, frame: rank_messages.Control, is_alive: Callable[[], bool] = lambda: False
    ) -> None:
        """Hand one frame to the kernel; waits only while the peer's buffer is full.

        Args:
            frame: any.
            is_alive: whether the peer's process is known to live, though its loop takes nothing.

        Raises:
            PeerLostError: the peer is gone, or took nothing for ``limit_ns`` and is not alive.
            ProtocolError: the frame is larger than ``FRAME_BYTES_MAX``.
        """
        self._acquire(is_alive)
        try:
            data = self._encoded(frame)
            sent = 0 if self._rest else self._send_some(data)
            if sent < len(data):
                self._send_rest(memoryview(self._rest + bytes(data))[sent:], is_alive)
                self.frames_sent += bool(self._rest)
                self._rest = b""
            self.frames_sent += 1
        finally:
            self._lock.release()

    def offer(self, frame: rank_messages.Control) -> bool:
        """Hand one frame to the kernel if it has room now; returns False when it is dropped.

        Raises:
            PeerLostError: the peer is gone, or another thread has waited for it for ``limit_ns``.
            ProtocolError: as ``send``.
        """
        self._acquire()
        try:
            if self._rest:
                self._rest = self._rest[self._send_some(self._rest) :]
                self.frames_sent += not self._rest
            if self._rest:
                return False
            data = self._encoded(frame)
            sent = self._send_some(data)
            self._rest = bytes(data[sent:]) if sent else b""
            self.frames_sent += sent == len(data)
            return sent > 0
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
            raise PeerLostError(f"{self._name} accepts no descriptors: {error}") from error
        finally:
            self._lock.release()

    def _encoded(self, frame: rank_messages.Control) -> bytearray:
        outgoing = self._outgoing
        encoder.encode_into(frame, outgoing, LENGTH.size)
        length = len(outgoing) - LENGTH.size
        if length > FRAME_BYTES_MAX:
            raise ProtocolError(
                f"{type(frame).__name__} is {length} bytes, limit {FRAME_BYTES_MAX}: send less"
            )
        LENGTH.pack_into(outgoing, 0, length)
        return outgoing

    def _acquire(self, is_alive: Callable[[], bool] = lambda: False) -> None:
        while not self._lock.acquire(timeout=self._limit_ns / NS_PER_S):
            if not is_alive():
                raise self._stuck()
        if self._broken is not None:
            self._lock.release()
            raise self._broken

    def _send_some(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerLostError(f"{self._name} is gone: {error}") from error

    def _send_rest(self, rest: memoryview, is_alive: Callable[[], bool]) -> None:
        """The buffer is full: wait for room, within the limit since the peer last took a byte."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while rest:
            if room.poll(min(self._limit_ns, POLL_NS_MAX) / NS_PER_MS):
                rest = rest[self._send_some(rest) :]
            elif not is_alive():
                # Half a frame may be out: nothing behind it could be understood.
                self._broken = self._stuck()
                raise self._broken

    def _stuck(self) -> PeerLostError:
        limit_s = self._limit_ns / NS_PER_S
        return PeerLostError(f"{self._name} took nothing for {limit_s:.1f} s: stopped or wedged")


class FrameReader:
    """Receive into ``room()``, tell how much with ``frames(taken)``, and use what it yields."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._filled = 0

    def room(self) -> memoryview:
        """Returns the memory for the next bytes; never empty."""
        return self._buffer[self._filled :]

    def frames(self, taken: int) -> Iterator[memoryview]:
        """Each whole frame, after ``taken`` bytes were written into ``room()``.

        A frame is a view into the buffer, valid until the next one is asked for. To be exhausted
        before the next ``room()``.

        Raises:
            ProtocolError: a frame announces more than ``FRAME_BYTES_MAX`` bytes.
        """
        self._filled += taken
        start = needed = 0
        while self._filled - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(
                    f"a frame of {length} bytes was announced, limit {FRAME_BYTES_MAX}"
                )
            needed = LENGTH.size + length
            if self._filled - start < needed:
                break
            yield self._buffer[start + LENGTH.size : start + needed]
            start += needed
        self._keep(start, needed)

    def _keep(self, start: int, needed: int) -> None:
        """Move what is left to the front, into a buffer that holds the frame it begins."""
        if start == self._filled and len(self._buffer) == BUFFER_BYTES:
            self._filled = 0  # nothing is left: the usual case
            return
        rest = bytes(self._buffer[start : self._filled])
        self._filled = len(rest)
        wanted = max(BUFFER_BYTES, needed) if rest else BUFFER_BYTES
        if wanted != len(self._buffer):
            self._buffer = memoryview(bytearray(wanted))
        if rest:
            self._buffer[: len(rest)] = rest
