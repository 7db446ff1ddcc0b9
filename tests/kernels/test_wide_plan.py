"""A wide plan gives a row the same bits in every batch, those of a plan for that row alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ppstream_kernels import Mode, ResamplePlan, StreamSource

ROWS, SAMPLES, STEPS = 300, 40, 25
WIDTH = 7


def drawn(mode: Mode, dtype: torch.dtype) -> tuple[StreamSource, Tensor]:
    generator = torch.Generator().manual_seed(3)
    dim = 4 if mode == "slerp" else WIDTH
    stamps = torch.randint(1, 2_000_000, (ROWS, SAMPLES), generator=generator).cumsum(1)
    values = torch.randn(ROWS, SAMPLES, dim, generator=generator).to(dtype)
    count = torch.randint(0, SAMPLES + 1, (ROWS,), generator=generator)
    head = torch.randint(0, SAMPLES, (ROWS,), generator=generator)
    targets = torch.randint(0, 45_000_000, (ROWS, STEPS), generator=generator).sort(1).values
    held = [stamps[row].roll(int(head[row])) for row in range(ROWS)]
    return StreamSource(values, torch.stack(held), count, head, mode, 900_000, 10**7), targets


def planned(source: StreamSource, targets: Tensor, *, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, steps = targets.shape
    values = torch.full((rows, steps, source.values.shape[2]), torch.nan)
    out = values, torch.empty(rows, steps, 1, dtype=torch.bool), torch.empty(rows, steps, 1)
    ResamplePlan([source], steps, distinct=True, wide=wide)(targets, out)
    return out


def one_row(source: StreamSource, row: int) -> StreamSource:
    assert source.count is not None
    assert source.head is not None
    only = slice(row, row + 1)
    return replace(
        source,
        values=source.values[only],
        stamps_ns=source.stamps_ns[only],
        count=source.count[only],
        head=source.head[only],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["linear", "previous", "nearest", "slerp", "angle"])
def test_a_row_s_bits_do_not_depend_on_its_batch(mode: Mode, dtype: torch.dtype) -> None:
    source, targets = drawn(mode, dtype)
    together = planned(source, targets, wide=True)
    for row in range(ROWS):
        alone = planned(one_row(source, row), targets[row : row + 1], wide=False)
        for many, one in zip(together, alone, strict=True):
            assert torch.equal(many[row], one[0]), f"row {row}"


def test_the_narrow_plan_differs_in_the_last_bit_alone() -> None:
    source, targets = drawn("linear", torch.float32)
    wide, narrow = (planned(source, targets, wide=wide)[0] for wide in (True, False))
    assert not torch.equal(wide, narrow)
    assert torch.allclose(wide, narrow, atol=1e-6)
