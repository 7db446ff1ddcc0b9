"""Interpolation between two samples, per mode, in float64 for numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

# M=targets of all rows D=dims

Doubles: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


def linear(
    first_MD: Doubles, second_MD: Doubles, weight: Doubles, out: Doubles | None = None
) -> Doubles:
    """Along the straight line; ``weight`` broadcasts, ``out`` may be ``second_MD``."""
    mixed_MD: Doubles = np.subtract(second_MD, first_MD, out)
    np.multiply(mixed_MD, weight, mixed_MD)
    np.add(mixed_MD, first_MD, mixed_MD)
    return mixed_MD


def slerp(first_M4: Doubles, second_M4: Doubles, weight_M1: Doubles) -> Doubles:
    """Shoemake's slerp as sin(w a) / sin(a) = w sinc(w a) / sinc(a): nothing to divide at a = 0.

    The common 1 / sinc(a) falls to the final normalisation. The angle a = 2 atan2(|q - p|, |q + p|)
    keeps its digits where acos(p . q) loses them. Where one that counts names no rotation the
    result is zero, and only there.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # lengths beyond float64 name none, either
        first_M4, second_M4 = _normalised(first_M4), _normalised(second_M4)
    is_far_M1 = (first_M4 * second_M4).sum(1, keepdims=True) < 0
    names_M1 = first_M4.any(1, keepdims=True)
    names_M1 &= second_M4.any(1, keepdims=True) | (weight_M1 == 0)
    second_M4 = np.where(is_far_M1, -second_M4, second_M4)
    angle_M1 = 2 * np.arctan2(_norm(second_M4 - first_M4), _norm(second_M4 + first_M4))
    weight_M1 = weight_M1.clip(0, 1)  # where both are one
    turns_M1, rest_M1 = angle_M1 / math.pi, 1 - weight_M1  # np.sinc(x) is sin(pi x) / (pi x)
    first_part_M4 = first_M4 * (rest_M1 * np.sinc(rest_M1 * turns_M1))
    mixed_M4 = first_part_M4 + second_M4 * (weight_M1 * np.sinc(weight_M1 * turns_M1))
    return _normalised(mixed_M4 * names_M1)


def angle(first_MD: Doubles, second_MD: Doubles, weight_M1: Doubles) -> Doubles:
    """Radians, turned the shorter way and wrapped to (-pi, pi]."""
    return _wrapped(first_MD + weight_M1 * _wrapped(second_MD - first_MD))


def cubic_weight(rises_3MD: Doubles, ratios_2M1: Doubles, weight_M1: Doubles) -> Doubles:
    """Fraction of the way from the first sample to the second, on a monotone cubic; in 0..1.

    In fractions of the rise between the two a slope keeps its digits whatever the unit, a rise of 0
    needs none, and the curve cannot leave the range of the two. The formulas stand in
    ``resampling.py``, times h / (y1 - y0).

    Args:
        rises_3MD: differences of neighbouring samples, from the one before to the one after.
        ratios_2M1: the outer intervals over the inner one, or 0 where that sample is missing.
        weight_M1: how far past the first sample the target lies, of the inner interval.
    """
    with np.errstate(all="ignore"):  # of extremes a slope is 0 or at its limit
        before_MD, rise_MD, after_MD = rises_3MD
        old_M1, new_M1 = ratios_2M1
        rises_MD = rise_MD > 0
        first_MD = _mean_slope(rise_MD, rises_MD, before_MD, old_M1)
        second_MD = _mean_slope(rise_MD, rises_MD, after_MD, new_M1)
        for slope_MD, ratio_M1, beyond_MD, far_M1 in (
            (first_MD, old_M1, after_MD, new_M1),
            (second_MD, new_M1, before_MD, old_M1),
        ):
            ends = np.flatnonzero(ratio_M1 == 0)
            if len(ends):
                slope_MD[ends] = _end_slope(rise_MD[ends], beyond_MD[ends], far_M1[ends])
        bend_MD = first_MD + second_MD
        second_MD += first_MD
        second_MD += first_MD  # 2 a + b
        bend_MD -= 2
        bend_MD *= weight_M1
        bend_MD -= second_MD
        bend_MD += 3
        bend_MD *= weight_M1
        bend_MD += first_MD
        bend_MD *= weight_M1
        return bend_MD.clip(0, 1, bend_MD)


def _mean_slope(
    rise_MD: Doubles, rises_MD: Bools, beside_MD: Doubles, ratio_M1: Doubles
) -> Doubles:
    """At the end of an interval that another joins, over the interval's own slope.

    What is not finite counts as 0. ``beside_MD`` is the rise of the interval that joins.
    """
    mean_MD: Doubles = rise_MD * ((2 + ratio_M1) * ratio_M1)
    mean_MD += beside_MD * (1 + 2 * ratio_M1)
    np.divide(beside_MD * (3 * (1 + ratio_M1)), mean_MD, mean_MD)
    mean_MD *= (beside_MD > 0) == rises_MD
    return np.fmax(mean_MD, 0, mean_MD)


def _end_slope(rise_MD: Doubles, beyond_MD: Doubles, far_M1: Doubles) -> Doubles:
    """The same where none joins, from the interval at the other end, if there is one."""
    slope_MD = (2 + far_M1 - beyond_MD / (far_M1 * rise_MD)) / (1 + far_M1)
    return np.where(far_M1 > 0, np.fmin(np.fmax(slope_MD, 0), 3), 1)


MIXES: Final[Mapping[str, Callable[[Doubles, Doubles, Doubles], Doubles]]] = {
    "linear": linear,
    "slerp": slerp,
    "angle": angle,
}


def _norm(quaternion_M4: Doubles) -> Doubles:
    norm_M1: Doubles = np.sqrt((quaternion_M4 * quaternion_M4).sum(1, keepdims=True))
    return norm_M1


def _normalised(quaternion_M4: Doubles) -> Doubles:
    """Unit length; zero where the length is 0 or not finite, which names no rotation."""
    length_M1 = _norm(quaternion_M4)
    is_named_M1 = (length_M1 > 0) & (length_M1 < math.inf)
    return np.where(is_named_M1, quaternion_M4, 0) / np.where(is_named_M1, length_M1, 1)


def _wrapped(radians: Doubles) -> Doubles:
    """Whole turns removed: in (-pi, pi]; what lies in there already is returned exactly."""
    turns = np.ceil((radians - math.pi) / math.tau)
    turns *= math.tau
    return radians - turns
