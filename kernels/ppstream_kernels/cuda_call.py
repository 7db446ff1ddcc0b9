"""A call as the bytes that ``resample.cu`` takes: the layouts of its ``Call`` and ``Stream``.

Everything about a call but its addresses depends on shapes, strides, modes and limits alone. That
part, the form, is worked out once and kept; a call then only writes its addresses into it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ppstream_kernels.cuda_compile import Variant
from ppstream_kernels.cuda_tiling import PREFETCH_MOST_BYTES, Load, choose_tiles, stage_shift
from ppstream_kernels.source import MODES, NO_LIMIT, Columns

MOST_STREAMS: Final = 24  # per launch: 4 KiB of kernel parameters
_CAPACITIES: Final = (1, 4, MOST_STREAMS)  # that the kernel is compiled for
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # DTYPE_* in order
_OUT_DTYPES: Final = (*_DTYPES, torch.int8, torch.float8_e4m3fn)
_TURNING_MODES: Final = ("slerp", "angle")
_RARE_MODES: Final = (*_TURNING_MODES, "cubic")  # compiled for launches that need them alone
_CUBIC_WORDS: Final = 3  # per target: a place, and what lies beside
_WORD_BYTES: Final = 16  # widest read and write
_LEAST_STORE_BYTES: Final = 4  # of results that a block writes together
_PREFETCHING_CAPABILITY: Final = (9, 0)

_MOST_GRID_Y: Final = 65535
_MOST_RING_ELEMENTS: Final = 2**31 - 1  # the kernel counts elements of a ring in 32 bits

_HEADER: Final = struct.Struct("=5Q2q6i")
_STREAM: Final = struct.Struct("=4Q9q14i")
HEADER_ADDRESSES: Final = struct.Struct("=5Q")  # values, valid, age_s, tgt_ns, scale
STREAM_ADDRESSES: Final = struct.Struct("=4Q")  # values, stamps_ns, counts, heads


class Gpu(NamedTuple):
    """Properties of a GPU that a tiling depends on."""

    multiprocessors: int
    capability: tuple[int, int]


class LaunchForm(NamedTuple):
    """One launch without its addresses."""

    variant: Variant
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    streams: range  # of the call, that this launch serves
    parameters: bytes  # addresses are 0


def stream_address_at(position: int) -> int:
    """Offset in ``LaunchForm.parameters`` of the addresses of the ``position``-th stream."""
    return _HEADER.size + position * _STREAM.size


def make_forms(columns: Columns, tgt_ns: Tensor, out_values: Tensor, gpu: Gpu) -> list[LaunchForm]:
    """The launches of a call: one, unless there are more than ``MOST_STREAMS`` streams.

    Arguments are checked otherwise, and there is at least one target.

    Raises:
        ValueError: a ring has more elements than the kernel counts.
    """
    for samples in columns.values:
        elements = samples.shape[1] * max(samples.shape[2], samples.stride(1))
        if elements > _MOST_RING_ELEMENTS:
            raise ValueError(f"a ring spans {elements} elements, on CUDA the limit is 2^31 - 1")
    starts = range(0, len(columns.values), MOST_STREAMS)
    groups = [range(at, min(at + MOST_STREAMS, len(columns.values))) for at in starts]
    return [_make_form(columns, group, tgt_ns, out_values, gpu) for group in groups]


def _make_form(
    columns: Columns, group: range, tgt_ns: Tensor, out_values: Tensor, gpu: Gpu
) -> LaunchForm:
    rows, targets = tgt_ns.shape
    widths = [samples.shape[2] for samples in columns.values]
    lefts = [sum(widths[:s]) for s in group]
    packs = [_pack(columns, s) for s in group]
    items = [_items(columns, s, pack) for s, pack in zip(group, packs, strict=True)]
    slots = [columns.values[s].shape[1] for s in group]
    words = [_CUBIC_WORDS if columns.modes[s] == "cubic" else 1 for s in group]
    whole = [_whole_bytes(columns, s, targets, out_values) for s in group]
    rooms = [sum(bytes_) for bytes_ in whole]
    loads = [*map(Load, items, slots, words, rooms)]
    tiling = choose_tiles(rows, targets, loads, gpu.multiprocessors)
    is_asked_ahead = _is_asked_ahead(columns, group, targets, gpu)
    described, first_tile = b"", 0
    for place, s in enumerate(group):
        tiles = -(-targets // tiling.tile_targets[place])
        is_whole = tiling.is_whole[place]
        described += _STREAM.pack(
            *(0, 0, 0, 0),
            *_strides(columns, s),
            _unsigned(columns.max_gap_ns[s]),
            _unsigned(columns.max_age_ns[s]),
            *columns.values[s].shape[1:],
            MODES.index(columns.modes[s]),
            _DTYPES.index(columns.values[s].dtype),
            stage_shift(slots[place]),
            *(lefts[place], first_tile, tiling.tile_targets[place], packs[place], items[place]),
            _row_store_bytes(out_values)
            if is_whole
            else _store_bytes(out_values, lefts[place], packs[place]),
            *_ahead(columns.values[s], tiles if is_asked_ahead[place] and not is_whole else 0),
            whole[place][0] if is_whole else 0,
        )
        first_tile += tiles
    header = _header(tgt_ns, sum(widths), len(widths), group)
    variant = _variant(columns, group, out_values, has_whole=any(tiling.is_whole))
    unused = bytes(_STREAM.size * (variant.streams - len(group)))
    return LaunchForm(
        variant,
        _grid(first_tile, rows),
        tiling.threads,
        tiling.shared_bytes,
        group,
        header + described + unused,
    )


def _unsigned(limit_ns: int) -> int:
    """The bits of what no distance exceeds, where there is no limit."""
    return -1 if limit_ns == NO_LIMIT else limit_ns


def _header(tgt_ns: Tensor, width: int, streams: int, group: range) -> bytes:
    counts = (*tgt_ns.shape, width, streams, group.start, len(group))
    return _HEADER.pack(0, 0, 0, 0, 0, *tgt_ns.stride(), *counts)


def _grid(tiles: int, rows: int) -> tuple[int, int, int]:
    layers = -(-rows // _MOST_GRID_Y)
    return tiles, -(-rows // layers), layers


def _variant(columns: Columns, group: range, out_values: Tensor, *, has_whole: bool) -> Variant:
    """Lean code for what is common: a launch of straight lines carries neither turns nor curves."""
    capacity = next(capacity for capacity in _CAPACITIES if capacity >= len(group))
    dtypes = {_DTYPES.index(columns.values[s].dtype) for s in group}
    modes = {MODES.index(columns.modes[s]) for s in group}
    rare = sum(1 << mode for mode in modes if MODES[mode] in _RARE_MODES)
    rings = [(columns.counts[s], columns.heads[s]) for s in group]
    is_turned = any(one is not None for ring in rings for one in ring)
    is_long = any(stage_shift(columns.values[s].shape[1]) for s in group)
    straight = sum(1 << at for at, mode in enumerate(MODES) if mode not in _RARE_MODES)
    return Variant(
        capacity,
        _OUT_DTYPES.index(out_values.dtype),
        sum(1 << dtype for dtype in dtypes),
        straight | rare,
        is_turned | is_long << 1 | has_whole << 2,
    )


def _strides(columns: Columns, s: int) -> tuple[int, ...]:
    count, head = columns.counts[s], columns.heads[s]
    return (
        *columns.values[s].stride(),
        *columns.stamps_ns[s].stride(),
        0 if count is None else count.stride(0),
        0 if head is None else head.stride(0),
    )


def _pack(columns: Columns, s: int) -> int:
    """Returns how many values lie side by side, aligned, in every sample: up to 16 bytes."""
    samples = columns.values[s]
    size, dim = samples.element_size(), samples.shape[2]
    if columns.modes[s] in _TURNING_MODES or samples.stride(2) != 1:
        return 1
    apart = (samples.data_ptr(), *(stride * size for stride in samples.stride()[:2]), dim * size)
    return max(1, _aligned_bytes(apart) // size)


def _items(columns: Columns, s: int, pack: int) -> int:
    return 1 if columns.modes[s] == "slerp" else columns.values[s].shape[2] // pack


def _store_bytes(out_values: Tensor, left: int, pack: int) -> int:
    size = out_values.element_size()
    width = out_values.shape[2]
    return _aligned_bytes((out_values.data_ptr(), width * size, left * size, pack * size))


def _row_store_bytes(out_values: Tensor) -> int:
    row = out_values.shape[1] * out_values.shape[2] * out_values.element_size()
    return _aligned_bytes((out_values.data_ptr(), row))


def _whole_bytes(columns: Columns, s: int, targets: int, out_values: Tensor) -> tuple[int, int]:
    """Bytes of a ring's samples and of a row's results, where a block may move both at once.

    Both are 0 where words as wide as can be are read anyway, where a result is not the next one's
    neighbour, and where the blend is more than a line.
    """
    samples = columns.values[s]
    size, dim = samples.element_size(), samples.shape[2]
    ring_bytes = samples.shape[1] * dim * size
    is_apart = samples.stride()[1:] != (dim, 1) or out_values.shape[2] != dim
    if (
        is_apart
        or columns.modes[s] in _RARE_MODES
        or out_values.element_size() == 1
        or _pack(columns, s) * size >= _WORD_BYTES
        or _aligned_bytes((samples.data_ptr(), samples.stride(0) * size, ring_bytes)) < _WORD_BYTES
        or _row_store_bytes(out_values) < _LEAST_STORE_BYTES
    ):
        return 0, 0
    return ring_bytes, targets * dim * out_values.element_size()


def _aligned_bytes(numbers: Sequence[int]) -> int:
    """The largest power of two, up to a word, that divides all of them."""
    together = _WORD_BYTES
    for number in numbers:
        together |= number
    return together & -together


def _ahead(samples: Tensor, tiles: int) -> tuple[int, int]:
    """Bytes per tile and per ring to ask for ahead, in words; both 0 without tiles."""
    ring_bytes = samples.shape[1] * samples.shape[2] * samples.element_size()
    words = (ring_bytes - _WORD_BYTES + 1) // _WORD_BYTES if tiles else 0  # wherever it begins
    return -(-words // max(1, tiles)) * _WORD_BYTES, words * _WORD_BYTES


def _is_asked_ahead(columns: Columns, group: range, targets: int, gpu: Gpu) -> list[bool]:
    """Rings that are wanted nearly whole, side by side, and stay in L2 until they are read."""
    samples = [columns.values[s] for s in group]
    is_small = sum(one.numel() * one.element_size() for one in samples) <= PREFETCH_MOST_BYTES
    is_able = gpu.capability >= _PREFETCHING_CAPABILITY and is_small
    return [
        is_able and 2 * targets >= one.shape[1] and one.stride()[1:] == (one.shape[2], 1)
        for one in samples
    ]
