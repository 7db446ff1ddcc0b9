"""Trust in the values: age of what is held, and whether bridge and age keep the limits.

For CPU tensors; the rules stand in ``resampling.py``.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ppstream_kernels.bracket import PICKING_MODES, Brackets
from ppstream_kernels.rings import Bools, Uint64s
from ppstream_kernels.source import NO_LIMIT, Columns

# S=streams B=rows T=targets

Float32s: TypeAlias = NDArray[np.float32]

_S_PER_NS: Final = 1e-9


class Trust:
    """Writes validity and age of one set of streams; consumes the times of their brackets."""

    def __init__(self, columns: Columns, found: Brackets) -> None:
        self._found = found
        limits_ns = (columns.max_age_ns, columns.max_gap_ns)
        limits_ns_2S = np.array([[*map(_unsigned, limits)] for limits in limits_ns], np.uint64)
        self._limits_ns_2S11: Uint64s = limits_ns_2S[:, :, None, None]
        self._is_gap_limited = min(columns.max_gap_ns) < NO_LIMIT
        self._picking = [s for s, mode in enumerate(columns.modes) if mode in PICKING_MODES]
        self._flag_SBT: Bools = np.empty(found.past_ns_SBT.shape, np.bool_)
        self._begun_SBT: Bools = np.empty_like(self._flag_SBT)
        self._fits_2SBT: Bools = np.empty(found.times_2SBT.shape, np.bool_)
        self._is_young_SBT, self._is_short_SBT = self._fits_2SBT

    def write(self, valid_SBT: Bools, age_s_SBT: Float32s) -> None:
        """Every element of both; turns the times into ages and bridges on the way."""
        found = self._found
        age_ns_SBT, bridge_ns_SBT = found.past_ns_SBT, found.gap_ns_SBT
        begun_SBT, flag_SBT = self._begun_SBT, self._flag_SBT
        if self._is_gap_limited:  # exactly at a sample nothing is bridged
            np.not_equal(age_ns_SBT, 0, flag_SBT)
            np.multiply(bridge_ns_SBT, flag_SBT, bridge_ns_SBT)
        np.not_equal(found.passed_SBT, 0, begun_SBT)
        np.equal(bridge_ns_SBT, 0, flag_SBT)
        np.logical_and(flag_SBT, begun_SBT, flag_SBT)
        np.multiply(age_ns_SBT, flag_SBT, age_ns_SBT)
        for s in self._picking:  # a bridge leads from the target to the sample picked
            np.copyto(bridge_ns_SBT[s], found.distance_ns_SBT[s])
        np.less_equal(found.times_2SBT, self._limits_ns_2S11, self._fits_2SBT)
        np.logical_and(self._is_young_SBT, self._is_short_SBT, valid_SBT)
        np.logical_and(valid_SBT, begun_SBT, valid_SBT)
        for s, nameless_BT in found.nameless_BT.items():
            np.greater(valid_SBT[s], nameless_BT, valid_SBT[s])
        np.multiply(age_ns_SBT, _S_PER_NS, age_s_SBT, casting="same_kind")


def _unsigned(limit_ns: int) -> int:
    """Nothing exceeds no limit, whatever 64 bits can hold."""
    return 2**64 - 1 if limit_ns == NO_LIMIT else limit_ns
