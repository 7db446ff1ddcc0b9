"""The ops' implementations for CUDA tensors. Importing it touches no CUDA.

A call that comes again with the same memory, as in a loop over rings and slots, finds its launch
ready: the key holds every address and whatever else a launch depends on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ppstream_kernels import ops
from ppstream_kernels.cuda_plan import Forms, Key, Queue, keep
from ppstream_kernels.source import NO_LIMIT, Columns


class _Kept(threading.local):
    """Per thread, since a launch belongs to one."""

    def __init__(self) -> None:
        self.forms = Forms()
        self.queues: dict[Key, Queue] = {}


_kept: Final = _Kept()


def resample_out(
    src: Tensor,
    src_ns: Tensor,
    tgt_ns: Tensor,
    out_values: Tensor,
    out_valid: Tensor,
    out_age_s: Tensor,
    *options: Any,
) -> None:
    """Of both ops; ``options`` begin with count, and those at the end may be missing."""
    # Strides of a contiguous tensor follow from its shape, and asking for them takes longer.
    key: Key = (
        src.data_ptr(),
        src_ns.data_ptr(),
        tgt_ns.data_ptr(),
        out_values.data_ptr(),
        out_valid.data_ptr(),
        out_age_s.data_ptr(),
        src.shape,
        src.is_contiguous() or src.stride(),
        src_ns.is_contiguous() or src_ns.stride(),
        tgt_ns.numel(),
        tgt_ns.is_contiguous() or tgt_ns.stride(),
        src.dtype,
        out_values.dtype,
        tgt_ns.get_device(),
    )
    if options:
        key += _options_key(*options)
    kept = _kept
    queue = kept.queues.get(key)
    if queue is None:  # [B, T] and [B, T, 1] are the same memory
        one = _columns(src, src_ns, *options)
        queue = kept.forms.queue(one, tgt_ns, out_values, out_valid, out_age_s)
        keep(kept.queues, key, queue)
    queue()


def _options_key(
    count: Tensor | None,
    head: Tensor | None = None,
    interpolation: str = "linear",
    max_gap_ns: int = NO_LIMIT,
    max_age_ns: int = NO_LIMIT,
) -> Key:
    ring = [None if one is None else (one.data_ptr(), one.stride()) for one in (count, head)]
    return *ring, interpolation, max_gap_ns, max_age_ns


def _columns(
    src: Tensor,
    src_ns: Tensor,
    count: Tensor | None = None,
    head: Tensor | None = None,
    interpolation: str = "linear",
    max_gap_ns: int = NO_LIMIT,
    max_age_ns: int = NO_LIMIT,
) -> Columns:
    return Columns([src], [src_ns], [count], [head], [interpolation], [max_gap_ns], [max_age_ns])


def resample_streams_out(
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
    scale: Tensor | None = None,
) -> None:
    key: Key = (
        0 if scale is None else scale.data_ptr(),
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
    queue = kept.queues.get(key)
    if queue is None:
        many = Columns(values, stamps_ns, counts, heads, modes, max_gap_ns, max_age_ns)
        queue = kept.forms.queue(many, tgt_ns, out_values, out_valid, out_age_s, scale)
        keep(kept.queues, key, queue)
    queue()


def resample_scaled_out(*arguments: Any) -> None:
    """``resample_streams_out`` with the scale before the outputs, as the op has it."""
    many, scale = arguments[: ops.GIVEN_TO_MANY], arguments[ops.GIVEN_TO_MANY]
    resample_streams_out(*(*many, *arguments[ops.GIVEN_TO_SCALED :], scale))


_IMPLEMENTED: Final[dict[str, Callable[..., object]]] = {
    "resample": ops.allocating(ops.resample_fake, resample_out, ops.GIVEN_TO_ONE),
    "resample_out": resample_out,
    "resample_options_out": resample_out,
    "resample_streams": ops.allocating(
        ops.resample_streams_fake, resample_streams_out, ops.GIVEN_TO_MANY
    ),
    "resample_streams_out": resample_streams_out,
    "resample_scaled": ops.allocating_scaled(resample_scaled_out),
    "resample_scaled_out": resample_scaled_out,
}
for _name, _implementation in _IMPLEMENTED.items():
    ops.LIBRARY.impl(_name, _implementation, "CUDA")
    # Nothing is differentiable: autograd need not look at the arguments, which takes it 0.1 µs.
    ops.LIBRARY.impl(_name, torch.library.fallthrough_kernel, "AutogradCUDA")
