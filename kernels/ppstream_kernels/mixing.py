"""Interpolation between two samples, per mode, in float64 for numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

# M=targets of all rows D=dims

Doubles: TypeAlias = NDArray[np.float64]


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

    The common 1 / sinc(a) falls to the final normalisation. The angle, ``a = 2 atan2(|q - p|,
    |q + p|)``, keeps its digits where acos(p . q) loses them. Where one that counts names no
    rotation the result is zero, and only there.
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
