"""RealTime: settings that a control loop requests of the operating system, and the refused ones.

Scheduling class and processors of the calling thread, memory that is never paged out. All of it is
given back at the end. Nothing here makes Python real-time: it only keeps others out of the way.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from ppstream.core.errors import PpstreamError

logger = logging.getLogger("ppstream")

PR_SET_TIMERSLACK: Final = 29  # sys/prctl.h
PR_GET_TIMERSLACK: Final = 30
MCL_CURRENT: Final = 1  # sys/mman.h
MCL_FUTURE: Final = 2


class NotPermittedError(PpstreamError):
    """The operating system refused what a control loop requires."""


@dataclass(frozen=True, slots=True)
class RealTime:
    """Real-time settings of the operating system, in force while the loop runs.

    Args:
        fifo_priority: 1 to 99: run the loop's thread under SCHED_FIFO, before every normal thread.
        cpus: run it on these processors only.
        lock_memory: keep all of the process's memory, present and future, in RAM.
        required: raise when a setting is refused; False: log and count the refusal.
    """

    fifo_priority: int | None = None
    cpus: frozenset[int] | None = None
    lock_memory: bool = False
    required: bool = False


class RealTimeScope:
    """A context manager on the loop's own thread; ``refused``: refusals, each with its remedy.

    Raises on entry:
        NotPermittedError: something was refused, and it is required.
    """

    def __init__(self, wanted: RealTime) -> None:
        self.refused: tuple[str, ...] = ()
        self._wanted = wanted
        self._undo = ExitStack()

    def __enter__(self) -> RealTimeScope:
        wanted = self._wanted
        self.refused = tuple(
            line
            for line in (
                _refusal_of(lambda: self._lock_memory(wanted.lock_memory)),
                _refusal_of(lambda: self._move(wanted.cpus)),
                _refusal_of(lambda: self._prefer(wanted.fifo_priority)),
            )
            if line
        )
        if self.refused and wanted.required:
            self._undo.close()
            raise NotPermittedError("\n".join(self.refused))
        for line in self.refused:
            logger.warning("%s", line)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _prefer(self, priority: int | None) -> None:
        if priority is None:
            return
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        except OSError as error:
            raise NotPermittedError(
                f"SCHED_FIFO priority {priority} was refused ({error.strerror}): give the user "
                f"'rtprio {priority}' in /etc/security/limits.conf, or the process CAP_SYS_NICE"
            ) from error
        self._undo.callback(os.sched_setscheduler, 0, *before)

    def _move(self, cpus: frozenset[int] | None) -> None:
        if cpus is None:
            return
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, cpus)
        except (OSError, ValueError) as error:
            raise NotPermittedError(
                f"processors {sorted(cpus)} were refused ({error}): this process may use "
                f"{sorted(before)}; name some of these, or widen its cpuset"
            ) from error
        self._undo.callback(os.sched_setaffinity, 0, before)

    def _lock_memory(self, wanted: bool) -> None:  # noqa: FBT001 - as it is configured
        if not wanted:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlockall(MCL_CURRENT | MCL_FUTURE) != 0:
            raise NotPermittedError(
                f"locking memory was refused ({os.strerror(ctypes.get_errno())}): give the user "
                "'memlock unlimited' in /etc/security/limits.conf, or the process CAP_IPC_LOCK"
            )
        self._undo.callback(libc.munlockall)


def end_timeouts_on_time() -> bool:
    """Have every time-out of the calling thread end within a few µs; Linux adds 50 by default.

    Returns:
        Whether it will; it needs no permission.
    """
    return _set_timer_slack(1)


@contextmanager
def timeouts_on_time() -> Iterator[None]:
    """The same inside the block, for a thread that is not ours alone."""
    before_ns = ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    end_timeouts_on_time()
    try:
        yield
    finally:
        if before_ns > 0:  # a real-time thread has none
            _set_timer_slack(before_ns)


def _set_timer_slack(slack_ns: int) -> bool:
    return bool(ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns), 0, 0, 0) == 0)


def _refusal_of(ask: Callable[[], None]) -> str | None:
    """Returns what was refused, in words, or None."""
    try:
        ask()
    except NotPermittedError as error:
        return f"thread {threading.current_thread().name}: {error}"
    return None
