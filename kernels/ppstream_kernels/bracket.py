"""Bracketing of each target by the samples of its row: one search per target, for CPU tensors.

The result is index arithmetic in 64 bits only; values are not touched here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ppstream_kernels.outer_samples import OuterSamples
from ppstream_kernels.rings import (
    Bools,
    Int64s,
    Ring,
    Uint64s,
    check_numbers,
    first_of_equals,
    may_hold_equals,
    rings_of,
    search_row,
    search_rows,
)
from ppstream_kernels.source import Columns

# S=streams B=rows T=targets N=slots of a stream

PICKING_MODES: Final = ("previous", "nearest")  # one sample each, nothing between

#: Up to here one numpy search per row beats torch's batched search with its linearised ring.
_ROWS_SEARCHED_SINGLY: Final = 8


class _Line(NamedTuple):
    """One stream's ring and its share of the memory."""

    ring: Ring
    passed_BT: Int64s
    first_BT: Int64s
    second_BT: Int64s
    past_ns_BT: Uint64s
    gap_ns_BT: Uint64s
    distance_ns_BT: Uint64s


class Brackets:
    """For each target the sample at or before it and the one after it, or one sample held twice.

    Memory for one set of streams and one number of targets; ``find`` fills it, and whoever comes
    last may compute in it.

    ``rows_2SBT`` names both samples as rows of ``[B * N, D]``, to be taken with wrap-around: one
    ring alone may run past its end. ``past_ns_SBT`` is the target minus the first sample,
    ``gap_ns_SBT`` the second minus the first; gap 0: the first one alone counts. Both are unsigned
    and so right at any distance; before the oldest sample, where none has ``passed``, past means
    nothing. Of a picking mode the first is the one picked, past is its age (0 where it is newer
    than the target) and ``distance_ns_SBT`` is how far it lies from the target. ``outer`` has
    the samples on either side of each bracket, by stream of ``cubic``.

    Args:
        columns: the streams.
        rows: B.
        targets: T.
        distinct: no row holds two equal stamps, as their owner sees to; otherwise the first of
            equals is looked for.
    """

    def __init__(
        self, columns: Columns, rows: int, targets: int, *, distinct: bool = False
    ) -> None:
        rings = rings_of(columns)
        streams = len(rings)
        self.modes = columns.modes
        self.passed_SBT: Int64s = np.empty((streams, rows, targets), np.int64)  # at or before it
        self.rows_2SBT: Int64s = np.empty((2, streams, rows, targets), np.int64)
        self._first_SBT, self._second_SBT = self.rows_2SBT
        self.times_2SBT: Uint64s = np.empty((2, streams, rows, targets), np.uint64)
        self.past_ns_SBT, self.gap_ns_SBT = self.times_2SBT
        self.distance_ns_SBT: Uint64s = np.empty_like(self.past_ns_SBT)
        self.empty_SB: Bools | None = None  # rows without samples, if any: times are 0 there
        self.nameless_BT: dict[int, Bools] = {}  # by stream of slerp: written with its values
        self.outer = {
            s: OuterSamples(ring, targets, columns.max_gap_ns[s], distinct=distinct)
            for s, ring in enumerate(rings)
            if columns.modes[s] == "cubic"
        }
        self._is_distinct = distinct
        memory = (self.passed_SBT, *self.rows_2SBT, *self.times_2SBT, self.distance_ns_SBT)
        self._lines = [_Line(*line) for line in zip(rings, *memory, strict=True)]
        self._takes = [
            (line.ring.stamps_ns_BN.view(np.uint64).take, *line[2:6]) for line in self._lines
        ]
        self._low_SB1: Int64s = np.empty((streams, rows, 1), np.int64)  # the oldest, the newest
        self._high_SB1: Int64s = np.empty_like(self._low_SB1)  # sample, before wrap-around

    def find(self, tgt_ns_BT: Int64s) -> None:
        """Fills the memory for these contiguous targets.

        Raises:
            ValueError: a count is outside 0..N or a head outside 0..N-1.
        """
        if len(tgt_ns_BT) == 1:
            self._search_one_row(tgt_ns_BT[0])
            self._find()
        else:
            self._search_rows(tgt_ns_BT)
            self._find_in_rows()
        self._measure(tgt_ns_BT)
        for line, mode in zip(self._lines, self.modes, strict=True):
            if mode in PICKING_MODES:
                np.copyto(line.distance_ns_BT, line.past_ns_BT)
                if mode == "nearest":
                    _move_to_nearest(line)
                line.gap_ns_BT.fill(0)

    def _search_one_row(self, tgt_ns_T: Int64s) -> None:
        """Scalars in place of small arrays: they cost a tenth."""
        self.empty_SB = None
        for s, line in enumerate(self._lines):
            ring = line.ring
            count, head = ring.count_B.item(), ring.head_B.item()
            if not (0 < count <= ring.slots and 0 <= head < ring.slots):
                check_numbers(ring, [count], [head])
                self.empty_SB = np.array([line.ring.count_B == 0 for line in self._lines])
            line.passed_BT[0] = search_row(ring.stamps_ns_BN[0], head, count, tgt_ns_T)
            self._low_SB1[s] = head
            self._high_SB1[s] = head + count - 1 if count else head

    def _search_rows(self, tgt_ns_BT: Int64s) -> None:
        for line in self._lines:
            ring = line.ring
            counts, heads = ring.count_B.tolist(), ring.head_B.tolist()
            check_numbers(ring, counts, heads)
            if len(tgt_ns_BT) > _ROWS_SEARCHED_SINGLY:
                search_rows(ring, tgt_ns_BT, line.passed_BT)
                continue
            for b, place in enumerate(zip(heads, counts, tgt_ns_BT, strict=True)):
                line.passed_BT[b] = search_row(ring.stamps_ns_BN[b], *place)

    def _find_in_rows(self) -> None:
        """Rows of all rings: where each begins is added last, or first while nothing wraps."""
        rings = [line.ring for line in self._lines]
        slots_S11 = np.array([[[ring.slots]] for ring in rings])
        base_SB1 = slots_S11 * np.arange(self._low_SB1.shape[1])[:, None]
        head_SB1 = np.array([ring.head_B for ring in rings])[..., None]
        count_SB1 = np.array([ring.count_B for ring in rings])[..., None]
        is_empty_SB1 = count_SB1 == 0
        self.empty_SB = is_empty_SB1[..., 0] if is_empty_SB1.any() else None
        is_rotated = head_SB1.any()
        self._low_SB1[:] = head_SB1 if is_rotated else base_SB1
        np.add(self._low_SB1, np.maximum(count_SB1 - 1, 0), self._high_SB1)
        self._find()
        if is_rotated:
            rows_2SBT = self.rows_2SBT
            np.subtract(rows_2SBT, slots_S11, out=rows_2SBT, where=rows_2SBT >= slots_S11)
            rows_2SBT += base_SB1

    def _find(self) -> None:
        """From "how many have passed" to the two samples around, both among the samples held."""
        first_SBT, second_SBT = self._first_SBT, self._second_SBT
        np.add(self.passed_SBT, self._low_SB1, second_SBT)
        if not self._is_distinct and any(may_hold_equals(line.ring) for line in self._lines):
            self._find_first_of_equals()
            np.add(first_SBT, self._low_SB1, first_SBT)
            np.copyto(second_SBT, first_SBT, where=second_SBT > self._high_SB1)
        else:
            np.subtract(second_SBT, 1, first_SBT)
            np.maximum(first_SBT, self._low_SB1, out=first_SBT)
            np.minimum(second_SBT, self._high_SB1, out=second_SBT)
        for s, outer in self.outer.items():
            outer.find(first_SBT[s] - self._low_SB1[s], self.passed_SBT[s])

    def _find_first_of_equals(self) -> None:
        for line in self._lines:
            ring = line.ring
            places = zip(ring.head_B.tolist(), ring.count_B.tolist(), line.passed_BT, strict=True)
            for b, place in enumerate(places):
                line.first_BT[b] = first_of_equals(ring.stamps_ns_BN[b], *place)

    def _measure(self, tgt_ns_BT: Int64s) -> None:
        for take, first_BT, second_BT, past_ns_BT, gap_ns_BT in self._takes:
            take(first_BT, None, past_ns_BT, "wrap")  # "raise" would buffer
            take(second_BT, None, gap_ns_BT, "wrap")
        np.subtract(self.gap_ns_SBT, self.past_ns_SBT, self.gap_ns_SBT)
        np.subtract(tgt_ns_BT.view(np.uint64), self.past_ns_SBT, self.past_ns_SBT)
        if self.empty_SB is not None:
            self.times_2SBT[:, self.empty_SB] = 0


def _move_to_nearest(line: _Line) -> None:
    """Picks the second sample where it is closer; a tie, and one sample alone, stay the older."""
    rest_ns_BT = line.gap_ns_BT - line.past_ns_BT
    is_newer_BT = (line.past_ns_BT > rest_ns_BT) & (line.gap_ns_BT != 0)
    np.copyto(line.first_BT, line.second_BT, where=is_newer_BT)
    np.copyto(line.distance_ns_BT, rest_ns_BT, where=is_newer_BT)
    np.copyto(line.past_ns_BT, 0, where=is_newer_BT)
