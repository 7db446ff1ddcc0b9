"""The public functions: irregular samples in, values at given times out, with validity and age.

What holds for every mode, stream and device:

* A target between two samples is interpolated; before the oldest and after the newest sample it
  holds that sample, like ``numpy.interp``. Values are exact at samples and never overshoot.
* Of samples with equal stamps the first one counts, as if the others were not there: a ring that
  drops a repeated stamp gives the same. Nothing divides by zero.
* ``age_s`` is the target's time minus the stamp of the newest sample used, at least 0: 0 where the
  target is interpolated, positive where a sample is held.
* ``valid`` is false without samples (value and age are then 0), before the oldest sample, where
  the age exceeds ``max_age_ns``, where the bridge exceeds ``max_gap_ns``, and where ``slerp`` uses
  a quaternion that names no rotation. The bridge is the distance between the two samples
  interpolated (0 exactly at a sample and beyond the newest); for ``previous`` and ``nearest``,
  which hold one sample, it is the distance from the target to that one, also beyond the newest, so
  that there ``max_gap_ns`` limits the age as ``max_age_ns`` does.
* A quaternion names no rotation when its length, in float64, is 0 or not finite; values are zero
  where one is used.
* ``cubic`` is the monotone cubic of Fritsch and Carlson (SIAM J. Numer. Anal. 17, 1980) with the
  slopes of Fritsch and Butland (SIAM J. Sci. Stat. Comput. 5, 1984), as scipy's PchipInterpolator.
  From sample 0 to 1, h apart, with slope D = (y1 - y0) / h and u = (t - t0) / h, it is
  y0 + (y1 - y0) (a u + (3 - 2a - b) u^2 + (a + b - 2) u^3): at its ends its slopes are a D and b D.
  With sample -1, g before sample 0, and E = (y0 - y-1) / g, the slope at sample 0 is
  3 (g + h) / ((2h + g) / E + (h + 2g) / D), or 0 unless D and E have one sign. Without, it is
  one-sided, ((2h + k) D - h F) / (h + k), limited to 0..3 D, where F is the slope from sample 1 to
  2, k apart; with neither it is D. The slope at sample 1 mirrors it. The curve is monotone between
  two samples and has one tangent at each. A neighbour is missing where the row does not hold it,
  and across more than ``max_gap_ns``: a hole shapes nothing. So the last bracket's curve knows no
  sample to come, and may change a little when the next one arrives.
* Differences of stamps are exact over the whole range of int64, so their origin does not matter.
  Arithmetic is float32 or better (float64 for float64 samples, quaternions and angles), rounded
  once to the output's dtype. Calls of other shapes or batches may differ in the last bit; the same
  call never does.
* Samples must be finite, and neighbours may not differ by more than their dtype's largest number.
  One that is not finite, but for ``slerp``, makes the targets between it and its neighbours NaN or
  infinite, perhaps those exactly at its neighbours, and no others (the slope of a ``cubic`` at a
  neighbour is then of no account); ``valid`` does not tell.

With a ``scale`` values are in 8 bits, written by the same launch: ``quantisation.py`` has rounding,
ranges and errors. Stamps out of order are not detected; they give finite nonsense within the
samples read. Nothing here is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ppstream_kernels import ops
from ppstream_kernels.arguments import check_call, check_dtype, check_out, check_scale
from ppstream_kernels.source import Mode, StreamSource, ops_limit_ns, to_columns


class Resampled(NamedTuple):
    """Values at the targets and how far to trust them; S streams, or no such dimension for one."""

    values: Tensor  # [B, T, D] or [B, T, sum of D]
    valid: Tensor  # [B, T] or [B, T, S] bool
    age_s: Tensor  # [B, T] or [B, T, S] float32, seconds


def resample(
    src: Tensor,
    src_ns: Tensor,
    tgt_ns: Tensor,
    *,
    count: Tensor | None = None,
    head: Tensor | None = None,
    mode: Mode = "linear",
    max_gap_ns: int | None = None,
    max_age_ns: int | None = None,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Resampled:
    """One stream at the target times, by the rules of this module.

    Args:
        src: ``[B, N, D]`` samples, float32, float64, bfloat16 or float16; read only.
        src_ns: ``[B, N]`` int64 stamps, never decreasing from the oldest to the newest.
        tgt_ns: ``[B, T]`` int64 targets, in any order (rising is fastest).
        count: ``[B]`` int64 samples per row, default N.
        head: ``[B]`` int64 slot of the oldest sample, default 0; the row wraps at N.
        mode: one of ``MODES``; ``slerp`` returns normalised quaternions.
        max_gap_ns: longest bridge that is valid, default no limit (``max_gap_ms`` of a stream).
        max_age_ns: longest hold that is valid, default no limit (``max_age_ms`` of a stream).
        dtype: int8 or float8_e4m3fn, with ``scale``; default that of ``src``.
        scale: ``[D]`` float32, positive: values are in 8 bits, each times its scale
            (``quantisation.py``).
        out: contiguous ``[B, T, D]``, ``[B, T]`` bool and ``[B, T]`` float32, written in place and
            returned; every element is written. The values may have another of the four dtypes, or
            with ``scale`` one of 8 bits.

    Returns:
        Values in the dtype of ``src``, validity and age; freshly allocated unless ``out`` is given.

    Raises:
        ValueError: what is no tensor; a shape, dtype, device, mode or limit is not as above; or, on
            the CPU, a count or head lies outside the ring.
    """
    source = StreamSource(src, src_ns, count, head, mode, max_gap_ns, max_age_ns)
    if scale is not None or dtype is not None:
        if out is not None:
            out = (out[0], out[1].unsqueeze(2), out[2].unsqueeze(2))
        values, valid, age_s = resample_streams([source], tgt_ns, dtype=dtype, scale=scale, out=out)
        return Resampled(values, valid.squeeze(2), age_s.squeeze(2))
    check_call([source], tgt_ns)
    options = (count, head, mode, ops_limit_ns(max_gap_ns), ops_limit_ns(max_age_ns))
    if out is None:
        return Resampled(*ops.resample(src, src_ns, tgt_ns, *options))
    check_out(out, tuple(tgt_ns.shape), src.shape[2], tgt_ns.device)
    is_ring = count is not None or head is not None
    is_limited = max_gap_ns is not None or max_age_ns is not None
    if mode == "linear" and not is_ring and not is_limited:
        ops.resample_out(src, src_ns, tgt_ns, *out)
    else:
        ops.resample_options_out(src, src_ns, tgt_ns, *out, *options)
    return Resampled(*out)


def resample_streams(
    sources: Sequence[StreamSource],
    tgt_ns: Tensor,
    *,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Resampled:
    """Several streams at the same target times, side by side in one tensor, as one op.

    For sources that stay, ``ResamplePlan`` gives the same; a small window costs less than half.

    Args:
        sources: one or more; N, D, mode, dtype and limits may differ, B may not.
        tgt_ns: ``[B, T]`` int64 targets.
        dtype: int8 or float8_e4m3fn, with ``scale``.
        scale: ``[sum of D]`` float32, positive: values are in 8 bits, each times its scale
            (``quantisation.py``).
        out: contiguous ``[B, T, sum of D]``, ``[B, T, S]`` bool and ``[B, T, S]`` float32 (views
            into a slot, for example), written in place and returned; every element is written.

    Returns:
        Values in the order of ``sources``, in their promoted dtype (that of ``out`` if given),
        validity and age per stream; freshly allocated unless ``out`` is given.

    Raises:
        ValueError: as ``resample``; or ``sources`` is empty or disagrees with ``tgt_ns``.
    """
    check_call(sources, tgt_ns)
    arguments = (*to_columns(sources), tgt_ns)
    if scale is not None or dtype is not None:
        return _scaled(sources, tgt_ns, dtype, scale, out)
    if out is None:
        return Resampled(*ops.resample_streams(*arguments))
    width = sum(source.values.shape[2] for source in sources)
    check_out(out, (*tgt_ns.shape, len(sources)), width, tgt_ns.device)
    ops.resample_streams_out(*arguments, *out)
    return Resampled(*out)


def _scaled(
    sources: Sequence[StreamSource],
    tgt_ns: Tensor,
    dtype: torch.dtype | None,
    scale: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor] | None,
) -> Resampled:
    """``resample_streams`` in 8 bits; of an output the dtype need not be given, too."""
    dtype = out[0].dtype if out is not None and dtype is None else dtype
    check_dtype(dtype, scale)
    assert dtype is not None
    assert scale is not None
    check_scale(sources, scale)
    arguments = (*to_columns(sources), tgt_ns, scale)
    if out is None:
        return Resampled(*ops.resample_scaled(*arguments, dtype))
    shape = (*tgt_ns.shape, len(sources))
    check_out(out, shape, scale.shape[0], tgt_ns.device, (dtype,))
    ops.resample_scaled_out(*arguments, *out)
    return Resampled(*out)
