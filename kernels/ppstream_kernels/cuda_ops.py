"""The ops' implementations for CUDA tensors. Importing it touches no CUDA."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ppstream_kernels import cuda_plan, ops
from ppstream_kernels.source import Columns

_KEY: Final = "CUDA"


def _resample_out(
    src: Tensor,
    src_ns: Tensor,
    tgt_ns: Tensor,
    count: Tensor | None,
    head: Tensor | None,
    interpolation: str,
    max_gap_ns: int,
    max_age_ns: int,
    out_values: Tensor,
    out_valid: Tensor,
    out_age_s: Tensor,
) -> None:
    # [B, T] and [B, T, 1] are the same memory.
    one = Columns([src], [src_ns], [count], [head], [interpolation], [max_gap_ns], [max_age_ns])
    cuda_plan.resample_streams_out(one, tgt_ns, out_values, out_valid, out_age_s)


def _resample_streams_out(
    values: list[Tensor],
    stamps_ns: list[Tensor],
    counts: list[Tensor | None],
    heads: list[Tensor | None],
    modes: list[str],
    max_gap_ns: list[int],
    max_age_ns: list[int],
    tgt_ns: Tensor,
    out_values: Tensor,
    out_valid: Tensor,
    out_age_s: Tensor,
) -> None:
    many = Columns(values, stamps_ns, counts, heads, modes, max_gap_ns, max_age_ns)
    cuda_plan.resample_streams_out(many, tgt_ns, out_values, out_valid, out_age_s)


ops.LIBRARY.impl("resample", ops.allocating(ops.resample_fake, _resample_out), _KEY)
ops.LIBRARY.impl("resample_out", _resample_out, _KEY)
ops.LIBRARY.impl(
    "resample_streams", ops.allocating(ops.resample_streams_fake, _resample_streams_out), _KEY
)
ops.LIBRARY.impl("resample_streams_out", _resample_streams_out, _KEY)
