"""Values at the targets from the two samples around each, for CPU tensors: which way pays when.

Nothing here knows about time: a weight says how far past the first sample a target lies. What lies
between two samples is ``mixing.py``'s.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppstream_kernels.bracket import PICKING_MODES, Brackets
from ppstream_kernels.mixing import MIXES, Doubles, cubic_weight, linear
from ppstream_kernels.outer_samples import OuterSamples
from ppstream_kernels.rings import Bools, Int64s
from ppstream_kernels.source import Columns

# S=streams B=rows T=targets D=dims M=B*T R=rows of all samples (B*N) W=width of the output
# L=width of the small linear streams, side by side

Array: TypeAlias = NDArray[Any]

FEW_ELEMENTS: Final = 4096  # up to here float64 in numpy beats torch.lerp (fewer, cheaper calls)
_PART_BYTES: Final = 512 << 10  # of one sample each; two parts and the output stay in L2
_CURVED_PART_BYTES: Final = 64 << 10  # a dozen parts stay in L2
_HALVES: Final = (torch.bfloat16, torch.float16)
_ALL: Final = slice(None)


class _Stream(NamedTuple):
    s: int
    samples_RD: Array  # the stream's own memory
    rows_2BT: Int64s  # of the brackets
    weight_M1: Doubles
    nameless_M1: Bools | None  # of slerp: targets whose quaternions name no rotation
    outer: OuterSamples | None  # of cubic
    dtype: torch.dtype
    mode: str
    columns: slice  # of the output


class BlendOutput(NamedTuple):
    """The values being written: one memory, two views."""

    tensor_BTW: Tensor
    array_MW: Array


class Blend:
    """Writes the values of one set of streams from their brackets, whose memory it reads.

    ``wide``: large linear streams are mixed as small ones are, so that no bit of a row depends on
    how many rows there are.
    """

    def __init__(self, columns: Columns, found: Brackets, *, wide: bool = False) -> None:
        self._found = found
        self._is_wide = wide
        self._weight_SBT: Doubles = np.empty(found.past_ns_SBT.shape)
        self._streams = _streams(columns, found, self._weight_SBT)
        small = [stream for stream in self._streams if _is_small_linear(stream)]
        self._others = [stream for stream in self._streams if not _is_small_linear(stream)]
        self._small = _SmallLinear(small, self._weight_SBT) if small else None

    def write(self, out: BlendOutput) -> None:
        """Every element of the output, rounded once; 0 for rows without samples."""
        found = self._found
        np.divide(found.past_ns_SBT, np.maximum(found.gap_ns_SBT, 1), self._weight_SBT)
        if self._small is not None:
            self._small.write(out)
        for stream in self._others:
            if self._is_wide and stream.mode == "linear" and stream.dtype is not torch.float64:
                _mix_in_parts(stream, out)
            else:
                _write_alone(stream, out)
        if found.empty_SB is not None:
            for empty_B, stream in zip(found.empty_SB, self._streams, strict=True):
                out.tensor_BTW[torch.from_numpy(empty_B), :, stream.columns] = 0


def output_of(values_BTW: Tensor) -> BlendOutput:
    """Returns where a blend writes: contiguous values of any of the four dtypes."""
    return BlendOutput(values_BTW, _rows(_array(values_BTW)))


def _streams(columns: Columns, found: Brackets, weight_SBT: Doubles) -> list[_Stream]:
    streams: list[_Stream] = []
    left = 0
    for s, (samples, mode) in enumerate(zip(columns.values, columns.modes, strict=True)):
        stop = left + samples.shape[2]
        nameless_M1 = None
        if mode == "slerp":
            found.nameless_BT[s] = np.zeros(weight_SBT[s].shape, np.bool_)
            nameless_M1 = found.nameless_BT[s].reshape(-1, 1)
        streams.append(
            _Stream(
                s,
                _rows(_array(samples)),
                found.rows_2SBT[:, s],
                weight_SBT[s].reshape(-1, 1),
                nameless_M1,
                found.outer.get(s),
                samples.dtype,
                mode,
                slice(left, stop),
            )
        )
        left = stop
    return streams


def _is_small_linear(stream: _Stream) -> bool:
    is_small = stream.weight_M1.size * stream.samples_RD.shape[1] <= FEW_ELEMENTS
    return stream.mode == "linear" and is_small and stream.dtype is not torch.float64


class _Gather(NamedTuple):
    samples_RD: Array
    rows_2BT: Int64s
    gathered_2BTD: Array
    pair_2BTD: Doubles  # where they go, as float64
    bfloat16s: tuple[Tensor, Tensor] | None  # the last two, where numpy cannot convert


class _SmallLinear:
    """Linear streams of few elements, mixed together in float64.

    Fewer, cheaper calls; and what is mixed wider than the samples stays within them, rounded.
    """

    def __init__(self, streams: list[_Stream], weight_SBT: Doubles) -> None:
        dims = [stream.samples_RD.shape[1] for stream in streams]
        pair_2BTL = np.empty((2, *weight_SBT.shape[1:], sum(dims)))
        targets = streams[0].weight_M1.size
        self._first_ML, self._second_ML = pair_2BTL.reshape(2, targets, sum(dims))
        self._mixed_ML: Doubles = np.empty_like(self._first_ML)
        self._only = streams[0].weight_M1 if len(streams) == 1 else None
        self._weight_ML: Doubles = np.empty_like(self._first_ML)
        self._weight_MS = weight_SBT.reshape(len(weight_SBT), targets).T
        self._stream_of_column = np.repeat([stream.s for stream in streams], dims)
        self._gathers = [
            _gather(stream, pair_2BTD)
            for stream, pair_2BTD in zip(
                streams, np.split(pair_2BTL, np.cumsum(dims)[:-1], 3), strict=True
            )
        ]
        mixed = np.split(self._mixed_ML, np.cumsum(dims)[:-1], 1)
        self._shares = [
            (stream.columns, mixed_MD) for stream, mixed_MD in zip(streams, mixed, strict=True)
        ]

    def write(self, out: BlendOutput) -> None:
        """The columns of these streams."""
        for samples_RD, rows_2BT, gathered_2BTD, pair_2BTD, bfloat16s in self._gathers:
            samples_RD.take(rows_2BT, 0, gathered_2BTD, "wrap")  # "raise" would buffer
            if bfloat16s is None:
                pair_2BTD[:] = gathered_2BTD
            else:
                bfloat16s[1].copy_(bfloat16s[0])
        weight_ML = self._only
        if weight_ML is None:
            weight_ML = self._weight_ML
            self._weight_MS.take(self._stream_of_column, 1, weight_ML, "wrap")
        linear(self._first_ML, self._second_ML, weight_ML, self._mixed_ML)
        for columns, mixed_MD in self._shares:
            _round_into(out, columns, mixed_MD)


def _gather(stream: _Stream, pair_2BTD: Doubles) -> _Gather:
    gathered_2BTD = np.empty(pair_2BTD.shape, stream.samples_RD.dtype)
    bfloat16s = None
    if stream.dtype is torch.bfloat16:
        bfloat16s = (_tensor(gathered_2BTD, stream.dtype), torch.from_numpy(pair_2BTD))
    return _Gather(stream.samples_RD, stream.rows_2BT, gathered_2BTD, pair_2BTD, bfloat16s)


def _write_alone(stream: _Stream, out: BlendOutput) -> None:
    rows_2M = stream.rows_2BT.reshape(2, stream.weight_M1.size)
    if stream.mode in PICKING_MODES:
        _copy_first(stream, rows_2M[0], out)
    elif stream.mode == "linear":
        _lerp_in_parts(stream, rows_2M, out)
    elif stream.outer is not None:
        _cubic_in_parts(stream, stream.outer, rows_2M, out)
    else:
        pair_2MD = stream.samples_RD.take(rows_2M, 0, mode="wrap")
        if stream.dtype in _HALVES:
            pair_2MD = _tensor(pair_2MD, stream.dtype).double().numpy()
        first_MD, second_MD = pair_2MD.astype(np.float64)
        mixed_MD = MIXES[stream.mode](first_MD, second_MD, stream.weight_M1)
        if stream.nameless_M1 is not None:
            np.logical_not(mixed_MD.any(1, keepdims=True), stream.nameless_M1)
        _round_into(out, stream.columns, mixed_MD)


def _copy_first(stream: _Stream, first_M: Int64s, out: BlendOutput) -> None:
    picked_MD = stream.samples_RD.take(first_M, 0, mode="wrap")
    if out.tensor_BTW.dtype is stream.dtype:
        out.array_MW[:, stream.columns] = picked_MD
    else:
        out.tensor_BTW.flatten(0, 1)[:, stream.columns] = _tensor(picked_MD, stream.dtype)


def _lerp_in_parts(stream: _Stream, rows_2M: Int64s, out: BlendOutput) -> None:
    """torch.lerp starts from the closer sample: exact at both, monotone, never beyond either.

    Where the output is one piece of memory of the same dtype, the first samples are gathered right
    there: one pass over fresh memory less.
    """
    samples_RD, dtype, is_half = stream.samples_RD, stream.dtype, stream.dtype in _HALVES
    dim, targets = samples_RD.shape[1], rows_2M.shape[1]
    weight_M1 = stream.weight_M1
    if dtype is not torch.float64:
        weight_M1 = weight_M1.astype(np.float32)
    is_direct = not is_half and out.tensor_BTW.dtype is dtype and dim == out.array_MW.shape[1]
    step = max(1, _PART_BYTES // max(1, dim * samples_RD.itemsize))
    scratch_2PD = _scratch.like(samples_RD, min(step, targets))
    for start in range(0, targets, step):
        stop = min(start + step, targets)
        second_PD = scratch_2PD[1, : stop - start]
        first_PD = out.array_MW[start:stop] if is_direct else scratch_2PD[0, : stop - start]
        samples_RD.take(rows_2M[0, start:stop], 0, first_PD, "wrap")  # "raise" would buffer
        samples_RD.take(rows_2M[1, start:stop], 0, second_PD, "wrap")
        first, second = _tensor(first_PD, dtype), _tensor(second_PD, dtype)
        if is_half:
            first, second = first.float(), second.float()
        first.lerp_(second, torch.from_numpy(weight_M1[start:stop]))
        if not is_direct:
            out.tensor_BTW.flatten(0, 1)[start:stop, stream.columns] = first


def _cubic_in_parts(
    stream: _Stream, outer: OuterSamples, rows_2M: Int64s, out: BlendOutput
) -> None:
    """In float64, from the closer of the two samples: exact at both, never beyond either."""
    targets = rows_2M.shape[1]
    before_M, after_M = outer.rows_2BT.reshape(2, targets)
    rows_4M = np.stack([before_M, *rows_2M, after_M])
    ratios_2M1 = outer.ratios_2BT.reshape(2, targets, 1)
    step = max(1, _CURVED_PART_BYTES // max(8, 8 * stream.samples_RD.shape[1]))
    for start in range(0, targets, step):
        part = slice(start, min(start + step, targets))
        samples_4PD = stream.samples_RD.take(rows_4M[:, part], 0, mode="wrap")
        if stream.dtype in _HALVES:
            samples_4PD = _tensor(samples_4PD, stream.dtype).double().numpy()
        samples_4PD = samples_4PD.astype(np.float64, copy=False)
        with np.errstate(invalid="ignore", over="ignore"):  # samples that are not finite
            rises_3PD = np.diff(samples_4PD, axis=0)
            way_PD = cubic_weight(rises_3PD, ratios_2M1[:, part], stream.weight_M1[part])
            is_closer_PD = way_PD > 0.5
            way_PD -= is_closer_PD
            way_PD *= rises_3PD[1]
            way_PD += np.where(is_closer_PD, samples_4PD[2], samples_4PD[1])
        _round_into(out, stream.columns, way_PD, part)


def _mix_in_parts(stream: _Stream, out: BlendOutput) -> None:
    """``mixing.linear`` in float64, as ``_SmallLinear`` does, step by step: nothing is fused."""
    samples, rows_2M = _tensor(stream.samples_RD, stream.dtype), stream.rows_2BT.reshape(2, -1)
    weight_M1 = torch.from_numpy(stream.weight_M1)
    step = max(1, _PART_BYTES // (2 * stream.samples_RD.shape[1] * weight_M1.itemsize))
    out_MD = out.tensor_BTW.flatten(0, 1)[:, stream.columns]
    for part in range(0, len(weight_M1), step):
        span = slice(part, part + step)
        first, second = (
            samples.index_select(0, torch.from_numpy(rows_M[span] % len(samples))).double()
            for rows_M in rows_2M
        )
        out_MD[span] = second.sub_(first).mul_(weight_M1[span]).add_(first)


class _Scratch(threading.local):
    """Memory in which samples are gathered: fresh memory would cost a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._memory = np.empty(2 * _PART_BYTES, np.uint8)

    def like(self, samples_RD: Array, rows: int) -> Array:
        """``[2, rows, D]``, valid until the next call of this thread."""
        shape = (2, rows, samples_RD.shape[1])
        needed_bytes = 2 * rows * samples_RD.shape[1] * samples_RD.itemsize
        memory = self._memory
        if needed_bytes > memory.size:  # one row alone is larger
            memory = np.empty(needed_bytes, np.uint8)
        scratch: Array = memory[:needed_bytes].view(samples_RD.dtype).reshape(shape)
        return scratch


_scratch: Final = _Scratch()


def _round_into(out: BlendOutput, columns: slice, mixed_MD: Doubles, targets: slice = _ALL) -> None:
    if out.tensor_BTW.dtype in _HALVES:
        out.tensor_BTW.flatten(0, 1)[targets, columns] = torch.from_numpy(mixed_MD)
    else:
        out.array_MW[targets, columns] = mixed_MD


def _array(tensor: Tensor) -> Array:
    """The tensor's memory for numpy, which has no bfloat16: that appears as its bits."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _rows(array: Array) -> Array:
    """``[B, N, D]`` as ``[B * N, D]``."""
    return array.reshape(array.shape[0] * array.shape[1], array.shape[2])


def _tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """The reverse of ``_array``."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype is torch.bfloat16 else tensor
