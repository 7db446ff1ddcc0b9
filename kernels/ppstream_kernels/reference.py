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
        if mode == "cubic":
            value = _pchip(_knots(samples, stamps_ns, (at, after), max_gap_ns), past_ns / gap_ns)
        else:
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


class _Knots(NamedTuple):
    """Samples around a target by their place, 0 before it and 1 after; intervals in seconds."""

    at: dict[int, Row]
    gap_s: dict[int, float]  # by the interval's older sample


def _knots(
    samples: list[Row], stamps_ns: list[int], around: tuple[int, int], max_gap_ns: int | None
) -> _Knots:
    """The two samples around a target, and those beside them that no hole divides from them."""
    at, after = around
    knots = _Knots(
        {0: samples[at], 1: samples[after]}, {0: (stamps_ns[after] - stamps_ns[at]) / 1e9}
    )
    before = bisect_left(stamps_ns, stamps_ns[at - 1]) if at else None
    behind = bisect_right(stamps_ns, stamps_ns[after])
    if before is not None and _is_bridged(stamps_ns[at] - stamps_ns[before], max_gap_ns):
        knots.at[-1] = samples[before]
        knots.gap_s[-1] = (stamps_ns[at] - stamps_ns[before]) / 1e9
    if behind < len(samples) and _is_bridged(stamps_ns[behind] - stamps_ns[after], max_gap_ns):
        knots.at[2] = samples[behind]
        knots.gap_s[1] = (stamps_ns[behind] - stamps_ns[after]) / 1e9
    return knots


def _is_bridged(gap_ns: int, max_gap_ns: int | None) -> bool:
    return max_gap_ns is None or gap_ns <= max_gap_ns


def _pchip(knots: _Knots, u: float) -> Row:
    """Cubic Hermite polynomials with the slopes of Fritsch and Butland."""
    row, h = [], knots.gap_s[0]
    for d in range(len(knots.at[0])):
        rise = {k: (knots.at[k + 1][d] - knots.at[k][d]) / gap for k, gap in knots.gap_s.items()}
        old, new = (_slope(knots.gap_s, rise, beside) for beside in (-1, 1))
        y0, y1 = knots.at[0][d], knots.at[1][d]
        row.append(
            (1 + 2 * u) * (1 - u) ** 2 * y0
            + u**2 * (3 - 2 * u) * y1
            + h * u * (1 - u) ** 2 * old
            - h * u**2 * (1 - u) * new
        )
    return row


def _slope(gap_s: dict[int, float], rise: dict[int, float], beside: int) -> float:
    """At the end of interval 0 that interval ``beside`` joins, -1 or 1."""
    h, d = gap_s[0], rise[0]
    if beside in gap_s:
        g, e = gap_s[beside], rise[beside]
        if not d * e > 0:
            return 0.0
        return 3 * (h + g) / ((2 * h + g) / e + (h + 2 * g) / d)
    if -beside not in gap_s:
        return d
    k, f = gap_s[-beside], rise[-beside]
    slope = ((2 * h + k) * d - h * f) / (h + k)
    if not slope * d > 0:
        return 0.0
    return 3 * d if abs(slope) > 3 * abs(d) else slope


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
