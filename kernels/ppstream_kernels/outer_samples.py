"""The samples beside the two that bracket each target, for CPU tensors.

A monotone cubic takes its slopes from them. As in a bracket, of equal stamps the first sample
counts.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ppstream_kernels.rings import (
    Int64s,
    Ring,
    Uint64s,
    first_of_equals,
    may_hold_equals,
    passed_equals,
)
from ppstream_kernels.source import NO_LIMIT

# B=rows T=targets

Doubles: TypeAlias = NDArray[np.float64]

MISSING: Final = 0.0  # as a ratio: no gap is


class OuterSamples:
    """Memory for the samples before and after the brackets of one ring; ``find`` fills it.

    ``rows_2BT`` names them as rows of ``[B * N, D]``, any row where they are missing.
    ``ratios_2BT`` says how far each lies from its sample of the bracket, in gaps of that bracket,
    or ``MISSING``: the ring does not hold it, or it lies beyond a hole.

    Args:
        ring: the samples.
        targets: T.
        max_gap_ns: widest interval that shapes a curve, or ``NO_LIMIT``.
        distinct: the ring never holds two equal stamps.
    """

    def __init__(self, ring: Ring, targets: int, max_gap_ns: int, *, distinct: bool) -> None:
        shape = (2, len(ring.stamps_ns_BN), targets)
        self.rows_2BT: Int64s = np.zeros(shape, np.int64)
        self.ratios_2BT: Doubles = np.zeros(shape)
        self._ring, self._is_distinct = ring, distinct
        self._most_ns = np.uint64(2**64 - 1 if max_gap_ns == NO_LIMIT else max_gap_ns)

    def find(self, first_BT: Int64s, passed_BT: Int64s) -> None:
        """Fill the memory for these brackets.

        Args:
            first_BT: the older sample of each, counted from the oldest.
            passed_BT: samples at or before each target: the number of the newer one, if there is.
        """
        ring = self._ring
        count_B1, head_B1 = ring.count_B[:, None], ring.head_B[:, None]
        before_BT, after_BT = first_BT - 1, passed_BT + 1
        if not self._is_distinct and may_hold_equals(ring):
            for b, (stamps_ns, head, count) in enumerate(
                zip(ring.stamps_ns_BN, ring.head_B.tolist(), ring.count_B.tolist(), strict=True)
            ):
                if count:
                    older = first_of_equals(stamps_ns, head, count, first_BT[b])
                    before_BT[b] = np.where(first_BT[b] > 0, older, -1)
                    after_BT[b] = passed_equals(stamps_ns, head, count, passed_BT[b])
        held_4BT = np.stack([before_BT, first_BT, passed_BT, after_BT])
        held_4BT.clip(0, np.maximum(count_B1 - 1, 0), held_4BT)
        held_4BT += head_B1
        np.subtract(held_4BT, ring.slots, out=held_4BT, where=held_4BT >= ring.slots)
        held_4BT += np.arange(len(count_B1))[:, None] * ring.slots
        stamps_4BT: Uint64s = ring.stamps_ns_BN.view(np.uint64).take(held_4BT)
        gap_3BT = stamps_4BT[1:] - stamps_4BT[:-1]
        beside_2BT = gap_3BT[::2]
        is_there_2BT = beside_2BT <= self._most_ns
        is_there_2BT[0] &= before_BT >= 0
        is_there_2BT[1] &= after_BT < count_B1
        self.rows_2BT[:] = held_4BT[::3]
        np.divide(beside_2BT, np.maximum(gap_3BT[1], 1), self.ratios_2BT)
        np.copyto(self.ratios_2BT, MISSING, where=~is_there_2BT)
