"""Arrivals: when envelopes became complete on a rank that was busy in stage B and could not look.

Without it an envelope that waits behind stage B would seem to be in transport. A thread sleeps on
the link's descriptors, edge-triggered, and stamps each edge; it reads nothing, so the frames stay
the loop's. It runs only while the loop says it is busy, so an idle rank pays nothing for it.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from ppstream.clock import now_ns

STAMPS_MAX: Final = 64  # more than can be in flight
EDGE: Final = select.EPOLLIN | select.EPOLLET
NOTHING: Final = 0
STOP_LIMIT_S: Final = 1.0


class Arrivals:
    """Stamps what arrives on ``fds`` between ``watch`` and ``rest``; for one loop."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = tuple(fds)
        self._stamps: deque[int] = deque(maxlen=STAMPS_MAX)
        self._epoll = select.epoll()
        for fd in self._fds:
            self._epoll.register(fd, NOTHING)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """The loop becomes busy and will not look for a while."""
        for fd in self._fds:
            self._epoll.modify(fd, EDGE)

    def rest(self) -> None:
        """The loop looks itself again."""
        for fd in self._fds:
            self._epoll.modify(fd, NOTHING)

    def take(self, pending: int, now: int) -> list[int]:
        """When each of the ``pending`` envelopes found just now had arrived, oldest first.

        Never earlier than true: edges may belong to other frames or be shared, so the newest stamps
        count, and ``now`` where there are too few.
        """
        stamps = [*self._stamps, *[now] * (pending - len(self._stamps))]
        self._stamps.clear()
        return stamps[-pending:]

    def close(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join(STOP_LIMIT_S)
        if not self._thread.is_alive():
            self._epoll.close()
            os.close(self._stop_fd)

    def _run(self) -> None:
        while True:
            ready = self._epoll.poll()
            now = now_ns()
            if any(fd == self._stop_fd for fd, _ in ready):
                return
            self._stamps.append(now)
            if any(event & select.EPOLLHUP for _, event in ready):
                return  # a dead peer is the loop's and the heartbeat's to notice
