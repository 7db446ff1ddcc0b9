"""Values in 8 bits: what a step stands for, and the rounding for CPU tensors.

A value x of a column with scale s is stored as the number nearest to x / s, ties to even, and reads
as that number times s. int8 holds -127..127 in steps of 1, float8_e4m3fn holds -448..448 with four
significant bits. Values beyond saturate. NaN stays NaN in float8_e4m3fn and is 0 in int8, which has
none; neither is told by validity.

The error of a value within the range is at most s / 2 in int8, and in float8_e4m3fn ``|x| / 16``,
or s / 1024 where ``|x| < s / 64``: there the numbers are 1/512 apart, and a value is at most half
of that from one; above, those from 2^e to 2^(e+1) are 2^(e-3) apart. float32's rounding adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ppstream_kernels.source import SCALED_DTYPES, dtype_name

#: The largest number of each dtype; the lowest is its negative.
LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def scale_for(low: Sequence[float], high: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Smallest scales with which the columns' ranges fit ``dtype``.

    Args:
        low: lowest value of each column.
        high: highest value of each.
        dtype: int8 or float8_e4m3fn.

    Returns:
        ``[D]`` float32 on the CPU.

    Raises:
        ValueError: another dtype; lengths differ; or a range is not finite, not rising, or so
            narrow around 0 or so wide that its scale is no normal float32.
    """
    if dtype not in LARGEST:
        wanted = " or ".join(map(dtype_name, SCALED_DTYPES))
        raise ValueError(f"dtype is {dtype_name(dtype)}, needs {wanted}")
    if len(low) != len(high):
        raise ValueError(f"low has {len(low)} values, high {len(high)}: needs one each per column")
    tiniest, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    scales = []
    for column, (lowest, highest) in enumerate(zip(low, high, strict=True)):
        scale = max(abs(lowest), abs(highest)) / LARGEST[dtype]
        if not (lowest < highest and math.isfinite(scale) and tiniest <= scale <= largest):
            raise ValueError(
                f"column {column} ranges from {lowest:g} to {highest:g}, needs finite limits of "
                "float32, the low one below the high one"
            )
        scales.append(scale)
    return torch.tensor(scales, dtype=torch.float32)


def round_into(values: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes values in 8 bits.

    Args:
        values: ``[..., D]`` float32; used up.
        scale: ``[D]`` float32.
        out: ``[..., D]`` int8 or float8_e4m3fn.
    """
    values.div_(scale)
    if out.dtype is torch.int8:
        values.round_().nan_to_num_(0.0)
    out.copy_(values.clamp_(-LARGEST[out.dtype], LARGEST[out.dtype]))
