"""Rings that a GPU takes whole, samples and all, give the bits of rings that it takes in tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ppstream_kernels import Mode, Resampled, StreamSource, resample_streams

TILED_ROWS = 250  # too few for a GPU to take them whole
SHAPES = ((120, 100, 14), (120, 100, 7), (120, 100, 3), (100, 50, 14), (200, 100, 9), (8, 250, 1))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODES: tuple[Mode, ...] = ("linear", "previous", "nearest")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rows() -> int:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return 16 * torch.cuda.get_device_properties(0).multi_processor_count + 5


def drawn(
    rows: int, shape: tuple[int, int, int], dtype: torch.dtype, mode: Mode, *, is_turned: bool
) -> tuple[StreamSource, Tensor]:
    """Stamps with equals and holes; targets before, between and behind them."""
    slots, targets, dim = shape
    generator = torch.Generator("cuda").manual_seed(slots * dim)

    def whole(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, device="cuda", generator=generator)

    stamps_ns = whole(0, 3, rows, slots).cumsum(1) * 1000
    count, head = None, None
    if is_turned:
        count, head = whole(0, slots + 1, rows), whole(0, slots, rows)
        order = (torch.arange(slots, device="cuda") - head[:, None]) % slots
        stamps_ns = stamps_ns.gather(1, order)
    values = torch.randn(rows, slots, dim, device="cuda", generator=generator).to(dtype)
    source = StreamSource(values, stamps_ns, count, head, mode=mode, max_gap_ns=1500)
    return source, whole(-2000, slots * 1000 + 4000, rows, targets)


def resampled(source: StreamSource, tgt_ns: Tensor, dtype: torch.dtype) -> Resampled:
    rows, targets = tgt_ns.shape
    values = torch.empty(rows, targets, source.values.shape[2], dtype=dtype, device="cuda")
    valid = torch.empty(rows, targets, 1, dtype=torch.bool, device="cuda")
    age_s = torch.empty(rows, targets, 1, device="cuda")
    return resample_streams([source], tgt_ns, out=(values, valid, age_s))


def tiled(source: StreamSource, tgt_ns: Tensor, dtype: torch.dtype) -> list[Tensor]:
    parts = []
    for begin in range(0, len(tgt_ns), TILED_ROWS):
        rows = slice(begin, begin + TILED_ROWS)
        few = replace(
            source,
            values=source.values[rows],
            stamps_ns=source.stamps_ns[rows],
            count=None if source.count is None else source.count[rows],
            head=None if source.head is None else source.head[rows],
        )
        parts.append(resampled(few, tgt_ns[rows], dtype))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_rings_give_the_bits_of_tiles(
    rows: int, shape: tuple[int, int, int], dtype: torch.dtype, mode: Mode, is_turned: bool
) -> None:
    source, tgt_ns = drawn(rows, shape, dtype, mode, is_turned=is_turned)
    whole = resampled(source, tgt_ns, dtype)
    for found, wanted in zip(whole, tiled(source, tgt_ns, dtype), strict=True):
        assert torch.equal(found, wanted)
    assert 0 < whole.valid.float().mean() < 1


@pytest.mark.parametrize("out", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_whole_rings_are_written_in_another_dtype(
    rows: int, dtype: torch.dtype, out: torch.dtype
) -> None:
    shape = (60, 50, 1 if dtype.itemsize == 8 else 6)
    source, tgt_ns = drawn(rows, shape, dtype, "linear", is_turned=False)
    whole = resampled(source, tgt_ns, out)
    assert torch.equal(whole.values, tiled(source, tgt_ns, out)[0])
