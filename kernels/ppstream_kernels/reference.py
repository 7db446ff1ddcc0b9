"""The oracle: every rule of resampling in plain float64 loops, for tests and benchmarks; slow.

Stamps are Python integers here, so differences are exact; each target is looked up with bisect.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Row = list[float]


class Reference(NamedTuple):
    """Reference that every implementation must come close to."""

    values: NDArray[np.float64]  # [B, T, D]
    valid: NDArray[np.bool_]  # [B, T]
    age_s: NDArray[np.float64]  # [B, T]


class _Answer(NamedTuple):
    value: Row
    valid: bool
    age_ns: int


def resample_reference(
    src: NDArray[Any],
    src_ns: NDArray[np.int64],
    tgt_ns: NDArray[np.int64],
    *,
    count: NDArray[np.int64] | None = None,
    head: NDArray[np.int64] | None = None,
    mode: str = "linear",
    max_gap_ns: int | None = None,
    max_age_ns: int | None = None,
) -> Reference:
    """As ``ppstream_kernels.resample``, from numpy arrays, in float64.

    Args:
        src: ``[B, N, D]`` of any float dtype.
        src_ns: ``[B, N]``, never decreasing from the oldest to the newest.
        tgt_ns: ``[B, T]``.
        count: ``[B]``, default N.
        head: ``[B]``, default 0.
        mode: one of ``MODES``.
        max_gap_ns: default no limit.
        max_age_ns: default no limit.
    """
    (rows, slots, dim), targets = src.shape, tgt_ns.shape[1]
    values = np.zeros((rows, targets, dim))
    valid = np.zeros((rows, targets), np.bool_)
    age_s = np.zeros((rows, targets))
    for b in range(rows):
        held = slots if count is None else int(count[b])
        oldest = 0 if head is None else int(head[b])
        order = [(oldest + k) % slots for k in range(held)]
        samples = [[float(x) for x in src[b, slot]] for slot in order]
        stamps_ns = [int(src_ns[b, slot]) for slot in order]
        for t in range(targets if held else 0):
            answer = _answer(samples, stamps_ns, int(tgt_ns[b, t]), mode, max_gap_ns)
            young = max_age_ns is None or answer.age_ns <= max_age_ns
            values[b, t], valid[b, t] = answer.value, answer.valid and young
            age_s[b, t] = answer.age_ns / 1e9
    return Reference(values, valid, age_s)


def _answer(
    samples: list[Row], stamps_ns: list[int], target_ns: int, mode: str, max_gap_ns: int | None
) -> _Answer:
    """One target; ``after`` is the first sample newer than it, ``at`` the first of those before."""
    after = bisect_right(stamps_ns, target_ns)
    if after == 0:
        return _Answer(_at_sample(samples[0], mode), valid=False, age_ns=0)
    at = bisect_left(stamps_ns, stamps_ns[after - 1])
    if mode in ("previous", "nearest"):
        return _picked(samples, stamps_ns, target_ns, (at, after), mode, max_gap_ns)
    past_ns = target_ns - stamps_ns[at]
    if after == len(samples) or past_ns == 0:
        used = [samples[at]]
        answer = _Answer(_at_sample(samples[at], mode), valid=True, age_ns=past_ns)
    else:
        used = [samples[at], samples[after]]
        gap_ns = stamps_ns[after] - stamps_ns[at]
        value = _between(samples[at], samples[after], past_ns / gap_ns, mode)
        answer = _Answer(value, valid=max_gap_ns is None or gap_ns <= max_gap_ns, age_ns=0)
    if mode == "slerp" and not all(map(_names_a_rotation, used)):
        return _Answer([0.0] * 4, valid=False, age_ns=answer.age_ns)
    return answer


def _picked(
    samples: list[Row],
    stamps_ns: list[int],
    target_ns: int,
    around: tuple[int, int],
    mode: str,
    max_gap_ns: int | None,
) -> _Answer:
    pick, after = around
    if mode == "nearest" and after < len(samples):
        is_newer_closer = stamps_ns[after] - target_ns < target_ns - stamps_ns[pick]
        pick = after if is_newer_closer else pick
    distance_ns = abs(target_ns - stamps_ns[pick])
    valid = max_gap_ns is None or distance_ns <= max_gap_ns
    return _Answer(samples[pick], valid, max(0, target_ns - stamps_ns[pick]))


def _at_sample(sample: Row, mode: str) -> Row:
    if mode == "slerp":
        return _unit(sample)
    return [_wrap(x) for x in sample] if mode == "angle" else sample


def _between(first: Row, second: Row, weight: float, mode: str) -> Row:
    if mode == "slerp":
        return _slerp(_unit(first), _unit(second), weight)
    pairs = zip(first, second, strict=True)
    if mode == "angle":
        return [_wrap(p + weight * _wrap(q - p)) for p, q in pairs]
    return [(1 - weight) * p + weight * q for p, q in pairs]


def _slerp(first: Row, second: Row, weight: float) -> Row:
    """Shoemake 1985: sin((1-w)t)/sin(t) p + sin(wt)/sin(t) q, on the side where p.q >= 0."""
    cosine = math.fsum(p * q for p, q in zip(first, second, strict=True))
    side = -1.0 if cosine < 0 else 1.0
    angle = math.acos(min(1.0, abs(cosine)))
    if angle < 1e-6:  # the curve is its chord to 1e-13
        keep, take = 1 - weight, weight
    else:
        keep = math.sin((1 - weight) * angle) / math.sin(angle)
        take = math.sin(weight * angle) / math.sin(angle)
    return _unit([keep * p + take * side * q for p, q in zip(first, second, strict=True)])


def _names_a_rotation(quaternion: Row) -> bool:
    return 0 < math.sqrt(math.fsum(x * x for x in quaternion)) < math.inf


def _unit(quaternion: Row) -> Row:
    if not _names_a_rotation(quaternion):
        return [0.0] * 4
    length = math.sqrt(math.fsum(x * x for x in quaternion))
    return [x / length for x in quaternion]


def _wrap(radians: float) -> float:
    """In (-pi, pi], by whole turns."""
    return radians - math.tau * math.ceil((radians - math.pi) / math.tau)
