from __future__ import annotations

import pytest
import torch
from resample_cases import make_sources, make_targets

from ppstream_kernels import Resampled, StreamSource, resample, resample_streams


def one_by_one(sources: list[StreamSource], tgt_ns: torch.Tensor) -> list[Resampled]:
    return [
        resample(
            source.values,
            source.stamps_ns,
            tgt_ns,
            count=source.count,
            head=source.head,
            mode=source.mode,
            max_gap_ns=source.max_gap_ns,
            max_age_ns=source.max_age_ns,
        )
        for source in sources
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_fused_streams_equal_single_ones_bit_for_bit(
    device: str, rows: int, dtype: torch.dtype
) -> None:
    sources, tgt_ns = make_sources(rows, device, dtype), make_targets(rows, device)
    fused, single = resample_streams(sources, tgt_ns), one_by_one(sources, tgt_ns)
    assert torch.equal(fused.values, torch.cat([one.values for one in single], 2))
    assert torch.equal(fused.valid, torch.stack([one.valid for one in single], 2))
    assert torch.equal(fused.age_s, torch.stack([one.age_s for one in single], 2))
    assert 0 < fused.valid.float().mean() < 1


@pytest.mark.parametrize("targets", [9, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_element_of_a_given_output_is_written(
    device: str, dtype: torch.dtype, targets: int
) -> None:
    sources, tgt_ns = make_sources(2, device), torch.randint(-10, 400, (2, targets), device=device)
    width = sum(source.values.shape[2] for source in sources)
    values = torch.full((2, targets, width), torch.nan, dtype=dtype, device=device)
    valid = torch.ones(2, targets, len(sources), dtype=torch.bool, device=device)
    age_s = torch.full((2, targets, len(sources)), torch.nan, device=device)
    result = resample_streams(sources, tgt_ns, out=(values, valid, age_s))
    assert result.values is values
    assert result.valid is valid
    assert result.age_s is age_s
    fresh = resample_streams(sources, tgt_ns)
    torch.testing.assert_close(values, fresh.values.to(dtype), rtol=0, atol=1e-6)
    assert torch.equal(valid, fresh.valid)
    assert torch.equal(age_s, fresh.age_s)


def test_a_row_of_a_slot_can_be_the_output(device: str) -> None:
    sources, tgt_ns = make_sources(1, device), make_targets(1, device)
    fresh = resample_streams(sources, tgt_ns)
    slot = torch.full((4, *fresh.values.shape), torch.nan, device=device)
    resample_streams(sources, tgt_ns, out=(slot[2], fresh.valid.clone(), fresh.age_s.clone()))
    assert torch.equal(slot[2], fresh.values)
    assert slot[[0, 1, 3]].isnan().all()


def test_streams_of_different_dtypes_are_promoted(device: str) -> None:
    stamps_ns = torch.tensor([[0, 2]], device=device)
    halves = [
        StreamSource(torch.ones(1, 2, 1, dtype=dtype, device=device), stamps_ns)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    assert resample_streams(halves, stamps_ns).values.dtype is torch.float32


def test_a_source_sees_what_its_ring_holds_now(device: str) -> None:
    count = torch.tensor([1], device=device)
    values, stamps_ns = torch.zeros(1, 2, 1, device=device), torch.tensor([[0, 0]], device=device)
    source = StreamSource(values, stamps_ns, count)
    tgt_ns = torch.tensor([[10]], device=device)
    assert resample_streams([source], tgt_ns).values.item() == 0
    values[0, 1], stamps_ns[0, 1] = 8, 20
    assert resample_streams([source], tgt_ns).values.item() == 0
    count[0] = 2
    assert resample_streams([source], tgt_ns).values.item() == 4
