"""Time as integers: the monotonic clock, a manual one for tests, and a drift-free ticker.

Logic takes ``now_ns`` as an argument; only this file reads the clock.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Final, Protocol

from ppstream.core.errors import SpecError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
#: Longest time-out that poll(2) and sockets take, an int of milliseconds: 24.8 days.
POLL_NS_MAX = (2**31 - 1) * NS_PER_MS
ENDLESS_NS: Final = 2**62  # 146 years: locks and conditions take no longer time-out than 292
UNITS: Final = {10**3: "microseconds", 10**6: "milliseconds", 10**9: "seconds"}
UNIT_LOOKS: Final = 6  # that show in which one a clock counts
UNIT_LOOK_NS: Final = 250 * NS_PER_MS  # between two of them, at least

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


class UnitCheck:
    """Shows within two seconds whether a clock counts nanoseconds; simulated ones have any speed.

    One that stands is looked at until it runs.

    Attributes:
        due_ns: when to look again, by the monotonic clock.
    """

    def __init__(self, clock: Clock) -> None:
        self.due_ns = 0
        self._clock = clock
        self._looks: list[tuple[int, int]] = []  # monotonic ns, and the clock's

    def is_over(self, now_ns: int) -> bool:
        """Look at the clock if that is due; True: no other look is needed.

        Raises:
            SpecError: it advances as one of microseconds, milliseconds or seconds does.
        """
        if now_ns < self.due_ns:
            return False
        self.due_ns = now_ns + UNIT_LOOK_NS
        looks = self._looks
        looks.append((now_ns, self._clock()))
        if len(looks) < UNIT_LOOKS:
            return False
        (first_ns, first), (_, newest) = looks[0], looks[-1]
        advance, took_ns = newest - first, now_ns - first_ns
        if advance == 0:
            looks.pop(0)
            return False
        speeds = [(b - a) / (b_ns - a_ns) for (a_ns, a), (b_ns, b) in pairwise(looks)]
        is_even = all(0.0005 < speed < 0.002 for speed in speeds)  # no simulation that stumbles
        if is_even or 0 < advance < took_ns / 10**5:
            factor = min(UNITS, key=lambda factor: abs(math.log(advance * factor / took_ns)))
            raise SpecError(
                f"clock() must return nanoseconds: it advanced by {advance:g} while "
                f"{took_ns / NS_PER_S:.2f} s passed, {advance / took_ns:.1e} of their nanoseconds; "
                f"as it seems it counts {UNITS[factor]}: multiply by {factor}"
            )
        return True
