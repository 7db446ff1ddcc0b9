"""What a resampling benchmark on a GPU is fed, and the bytes that such a call must move."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ppstream_kernels import Resampled

ORIGIN_NS: Final = 10**18
SPAN_NS: Final = 10**9
TRUST_BYTES: Final = 5  # validity and age of a target


class Inputs(NamedTuple):
    """The tensors of one call."""

    src: Tensor
    src_ns: Tensor
    tgt_ns: Tensor
    out: Resampled


def make_inputs(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """Stamps jittered by up to half a period; a regular grid of targets up to the newest."""
    rows, slots, targets, dim = shape
    period_ns = SPAN_NS // slots
    src_ns = ORIGIN_NS + torch.arange(slots, device="cuda") * period_ns
    src_ns = src_ns + torch.randint(0, period_ns // 2, (rows, slots), device="cuda")
    tgt_ns = ORIGIN_NS + torch.arange(1, targets + 1, device="cuda") * (SPAN_NS // targets)
    src = torch.randn(rows, slots, dim, device="cuda").to(dtype)
    out = (
        torch.empty(rows, targets, dim, dtype=dtype, device="cuda"),
        torch.empty(rows, targets, dtype=torch.bool, device="cuda"),
        torch.empty(rows, targets, device="cuda"),
    )
    return Inputs(src, src_ns, tgt_ns.repeat(rows, 1), Resampled(*out))


def must_move(shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    """Samples that some target needs, all stamps and targets, and what is written."""
    rows, slots, targets, dim = shape
    touched = min(slots, 2 * targets - 1)  # two around each target but the last, which is held
    samples = touched + targets
    per_row = samples * dim * dtype.itemsize + 8 * (slots + targets) + TRUST_BYTES * targets
    return int(rows * per_row)
