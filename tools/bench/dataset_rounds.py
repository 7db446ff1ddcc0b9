"""Rounds of ``dataset.py``: ways that one process measures in turn, beside the other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """Of all processes."""

    folder: str
    rounds: int
    scale: float
    is_gpu: bool
    is_cold: bool

    def scaled(self, number: int, least: int = 1) -> int:
        return max(least, int(number * self.scale))


class Taken(NamedTuple):
    """Seconds of one way in one process, by round."""

    case: str
    way: str
    trajectories: int  # a round
    moved_bytes: int
    seconds: list[float]
    note: str = ""


class Way(NamedTuple):
    """A round of one way; returns once everything is done."""

    run: Callable[[], object]
    trajectories: int
    moved_bytes: int


def rounds_of(
    case: object, ways: Mapping[str, Way], settings: Settings, gate: Any, note: str = ""
) -> Iterator[Taken]:
    """All ways in turn; a round begins in all processes together."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, settings.rounds):
        for name, way in ways.items():
            gate.wait()
            began = time.perf_counter()
            way.run()
            if turn >= 0:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    for name, way in ways.items():
        yield Taken(str(case), name, way.trajectories, way.moved_bytes, seconds[name], note)
