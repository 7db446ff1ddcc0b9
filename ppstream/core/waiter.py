"""Waiter: a thread sleeps until a descriptor is readable, another thread calls, or time runs out.

Not an event loop: it says only *that* something happened; the caller looks at its own sources, each
of which is cheap to ask. The compiled core waits and wakes where there is one.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Sequence
from typing import Final, Protocol

from ppstream import native
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns

#: select(2) cannot name higher descriptors; poll(2) can, but ends a wait up to 1 ms late
#: (measured medians: poll +0.2 to +1.0 ms, select +0.1 ms at any time-out).
FD_SETSIZE: Final = 1024


class WaiterBell(Protocol):
    """A sender in another process, which makes a descriptor readable only for a sleeper."""

    def fileno(self) -> int: ...

    @property
    def is_rung(self) -> bool:
        """There is something, as far as can be seen without a system call."""

    def sleep(self) -> bool:
        """Ask to be woken; returns False when there is something already."""

    def wake(self) -> None:
        """No longer asleep."""

    def clear(self) -> None:
        """Make the descriptor unreadable again."""


class PythonWaiter:
    """``Waiter`` without the compiled core, and the reference of it."""

    def __init__(self, spin_ns: int = 0) -> None:
        self.spin_ns = spin_ns
        # Reentrant: a signal handler may call wake() inside the same thread's wake().
        self._lock = threading.RLock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._asleep = False  # only then a wake is a system call
        self._wake_due = False
        self.woken = False
        self._bells: list[WaiterBell] = []
        self._fds: list[int] = []
        self._poll = select.poll()
        self.register(self._wake_fd)

    def register(self, fd: int) -> None:
        """Watch ``fd`` for readability, hang-up and errors; the caller keeps it open."""
        if fd in self._fds:
            raise ValueError(f"descriptor {fd} is registered already")
        self._fds.append(fd)
        self._poll.register(fd, select.POLLIN)
        self._may_select = max(self._fds) < FD_SETSIZE

    def register_bell(self, bell: WaiterBell) -> None:
        """Watch ``bell`` and its descriptor; the caller keeps it open."""
        self.register(bell.fileno())
        self._bells.append(bell)

    def unregister_bell(self, bell: WaiterBell) -> None:
        """Stop watching ``bell``; to be called by the thread that waits, before it is closed."""
        self._bells.remove(bell)
        self.unregister(bell.fileno())

    def unregister(self, fd: int) -> None:
        """Stop watching ``fd``; to be called before it is closed."""
        self._fds.remove(fd)
        self._poll.unregister(fd)
        self._may_select = max(self._fds, default=0) < FD_SETSIZE

    def wait(self, timeout_ns: int | None, /) -> Sequence[int]:
        """Return when a descriptor is readable, after ``wake``, or after ``timeout_ns``.

        A wake that came before the wait ends it at once; several wakes count as one. It never
        returns before the time-out without one of these; it may return a little later.

        Args:
            timeout_ns: None waits without limit; zero or less only looks.

        Returns:
            The descriptors that are readable, or of a bell that has rung: then others may be, too.
            None when anything may have happened: after a wake, or when time ran out.

        Raises:
            OSError: a registered descriptor was closed (EBADF).
        """
        self._asleep = True  # before the looks: a later sender writes a descriptor
        try:
            rung = [bell.fileno() for bell in self._bells if not bell.sleep()]
            ready = [] if rung or self._wake_due else self._ready(timeout_ns)
        finally:
            self._asleep = False
            for bell in self._bells:
                bell.wake()
        for bell in self._bells:
            if bell.fileno() in ready:
                bell.clear()
        self.woken = self._wake_fd in ready
        if self.woken:
            os.eventfd_read(self._wake_fd)
        if self._wake_due:  # never unset unseen
            self.woken, self._wake_due = True, False
        return () if self.woken else rung or ready

    def wait_awake(self, timeout_ns: int, look_ns: int | None = None) -> Sequence[int]:
        """As ``wait``, awake: looks at the bells all the time, and at other descriptors in the end.

        Without a bell, and without ``look_ns``, it sleeps.

        Args:
            timeout_ns: as of ``wait``.
            look_ns: so often it looks at other descriptors, too, and lets another thread that
                waits for this CPU have it.
        """
        if not self._bells and look_ns is None:
            return self.wait(timeout_ns)
        now = now_ns()
        until_ns = now + timeout_ns
        while True:
            look_until_ns = until_ns if look_ns is None else min(until_ns, now + look_ns)
            while not (self._wake_due or any(bell.is_rung for bell in self._bells)):
                if (now := now_ns()) >= look_until_ns:
                    break
            ready = self.wait(0)
            if ready or self.woken or now >= until_ns:
                return ready
            os.sched_yield()

    def wake(self) -> None:
        """End the present or next ``wait``; for any thread and signal handlers."""
        with self._lock:
            self._wake_due = True
            if self._asleep and not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Release the waiter's own descriptor; registered ones stay the caller's. Twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.unregister(self._wake_fd)
                os.close(self._wake_fd)

    def _ready(self, timeout_ns: int | None) -> list[int]:
        until_ns = None if timeout_ns is None else now_ns() + timeout_ns
        spin_until_ns = now_ns() + self.spin_ns
        while (now := now_ns()) < spin_until_ns and (until_ns is None or now < until_ns):
            if ready := self._polled(0):
                return ready
            os.sched_yield()
        if until_ns is None:
            return self._polled(None)
        left_ns = until_ns - now
        if left_ns > 0 and self._may_select:
            return select.select(self._fds, (), (), left_ns / NS_PER_S)[0]
        return self._polled(max(0, -(-left_ns // NS_PER_MS)))

    def _polled(self, timeout_ms: int | None) -> list[int]:
        events = self._poll.poll(timeout_ms)
        for fd, event in events:
            if event & select.POLLNVAL:
                raise OSError(errno.EBADF, f"descriptor {fd} was closed while registered")
        return [fd for fd, _ in events]


class Waiter(native.Waiter, PythonWaiter):
    """Waits for any of the registered descriptors. One thread waits; ``wake`` is for any thread.

    Args:
        spin_ns: each wait first looks again and again for so long, and sleeps then: the CPU is
            awake, and its caches warm, when something comes. 0: it sleeps at once.

    Attributes:
        spin_ns: as given.
        woken: the last wait was ended by ``wake``, or found that it would have been.
    """
