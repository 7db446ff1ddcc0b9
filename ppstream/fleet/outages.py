"""Failures of whole pipelines, event by event: for how long robots hold, with or without spares.

A failed pipeline's robots move to free rows of others, the emptiest first, as the directory hands
them out; who finds none waits until a pipeline is back. Robots are not moved back.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FAILURES: Final = 2000  # that one answer rests on
S_PER_H: Final = 3600.0


@dataclass(frozen=True)
class Failures:
    """Of one pipeline: mean time between failures, time until it serves again, and the move.

    ``move_s``: from the failure until its robots are served elsewhere.
    """

    mtbf_h: float
    repair_s: float
    move_s: float


@dataclass(frozen=True)
class Held:
    """Shares of all robots' time: held at all, and held because no row was free."""

    share: float
    without_row_share: float


def simulate(
    robots: int, pipelines: int, rows: int, failures: Failures, rng: np.random.Generator
) -> Held:
    """``FAILURES`` failures of ``pipelines`` with ``rows`` each, drawn of ``rng``.

    Raises:
        ValueError: the rows of all pipelines are fewer than the robots.
    """
    if robots > pipelines * rows:
        raise ValueError(f"{pipelines} pipelines of {rows} rows hold no {robots} robots")
    mtbf_s = failures.mtbf_h * S_PER_H
    taken = np.full(pipelines, robots // pipelines)
    taken[: robots % pipelines] += 1
    is_up = np.ones(pipelines, dtype=bool)
    events = [(float(rng.exponential(mtbf_s)), k) for k in range(pipelines)]
    heapq.heapify(events)
    waiting, moved, waited_s, now = 0, 0, 0.0, 0.0
    failed = 0
    while failed < FAILURES:
        at, pipeline = heapq.heappop(events)
        waited_s += waiting * (at - now)
        now = at
        is_up[pipeline] = not is_up[pipeline]
        if is_up[pipeline]:
            next_s = float(rng.exponential(mtbf_s))
        else:
            failed += 1
            waiting += int(taken[pipeline])
            taken[pipeline] = 0
            next_s = failures.repair_s
        heapq.heappush(events, (now + next_s, pipeline))
        placed = _place(waiting, taken, is_up, rows)
        waiting, moved = waiting - placed, moved + placed
    whole_s = robots * now
    held_s = moved * failures.move_s + waited_s  # who is moved again meanwhile counts twice
    return Held(min(1.0, held_s / whole_s), waited_s / whole_s)


def _place(waiting: int, taken: NDArray[np.int_], is_up: NDArray[np.bool_], rows: int) -> int:
    """Give free rows to those who wait; returns to how many."""
    for placed in range(waiting):
        emptiest = int(np.argmin(np.where(is_up, taken, rows)))
        if not is_up[emptiest] or taken[emptiest] >= rows:
            return placed
        taken[emptiest] += 1
    return waiting
