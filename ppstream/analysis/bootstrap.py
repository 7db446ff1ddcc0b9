"""A 95 % interval for a statistic of window sums: moving-block bootstrap. Pure, deterministic."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

BLOCK: Final = 10  # envelopes: neighbours depend on each other, blocks of this length hardly do
RESAMPLES: Final = 1000
DRAWS_MAX: Final = 1000  # of blocks for one resample; beyond it the blocks grow instead
SEED: Final = 0
TAIL: Final = 0.025

Row = tuple[int, ...]


def interval(
    runs: Sequence[Sequence[Row]], statistic: Callable[[Row], float | None]
) -> tuple[float, float] | None:
    """Lower and upper end for ``statistic`` of the summed rows.

    Args:
        runs: rows of numbers, in order; a block never crosses from one run into the next.
        statistic: takes the sums of all columns; None where undefined.

    Returns:
        The 2.5 % and 97.5 % quantiles over the resamples, or None where nothing is defined.
    """
    n = sum(len(rows) for rows in runs)
    block = block_length(n)
    blocks = [sums for rows in runs for sums in block_sums(rows, block)]
    if not blocks:
        return None
    resampled = (statistic(sums) for sums in resamples(blocks, -(-n // block)))
    found = [value for value in resampled if value is not None]
    if not found:
        return None
    found.sort()
    last = len(found) - 1
    return found[round(TAIL * last)], found[round((1 - TAIL) * last)]


def resamples(blocks: Sequence[Row], draws: int) -> Iterator[Row]:
    """Sums of ``draws`` blocks that are drawn with replacement, for each resample."""
    drawn = _drawn(len(blocks), draws)
    for start in range(0, len(drawn), draws):
        picked = [blocks[i] for i in drawn[start : start + draws]]
        yield tuple(map(sum, zip(*picked, strict=True)))


@lru_cache(maxsize=4)
def _drawn(blocks: int, draws: int) -> array[int]:
    """Indices of all resamples, one after the other; runs that are compared are often as long."""
    source, drawn = random.Random(SEED), array("I")
    for _ in range(RESAMPLES):
        drawn.extend(source.choices(range(blocks), k=draws))
    return drawn


def block_length(n: int) -> int:
    """Rows of one block when there are ``n``: longer where that spares draws, never shorter."""
    return max(BLOCK, -(-n // DRAWS_MAX))


def block_sums(rows: Sequence[Row], length: int) -> list[Row]:
    """Sums of every run of ``length`` neighbours, from running totals."""
    if not rows:
        return []
    block = min(length, len(rows))
    columns = [list(accumulate(column, initial=0)) for column in zip(*rows, strict=True)]
    starts = range(len(rows) - block + 1)
    return [tuple(total[i + block] - total[i] for total in columns) for i in starts]
