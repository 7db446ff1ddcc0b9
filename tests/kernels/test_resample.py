from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resample_cases import (
    SHIFT_NS,
    TOLERANCE,
    Case,
    assert_close,
    assert_identical,
    cases,
    expected,
    few,
    run,
)

from ppstream_kernels import MODES, Resampled, resample
from ppstream_kernels.reference import resample_reference


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
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@few
@given(case=cases(min_count=1))
def test_lines_and_cubics_never_leave_the_range_of_their_neighbours(
    device: str, mode: str, dtype: torch.dtype, case: Case
) -> None:
    result = run(case, device, dtype=dtype, mode=mode).values
    for b, (values, stamps_ns) in enumerate(case.plain):
        samples = torch.from_numpy(values).to(dtype)
        for t, target in enumerate(case.targets[b]):
            after = int(np.searchsorted(stamps_ns, target, "right"))
            at = int(np.searchsorted(stamps_ns, stamps_ns[max(after - 1, 0)]))
            around = samples[[at, after if 0 < after < len(samples) else at]]
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
@pytest.mark.parametrize("mode", ["linear", "previous", "nearest", "cubic"])
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
