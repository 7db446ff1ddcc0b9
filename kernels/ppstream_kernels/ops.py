"""The torch ops: schemas, and their implementations for the CPU and for shapes alone (Meta, fake).

``resample`` and ``resample_streams`` allocate; the ``_out`` twins write three given tensors and
return nothing, so that torch.compile can functionalise them. ``resample_out`` is linear, without
ring and limits, which ``resample_options_out`` has; ``resample_scaled`` gives 8 bits. Another
device adds its own implementations to ``LIBRARY`` from a file of its own. Arguments are checked
before an op is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Final, ParamSpec, TypeAlias

import torch
from torch import Tensor

from ppstream_kernels import cpu
from ppstream_kernels.source import NO_LIMIT, Columns

NAMESPACE: Final = "ppstream_kernels"

# An argument called "mode" would collide with one of torch.compile's own when outputs are given.
# Every argument costs a call 0.1 to 0.3 µs, also one that is left out: the common call has an op.
_ONE: Final = "Tensor src, Tensor src_ns, Tensor tgt_ns"
_ONE_MORE: Final = (
    "Tensor? count=None, Tensor? head=None, str interpolation='linear', "
    f"int max_gap_ns={NO_LIMIT}, int max_age_ns={NO_LIMIT}"
)
_MANY: Final = (
    "Tensor[] values, Tensor[] stamps_ns, Tensor?[] counts, Tensor?[] heads, "
    "str[] modes, int[] max_gap_ns, int[] max_age_ns, Tensor tgt_ns"
)
_OUT: Final = "Tensor(a!) out_values, Tensor(b!) out_valid, Tensor(c!) out_age_s"
GIVEN_TO_ONE: Final = 3  # arguments before the outputs
GIVEN_TO_MANY: Final = 8
GIVEN_TO_SCALED: Final = 9

_untyped_library: Final[Any] = torch.library.Library  # torch does not annotate its methods
LIBRARY: Final = _untyped_library(NAMESPACE, "DEF")
LIBRARY.define(f"resample({_ONE}, {_ONE_MORE}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(f"resample_out({_ONE}, {_OUT}) -> ()")
LIBRARY.define(f"resample_options_out({_ONE}, {_OUT}, {_ONE_MORE}) -> ()")
LIBRARY.define(f"resample_streams({_MANY}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(f"resample_streams_out({_MANY}, {_OUT}) -> ()")
LIBRARY.define(
    f"resample_scaled({_MANY}, Tensor scale, ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(f"resample_scaled_out({_MANY}, Tensor scale, {_OUT}) -> ()")

P = ParamSpec("P")
Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]  # values, valid, age_s


def resample_fake(
    src: Tensor,
    src_ns: Tensor,
    tgt_ns: Tensor,
    count: Tensor | None = None,
    head: Tensor | None = None,
    interpolation: str = "linear",
    max_gap_ns: int = NO_LIMIT,
    max_age_ns: int = NO_LIMIT,
) -> Triple:
    """Results of the right shape, dtype and device, not yet written."""
    return _allocate(tgt_ns, src.dtype, src.shape[2])


def resample_streams_fake(
    values: list[Tensor],
    stamps_ns: list[Tensor],
    counts: list[Tensor | None],
    heads: list[Tensor | None],
    modes: list[str],
    max_gap_ns: list[int],
    max_age_ns: list[int],
    tgt_ns: Tensor,
) -> Triple:
    """Results of the right shape, dtype and device, not yet written."""
    dtype = reduce(torch.promote_types, [samples.dtype for samples in values])
    width = sum(samples.shape[2] for samples in values)
    return _allocate(tgt_ns, dtype, width, len(values))


def resample_scaled_fake(
    values: list[Tensor],
    stamps_ns: list[Tensor],
    counts: list[Tensor | None],
    heads: list[Tensor | None],
    modes: list[str],
    max_gap_ns: list[int],
    max_age_ns: list[int],
    tgt_ns: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
) -> Triple:
    """Results of the right shape, dtype and device, not yet written."""
    return _allocate(tgt_ns, dtype, scale.shape[0], len(values))


def _allocate(tgt_ns: Tensor, dtype: torch.dtype, width: int, streams: int | None = None) -> Triple:
    rows, targets = tgt_ns.shape
    shape: tuple[int, ...] = (rows, targets)
    strides: tuple[int, ...] = (targets, 1)
    if streams is not None:
        shape, strides = (rows, targets, streams), (targets * streams, streams, 1)
    empty, device = torch.empty_strided, tgt_ns.device  # a third faster than new_empty
    return (
        empty((rows, targets, width), (targets * width, width, 1), dtype=dtype, device=device),
        empty(shape, strides, dtype=torch.bool, device=device),
        empty(shape, strides, dtype=torch.float32, device=device),
    )


def _resample_out_cpu(
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
    one = Columns([src], [src_ns], [count], [head], [interpolation], [max_gap_ns], [max_age_ns])
    trust = (out_valid.unsqueeze(2), out_age_s.unsqueeze(2))
    cpu.resample_streams_out(one, tgt_ns, out_values, *trust)


def _resample_streams_out_cpu(
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
    cpu.resample_streams_out(many, tgt_ns, out_values, out_valid, out_age_s)


def _resample_scaled_out_cpu(
    values: list[Tensor],
    stamps_ns: list[Tensor],
    counts: list[Tensor | None],
    heads: list[Tensor | None],
    modes: list[str],
    max_gap_ns: list[int],
    max_age_ns: list[int],
    tgt_ns: Tensor,
    scale: Tensor,
    out_values: Tensor,
    out_valid: Tensor,
    out_age_s: Tensor,
) -> None:
    many = Columns(values, stamps_ns, counts, heads, modes, max_gap_ns, max_age_ns)
    cpu.resample_streams_out(many, tgt_ns, out_values, out_valid, out_age_s, scale)


def allocating_scaled(write: Callable[..., None]) -> Callable[..., Triple]:
    """``allocating`` for 8 bits: the dtype, the last argument, shapes the outputs alone."""

    def allocate_and_write(*arguments: Any) -> Triple:
        out = resample_scaled_fake(*arguments)
        write(*arguments[:GIVEN_TO_SCALED], *out)
        return out

    return allocate_and_write


def allocating(
    fake: Callable[P, Triple], write: Callable[..., None], given: int
) -> Callable[P, Triple]:
    """``write`` into fresh outputs, which it takes behind its first ``given`` arguments."""

    def allocate_and_write(*arguments: P.args, **keywords: P.kwargs) -> Triple:
        out = fake(*arguments, **keywords)
        write(*arguments[:given], *out, *arguments[given:], **keywords)
        return out

    return allocate_and_write


def _nothing(*arguments: object, **keywords: object) -> None:
    """The fake of an op that only writes what it was given."""


_CPU: Final[dict[str, Callable[..., object]]] = {
    "resample": allocating(resample_fake, _resample_out_cpu, GIVEN_TO_ONE),
    "resample_out": _resample_out_cpu,
    "resample_options_out": _resample_out_cpu,
    "resample_streams": allocating(resample_streams_fake, _resample_streams_out_cpu, GIVEN_TO_MANY),
    "resample_streams_out": _resample_streams_out_cpu,
    "resample_scaled": allocating_scaled(_resample_scaled_out_cpu),
    "resample_scaled_out": _resample_scaled_out_cpu,
}
_FAKE: Final[dict[str, Callable[..., object]]] = {
    "resample": resample_fake,
    "resample_out": _nothing,
    "resample_options_out": _nothing,
    "resample_streams": resample_streams_fake,
    "resample_streams_out": _nothing,
    "resample_scaled": resample_scaled_fake,
    "resample_scaled_out": _nothing,
}
for _name, _implementation in _CPU.items():
    LIBRARY.impl(_name, _implementation, "CPU")
for _name, _shapes in _FAKE.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _shapes, lib=LIBRARY)

resample = torch.ops.ppstream_kernels.resample.default
resample_out = torch.ops.ppstream_kernels.resample_out.default
resample_options_out = torch.ops.ppstream_kernels.resample_options_out.default
resample_streams = torch.ops.ppstream_kernels.resample_streams.default
resample_streams_out = torch.ops.ppstream_kernels.resample_streams_out.default
resample_scaled = torch.ops.ppstream_kernels.resample_scaled.default
resample_scaled_out = torch.ops.ppstream_kernels.resample_scaled_out.default


def is_implemented(dispatch_key: str) -> bool:
    """True when every op has an implementation for ``dispatch_key``, such as ``CUDA``."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(has_kernel(f"{NAMESPACE}::{name}", dispatch_key) for name in _CPU)
