"""Kernels that run at two speeds: told apart by the shape of their launch, or within one. Pure.

A mean over both hides them, and "warm-up" is a guess: two launch shapes are two kinds of work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final, NamedTuple

from ppstream.report.kernels.trace import Work

MODES_RATIO: Final = 1.5  # two speeds are this far apart
MODES_CALLS_MIN: Final = 20
SHAPE_CALLS_MIN: Final = 5
MODE_SHARE_MIN: Final = 0.1  # of the calls, on either side


class Modes(NamedTuple):
    """One kernel with two speeds, and why."""

    name: str
    why: str
    slow_ns: float
    fast_ns: float


def two_speeds(work: Iterable[Work]) -> Iterable[Modes]:
    """Kernels with two speeds: by launch shape, or with one shape alone."""
    by_name: dict[str, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for one in work:
        if one.shape is not None:
            by_name[one.name][one.shape].append(one.busy_ns)
    for name, shapes in sorted(by_name.items()):
        means = {s: fmean(v) for s, v in shapes.items() if len(v) >= SHAPE_CALLS_MIN}
        if len(means) > 1:
            slow, fast = max(means, key=lambda s: means[s]), min(means, key=lambda s: means[s])
            if means[slow] >= MODES_RATIO * means[fast]:
                yield Modes(
                    name, f"launch {_launch(slow)} or {_launch(fast)}", means[slow], means[fast]
                )
        for shape, values in shapes.items():
            if len(values) >= MODES_CALLS_MIN and (split := _split(values)) is not None:
                yield Modes(
                    name, f"one launch, {_launch(shape)}: look at clocks, L2, a neighbour", *split
                )


def _launch(shape: tuple[int, ...]) -> str:
    grid, block = shape[:3], shape[3:]
    return f"{'x'.join(map(str, grid))} blocks of {'x'.join(map(str, block))}"


def _split(values: Sequence[int]) -> tuple[float, float] | None:
    """Means of the slower and the faster part, cut at the widest hole; None: there is one speed."""
    ordered = sorted(values)
    few = max(1, round(MODE_SHARE_MIN * len(ordered)))
    cut = max(range(few, len(ordered) - few + 1), key=lambda i: ordered[i] - ordered[i - 1])
    fast, slow = fmean(ordered[:cut]), fmean(ordered[cut:])
    hole = ordered[cut] / max(1, ordered[cut - 1])
    return (slow, fast) if slow >= MODES_RATIO * fast and hole >= (1 + MODES_RATIO) / 2 else None
