from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from resample_cases import POISON, assert_close, assert_identical, rows_of

from ppstream_kernels import MODES, Resampled, resample
from ppstream_kernels.reference import resample_reference


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


@pytest.mark.parametrize("rows", [1, 12])  # searched one by one, and together, on the CPU
@pytest.mark.parametrize("turned", [0, 3])
@pytest.mark.parametrize("max_gap_ns", [9, 10])  # each bridge too wide, or none
@pytest.mark.parametrize("mode", MODES)
def test_of_equal_stamps_the_first_sample_counts_and_the_others_are_never_read(
    device: str, mode: str, max_gap_ns: int, turned: int, rows: int
) -> None:
    stamps_ns = [0, 0, 10, 10, 10, 20, 30, 30]
    firsts = [0, 2, 5, 6]
    angles = torch.linspace(0.1, 0.8, len(stamps_ns))
    src = torch.stack([angles.sin(), 0 * angles, 0 * angles, angles.cos()], 1).repeat(rows, 1, 1)
    src_ns = torch.tensor([stamps_ns]).repeat(rows, 1)
    tgt_ns = torch.arange(-2, 36).repeat(rows, 1).to(device)
    limits = {"max_gap_ns": max_gap_ns, "max_age_ns": 4}
    once = resample(
        src[:, firsts].to(device), src_ns[:, firsts].to(device), tgt_ns, mode=mode, **limits
    )
    poisoned = torch.full_like(src, POISON)
    poisoned[:, firsts] = src[:, firsts]
    head = torch.full((rows,), turned, device=device)
    ring = [one.roll(turned, 1).to(device) for one in (poisoned, src_ns)]
    result = resample(*ring, tgt_ns, head=head, mode=mode, **limits)
    assert_identical(result, once)


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


def test_equal_stamps_on_both_sides_of_a_rings_end_are_seen(device: str) -> None:
    src = rows_of([2.0], [3.0], [0.0], [1.0]).to(device)
    src_ns = rows_of(10, 20, 0, 10, dtype=torch.int64).to(device)
    head = torch.tensor([2], device=device)
    tgt_ns = rows_of(5, 10, 15, dtype=torch.int64).to(device)
    result = resample(src, src_ns, tgt_ns, head=head)
    assert result.values.flatten().tolist() == [0.5, 1.0, 2.0]


def test_the_first_of_equal_stamps_is_found_in_a_long_ring(device: str) -> None:
    slots = 10_000
    src = torch.arange(2 * slots, dtype=torch.float64, device=device)[None, :, None]
    src_ns = (torch.arange(2 * slots, device=device) // 2)[None] * 10
    tgt_ns = torch.tensor([[0, 5, 50_000, 50_005, 99_990, 99_995]], device=device)
    result = resample(src, src_ns, tgt_ns)
    assert result.values.flatten().tolist() == [0, 1, 10_000, 10_001, 19_998, 19_998]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_quaternion_that_names_no_rotation_spoils_the_targets_that_use_it_and_no_other(
    device: str, dtype: torch.dtype
) -> None:
    one, none = [0.0, 0.0, 0.6, 0.8], [0.0] * 4
    src = rows_of(one, none, one, one, none, dtype=dtype)
    src_ns = rows_of(0, 10, 20, 30, 40, dtype=torch.int64)
    tgt_ns = rows_of(-1, 0, 5, 10, 15, 20, 25, 30, 35, 40, 45, dtype=torch.int64)
    usable = [True, True, False, False, False, True, True, True, False, False, False]
    result = resample(src.to(device), src_ns.to(device), tgt_ns.to(device), mode="slerp")
    assert result.valid.tolist() == [[False, *usable[1:]]]  # the first is before the oldest
    assert result.values.isfinite().all()
    assert [any(value) for value in result.values[0].tolist()] == usable


@pytest.mark.parametrize("length", [1e-200, 1e200, math.inf, math.nan])
def test_a_length_that_float64_cannot_tell_names_no_rotation(device: str, length: float) -> None:
    src = rows_of([0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, length], dtype=torch.float64).to(device)
    src_ns = rows_of(0, 10, dtype=torch.int64).to(device)
    tgt_ns = rows_of(0, 5, 10, 15, dtype=torch.int64).to(device)
    result = resample(src, src_ns, tgt_ns, mode="slerp")
    assert result.values[0].tolist() == [[0, 0, 0, 1], [0] * 4, [0] * 4, [0] * 4]
    assert result.valid.tolist() == [[True, False, False, False]]


ENDS = (-(2**63), -(2**62) - 1, -(2**62), -1, 0, 2**62, 2**62 + 1, 2**63 - 1)


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("max_age_ns", [None, 2**62])
@pytest.mark.parametrize("max_gap_ns", [None, 2**62])
@pytest.mark.parametrize("mode", MODES)
def test_distances_are_right_over_the_whole_range_of_stamps(
    device: str, mode: str, max_gap_ns: int, max_age_ns: int, rows: int
) -> None:
    src = torch.rand(rows, 2, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    tgt_ns = torch.tensor([ENDS]).repeat(rows, 1)
    options = {"mode": mode, "max_gap_ns": max_gap_ns, "max_age_ns": max_age_ns}
    for pair in combinations(ENDS, 2):
        src_ns = torch.tensor([pair]).repeat(rows, 1)
        result = resample(*(one.to(device) for one in (src, src_ns, tgt_ns)), **options)
        expected = resample_reference(src.numpy(), src_ns.numpy(), tgt_ns.numpy(), **options)
        on_host = Resampled(*(one.cpu() for one in result))
        assert_close(on_host, expected, torch.float32, mode)


@pytest.mark.parametrize("mode", ["linear", "previous", "nearest", "angle", "cubic"])
def test_a_sample_that_is_not_finite_spoils_targets_beside_it_and_validity_does_not_tell(
    device: str, mode: str
) -> None:
    src = rows_of(*([float(k)] for k in range(6)))
    src[0, 3] = math.nan
    src_ns = (torch.arange(6) * 10)[None]
    tgt_ns = rows_of(0, 15, 20, 25, 30, 35, 40, 45, dtype=torch.int64)
    result = resample(src.to(device), src_ns.to(device), tgt_ns.to(device), mode=mode)
    spoiled = result.values[0, :, 0].isnan().tolist()
    assert spoiled[4]
    assert not any(spoiled[:2] + spoiled[6:])  # beyond its neighbours nothing is changed
    assert result.valid.all()


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
