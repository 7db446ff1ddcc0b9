"""Garbage: Python's collection of cyclic garbage, moved to where a loop has time for it.

Automatic collection stops the world when some allocation trips it, in the middle of a tick. While a
``Garbage`` is entered it is off, what exists already is never looked at again, and the loop offers
the time it has left behind a tick. It frees nothing by itself: reference counts go on doing that.
"""

from __future__ import annotations

import gc
from typing import Final

from ppstream.core.clock import NS_PER_S, now_ns

EVERY_NS: Final = NS_PER_S
OVERDUE_NS: Final = 30 * NS_PER_S  # then it is collected though a tick may be missed: memory ends
MARGIN: Final = 2  # times the longest collection so far must be left


class Garbage:
    """A context manager for the loop's thread; the whole process is concerned."""

    def __init__(self) -> None:
        self.collections = 0
        self.longest_ns = 0
        self._due_ns = 0
        self._overdue_ns = 0
        self._was_enabled = True

    def __enter__(self) -> Garbage:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        self._schedule(now_ns())
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

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
