"""Limits on how long a thread or the collector may hold the interpreter.

Python runs one thread of a process at a time. A loop that gave its turn away for a system call gets
it back when the other thread pauses, or after the switch interval; a collection of cyclic garbage
stops every thread, in the middle of whatever tripped it. These are all the limits, and nothing else
sets one::

  | who | holds it at most | limit |
  |---|---|---|
  | a thread of a rank or gateway | 0.5 ms while another waits (Python's: 5) | `SWITCH_INTERVAL_S` |
  | ... in a process of others | the same, while the run lasts | `as_guest` |
  | ... whose loop is on a GPU | 0.01 ms: driver calls yield | `DEVICE_SWITCH_INTERVAL_S` |
  | a thread beside a robot's control loop | 0.05 ms while the loop runs | `short_turns` |
  | log, metrics, health beside a loop | 0.1 ms, then a pause of 0.1 ms | `InterpreterPauses` |
  | the collector while a program imports or reads a log | collects nothing | `uncollected` |
  | the collector in a rank | collects before ready, and leaves out what exists | `freeze_garbage` |
  | ... that lets a part of the policy go | collects while nothing runs | `collect_garbage` |
  | the collector beside a control loop | once a second, in time left behind a tick | `GcControl` |
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Final

from ppstream.core.clock import NS_PER_S, now_ns

SWITCH_INTERVAL_S: Final = 0.0005
DEVICE_SWITCH_INTERVAL_S: Final = 0.00001
CONTROL_SWITCH_INTERVAL_S: Final = 0.00005  # a tick waits no longer for a receiver
PIECE_NS: Final = 100_000  # half of a short stage's time
PAUSE_S: Final = 0.0001
EVERY_NS: Final = NS_PER_S
OVERDUE_NS: Final = 30 * NS_PER_S  # then it is collected though a tick may be missed: memory ends
MARGIN: Final = 2  # times the longest collection so far must be left


def set_switch_interval(interval_s: float = SWITCH_INTERVAL_S) -> None:
    """Limit the turns of all threads of this process from now on."""
    sys.setswitchinterval(interval_s)


class _Shared:
    """A scope of the whole process: the first who enters makes it, the last who leaves ends it."""

    def __init__(self, scope: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = scope
        self._scope = ExitStack()
        self._inside = 0
        self._changing = threading.Lock()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._changing:
            if not self._inside:
                self._scope.enter_context(self._make())
            self._inside += 1
        try:
            yield
        finally:
            with self._changing:
                self._inside -= 1
                if not self._inside:
                    self._scope.close()


@_Shared
@contextmanager
def _short_turns() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, CONTROL_SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def short_turns() -> AbstractContextManager[None]:
    """Turns of ``CONTROL_SWITCH_INTERVAL_S`` at most here; what was set before holds again behind.

    For a process that is not ours alone. Several threads may be in here at once.
    """
    return _short_turns.entered()


@contextmanager
def as_guest() -> Iterator[None]:
    """Undo behind a run what it has set: turns, and what the collector does not look at."""
    before_s, was_frozen = sys.getswitchinterval(), gc.get_freeze_count() > 0
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
        if not was_frozen:
            gc.unfreeze()


class InterpreterPauses:
    """The pieces of one thread's long work beside a loop, from now on.

    A loop with a little slack does not notice pieces; one long stretch it would wait for.
    """

    def __init__(self) -> None:
        self._began_ns = now_ns()

    def pause(self) -> None:
        """To be called every few µs of work: sleeps when the piece is long enough."""
        if now_ns() - self._began_ns >= PIECE_NS:
            time.sleep(PAUSE_S)
            self._began_ns = now_ns()


def collect_garbage() -> None:
    """Collect now: cycles hold what was let go, such as the memory of a module."""
    gc.collect()


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected here: for imports and records, which are no garbage.

    Looking through them again and again takes 15 % of an import of torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_garbage() -> None:
    """Collect now; what exists then lives to the end, and no later collection looks at it."""
    gc.collect()
    gc.freeze()


@_Shared
@contextmanager
def _no_collector() -> Iterator[None]:
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    freeze_garbage()
    gc.disable()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class GcControl:
    """Collections at moments that a loop offers; a context manager for the loop's thread.

    While one is entered, the whole process collects nothing by itself, and what existed before the
    first is never looked at; behind it, too, where something was frozen before. It frees little:
    reference counts go on freeing the rest.
    """

    def __init__(self) -> None:
        self.collections = 0
        self.longest_ns = 0
        self._due_ns = 0
        self._overdue_ns = 0
        self._scope = ExitStack()

    def __enter__(self) -> GcControl:
        self._scope.enter_context(_no_collector.entered())
        self._schedule(now_ns())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scope.close()

    def offer(self, now: int, left_ns: int) -> None:
        """There is nothing to do for ``left_ns``: collect if it is due and fits, or is overdue."""
        if now < self._due_ns:
            return
        if left_ns < MARGIN * self.longest_ns and now < self._overdue_ns:
            return
        gc.collect()
        done = now_ns()
        self.collections += 1
        self.longest_ns = max(self.longest_ns, done - now)
        self._schedule(done)

    def _schedule(self, now: int) -> None:
        self._due_ns, self._overdue_ns = now + EVERY_NS, now + OVERDUE_NS
