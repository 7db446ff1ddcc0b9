"""What is handed to the driver, without one: its call is replaced, tensors are the CPU's."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ppstream_kernels import StreamSource, cuda_launch, cuda_ops, cuda_plan
from ppstream_kernels.cuda_call import HEADER_ADDRESSES, STREAM_ADDRESSES, Gpu, stream_address_at
from ppstream_kernels.cuda_plan import CudaPlan
from ppstream_kernels.source import to_columns

CONFIG = struct.Struct("=7I4x2QI4x")  # CUlaunchConfig: grid, block, shared; stream; attributes
ATTRIBUTE = struct.Struct("=i4xi60x")  # CUlaunchAttribute with a number as its value
STREAM_STRIDES_AT = STREAM_ADDRESSES.size
KERNEL = 77


class Queued(NamedTuple):
    """One launch as the driver would read it."""

    grid: tuple[int, ...]
    stream: int
    header: tuple[int, ...]  # values, valid, age_s, tgt_ns
    source: tuple[int, ...]  # values, stamps_ns, counts, heads of the first stream
    strides: tuple[int, ...]  # of its values
    attributes: list[tuple[int, ...]]  # identifiers and values


class Driver:
    """Notes launches; ``stream`` is torch's current one."""

    def __init__(self) -> None:
        self.queued: list[Queued] = []
        self.stream = 5
        self.capability, self.version = (9, 0), 13000

    def launch(self, config_at: int, kernel: int, arguments_at: int, extra: None) -> int:
        assert kernel == KERNEL
        size = CONFIG.unpack(ctypes.string_at(config_at, CONFIG.size))
        call_at = ctypes.c_uint64.from_address(arguments_at).value
        at = call_at + stream_address_at(0)
        source = STREAM_ADDRESSES.unpack(ctypes.string_at(at, STREAM_ADDRESSES.size))
        strides = struct.unpack("=3q", ctypes.string_at(at + STREAM_STRIDES_AT, 24))
        header = HEADER_ADDRESSES.unpack(ctypes.string_at(call_at, HEADER_ADDRESSES.size))
        attributes = [
            ATTRIBUTE.unpack(ctypes.string_at(size[8] + at * ATTRIBUTE.size, ATTRIBUTE.size))
            for at in range(size[9])
        ]
        self.queued.append(Queued(size[:3], size[7], header, source, strides, attributes))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(cuda_launch, "_load", lambda *_: KERNEL)
    monkeypatch.setattr(cuda_launch, "_launch_kernel", lambda: driver.launch)
    monkeypatch.setattr(cuda_plan, "gpu", lambda _: Gpu(132, driver.capability))
    monkeypatch.setattr(cuda_launch, "gpu", lambda _: Gpu(132, driver.capability))
    monkeypatch.setattr(cuda_launch, "_driver_version", lambda: driver.version)
    monkeypatch.setattr(cuda_ops, "_kept", cuda_ops._Kept())
    for name, call in (
        ("_cuda_getDevice", lambda: None),  # the index of a CPU tensor's device
        ("_cuda_getCurrentRawStream", lambda _: driver.stream),
    ):
        monkeypatch.setattr(torch._C, name, call, raising=False)
    return driver


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
        cuda_ops._resample_out(*tensors)
    headers = [addresses(*tensors[3:6], tensors[2]) for tensors in calls]
    assert [one.header for one in driver.queued] == headers * 2
    sources = [addresses(*tensors[:2], *tensors[6:]) for tensors in calls]
    assert [one.source for one in driver.queued] == sources * 2


def test_other_samples_in_the_same_memory_are_another_launch(driver: Driver) -> None:
    src, src_ns, tgt_ns = samples(slots=8, dim=8)
    out = out_for(src, 5)
    for seen in (src, src.transpose(1, 2), src):
        cuda_ops._resample_out(seen, src_ns, tgt_ns, *out)
    assert [one.strides for one in driver.queued] == [(64, 8, 1), (64, 1, 8), (64, 8, 1)]
    assert {one.source[:2] for one in driver.queued} == {addresses(src, src_ns)}


def test_what_comes_again_is_not_made_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, src_ns, tgt_ns = samples()
    out = out_for(src, 5)
    cuda_ops._resample_out(src, src_ns, tgt_ns, *out)
    monkeypatch.setattr(cuda_plan, "Launch", lambda *_: pytest.fail("made again"))
    cuda_ops._resample_out(src, src_ns, tgt_ns, *out)
    assert len(driver.queued) == 2


def test_another_address_of_the_same_form_needs_no_other_kernel(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, src_ns, tgt_ns = samples()
    cuda_ops._resample_out(src, src_ns, tgt_ns, *out_for(src, 5))
    monkeypatch.setattr(cuda_plan, "make_forms", lambda *_: pytest.fail("tiled again"))
    aligned = src.clone()  # to a word, as all of torch's own memory
    cuda_ops._resample_out(aligned, src_ns, tgt_ns, *out_for(src, 5))
    assert driver.queued[1].source[0] == aligned.data_ptr()


def test_a_launch_goes_to_the_stream_that_is_current(driver: Driver) -> None:
    src, src_ns, tgt_ns = samples()
    out = out_for(src, 5)
    for driver.stream in (5, 9, 0, 9):
        cuda_ops._resample_out(src, src_ns, tgt_ns, *out)
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
    cuda_ops._resample_out(src, src_ns, tgt_ns, *out_for(src, 5))
    assert driver.queued[0].attributes == attributes


def test_a_plan_is_launched_with_the_addresses_of_each_call(driver: Driver) -> None:
    src, src_ns, tgt_ns = samples()
    plan = CudaPlan(to_columns([StreamSource(src, src_ns)]), 5)
    calls = each_replaced((tgt_ns, *out_for(src, 5)))
    for tensors in (*calls, *calls):
        plan.run(*tensors)
    headers = [addresses(*tensors[1:], tensors[0]) for tensors in calls]
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
        cuda_ops._resample_streams_out(*one, tgt_ns, *rest[:3])
    headers = [addresses(*tensors[3:6], tensors[2]) for tensors in calls]
    assert [one.header for one in driver.queued] == headers * 2
    sources = [addresses(*tensors[:2], *tensors[6:]) for tensors in calls]
    assert [one.source for one in driver.queued] == sources * 2


def test_memory_of_kept_launches_is_bounded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_plan, "_MOST_KEPT", 4)
    src, src_ns, tgt_ns = samples()
    outputs = [out_for(src, 5) for _ in range(11)]
    for out in outputs:
        cuda_ops._resample_out(src, src_ns, tgt_ns, *out)
        assert len(cuda_ops._kept.launches) <= 4
    assert [one.header[0] for one in driver.queued] == [out[0].data_ptr() for out in outputs]


def test_a_refused_launch_is_told(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(cuda_launch, "_launch_kernel", lambda: lambda *_: 1)
    src, src_ns, tgt_ns = samples()
    with pytest.raises(RuntimeError, match=r"refuses a launch of \(.*INVALID_VALUE"):
        cuda_ops._resample_out(src, src_ns, tgt_ns, *out_for(src, 5))
