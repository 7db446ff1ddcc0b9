"""PeerProcess: the other rank's process on this host, so that a survivor never leaves it behind.

It is held by a descriptor of the process itself (pidfd), taken while it is there: a later process
that was given the same number is never ended for it. When to end it is ``ends.py``'s.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: struct ucred of SO_PEERCRED
MS_PER_S: Final = 1000


class PeerProcess:
    """Whoever connected a UNIX socket (``at_end_of``), or was found. For one thread at a time."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd

    @classmethod
    def at_end_of(cls, fd: int) -> PeerProcess | None:
        """The process behind a connected socket; None: it is on another host, or gone.

        Args:
            fd: the socket's descriptor; it stays the caller's.
        """
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family != socket.AF_UNIX:
                return None
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, _, _ = CREDENTIALS.unpack(found)
        if pid in (0, os.getpid()):  # in another PID namespace, or both ends are ours
            return None
        try:
            return cls(pid, os.pidfd_open(pid))
        except OSError:
            return None

    def wait_gone(self, limit_s: float) -> bool:
        """Whether it has ended, waiting for it."""
        gone = select.poll()
        gone.register(self._fd, select.POLLIN)
        return bool(gone.poll(limit_s * MS_PER_S))

    def state(self) -> str:
        """As ps shows it: ``T`` stopped, ``R`` running, ``S`` asleep, ``D`` in the kernel."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return "gone"
        return text.rpartition(")")[2].split()[0]  # its name may hold anything, also ")"

    def end(self) -> None:
        """Kill it, stopped or not."""
        with suppress(OSError):  # it was faster
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it. Twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
