"""The ops' implementations for CUDA tensors. Importing it touches no CUDA.

A call that comes again with the same memory, as in a loop over rings and slots, finds its launch
ready: the key holds every address and whatever else a launch depends on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from ppstream_kernels import ops
from ppstream_kernels.cuda_launch import Launch
from ppstream_kernels.cuda_plan import Forms, Key, keep
from ppstream_kernels.source import NO_LIMIT, Columns

_KEY: Final = "CUDA"


class _Kept(threading.local):
    """Per thread, since a launch belongs to one."""

    def __init__(self) -> None:
        self.forms = Forms()
        self.launches: dict[Key, Sequence[Launch]] = {}


_kept: Final = _Kept()


def _resample_out(
    src: Tensor,
    src_ns: Tensor,
    tgt_ns: Tensor,
    out_values: Tensor,
    out_valid: Tensor,
    out_age_s: Tensor,
    count: Tensor | None = None,
    head: Tensor | None = None,
    interpolation: str = "linear",
    max_gap_ns: int = NO_LIMIT,
    max_age_ns: int = NO_LIMIT,
) -> None:
    kept = _kept
    key: Key = (
        src.data_ptr(),
        src_ns.data_ptr(),
        tgt_ns.data_ptr(),
        out_values.data_ptr(),
        out_valid.data_ptr(),
        out_age_s.data_ptr(),
        src.shape,
        src.stride(),
        src.dtype,
        src_ns.stride(),
        tgt_ns.shape,
        tgt_ns.stride(),
        tgt_ns.get_device(),
        out_values.dtype,
        interpolation,
        max_gap_ns,
        max_age_ns,
        None if count is None else (count.data_ptr(), count.stride()),
        None if head is None else (head.data_ptr(), head.stride()),
    )
    launches = kept.launches.get(key)
    if launches is None:  # [B, T] and [B, T, 1] are the same memory
        one = Columns([src], [src_ns], [count], [head], [interpolation], [max_gap_ns], [max_age_ns])
        launches = kept.forms.launches(one, tgt_ns, out_values, out_valid, out_age_s)
        keep(kept.launches, key, launches)
    for launch in launches:
        launch.queue()


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
    key: Key = (
        tgt_ns.data_ptr(),
        out_values.data_ptr(),
        out_valid.data_ptr(),
        out_age_s.data_ptr(),
        tgt_ns.shape,
        tgt_ns.stride(),
        tgt_ns.get_device(),
        out_values.dtype,
        *[(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in values],
        *[(one.data_ptr(), one.stride()) for one in stamps_ns],
        *[None if one is None else (one.data_ptr(), one.stride()) for one in (*counts, *heads)],
        *modes,
        *max_gap_ns,
        *max_age_ns,
    )
    kept = _kept
    launches = kept.launches.get(key)
    if launches is None:
        many = Columns(values, stamps_ns, counts, heads, modes, max_gap_ns, max_age_ns)
        launches = kept.forms.launches(many, tgt_ns, out_values, out_valid, out_age_s)
        keep(kept.launches, key, launches)
    for launch in launches:
        launch.queue()


_allocate_one = ops.allocating(ops.resample_fake, _resample_out, ops.GIVEN_TO_ONE)
ops.LIBRARY.impl("resample", _allocate_one, _KEY)
ops.LIBRARY.impl("resample_out", _resample_out, _KEY)
_allocate_streams = ops.allocating(
    ops.resample_streams_fake, _resample_streams_out, ops.GIVEN_TO_MANY
)
ops.LIBRARY.impl("resample_streams", _allocate_streams, _KEY)
ops.LIBRARY.impl("resample_streams_out", _resample_streams_out, _KEY)
