"""What is handed to the driver, without one: its call is replaced, tensors are the CPU's."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from ppstream_kernels import StreamSource, cuda_launch, cuda_ops, cuda_plan
from ppstream_kernels.cuda_call import HEADER_ADDRESSES, STREAM_ADDRESSES, Gpu, stream_address_at
from ppstream_kernels.cuda_plan import CudaPlan
from ppstream_kernels.source import NO_LIMIT, to_columns

CONFIG = struct.Struct("=7I4x2QI4x")  # CUlaunchConfig: grid, block, shared; stream; attributes
ATTRIBUTE = struct.Struct("=i4xi60x")  # CUlaunchAttribute with a number as its value
Change: TypeAlias = Callable[[tuple[Any, ...]], tuple[Any, ...]]
KERNEL = 77


class Queued(NamedTuple):
    """One launch as the driver would read it."""

    grid: tuple[int, ...]
    stream: int
    header: tuple[int, ...]  # values, valid, age_s, tgt_ns, scale
    source: tuple[int, ...]  # values, stamps_ns, counts, heads of the first stream
    attributes: list[tuple[int, ...]]  # identifiers and values
    call: bytes  # all of it, as far as the first stream


class Driver:
    """Notes launches; ``stream`` is torch's current one of the first GPU."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self.queued: list[Queued] = []
        self.stream = 5
        self.capability, self.version = (9, 0), 13000

    def run(self, operator: Callable[..., None], *arguments: Any) -> None:
        """On a thread of its own, where nothing is kept yet."""
        self._thread.submit(operator, *arguments).result()

    def launch(self, config_at: int, kernel: int, arguments_at: int, extra: None) -> int:
        assert kernel == KERNEL
        size = CONFIG.unpack(ctypes.string_at(config_at, CONFIG.size))
        call_at = ctypes.c_uint64.from_address(arguments_at).value
        at = call_at + stream_address_at(0)
        source = STREAM_ADDRESSES.unpack(ctypes.string_at(at, STREAM_ADDRESSES.size))
        header = HEADER_ADDRESSES.unpack(ctypes.string_at(call_at, HEADER_ADDRESSES.size))
        attributes = [
            ATTRIBUTE.unpack(ctypes.string_at(size[8] + at * ATTRIBUTE.size, ATTRIBUTE.size))
            for at in range(size[9])
        ]
        call = ctypes.string_at(call_at, stream_address_at(1))
        self.queued.append(Queued(size[:3], size[7], header, source, attributes, call))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    thread = ThreadPoolExecutor(1)
    driver = Driver(thread)
    monkeypatch.setattr(cuda_launch, "load_kernels", lambda *_: {"resample": KERNEL})
    monkeypatch.setattr(cuda_launch, "launch_function", lambda: driver.launch)
    monkeypatch.setattr(cuda_plan, "gpu", lambda _: Gpu(132, driver.capability))
    monkeypatch.setattr(cuda_launch, "gpu", lambda _: Gpu(132, driver.capability))
    monkeypatch.setattr(cuda_launch, "driver_version", lambda: driver.version)
    monkeypatch.setattr(  # the index of a CPU tensor's device is None
        cuda_launch, "torch_calls", lambda: (lambda: None, lambda _: driver.stream)
    )
    with thread:
        yield driver


def addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def out_for(values: Tensor, targets: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, width = values.shape
    shape = (rows, targets)
    return (
        torch.empty(*shape, width, dtype=values.dtype),
        torch.empty(shape, dtype=torch.bool),
        torch.empty(shape),
    )


def samples(rows: int = 2, slots: int = 8, dim: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    stamps_ns = torch.arange(slots).repeat(rows, 1)
    return torch.randn(rows, slots, dim), stamps_ns, stamps_ns[:, :5].contiguous()


def each_replaced(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The tensors themselves, and once with each of them elsewhere in memory."""
    elsewhere = [tuple(tensors)]
    for at, tensor in enumerate(tensors):
        elsewhere.append((*tensors[:at], tensor.clone(), *tensors[at + 1 :]))
    return elsewhere


def test_a_call_is_launched_with_the_addresses_of_that_call(driver: Driver) -> None:
    src, src_ns, tgt_ns = samples()
    count, head = torch.full((2,), 8), torch.zeros(2, dtype=torch.int64)
    calls = each_replaced((src, src_ns, tgt_ns, *out_for(src, 5), count, head))
    for tensors in (*calls, *calls):
        driver.run(cuda_ops.resample_out, *tensors)
    headers = [(*addresses(*tensors[3:6], tensors[2]), 0) for tensors in calls]
    assert [one.header for one in driver.queued] == headers * 2
    sources = [addresses(*tensors[:2], *tensors[6:]) for tensors in calls]
    assert [one.source for one in driver.queued] == sources * 2


def seen_as(at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Change:
    """The same memory of the tensor at ``at`` seen with another shape."""
    return lambda t: (*t[:at], t[at].as_strided(shape, strides), *t[at + 1 :])


def read_as(at: int, dtype: torch.dtype) -> Change:
    return lambda t: (*t[:at], t[at].view(dtype).view(-1)[:128].view(2, 8, 8), *t[at + 1 :])


def both(one: Change, other: Change) -> Change:
    return lambda t: other(one(t))


def with_options(*options: object) -> Change:
    return lambda t: (*t, *options)


RING = torch.zeros(2, dtype=torch.int64)
OTHER_CALLS: dict[str, Change] = {
    "fewer rows": both(seen_as(0, (1, 8, 8), (64, 8, 1)), seen_as(2, (1, 8), (8, 1))),
    "other slots": both(seen_as(0, (2, 4, 8), (32, 8, 1)), seen_as(1, (2, 4), (4, 1))),
    "other dimensions": seen_as(0, (2, 8, 4), (32, 4, 1)),
    "dimensions outside": seen_as(0, (2, 8, 8), (64, 1, 8)),
    "rows that overlap": seen_as(0, (2, 8, 8), (8, 8, 1)),
    "samples of another dtype": read_as(0, torch.bfloat16),
    "the same stamps for all rows": seen_as(1, (2, 8), (0, 1)),
    "stamps of rows side by side": seen_as(1, (2, 8), (1, 2)),
    "fewer targets": seen_as(2, (2, 4), (4, 1)),
    "the same targets for all rows": seen_as(2, (2, 8), (0, 1)),
    "targets of rows side by side": seen_as(2, (2, 8), (1, 2)),
    "values of another dtype": read_as(3, torch.float16),
    "counts": with_options(RING),
    "heads": with_options(None, RING),
    "the same head for all rows": with_options(None, RING[:1].expand(2)),
    "a mode": with_options(None, None, "nearest"),
    "another mode": with_options(None, None, "previous"),
    "a limit of gaps": with_options(None, None, "linear", 5),
    "another limit of gaps": with_options(None, None, "linear", 6),
    "a limit of ages": with_options(None, None, "linear", NO_LIMIT, 5),
    "another limit of ages": with_options(None, None, "linear", NO_LIMIT, 6),
}


def test_calls_that_differ_in_the_same_memory_are_kept_apart(driver: Driver) -> None:
    src, src_ns, tgt_ns = (torch.zeros(2, 8, 8), *torch.zeros(2, 2, 8, dtype=torch.int64))
    usual = (src, src_ns, tgt_ns, *out_for(src, 8))
    calls = [usual, *(change(usual) for change in OTHER_CALLS.values())]
    for arguments in (*calls, *calls):
        driver.run(cuda_ops.resample_out, *arguments)
    for arguments in calls:
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(cuda_ops.resample_out, *arguments).result()
    launched = iter([(one.grid, one.call) for one in driver.queued])
    together, again, alone = ([next(launched) for _ in calls] for _ in range(3))
    names = ["usual", *OTHER_CALLS]
    assert dict(zip(names, together, strict=True)) == dict(zip(names, alone, strict=True))
    assert again == together
    assert len(set(alone)) == len(calls)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every launch that was made, by its form."""
    forms: list[object] = []
    make = cuda_plan.make_queue
    monkeypatch.setattr(
        cuda_plan, "make_queue", lambda form, *rest: forms.append(form) or make(form, *rest)
    )
    return forms


def test_the_same_address_on_another_gpu_is_another_launch(
    driver: Driver, made: list[object]
) -> None:
    class Elsewhere(Tensor):
        def get_device(self) -> int:
            return 1

    src, src_ns, tgt_ns = samples()
    out = out_for(src, 5)
    for seen_ns in (tgt_ns, tgt_ns.as_subclass(Elsewhere), tgt_ns):
        driver.run(cuda_ops.resample_out, src, src_ns, seen_ns, *out)
    assert len(made) == 2
    assert len(driver.queued) == 3


def test_what_comes_again_is_not_made_again(driver: Driver, made: list[object]) -> None:
    src, src_ns, tgt_ns = samples()
    out = out_for(src, 5)
    driver.run(cuda_ops.resample_out, src, src_ns, tgt_ns, *out)
    assert len(made) == 1
    driver.run(cuda_ops.resample_out, src, src_ns, tgt_ns, *out)
    assert (len(made), len(driver.queued)) == (1, 2)


def test_another_address_of_the_same_form_needs_no_other_kernel(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, src_ns, tgt_ns = samples()
    driver.run(cuda_ops.resample_out, src, src_ns, tgt_ns, *out_for(src, 5))
    monkeypatch.setattr(cuda_plan, "make_forms", lambda *_: pytest.fail("tiled again"))
    aligned = src.clone()  # to a word, as all of torch's own memory
    driver.run(cuda_ops.resample_out, aligned, src_ns, tgt_ns, *out_for(src, 5))
    assert driver.queued[1].source[0] == aligned.data_ptr()


def test_a_launch_goes_to_the_stream_that_is_current(driver: Driver) -> None:
    src, src_ns, tgt_ns = samples()
    out = out_for(src, 5)
    for driver.stream in (5, 9, 0, 9):
        driver.run(cuda_ops.resample_out, src, src_ns, tgt_ns, *out)
    assert [one.stream for one in driver.queued] == [5, 9, 0, 9]


@pytest.mark.parametrize(
    ("capability", "version", "attributes"),
    [
        ((9, 0), 12030, [(6, 1)]),  # programmatic stream serialisation
        ((12, 0), 13000, [(6, 1)]),
        ((8, 9), 13000, []),
        ((9, 0), 12020, []),  # captures none into a graph
    ],
)
def test_launches_overlap_where_gpu_and_driver_can(
    driver: Driver, capability: tuple[int, int], version: int, attributes: list[tuple[int, int]]
) -> None:
    driver.capability, driver.version = capability, version
    src, src_ns, tgt_ns = samples()
    driver.run(cuda_ops.resample_out, src, src_ns, tgt_ns, *out_for(src, 5))
    assert driver.queued[0].attributes == attributes


def test_a_plan_is_launched_with_the_addresses_of_each_call(driver: Driver) -> None:
    src, src_ns, tgt_ns = samples()
    plan = CudaPlan(to_columns([StreamSource(src, src_ns)]), 5)
    calls = each_replaced((tgt_ns, *out_for(src, 5)))
    for tensors in (*calls, *calls):
        plan.run(*tensors)
    headers = [(*addresses(*tensors[1:], tensors[0]), 0) for tensors in calls]
    assert [one.header for one in driver.queued] == headers * 2


def test_streams_are_launched_with_the_addresses_of_that_call(driver: Driver) -> None:
    first, second = samples(dim=3), samples(dim=4)
    count, head = torch.full((2,), 8), torch.zeros(2, dtype=torch.int64)
    columns = to_columns([StreamSource(*first[:2]), StreamSource(*second[:2], mode="slerp")])
    out = out_for(torch.empty(2, 1, 7), 5)
    calls = each_replaced((*first, *out, count, head))
    for values, stamps_ns, tgt_ns, *rest in (*calls, *calls):
        one = columns._replace(
            values=[values, second[0]],
            stamps_ns=[stamps_ns, second[1]],
            counts=[rest[3], None],
            heads=[rest[4], None],
        )
        driver.run(cuda_ops.resample_streams_out, *one, tgt_ns, *rest[:3])
    headers = [(*addresses(*tensors[3:6], tensors[2]), 0) for tensors in calls]
    assert [one.header for one in driver.queued] == headers * 2
    sources = [addresses(*tensors[:2], *tensors[6:]) for tensors in calls]
    assert [one.source for one in driver.queued] == sources * 2


def test_a_plan_and_the_op_in_8_bits_are_launched_with_the_address_of_the_scale(
    driver: Driver,
) -> None:
    src, src_ns, tgt_ns = samples()
    values, *trust = out_for(src, 5)
    out = (values.to(torch.int8), trust[0].unsqueeze(2), trust[1].unsqueeze(2))
    columns = to_columns([StreamSource(src, src_ns)])
    scales = [torch.ones(3), torch.ones(3)]
    for scale in scales:
        driver.run(cuda_ops.resample_scaled_out, *columns, tgt_ns, scale, *out)
        CudaPlan(columns, 5, scale=scale).run(tgt_ns, *out)
    told = [one.header[4] for one in driver.queued]
    assert told == [scale.data_ptr() for scale in scales for _ in range(2)]


@pytest.mark.parametrize(("streams", "targets", "launches"), [(24, 5, 1), (25, 5, 2), (3, 0, 0)])
def test_a_call_takes_as_many_launches_as_its_streams_need(
    driver: Driver, streams: int, targets: int, launches: int
) -> None:
    src, src_ns, tgt_ns = samples()
    plan = CudaPlan(to_columns([StreamSource(src, src_ns)] * streams), targets)
    out = (torch.empty(2, targets, 3 * streams), *torch.empty(2, 2, targets, streams))
    for _ in range(2):
        plan.run(tgt_ns[:, :targets].contiguous(), *out)
    assert len(driver.queued) == 2 * launches


def test_memory_of_kept_launches_is_bounded(
    driver: Driver, made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_plan, "MOST_KEPT", 4)
    src, src_ns, tgt_ns = samples()
    outputs = [out_for(src, 5) for _ in range(11)]
    calls = [*outputs, *reversed(outputs)]  # the newest first: nothing that is kept has to go
    for out in calls:
        driver.run(cuda_ops.resample_out, src, src_ns, tgt_ns, *out)
    assert len(made) >= len(calls) - 4
    assert [one.header[0] for one in driver.queued] == [out[0].data_ptr() for out in calls]


def test_a_refused_launch_is_told(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(cuda_launch, "launch_function", lambda: lambda *_: 1)
    src, src_ns, tgt_ns = samples()
    with pytest.raises(RuntimeError, match=r"refuses a launch of \(.*INVALID_VALUE"):
        driver.run(cuda_ops.resample_out, src, src_ns, tgt_ns, *out_for(src, 5))
