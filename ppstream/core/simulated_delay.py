"""Drawn delays that stand in for stage work: sleeping (a core stays free) or spinning (it is not).

Used on rank 0 by ``[simulate]`` and on the policy rank by the simulated policy.
"""

from __future__ import annotations

import random
import time
from typing import Final, Literal

from ppstream.core.clock import NS_PER_MS, now_ns

TAIL_SHARE: Final = 0.02  # of draws are TAIL_FACTOR times longer
TAIL_FACTOR: Final = 4.0
UNIFORM_SPREAD: Final = 0.3  # mean +- 30 %


class Delay:
    """Spends a duration drawn with the given mean; the same seed draws the same sequence.

    Attributes:
        takes_time: False: it never takes any, and nobody needs to call.
    """

    def __init__(
        self,
        mean_ms: float,
        kind: Literal["sleep", "spin"] = "sleep",
        law: Literal["constant", "uniform", "tail"] = "constant",
        seed: int = 0,
    ) -> None:
        self._mean_ns = mean_ms * NS_PER_MS
        self.takes_time = mean_ms > 0
        self._spend = _sleep if kind == "sleep" else _spin
        self._law = law
        self._random = random.Random(seed)

    def draw_ns(self) -> int:
        """The next duration."""
        return round(self._mean_ns * self._factor())

    def spend(self) -> None:
        """Take the next duration's time."""
        if self._mean_ns:
            self._spend(now_ns() + self.draw_ns())

    def _factor(self) -> float:
        if self._law == "uniform":
            return self._random.uniform(1 - UNIFORM_SPREAD, 1 + UNIFORM_SPREAD)
        if self._law == "tail":
            mean = 1 + TAIL_SHARE * (TAIL_FACTOR - 1)
            return (TAIL_FACTOR if self._random.random() < TAIL_SHARE else 1.0) / mean
        return 1.0


def _sleep(until_ns: int) -> None:
    remaining = until_ns - now_ns()
    if remaining > 0:
        time.sleep(remaining / 1e9)


def _spin(until_ns: int) -> None:
    while now_ns() < until_ns:
        pass
