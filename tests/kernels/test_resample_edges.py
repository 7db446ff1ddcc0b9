from __future__ import annotations

import math

import pytest
import torch
from resample_cases import POISON, assert_identical, rows_of

from ppstream_kernels import MODES, resample


def test_both_ends_hold_like_numpy_interp(device: str) -> None:
    src = rows_of([3.0], [5.0]).to(device)
    tgt_ns = rows_of(-100, 0, 5, 10, 400, dtype=torch.int64).to(device)
    src_ns = rows_of(0, 10, dtype=torch.int64).to(device)
    result = resample(src, src_ns, tgt_ns, max_age_ns=400)
    assert result.values.flatten().tolist() == [3.0, 3.0, 4.0, 5.0, 5.0]
    assert result.valid.tolist() == [[False, True, True, True, True]]
    assert result.age_s.tolist() == [[0, 0, 0, 0, pytest.approx(390e-9)]]


def test_a_hole_and_an_old_sample_are_invalid_but_keep_their_values(device: str) -> None:
    src = rows_of([0.0], [1.0], [2.0]).to(device)
    src_ns = rows_of(0, 10, 110, dtype=torch.int64).to(device)
    tgt_ns = rows_of(5, 10, 60, 110, 120, 121, dtype=torch.int64).to(device)
    result = resample(src, src_ns, tgt_ns, max_gap_ns=99, max_age_ns=10)
    assert result.values.flatten().tolist() == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert result.valid.tolist() == [[True, True, False, True, True, False]]


@pytest.mark.parametrize(
    ("mode", "values", "valid", "ages_ns"),
    [
        ("previous", [0, 0, 0, 1, 1], [True, True, False, True, False], [0, 5, 9, 0, 9]),
        ("nearest", [0, 0, 1, 1, 1], [True, True, True, True, False], [0, 5, 0, 0, 9]),
    ],
)
def test_picking_modes_judge_the_distance_to_the_sample_they_pick(
    device: str, mode: str, values: list[float], valid: list[bool], ages_ns: list[int]
) -> None:
    src = rows_of([0.0], [1.0]).to(device)
    src_ns = rows_of(0, 10, dtype=torch.int64).to(device)
    tgt_ns = rows_of(0, 5, 9, 10, 19, dtype=torch.int64).to(device)
    result = resample(src, src_ns, tgt_ns, mode=mode, max_gap_ns=5)
    assert result.values.flatten().tolist() == values
    assert result.valid.flatten().tolist() == valid
    assert (result.age_s * 1e9).round().flatten().tolist() == ages_ns


@pytest.mark.parametrize("mode", MODES)
def test_of_equal_stamps_the_last_sample_counts(device: str, mode: str) -> None:
    angles = torch.tensor([0.1, 0.2, 0.3], device=device)
    src = torch.stack([angles.sin(), 0 * angles, 0 * angles, angles.cos()], 1)[None]
    src_ns = torch.full((1, 3), 7, device=device)
    result = resample(src, src_ns, src_ns[:, :1] + 1, mode=mode)
    torch.testing.assert_close(result.values[0, 0], src[0, 2])
    assert result.valid.all()


@pytest.mark.parametrize("mode", MODES)
def test_one_sample_is_held(device: str, mode: str) -> None:
    src = rows_of([0.0, 0.0, 0.0, 1.0]).to(device)
    tgt_ns = rows_of(-1, 0, 1, dtype=torch.int64).to(device)
    result = resample(src, torch.zeros_like(tgt_ns[:, :1]), tgt_ns, mode=mode)
    assert torch.equal(result.values[0], src[0].expand(3, 4))
    assert result.valid.tolist() == [[False, True, True]]


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("mode", MODES)
def test_no_samples_give_zero_and_invalid(device: str, mode: str, rows: int) -> None:
    src = torch.full((rows, 5, 4), POISON, device=device)
    src_ns = torch.full((rows, 5), 3, device=device)
    count = torch.zeros(rows, dtype=torch.int64, device=device)
    result = resample(src, src_ns, src_ns, count=count, head=count + 4, mode=mode)
    assert not result.values.any()
    assert not result.valid.any()
    assert not result.age_s.any()


def test_an_angle_turns_the_shorter_way(device: str) -> None:
    src = rows_of([3.0, -3.0], [-3.0, 3.0]).to(device)
    src_ns = rows_of(0, 4, dtype=torch.int64).to(device)
    result = resample(src, src_ns, torch.ones_like(src_ns[:, :1]), mode="angle").values
    quarter = 3.0 + (math.tau - 6.0) / 4
    assert result.flatten().tolist() == pytest.approx([quarter, -quarter])


def test_a_turn_of_several_rounds_is_wrapped(device: str) -> None:
    src = rows_of([7 * math.pi + 0.5]).to(device)
    tgt_ns = torch.zeros(1, 1, dtype=torch.int64, device=device)
    result = resample(src, tgt_ns, tgt_ns, mode="angle").values
    assert result.item() == pytest.approx(0.5 - math.pi, abs=3e-6)


def test_slerp_takes_the_shorter_arc_and_normalises(device: str) -> None:
    half = math.pi / 8  # 45 degrees around z, written with the opposite sign and length 2
    src = rows_of([0.0, 0.0, 0.0, 1.0], [0.0, 0.0, -2 * math.sin(half), -2 * math.cos(half)])
    src_ns = rows_of(0, 3, dtype=torch.int64).to(device)
    tgt_ns = torch.ones(1, 1, dtype=torch.int64, device=device)
    result = resample(src.to(device), src_ns, tgt_ns, mode="slerp").values.flatten().tolist()
    assert result == pytest.approx([0, 0, math.sin(half / 3), math.cos(half / 3)], abs=1e-7)


def test_a_zero_quaternion_stays_zero(device: str) -> None:
    src_ns = rows_of(0, 3, dtype=torch.int64).to(device)
    result = resample(torch.zeros(1, 2, 4, device=device), src_ns, src_ns - 1, mode="slerp")
    assert not result.values.any()


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0), (12, 3, 0, 4)])
def test_nothing_to_do_is_done(device: str, shape: tuple[int, int, int, int]) -> None:
    rows, slots, targets, dim = shape
    src_ns = torch.zeros(rows, slots, dtype=torch.int64, device=device)
    tgt_ns = torch.zeros(rows, targets, dtype=torch.int64, device=device)
    result = resample(torch.zeros(rows, slots, dim, device=device), src_ns, tgt_ns)
    assert result.values.shape == (rows, targets, dim)
    assert result.valid.shape == result.age_s.shape == (rows, targets)


@pytest.mark.parametrize("rows", [2, 12])
def test_strided_views_are_read_in_place(device: str, rows: int) -> None:
    torch.manual_seed(0)
    src = torch.randn(rows, 5, 8, device=device)
    src_ns = torch.randint(1, 9, (rows, 10), device=device).cumsum(1)
    tgt_ns = torch.randint(0, 60, (rows, 6), device=device)
    apart = resample(src[:, :, ::2], src_ns[:, ::2], tgt_ns[:, ::3])
    copies = [t.contiguous() for t in (src[:, :, ::2], src_ns[:, ::2], tgt_ns[:, ::3])]
    assert_identical(apart, resample(*copies))
