"""Shuffled order of any number of windows, computed number by number: nothing is stored.

A Feistel network permutes the next power of four; numbers beyond the end are sent on until one
lies inside. So a billion windows begin at once, any place of the order can be asked for, and an
order is its seed alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDS: Final = 6
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's constants
MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
MIX_2: Final = np.uint64(0x94D049BB133111EB)


class ShuffledOrder:
    """A permutation of ``0 .. count - 1``.

    Args:
        count: of what is shuffled, 1 at least.
        seeds: any integers; others give another order.
    """

    def __init__(self, count: int, *seeds: int) -> None:
        if count < 1:
            raise ValueError(f"count is {count}, needs at least 1")
        self._count = np.uint64(count)
        self._half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        sequence = np.random.SeedSequence([seed % (1 << 64) for seed in seeds])
        self._keys = sequence.generate_state(ROUNDS, np.uint64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers ``[n]`` at these places ``[n]`` of the order."""
        numbers = self._permuted(places.astype(np.uint64))
        while (outside := numbers >= self._count).any():
            numbers[outside] = self._permuted(numbers[outside])
        return numbers.astype(np.int64)

    def _permuted(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        permuted: NDArray[np.uint64] = (left << self._half) | right
        return permuted


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = numbers + GOLDEN
    numbers = (numbers ^ (numbers >> np.uint64(30))) * MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * MIX_2
    return numbers ^ (numbers >> np.uint64(31))
