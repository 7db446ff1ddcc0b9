"""Histories to resample, as plain rows and as rings, and what is compared about the results."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from ppstream_kernels import MODES, Resampled, StreamSource, resample
from ppstream_kernels.reference import Reference, resample_reference

SHIFT_NS = 10**18
LIMIT_NS = 40
POISON = math.nan  # in every slot that holds no sample
# One rounding of the result, and for float32 those of torch.lerp, relative to the largest sample.
TOLERANCE = {
    torch.float64: 1e-15,
    torch.float32: 2.5e-7,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-10,
}
CURVED = 4  # a cubic's slopes and powers are rounded, too
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
    tolerance = TOLERANCE[dtype] * (CURVED if mode == "cubic" and dtype.itemsize > 2 else 1)
    assert np.abs(apart).max(initial=0) <= tolerance * largest
    np.testing.assert_array_equal(result.valid.numpy(), reference.valid)
    np.testing.assert_allclose(result.age_s.numpy(), reference.age_s, rtol=1e-6)


def assert_identical(one: Resampled, other: Resampled) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def rows_of(*values: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([values], dtype=dtype)


def make_sources(rows: int, device: str, dtype: torch.dtype = torch.float32) -> list[StreamSource]:
    """Rings of every mode, different in size, fill, rotation and limits."""
    torch.manual_seed(0)
    sources = []
    for position, mode in enumerate(MODES):
        slots, dim = 5 + position, 4 if mode == "slerp" else 3 + position
        stamps_ns = torch.randint(1, 60, (rows, slots)).cumsum(1)
        count = torch.randint(0, slots + 1, (rows,))
        head = torch.randint(0, slots, (rows,))
        order = (torch.arange(slots) - head[:, None]) % slots  # of each slot, its place in time
        source = StreamSource(
            torch.randn(rows, slots, dim).to(device, dtype),
            stamps_ns.gather(1, order).to(device),
            None if position == 0 else count.to(device),
            None if position == 0 else head.to(device),
            mode,
            max_gap_ns=None if position == 1 else LIMIT_NS,
            max_age_ns=None if position == 2 else LIMIT_NS,
        )
        sources.append(source)
    sources[0] = StreamSource(sources[0].values, torch.arange(5, device=device).repeat(rows, 1))
    return sources


def make_targets(rows: int, device: str, targets: int = 9) -> torch.Tensor:
    return torch.arange(-10, 400, 410 // targets, device=device)[:targets].repeat(rows, 1)
