"""Checks of what meets in one call: targets, sources and output. They read no data.

A source has checked itself when it was built. Counts and heads are data: the CPU implementation
checks them where it reads them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppstream_kernels.source import VALUE_DTYPES, StreamSource, check_tensor, dtype_name, seen


def check_call(sources: Sequence[StreamSource], tgt_ns: Tensor) -> None:
    """Raises ValueError unless targets are ``[B, T]`` int64 and all sources share B and device."""
    check_tensor("tgt_ns", tgt_ns)
    if tgt_ns.dim() != 2 or tgt_ns.dtype is not torch.int64:
        raise ValueError(f"tgt_ns is {seen(tgt_ns)}, needs [B, T] int64")
    if not sources:
        raise ValueError("sources is empty, needs at least one StreamSource")
    rows, device = tgt_ns.shape[0], tgt_ns.device
    for position, source in enumerate(sources):
        values = source.values
        if values.shape[0] != rows or values.device != device:
            raise ValueError(
                f"sources[{position}] holds values {seen(values)}, tgt_ns is {seen(tgt_ns)}: "
                "B and device must agree"
            )


def check_plan(sources: Sequence[StreamSource], steps: int, devices: Sequence[str]) -> None:
    """Raises ValueError unless the sources can be read in place by one of ``devices``."""
    if steps < 1:
        raise ValueError(f"steps is {steps}, needs at least one target")
    if not sources:
        raise ValueError("sources is empty, needs at least one StreamSource")
    first = sources[0].values
    if first.device.type not in devices:
        raise ValueError(f"sources are on {first.device}, plans exist for {', '.join(devices)}")
    for position, source in enumerate(sources):
        values = source.values
        if values.shape[0] != first.shape[0] or values.device != first.device:
            raise ValueError(
                f"sources[{position}] holds values {seen(values)}, sources[0] {seen(first)}: "
                "B and device must agree"
            )
        if not values.is_contiguous() or not source.stamps_ns.is_contiguous():
            raise ValueError(
                f"sources[{position}] has strides {values.stride()} of values and "
                f"{source.stamps_ns.stride()} of stamps_ns; a plan needs contiguous() ones"
            )


def check_out(
    out: tuple[Tensor, Tensor, Tensor],
    trust_shape: tuple[int, ...],
    width: int,
    device: torch.device,
) -> None:
    """Raises ValueError unless ``out`` can be written in place.

    Args:
        out: values ``[B, T, width]`` in any value dtype, valid bool, age_s float32; contiguous.
        trust_shape: the shape of valid and age_s, which begins with ``(B, T)``.
        width: the sum of all D.
        device: where all of them must be.
    """
    values, valid, age_s = out
    _check_tensor("values", values, (*trust_shape[:2], width), VALUE_DTYPES, device)
    _check_tensor("valid", valid, trust_shape, (torch.bool,), device)
    _check_tensor("age_s", age_s, trust_shape, (torch.float32,), device)


def _check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    check_tensor(f"out {name}", tensor)
    fits = tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device
    if not fits or not tensor.is_contiguous() or tensor.requires_grad:
        allowed = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise ValueError(
            f"out {name} is {seen(tensor)}, strides {tensor.stride()}, requires_grad "
            f"{tensor.requires_grad}; needs contiguous {list(shape)} {allowed} on {device}, no grad"
        )
