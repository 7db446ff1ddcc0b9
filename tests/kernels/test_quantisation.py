from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resample_cases import few, make_sources, make_targets, rows_of
from torch import Tensor

from ppstream_kernels import ResamplePlan, StreamSource, resample, resample_streams, scale_for
from ppstream_kernels.quantisation import LARGEST
from ppstream_kernels.source import SCALED_DTYPES

FLOAT32_ROUNDING = 2**-22  # of a value over its scale, and times it
DTYPES = pytest.mark.parametrize("dtype", SCALED_DTYPES, ids=str)


def at_samples(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[T, D]`` values in 8 bits, and nothing else done to them."""
    src_ns = torch.arange(len(values), device=values.device)[None]
    result = resample(values[None], src_ns, src_ns, mode="previous", dtype=dtype, scale=scale)
    return result.values[0]


@DTYPES
@few
@given(
    limit=st.floats(1e-30, 1e30),
    shares=st.lists(st.floats(-1, 1), min_size=1, max_size=50),
)
def test_the_round_trip_keeps_to_the_stated_error(
    device: str, dtype: torch.dtype, limit: float, shares: list[float]
) -> None:
    scale = scale_for([-limit], [limit], dtype).to(device)
    values = (torch.tensor(shares, dtype=torch.float64) * limit).float().to(device)[:, None]
    read = at_samples(values, scale, dtype).double() * scale
    error = (read - values).abs().flatten()
    size, step = values.abs().flatten().double(), scale.double()
    bound = step / 2 if dtype is torch.int8 else torch.maximum(size / 16, step / 1024)
    assert (error <= bound + size * FLOAT32_ROUNDING).all()


@DTYPES
def test_every_number_comes_back_as_it_was(device: str, dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8).view(dtype)
    numbers = codes.float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= LARGEST[dtype])].to(device)
    scale = torch.tensor([0.037], device=device)
    assert torch.equal(at_samples((numbers * scale)[:, None], scale, dtype)[:, 0].float(), numbers)


@DTYPES
def test_halves_are_rounded_to_even(device: str, dtype: torch.dtype) -> None:
    between = {torch.int8: [0.5, 1.5, -2.5], torch.float8_e4m3fn: [17.0, 19.0, -21.0]}[dtype]
    even = {torch.int8: [0.0, 2.0, -2.0], torch.float8_e4m3fn: [16.0, 20.0, -20.0]}[dtype]
    one = torch.ones(1, device=device)
    values = torch.tensor(between, device=device)[:, None]
    assert at_samples(values, one, dtype)[:, 0].float().tolist() == even


@DTYPES
def test_what_is_beyond_the_range_saturates(device: str, dtype: torch.dtype) -> None:
    scale = scale_for([-2.0], [1.0], dtype).to(device)
    values = rows_of(2.0, 2.1, 1e30, 3e38, -2.0, -1e30, -3e38)[0].to(device)
    written = at_samples(values[:, None], scale, dtype)[:, 0].float().tolist()
    assert written == [LARGEST[dtype]] * 4 + [-LARGEST[dtype]] * 3


@DTYPES
@pytest.mark.parametrize("mode", ["previous", "cubic", "angle"])
def test_nan_is_nan_in_float8_and_0_in_int8(device: str, dtype: torch.dtype, mode: str) -> None:
    src = rows_of([math.nan], [math.nan]).to(device)
    src_ns = rows_of(0, 10, dtype=torch.int64).to(device)
    one = torch.ones(1, device=device)
    result = resample(src, src_ns, src_ns + 5, mode=mode, dtype=dtype, scale=one)
    values = result.values.float()
    assert values.isnan().all() if dtype is torch.float8_e4m3fn else not values.any()
    assert result.valid.all()


@DTYPES
@pytest.mark.parametrize("rows", [1, 10])
def test_windows_of_every_mode_are_those_of_float32_rounded(
    device: str, dtype: torch.dtype, rows: int
) -> None:
    sources, tgt_ns = make_sources(rows, device), make_targets(rows, device)
    width = sum(source.values.shape[2] for source in sources)
    scale = scale_for([-3.0] * width, np.linspace(0.1, 3.5, width).tolist(), dtype).to(device)
    wide = resample_streams(sources, tgt_ns)
    narrow = resample_streams(sources, tgt_ns, dtype=dtype, scale=scale)
    assert narrow.values.dtype is dtype
    assert torch.equal(narrow.valid, wide.valid)
    assert torch.equal(narrow.age_s, wide.age_s)
    most = LARGEST[dtype]
    wanted = (wide.values / scale).clamp(-most, most)
    wanted = (wanted.round() if dtype is torch.int8 else wanted.to(dtype)).float()
    apart = (narrow.values.float() - wanted).abs()
    if device == "cpu":
        assert not apart.any()
    steps = 1.0 if dtype is torch.int8 else wanted.abs().clamp(min=2**-6) / 7
    assert (apart <= steps).all()  # the next number, where the last bit of a tie differs
    assert (apart > 0).float().mean() < 0.01


@DTYPES
def test_a_plan_writes_what_the_op_writes(device: str, dtype: torch.dtype) -> None:
    sources, tgt_ns = make_sources(3, device), make_targets(3, device)
    width = sum(source.values.shape[2] for source in sources)
    scale = torch.full((width,), 0.02, device=device)
    op = resample_streams(sources, tgt_ns, dtype=dtype, scale=scale)
    out = tuple(torch.full_like(one.view(torch.uint8), 0x55).view(one.dtype) for one in op)
    plan = ResamplePlan(sources, tgt_ns.shape[1], scale=scale)
    plan(tgt_ns.contiguous(), out)
    for written, wanted in zip(out, op, strict=True):
        assert torch.equal(written.view(torch.uint8), wanted.view(torch.uint8))
    again = resample_streams(sources, tgt_ns, scale=scale, out=out)
    assert torch.equal(again.values.view(torch.uint8), op.values.view(torch.uint8))


@DTYPES
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 7, 8, 14, 16, 33, 64])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_width_is_written_whole_and_nothing_beside(
    device: str, dtype: torch.dtype, dim: int, source: torch.dtype
) -> None:
    torch.manual_seed(0)
    src = torch.randint(-99, 100, (2, 9, dim), device=device)
    src_ns = torch.arange(0, 90, 10, device=device).repeat(2, 1)
    one = torch.ones(dim, device=device)
    memory = torch.full((2 * 9 * dim + 64,), 0x55, dtype=torch.uint8, device=device)
    values = memory[32:-32].view(dtype).view(2, 9, dim)
    trust = torch.zeros(2, 9, dtype=torch.bool, device=device), torch.zeros(2, 9, device=device)
    resample(src.to(source), src_ns, src_ns, scale=one, out=(values, *trust))
    assert torch.equal(values.float(), src.float().to(dtype).float())
    assert (memory[:32] == 0x55).all()
    assert (memory[-32:] == 0x55).all()


def test_scales_that_fit_no_range_are_refused() -> None:
    assert scale_for([-254.0, 0.0], [10.0, 12.7], torch.int8).tolist() == pytest.approx([2, 0.1])
    for low, high, what in (
        ([1.0], [1.0], "column 0 ranges from 1 to 1"),
        ([0.0, -math.inf], [1.0, 1.0], "column 1 ranges from -inf"),
        ([0.0], [1e-44], "needs finite limits"),
        ([0.0], [1.0, 2.0], "low has 1 values, high 2"),
    ):
        with pytest.raises(ValueError, match=what):
            scale_for(low, high, torch.int8)
    with pytest.raises(ValueError, match="dtype is float16, needs int8 or float8_e4m3fn"):
        scale_for([0.0], [1.0], torch.float16)


def test_a_scale_that_does_not_fit_is_refused() -> None:
    src, src_ns = torch.zeros(1, 3, 4), torch.arange(3)[None]
    one = torch.ones(4)
    for scale, dtype, what in (
        (one[:3], torch.int8, r"scale is \[3\] float32 on cpu, needs contiguous \[4\] float32"),
        (one.double(), torch.int8, "needs contiguous"),
        (one, torch.float16, "needs int8 or float8_e4m3fn and a scale, or neither"),
        (None, torch.int8, "scale is not given"),
        (one, None, "dtype is None"),
    ):
        with pytest.raises(ValueError, match=what):
            resample(src, src_ns, src_ns, dtype=dtype, scale=scale)
    with pytest.raises(ValueError, match="scale is"):
        ResamplePlan([StreamSource(src, src_ns)], 3, scale=one[:3])
    out = torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="out values is"):
        resample(src, src_ns, src_ns, dtype=torch.int8, scale=one, out=out)
