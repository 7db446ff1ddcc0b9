"""When an envelope became complete on a policy rank that was busy in stage B and could not look.

Without it an envelope that waits behind stage B would seem to be in transport. Every time given is
the true one or a little later, never earlier: that would claim a residence which was not.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from ppstream.core.clock import Clock, now_ns

SIGHTINGS_MAX: Final = 64  # more than envelopes that can be in flight
BELL_BYTES_MIN: Final = 7  # of a doorbell on the control socket: length, tag, index
EDGE: Final = select.EPOLLIN | select.EPOLLET
NOTHING: Final = 0
STOP_LIMIT_S: Final = 1.0

_int: Final = struct.Struct("i")


class Arrivals(Protocol):
    """For the loop of a policy rank."""

    def watch(self) -> None:
        """The loop becomes busy and will not look for a while."""

    def rest(self) -> None:
        """The loop looks itself again."""

    def take(self, pending: int, now_ns: int) -> list[int]:
        """When each of the ``pending`` envelopes found by ``now_ns`` had arrived, oldest first."""

    def close(self) -> None:
        """Release what it holds."""


class StampedArrivals:
    """Arrivals of a link whose own thread receives: that thread stamps each envelope."""

    def __init__(self, stamps_ns: deque[int]) -> None:
        self._stamps_ns = stamps_ns

    def watch(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def take(self, pending: int, now_ns: int) -> list[int]:
        return [self._stamps_ns.popleft() for _ in range(pending)]

    def close(self) -> None:
        pass


class _Sighting(NamedTuple):
    """By ``now_ns`` so many bytes had come in all."""

    now_ns: int
    bytes: int


class SocketArrivals:
    """Arrivals of doorbells on a socket that nobody reads while the loop is busy.

    A thread sleeps on the socket, edge-triggered, and notes how many bytes had come by when; it
    reads none of them. An idle rank pays nothing: the thread is woken only while ``watch`` holds.

    Args:
        fd: the socket.
        bytes_read: bytes taken from it so far.
        clock: stamps what the thread sees.
    """

    def __init__(self, fd: int, bytes_read: Callable[[], int], clock: Clock = now_ns) -> None:
        self._fd = fd
        self._bytes_read = bytes_read
        self._clock = clock
        self._sightings: deque[_Sighting] = deque(maxlen=SIGHTINGS_MAX)
        self._epoll = select.epoll()
        self._epoll.register(fd, NOTHING)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        self._epoll.modify(self._fd, EDGE)

    def rest(self) -> None:
        self._epoll.modify(self._fd, NOTHING)

    def take(self, pending: int, now_ns: int) -> list[int]:
        total = self._bytes_read()
        sightings = tuple(self._sightings)  # in one step: the thread adds to them meanwhile
        stamps = []
        for behind in range(pending - 1, -1, -1):
            # at least the bells behind this one were not needed for it to be there
            needed = total - behind * BELL_BYTES_MIN
            seen = (one.now_ns for one in sightings if one.bytes >= needed)
            stamps.append(min(seen, default=now_ns))
        self._sightings.clear()
        return stamps

    def close(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join(STOP_LIMIT_S)
        if not self._thread.is_alive():
            self._epoll.close()
            os.close(self._stop_fd)

    def _run(self) -> None:
        buffer = bytearray(_int.size)
        while True:
            ready = self._epoll.poll()
            if any(fd == self._stop_fd for fd, _ in ready):
                return
            if any(event & (select.EPOLLHUP | select.EPOLLERR) for _, event in ready):
                return  # a dead peer is the loop's and the heartbeat's to notice
            # this order: what the loop reads in between makes the sum too small, never too large
            total = self._bytes_read()
            fcntl.ioctl(self._fd, termios.FIONREAD, buffer)
            self._sightings.append(_Sighting(self._clock(), total + _int.unpack(buffer)[0]))
