from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resample_cases import few, rows_of
from torch import Tensor

from ppstream_kernels import resample
from ppstream_kernels.reference import resample_reference

# y of a robot's joint that starts, turns, stands still and jumps, at uneven times
STAMPS = (0, 8, 21, 30, 44, 50, 66)
SAMPLES = (0.0, 0.2, 1.1, 0.9, 0.9, 3.0, 3.1)
TARGETS = (4, 8, 15, 25, 37, 47, 58, 65)
#: By scipy 1.17.1: PchipInterpolator(STAMPS, SAMPLES)(TARGETS).
BY_SCIPY = (
    0.07273481775355606,
    0.2,
    0.7546293750748069,
    1.0165980795610425,
    0.9,
    1.9392123287671232,
    3.078767123287671,
    3.0997197399400687,
)


def cubic(
    stamps: object, samples: object, targets: object, device: str, **options: object
) -> Tensor:
    """One dimension of one row, in float64, on the CPU."""
    src = torch.tensor(samples, dtype=torch.float64, device=device)[None, :, None]
    src_ns, tgt_ns = (torch.tensor([one], device=device) for one in (stamps, targets))
    return resample(src, src_ns, tgt_ns, mode="cubic", **options).values[0, :, 0].cpu()


def test_the_curve_is_that_of_scipys_pchip_interpolator(device: str) -> None:
    curve = cubic(STAMPS, SAMPLES, TARGETS, device)
    np.testing.assert_allclose(curve.numpy(), BY_SCIPY, rtol=1e-12)


def test_the_reference_is_scipys_pchip_interpolator_on_any_data() -> None:
    interpolate = pytest.importorskip("scipy.interpolate")
    rng = np.random.default_rng(0)
    for count in (2, 3, 4, 40):
        stamps_ns = np.cumsum(rng.integers(1, 10**7, (1, count)), 1)
        samples = rng.normal(size=(1, count, 3)) * np.array([1e-9, 1, 1e9])
        tgt_ns = rng.integers(stamps_ns[0, 0], stamps_ns[0, -1], (1, 200))
        theirs = interpolate.PchipInterpolator(stamps_ns[0], samples[0])(tgt_ns[0])
        ours = resample_reference(samples, stamps_ns, tgt_ns, mode="cubic").values[0]
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-18)


@few
@given(
    steps=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e6)), min_size=2, max_size=12),
    sign=st.sampled_from([-1.0, 1.0]),
)
def test_rising_samples_give_a_rising_curve_and_falling_a_falling_one(
    device: str, steps: list[tuple[int, float]], sign: float
) -> None:
    stamps_ns = np.cumsum([step for step, _ in steps])
    samples = sign * np.cumsum([rise for _, rise in steps])
    targets = np.unique(np.linspace(stamps_ns[0], stamps_ns[-1], 300).astype(np.int64))
    curve = sign * cubic(stamps_ns.tolist(), samples.tolist(), targets.tolist(), device).numpy()
    rounding = 1e-15 * np.abs(samples).max()
    assert (np.diff(curve) >= -rounding).all()


def test_two_samples_give_a_straight_line(device: str) -> None:
    assert cubic([0, 10], [1.0, 3.0], [0, 1, 5, 9, 10], device).tolist() == pytest.approx(
        [1.0, 1.2, 2.0, 2.8, 3.0]
    )


def test_both_ends_hold_and_the_newest_bracket_uses_only_what_is_there(device: str) -> None:
    src = rows_of([0.0], [1.0], [4.0]).to(device, torch.float64)
    src_ns = rows_of(0, 10, 20, dtype=torch.int64).to(device)
    tgt_ns = rows_of(-5, 0, 15, 20, 25, dtype=torch.int64).to(device)
    result = resample(src, src_ns, tgt_ns, mode="cubic", max_age_ns=4)
    newest = (4 + 1) / 2 + 10 * (0.15 - 0.4) / 8  # slopes: 2 * 0.1 * 0.3 / 0.4, (3 * 0.3 - 0.1) / 2
    assert result.values.flatten().tolist() == pytest.approx([0, 0, newest, 4, 4])
    assert result.valid.tolist() == [[False, True, True, True, False]]
    assert result.age_s.tolist() == [[0, 0, 0, 0, pytest.approx(5e-9)]]


def test_a_hole_shapes_no_curve_beside_it(device: str) -> None:
    stamps, samples = [0, 10, 20, 120, 130], [0.0, 1.0, 4.0, 9.0, 9.5]
    targets = [3, 13, 18, 123, 127]
    holed = cubic(stamps, samples, targets, device, max_gap_ns=50)
    before = cubic(stamps[:3], samples[:3], targets[:3], device)
    after = cubic(stamps[3:], samples[3:], targets[3:], device)
    assert torch.equal(holed, torch.cat([before, after]))
    assert not torch.equal(holed, cubic(stamps, samples, targets, device, max_gap_ns=100))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", range(6))
def test_a_sample_that_is_not_finite_spoils_no_further_than_its_neighbours(
    device: str, at: int, value: float
) -> None:
    samples = [0.0, 1.0, 4.0, 5.0, 5.5, 5.0]
    samples[at] = value
    targets = list(range(51))
    curve = cubic([0, 10, 20, 30, 40, 50], samples, targets, device)
    distances = [abs(target - 10 * at) for target in targets]
    assert all(math.isfinite(y) for y, far in zip(curve, distances, strict=True) if far > 10)
    assert not any(math.isfinite(y) for y, far in zip(curve, distances, strict=True) if far < 10)


@pytest.mark.parametrize("unit", [1e-30, 1.0, 1e30])
def test_the_unit_of_the_samples_does_not_matter(device: str, unit: float) -> None:
    src = torch.tensor(SAMPLES, device=device)[None, :, None] * unit
    src_ns, tgt_ns = (torch.tensor([one], device=device) for one in (STAMPS, TARGETS))
    curve = resample(src, src_ns, tgt_ns, mode="cubic").values[0, :, 0].cpu() / unit
    np.testing.assert_allclose(curve.numpy(), BY_SCIPY, rtol=2e-6)


@pytest.mark.parametrize("rows", [1, 12])
def test_many_dimensions_are_computed_in_parts(device: str, rows: int) -> None:
    torch.manual_seed(0)
    src = torch.randn(rows, 40, 300, dtype=torch.float64, device=device)
    src_ns = torch.randint(1, 30, (rows, 40), device=device).cumsum(1)
    tgt_ns = torch.randint(0, 600, (rows, 700), device=device)
    whole = resample(src, src_ns, tgt_ns, mode="cubic").values
    one = resample(src[:, :, 7:8], src_ns, tgt_ns, mode="cubic").values
    torch.testing.assert_close(whole[:, :, 7:8], one, rtol=1e-13, atol=1e-13)
