"""Checks of what meets in one call: targets, sources and output. They read no data.

A source has checked itself when it was built. Counts and heads are data: the CPU implementation
checks them where it reads them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppstream_kernels.source import (
    SCALED_DTYPES,
    VALUE_DTYPES,
    StreamSource,
    check_tensor,
    dtype_name,
    seen,
)


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


def check_scale(sources: Sequence[StreamSource], scale: Tensor) -> None:
    """Raises ValueError unless ``scale`` is ``[sum of D]`` float32, contiguous, with the sources.

    Its numbers are not read: they have to be positive and finite, as ``scale_for`` gives them.
    """
    check_tensor("scale", scale)
    width, device = sum(source.values.shape[2] for source in sources), sources[0].values.device
    fits = scale.shape == (width,) and scale.dtype is torch.float32 and scale.device == device
    if not fits or not scale.is_contiguous():
        raise ValueError(f"scale is {seen(scale)}, needs contiguous [{width}] float32 on {device}")


def check_dtype(dtype: torch.dtype | None, scale: Tensor | None) -> None:
    """Raises ValueError unless both are given, the dtype being one of 8 bits, or neither."""
    if scale is None and dtype is None:
        return
    if scale is None or dtype not in SCALED_DTYPES:
        allowed = " or ".join(map(dtype_name, SCALED_DTYPES))
        given = "given" if scale is not None else "not given"
        raise ValueError(
            f"dtype is {dtype}, scale is {given}: needs {allowed} and a scale, or neither"
        )


def check_out(
    out: tuple[Tensor, Tensor, Tensor],
    trust_shape: tuple[int, ...],
    width: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = VALUE_DTYPES,
) -> None:
    """Raises ValueError unless ``out`` can be written in place.

    Args:
        out: values ``[B, T, width]`` in one of ``dtypes``, valid bool, age_s float32; contiguous.
        trust_shape: the shape of valid and age_s, which begins with ``(B, T)``.
        width: the sum of all D.
        device: where all of them must be.
        dtypes: default those of values.
    """
    values, valid, age_s = out
    _check_tensor("values", values, (*trust_shape[:2], width), dtypes, device)
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
