"""Time as integers: the monotonic clock, a manual one for tests, and a drift-free ticker.

Logic takes ``now_ns`` as an argument; only this file reads the clock.
"""

from __future__ import annotations

import math
import time
from typing import Final, Protocol

from ppstream.core.errors import SpecError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
#: Longest time-out that poll(2) and sockets take, an int of milliseconds: 24.8 days.
POLL_NS_MAX = (2**31 - 1) * NS_PER_MS
ENDLESS_NS: Final = 2**62  # 146 years: locks and conditions take no longer time-out than 292

#: CLOCK_MONOTONIC in nanoseconds: shared by all processes of one host.
now_ns = time.monotonic_ns

#: CPU time of the calling thread in nanoseconds: it stands while the thread waits or sleeps.
thread_cpu_ns = time.thread_time_ns


def limit_ns(timeout_s: float) -> int:
    """Returns the nanoseconds of a time-out; ``ENDLESS_NS`` for ``math.inf`` and what is longer.

    Those of ``-math.inf`` are as many, and negative.

    Raises:
        SpecError: it is NaN.
    """
    if math.isnan(timeout_s):
        raise SpecError(f"timeout_s: got {timeout_s}, want seconds, or math.inf to wait endlessly")
    return round(max(-ENDLESS_NS, min(timeout_s * NS_PER_S, ENDLESS_NS)))


class Clock(Protocol):
    """A source of monotonic nanoseconds."""

    def __call__(self) -> int: ...


class ManualClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def __call__(self) -> int:
        return self._now_ns

    def advance(self, step_ns: int) -> None:
        """Move forward by ``step_ns`` (never back)."""
        if step_ns < 0:
            raise ValueError(f"a clock cannot go back: {step_ns} ns")
        self._now_ns += step_ns


class Ticker:
    """Absolute ticks every ``period_ns``: a late tick does not shift the ones behind it."""

    def __init__(self, period_ns: int, start_ns: int) -> None:
        self.period_ns = period_ns
        self.due_ns = start_ns + period_ns

    def consume(self, now_ns: int) -> int:
        """Consume all ticks due by ``now_ns``; returns how many (above one: some were missed)."""
        if now_ns < self.due_ns:
            return 0
        ticks = 1 + (now_ns - self.due_ns) // self.period_ns
        self.due_ns += ticks * self.period_ns
        return ticks
