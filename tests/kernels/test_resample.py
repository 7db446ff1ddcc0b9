from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from ppstream_kernels import MODES, Resampled, resample
from ppstream_kernels.reference import Reference, resample_reference

SHIFT_NS = 10**18
POISON = math.nan  # in every slot that holds no sample
# One rounding of the result, and for float32 those of torch.lerp, relative to the largest sample.
TOLERANCE = {
    torch.float64: 1e-15,
    torch.float32: 2.5e-7,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-10,
}
few = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Case(NamedTuple):
    """Samples in order of time, and the same samples in rings."""

    plain: list[tuple[np.ndarray, np.ndarray]]  # per row: values [n, D], stamps [n]
    targets: np.ndarray  # [B, T]
    src: np.ndarray  # [B, N, D]
    src_ns: np.ndarray
    count: np.ndarray
    head: np.ndarray


@st.composite
def cases(draw: st.DrawFn, min_count: int = 0, unit: bool = False) -> Case:
    rows = draw(st.sampled_from([1, 2, 10]))  # 10 takes the batched search on the CPU
    slots, dim = draw(st.integers(max(1, min_count), 9)), 4 if unit else draw(st.integers(1, 5))
    count = draw(hnp.arrays(np.int64, rows, elements=st.integers(min_count, slots)))
    head = draw(hnp.arrays(np.int64, rows, elements=st.integers(0, slots - 1)))
    steps = draw(hnp.arrays(np.int64, (rows, slots), elements=st.integers(0, 50)))
    seed = draw(st.integers(0, 2**32 - 1))
    targets = draw(hnp.arrays(np.int64, (rows, 7), elements=st.integers(-60, 500)))
    values = np.random.default_rng(seed).normal(size=(rows, slots, dim)).astype(np.float32) * 3
    src, src_ns = np.full_like(values, POISON), np.full((rows, slots), -(10**15))
    plain = []
    for b in range(rows):
        kept, stamps_ns = values[b, : count[b]], np.cumsum(steps[b])[: count[b]]
        at = (head[b] + np.arange(count[b])) % slots
        src[b, at], src_ns[b, at] = kept, stamps_ns
        plain.append((kept, stamps_ns))
    return Case(plain, targets, src, src_ns, count, head)


def run(case: Case, device: str, **options: object) -> Resampled:
    """The case as rings on a device, results on the CPU."""
    dtype = options.pop("dtype", torch.float32)
    shift_ns = options.pop("shift_ns", 0)
    result = resample(
        torch.from_numpy(case.src).to(device, dtype),
        torch.from_numpy(case.src_ns + shift_ns).to(device),
        torch.from_numpy(case.targets + shift_ns).to(device),
        count=torch.from_numpy(case.count).to(device),
        head=torch.from_numpy(case.head).to(device),
        **options,
    )
    return Resampled(*(tensor.cpu() for tensor in result))


def expected(case: Case, dtype: torch.dtype = torch.float32, **options: object) -> Reference:
    src = torch.from_numpy(case.src).to(dtype).double().numpy()
    ring = {"count": case.count, "head": case.head}
    return resample_reference(src, case.src_ns, case.targets, **ring, **options)


def assert_close(
    result: Resampled, reference: Reference, dtype: torch.dtype, mode: str = "linear"
) -> None:
    apart = result.values.double().numpy() - reference.values
    if mode == "angle":  # -pi and pi are one angle
        apart = np.remainder(apart + math.pi, math.tau) - math.pi
    largest = max(1.0, np.abs(reference.values).max(initial=0))
    assert np.abs(apart).max(initial=0) <= TOLERANCE[dtype] * largest
    np.testing.assert_array_equal(result.valid.numpy(), reference.valid)
    np.testing.assert_allclose(result.age_s.numpy(), reference.age_s, rtol=1e-6)


def assert_identical(one: Resampled, other: Resampled) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def rows_of(*values: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([values], dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "slerp"])
@few
@given(case=cases(), max_gap_ns=st.sampled_from([None, 0, 20]), max_age_ns=st.none() | st.just(30))
def test_rings_equal_the_float64_reference(
    device: str, mode: str, dtype: torch.dtype, case: Case, max_gap_ns: int, max_age_ns: int
) -> None:
    options = {"mode": mode, "max_gap_ns": max_gap_ns, "max_age_ns": max_age_ns}
    result = run(case, device, dtype=dtype, **options)
    assert result.values.dtype is dtype
    assert_close(result, expected(case, dtype, **options), dtype, mode)


@few
@given(case=cases(unit=True))
def test_slerp_equals_the_float64_reference_and_is_normalised(device: str, case: Case) -> None:
    result = run(case, device, mode="slerp")
    assert_close(result, expected(case, mode="slerp"), torch.float32)
    held = torch.from_numpy(case.count) > 0
    lengths = result.values[held].norm(dim=2)
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=3e-7)


@pytest.mark.parametrize("mode", MODES)
@few
@given(case=cases(unit=True))
def test_a_shift_of_the_clock_changes_no_bit(device: str, mode: str, case: Case) -> None:
    options = {"mode": mode, "max_gap_ns": 20, "max_age_ns": 30}
    assert_identical(run(case, device, **options), run(case, device, **options, shift_ns=SHIFT_NS))


@pytest.mark.parametrize("mode", MODES)
@few
@given(case=cases(unit=True, min_count=1))
def test_a_ring_equals_its_samples_in_order(device: str, mode: str, case: Case) -> None:
    whole = run(case, device, mode=mode, max_gap_ns=20)
    for b, (values, stamps_ns) in enumerate(case.plain):
        plain = resample(
            torch.from_numpy(values).to(device)[None],
            torch.from_numpy(stamps_ns).to(device)[None],
            torch.from_numpy(case.targets[b : b + 1]).to(device),
            mode=mode,
            max_gap_ns=20,
        )
        assert_identical(Resampled(*(t.cpu()[0] for t in plain)), Resampled(*(t[b] for t in whole)))


@pytest.mark.parametrize("mode", MODES)
@few
@given(case=cases(unit=True), cut=st.integers(0, 7))
def test_targets_in_two_parts_equal_the_whole(device: str, mode: str, case: Case, cut: int) -> None:
    whole = run(case, device, mode=mode)
    parts = [
        run(case._replace(targets=t), device, mode=mode) for t in np.split(case.targets, [cut], 1)
    ]
    assert_identical(whole, Resampled(*(torch.cat(pair, 1) for pair in zip(*parts, strict=True))))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@few
@given(case=cases(min_count=1))
def test_linear_never_leaves_the_range_of_its_neighbours(
    device: str, dtype: torch.dtype, case: Case
) -> None:
    result = run(case, device, dtype=dtype).values
    for b, (values, stamps_ns) in enumerate(case.plain):
        samples = torch.from_numpy(values).to(dtype)
        for t, target in enumerate(case.targets[b]):
            after = int(np.searchsorted(stamps_ns, target, "right"))
            around = samples[max(after - 1, 0) : min(after, len(samples) - 1) + 1]
            assert (around.amin(0) <= result[b, t]).all()
            assert (result[b, t] <= around.amax(0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("targets", [300, 20000])
def test_a_constant_stays_constant_to_the_last_bit(
    device: str, dtype: torch.dtype, targets: int
) -> None:
    constants = torch.tensor([0.1, 1 / 3, 1e-30, 7e30], dtype=dtype, device=device)
    src_ns = torch.arange(0, 7000, 7, device=device)[None]
    tgt_ns = torch.linspace(0, 7000, targets, device=device).long()[None]
    result = resample(constants.expand(1, 1000, 4), src_ns, tgt_ns).values
    assert torch.equal(result, constants.expand_as(result))


@pytest.mark.parametrize("slots", [8, 3000])  # few elements and many: two implementations on a CPU
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", ["linear", "previous", "nearest"])
def test_values_are_exact_at_samples(
    device: str, mode: str, dtype: torch.dtype, slots: int
) -> None:
    torch.manual_seed(0)
    src = torch.randn(2, slots, 3).to(device, dtype)
    src_ns = torch.randint(1, 10**7, (2, slots)).cumsum(1).to(device) + SHIFT_NS
    result = resample(src, src_ns, src_ns, mode=mode, max_gap_ns=0, max_age_ns=0)
    assert torch.equal(result.values, src)
    assert result.valid.all()
    assert not result.age_s.any()


@pytest.mark.parametrize("shape", [(1, 500, 250, 30), (32, 100, 50, 14), (9, 4000, 3000, 90)])
def test_float32_error_is_at_most_1e_7(device: str, shape: tuple[int, int, int, int]) -> None:
    rows, slots, targets, dim = shape
    torch.manual_seed(0)
    src = torch.randn(rows, slots, dim)
    src_ns = torch.randint(1, 10**7, (rows, slots)).cumsum(1) + SHIFT_NS
    tgt_ns = torch.randint(0, slots * 5 * 10**6, (rows, targets)).sort(1)[0] + SHIFT_NS
    rows_checked = slice(rows - 1, rows)  # the reference is slow; the last row is the furthest in
    reference = resample_reference(
        src[rows_checked].numpy(), src_ns[rows_checked].numpy(), tgt_ns[rows_checked].numpy()
    )
    result = resample(src.to(device), src_ns.to(device), tgt_ns.to(device))
    apart = result.values[rows_checked].cpu().double().numpy() - reference.values
    assert np.linalg.norm(apart) <= 1e-7 * np.linalg.norm(reference.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("targets", [10, 4000])
def test_halves_are_rounded_once(device: str, dtype: torch.dtype, targets: int) -> None:
    torch.manual_seed(0)
    src = torch.randn(1, 50, 3).to(device, dtype)
    src_ns = (torch.arange(50, device=device) * 1000)[None]
    tgt_ns = torch.randint(0, 49000, (1, targets), device=device)
    wide = resample(src.float(), src_ns, tgt_ns).values
    assert torch.equal(resample(src, src_ns, tgt_ns).values, wide.to(dtype))


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
