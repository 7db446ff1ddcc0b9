from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ppstream_kernels import MODES, Resampled, StreamSource, resample, resample_streams
from ppstream_kernels.cuda_plan import CudaPlan
from ppstream_kernels.source import to_columns

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

LIMIT_NS = 30
POISON = 0xA5


def rings(
    rows: int, slots: int, dim: int, dtype: torch.dtype = torch.float32, mode: str = "linear"
) -> StreamSource:
    """Rotated and partly filled, on the CPU; what is not held is NaN and would show."""
    stamps_ns = torch.randint(0, 20, (rows, slots)).cumsum(1)
    count, head = torch.randint(0, slots + 1, (rows,)), torch.randint(0, slots, (rows,))
    order = (torch.arange(slots) - head[:, None]) % slots
    values = torch.randn(rows, slots, dim).to(dtype)
    values[order >= count[:, None]] = torch.nan
    return StreamSource(
        values, stamps_ns.gather(1, order), count, head, mode, LIMIT_NS // 2, LIMIT_NS
    )


def on_gpu(source: StreamSource) -> StreamSource:
    tensors = (source.values, source.stamps_ns, source.count, source.head)
    moved = [None if tensor is None else tensor.cuda() for tensor in tensors]
    return StreamSource(*moved, source.mode, source.max_gap_ns, source.max_age_ns)


def targets(rows: int, count: int, until: int) -> torch.Tensor:
    return torch.randint(-20, until, (rows, count)).sort(1)[0]


def assert_same(gpu: Resampled, cpu: Resampled, tolerance: float = 3e-7) -> None:
    """Two implementations may differ in a last bit; NaN never passes."""
    values = gpu.values.cpu()
    largest = max(1.0, float(cpu.values.float().abs().max()))
    assert ((values.double() - cpu.values.double()).abs() <= tolerance * largest).all()
    assert torch.equal(gpu.valid.cpu(), cpu.valid)
    torch.testing.assert_close(gpu.age_s.cpu(), cpu.age_s, rtol=1e-6, atol=0)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 7, 8, 12, 14, 16, 31, 33, 64, 270, 1030])
def test_any_width_equals_the_cpu(dim: int, mode: str, dtype: torch.dtype) -> None:
    source, tgt_ns = rings(3, 50, dim, dtype, mode), targets(3, 41, 500)
    float32 = 1e-6 if mode == "cubic" else 3e-7
    tolerance = {torch.float32: float32, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    gpu = resample_streams([on_gpu(source)], tgt_ns.cuda())
    assert_same(gpu, resample_streams([source], tgt_ns), tolerance)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 6])
def test_unaligned_memory_is_read_and_written(offset: int) -> None:
    source, tgt_ns = rings(2, 20, 16, torch.bfloat16), targets(2, 30, 200)
    moved = on_gpu(source)
    shifted = torch.empty(2 * 20 * 16 + offset, dtype=torch.bfloat16, device="cuda")[offset:]
    values = shifted.view(2, 20, 16).copy_(moved.values)
    out_memory = torch.empty(2 * 30 * 16 + offset, dtype=torch.bfloat16, device="cuda")
    ring = StreamSource(values, *(getattr(moved, name) for name in ("stamps_ns", "count", "head")))
    aligned = StreamSource(moved.values, ring.stamps_ns, ring.count, ring.head)
    fresh = resample_streams([aligned], tgt_ns.cuda())
    out = (out_memory[offset:].view(2, 30, 16), fresh.valid.clone(), fresh.age_s.clone())
    assert torch.equal(resample_streams([ring], tgt_ns.cuda(), out=out).values, fresh.values)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("slots", [2047, 2048, 2049, 5000, 20000])
def test_rings_longer_than_shared_memory_equal_the_cpu(slots: int, mode: str) -> None:
    source, tgt_ns = rings(3, slots, 6, mode=mode), targets(3, 700, slots * 10)
    gpu = resample_streams([on_gpu(source)], tgt_ns.cuda())
    assert_same(gpu, resample_streams([source], tgt_ns), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8, 14, 32, 270])
def test_8_bits_are_those_of_the_cpu_but_for_ties(
    dim: int, out_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    sources = [rings(3, 50, dim, dtype, mode) for mode in ("linear", "cubic", "nearest")]
    tgt_ns, scale = targets(3, 200, 500), torch.rand(3 * dim) * 0.02 + 0.005
    options = {"dtype": out_dtype}
    on_host = resample_streams(sources, tgt_ns, scale=scale, **options)
    moved = [on_gpu(source) for source in sources]
    gpu = resample_streams(moved, tgt_ns.cuda(), scale=scale.cuda(), **options)
    assert torch.equal(gpu.valid.cpu(), on_host.valid)
    apart = (gpu.values.cpu().float() - on_host.values.float()).abs()
    next_number = 1.0 if out_dtype is torch.int8 else on_host.values.float().abs() / 7 + 2**-8
    assert (apart <= next_number).all()
    assert (apart > 0).float().mean() < 0.02


def test_more_rows_than_a_grid_dimension_holds() -> None:
    rows = 70_000
    source, tgt_ns = rings(rows, 4, 2), targets(rows, 3, 50)
    assert_same(
        resample_streams([on_gpu(source)], tgt_ns.cuda()), resample_streams([source], tgt_ns)
    )


def test_more_streams_than_one_launch_holds() -> None:
    sources = [rings(2, 9 + s, 4, mode=MODES[s % len(MODES)]) for s in range(53)]
    tgt_ns = targets(2, 40, 120)
    gpu = resample_streams([on_gpu(source) for source in sources], tgt_ns.cuda())
    assert_same(gpu, resample_streams(sources, tgt_ns), 2e-6)


def test_dtypes_mix_in_one_launch() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    sources = [rings(2, 30, 3 + s, dtype) for s, dtype in enumerate(dtypes)]
    tgt_ns = targets(2, 40, 300)
    assert_same(
        resample_streams([on_gpu(source) for source in sources], tgt_ns.cuda()),
        resample_streams(sources, tgt_ns),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_byte_of_a_poisoned_output_is_written_and_none_beside(dtype: torch.dtype) -> None:
    sources = [on_gpu(rings(5, 20, dim, dtype)) for dim in (7, 16, 2)]
    tgt_ns = targets(5, 33, 200).cuda()
    fresh = resample_streams(sources, tgt_ns)
    out, guarded = [], []
    for tensor in fresh:
        memory = torch.full((tensor.nbytes + 512,), POISON, dtype=torch.uint8, device="cuda")
        inside = memory[256 : 256 + tensor.nbytes]
        out.append(inside.view(tensor.dtype).view(tensor.shape))
        guarded.append(memory)
    resample_streams(sources, tgt_ns, out=tuple(out))
    for tensor, memory, expected in zip(out, guarded, fresh, strict=True):
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
        assert (memory[:256] == POISON).all()
        assert (memory[256 + tensor.nbytes :] == POISON).all()


def test_counts_and_heads_outside_the_ring_stay_inside_memory() -> None:
    source = on_gpu(rings(2, 8, 3))
    wild = torch.tensor([-5, 2**40], device="cuda")
    values = torch.nan_to_num(source.values)
    result = resample(values, source.stamps_ns, targets(2, 9, 90).cuda(), count=wild, head=wild)
    assert not result.values[0].any()
    assert result.values.isfinite().all()


def test_a_captured_call_sees_what_the_rings_hold_at_replay() -> None:
    sources, tgt_ns = [on_gpu(rings(2, 12, dim)) for dim in (4, 9)], targets(2, 10, 120).cuda()
    out = tuple(torch.clone(tensor) for tensor in resample_streams(sources, tgt_ns))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        resample_streams(sources, tgt_ns, out=out)
    for source in sources:
        source.values.copy_(torch.randn_like(source.values))
        source.head.copy_((source.head + 5) % 12)
        source.count.fill_(12)
    tgt_ns += 7
    graph.replay()
    for replayed, eager in zip(out, resample_streams(sources, tgt_ns), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.filterwarnings("default")  # torch's compiler warns about itself
def test_a_compiled_function_launches_the_same_kernel() -> None:
    source, tgt_ns = on_gpu(rings(2, 12, 4)), targets(2, 10, 120).cuda()

    def twice(values: torch.Tensor, stamps_ns: torch.Tensor) -> torch.Tensor:
        return resample(values, stamps_ns, tgt_ns, mode="previous").values * 2

    compiled = torch.compile(twice, fullgraph=True)
    values = torch.nan_to_num(source.values)
    assert torch.equal(compiled(values, source.stamps_ns), twice(values, source.stamps_ns))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_calls_neither_synchronise_nor_allocate() -> None:
    sources, tgt_ns = [on_gpu(rings(2, 12, dim)) for dim in (4, 9)], targets(2, 10, 120).cuda()
    out = tuple(resample_streams(sources, tgt_ns))
    plan = CudaPlan(to_columns(sources), 10)
    plan.run(tgt_ns, *out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(20):
            resample_streams(sources, tgt_ns, out=out)
            plan.run(tgt_ns, *out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_plan_equals_the_op_for_every_dtype_of_output() -> None:
    sources, tgt_ns = [on_gpu(rings(2, 12, dim)) for dim in (4, 9)], targets(2, 10, 120).cuda()
    plan = CudaPlan(to_columns(sources), 10)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        fresh = resample_streams(sources, tgt_ns)
        out = (torch.empty_like(fresh.values, dtype=dtype), fresh.valid, fresh.age_s)
        expected = resample_streams(sources, tgt_ns, out=out).values.clone()
        plan.run(tgt_ns, out[0].fill_(torch.nan), *out[1:])
        assert torch.equal(out[0], expected)


@pytest.mark.parametrize("where", ["thread", "stream"])
def test_it_runs_in_a_fresh_thread_and_on_another_stream(where: str) -> None:
    source, tgt_ns = on_gpu(rings(2, 12, 4)), targets(2, 10, 120).cuda()
    expected = resample_streams([source], tgt_ns)
    out = tuple(torch.zeros_like(tensor) for tensor in expected)
    torch.cuda.synchronize()
    places: dict[str, Callable[[], object]] = {"thread": in_thread, "stream": on_stream}
    places[where](lambda: resample_streams([source], tgt_ns, out=out))  # type: ignore[call-arg]
    torch.cuda.synchronize()
    for written, wanted in zip(out, expected, strict=True):
        assert torch.equal(written, wanted)


def in_thread(call: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as problem:
            failed.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not failed


def on_stream(call: Callable[[], object]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
