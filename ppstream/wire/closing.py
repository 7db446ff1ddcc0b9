"""Closer: closes descriptors that strangers have chosen, on a thread of its own.

Closing takes as long as who opened them likes: a socket that lingers, a file whose file system does
not answer, a connection in which such descriptors lie unread.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

END: Final = -1
NO_LINGER: Final = struct.pack("ii", 0, 0)  # struct linger


class Closer:
    """For one thread. The thread that closes begins with the first descriptor."""

    def __init__(self) -> None:
        self._fds: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def close(self, fd: int) -> None:
        """Have ``fd`` closed soon; waits only behind ``end``."""
        if self._is_over:
            _close(fd)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ppstream-close", daemon=True)
            self._thread.start()
        self._fds.put(fd)

    def end(self) -> None:
        """Nobody minds waiting any more; what is there is still closed."""
        self._is_over = True
        if self._thread is not None:
            self._fds.put(END)

    def _run(self) -> None:
        while (fd := self._fds.get()) != END:
            _close(fd)


def _close(fd: int) -> None:
    with suppress(OSError):
        _forbid_linger(fd)
    with suppress(OSError):  # its file system has something to say; it is closed
        os.close(fd)


def _forbid_linger(fd: int) -> None:
    """Raises OSError when it is no socket, or one that lingers nevertheless."""
    found = socket.socket(fileno=fd)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    finally:
        found.detach()
