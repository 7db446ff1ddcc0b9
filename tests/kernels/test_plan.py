from __future__ import annotations

import pytest
import torch
from resample_cases import make_sources, make_targets

from ppstream_kernels import Resampled, ResamplePlan, StreamSource, resample_streams
from ppstream_kernels.plan import DEVICE_PLANS

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _needs_a_plan(device: str) -> None:
    if device not in DEVICE_PLANS:
        pytest.skip(f"no plan for {device}")


def rubbish_like(wanted: Resampled, dtype: torch.dtype | None = None) -> Resampled:
    """Memory in which whatever is not written shows."""
    return Resampled(
        torch.full_like(wanted.values, torch.nan, dtype=dtype or wanted.values.dtype),
        ~wanted.valid,
        torch.full_like(wanted.age_s, torch.nan),
    )


def refill(sources: list[StreamSource], generator: torch.Generator) -> None:
    """Other samples in the same memory: other stamps, fill and rotation, empty rings too."""
    for source in sources:
        rows, slots = source.stamps_ns.shape
        stamps_ns = torch.randint(0, 60, (rows, slots), generator=generator).cumsum(1)
        head = torch.zeros(rows, dtype=torch.int64)
        if source.head is not None and source.count is not None:
            head = torch.randint(0, slots, (rows,), generator=generator)
            source.head.copy_(head)
            source.count.copy_(torch.randint(0, slots + 1, (rows,), generator=generator))
        order = (torch.arange(slots) - head[:, None]) % slots
        source.stamps_ns.copy_(stamps_ns.gather(1, order))
        source.values.copy_(torch.randn(source.values.shape, generator=generator))


@pytest.mark.parametrize(
    ("rows", "targets"),  # few elements and many: two ways on a CPU
    [(1, 1), (1, 9), (1, 2000), (3, 1), (3, 9), (3, 2000), (12, 1), (12, 9)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plan_equals_the_op_bit_for_bit_while_its_rings_change(
    device: str, rows: int, dtype: torch.dtype, targets: int
) -> None:
    sources, generator = make_sources(rows, device, dtype), torch.Generator().manual_seed(1)
    plan = ResamplePlan(sources, targets)
    for _ in range(8):
        refill(sources, generator)
        tgt_ns = torch.randint(-50, 500, (rows, targets), generator=generator).to(device)
        wanted = resample_streams(sources, tgt_ns)
        result = rubbish_like(wanted)
        plan(tgt_ns, result)
        assert all(torch.equal(*pair) for pair in zip(result, wanted, strict=True))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plan_rounds_into_any_dtype_like_the_op(
    device: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    for rows in (1, 3):
        sources, tgt_ns = make_sources(rows, device, dtype), make_targets(rows, device)
        wanted = rubbish_like(resample_streams(sources, tgt_ns), out_dtype)
        resample_streams(sources, tgt_ns, out=wanted)
        result = rubbish_like(wanted)
        ResamplePlan(sources, 9)(tgt_ns, result)
        assert all(torch.equal(*pair) for pair in zip(result, wanted, strict=True))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_values_of_one_stream_are_rounded_once_into_any_dtype(
    device: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    src, wide = torch.randn(2, 50, 3).to(device, dtype), torch.promote_types(dtype, torch.float32)
    src_ns = (torch.arange(50, device=device) * 1000).repeat(2, 1)
    tgt_ns = torch.randint(0, 49000, (2, 3000), device=device)
    exact = resample_streams([StreamSource(src.to(wide), src_ns)], tgt_ns)
    result = rubbish_like(exact, out_dtype)
    ResamplePlan([StreamSource(src, src_ns)], 3000)(tgt_ns, result)
    assert torch.equal(result.values, exact.values.to(out_dtype))


def test_linear_streams_alone_equal_the_op_bit_for_bit(device: str) -> None:
    ring, other = make_sources(1, device)[:2]
    sources = [
        StreamSource(ring.values, ring.stamps_ns, None, None, "linear", 9, 9),
        StreamSource(other.values, other.stamps_ns, other.count, other.head, "linear"),
    ]
    tgt_ns = make_targets(1, device)
    wanted = resample_streams(sources, tgt_ns)
    result = rubbish_like(wanted)
    ResamplePlan(sources, 9)(tgt_ns, result)
    assert all(torch.equal(*pair) for pair in zip(result, wanted, strict=True))


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_a_plan_that_need_not_look_for_equal_stamps_gives_the_same_where_there_are_none(
    device: str, rows: int
) -> None:
    sources, tgt_ns = make_sources(rows, device), make_targets(rows, device)
    results = [rubbish_like(resample_streams(sources, tgt_ns)) for _ in range(2)]
    for distinct, result in zip((False, True), results, strict=True):
        ResamplePlan(sources, 9, distinct=distinct)(tgt_ns, result)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_bound_call_sees_targets_and_rings_as_they_are_at_each_call(device: str) -> None:
    sources, tgt_ns = make_sources(2, device), make_targets(2, device)
    wanted = resample_streams(sources, tgt_ns)
    result = rubbish_like(wanted)
    resample = ResamplePlan(sources, 9).bind(tgt_ns, result)
    resample()
    assert all(torch.equal(*pair) for pair in zip(result, wanted, strict=True))
    tgt_ns += 60
    sources[0].values.mul_(2)
    resample()
    wanted = resample_streams(sources, tgt_ns)
    assert all(torch.equal(*pair) for pair in zip(result, wanted, strict=True))


def test_two_plans_over_the_same_sources_do_not_disturb_each_other(device: str) -> None:
    sources = make_sources(1, device)
    early, late = make_targets(1, device), make_targets(1, device) + 60
    wanted = [resample_streams(sources, tgt_ns) for tgt_ns in (early, late)]
    plans = [ResamplePlan(sources, 9), ResamplePlan(sources, 9)]
    results = [rubbish_like(one) for one in wanted]
    for plan, tgt_ns, result in zip(plans, (early, late), results, strict=True):
        plan(tgt_ns, result)
    for result, one in zip(results, wanted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(result, one, strict=True))


def test_a_row_of_a_slot_can_be_the_output_of_a_plan(device: str) -> None:
    sources, tgt_ns = make_sources(1, device), make_targets(1, device)
    wanted = resample_streams(sources, tgt_ns)
    slot = torch.full((4, *wanted.values.shape), torch.nan, device=device)
    ResamplePlan(sources, 9)(tgt_ns, (slot[2], wanted.valid.clone(), wanted.age_s.clone()))
    assert torch.equal(slot[2], wanted.values)
    assert slot[[0, 1, 3]].isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 12])
@pytest.mark.parametrize(("name", "number"), [("count", 6), ("count", -1), ("head", 5)])
def test_a_ring_that_names_slots_it_does_not_have_is_refused_at_the_call(
    device: str, rows: int, name: str, number: int
) -> None:
    if device != "cpu":
        pytest.skip("counts and heads are read on the device")
    stamps_ns = torch.arange(5).repeat(rows, 1)
    count, head = torch.full((rows,), 5), torch.zeros(rows, dtype=torch.int64)
    sources = [StreamSource(torch.zeros(rows, 5, 1), stamps_ns, count, head)]
    plan, tgt_ns = ResamplePlan(sources, 2), stamps_ns[:, :2].contiguous()
    result = resample_streams(sources, tgt_ns)
    {"count": count, "head": head}[name][-1] = number
    with pytest.raises(ValueError, match=rf"{name}\[{rows - 1}\] is {number}, this ring allows"):
        plan(tgt_ns, result)


def test_sources_that_cannot_be_read_in_place_are_refused(device: str) -> None:
    stamps_ns = torch.zeros(2, 5, dtype=torch.int64, device=device)
    good = StreamSource(torch.zeros(2, 5, 3, device=device), stamps_ns)
    strided = StreamSource(torch.zeros(2, 5, 6, device=device)[:, :, ::2], stamps_ns)
    halved = StreamSource(good.values[:1], stamps_ns[:1])
    meta = StreamSource(good.values.to("meta"), stamps_ns.to("meta"))
    with pytest.raises(ValueError, match=r"sources\[1\] has strides \(30, 6, 2\)"):
        ResamplePlan([good, strided], 4)
    with pytest.raises(ValueError, match=r"sources\[1\] holds values \[1, 5, 3\]"):
        ResamplePlan([good, halved], 4)
    with pytest.raises(ValueError, match=r"sources are on meta, plans exist for cpu"):
        ResamplePlan([meta], 4)
    with pytest.raises(ValueError, match=r"sources is empty"):
        ResamplePlan([], 4)
    with pytest.raises(ValueError, match=r"steps is 0"):
        ResamplePlan([good], 0)
