"""The pinned link over a driver of threads: real shared memory, both ends in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeDriver, queue_call
from linked_ends import driven_by
from robot_rig import wait_until

from ppstream.control.launcher_store import LauncherStore
from ppstream.core.clock import NS_PER_MS
from ppstream.core.specs import TensorSpec
from ppstream.cuda.driver import CudaEvent, CudaStream
from ppstream.links import device_counters
from ppstream.links.pinned_memory import PinnedLink
from ppstream.links.slots import LinkShape, Position, SlotLayout

HEADER = ("index", "generation", "epoch", "seq")
LIMIT_S = 10.0
ALREADY = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED


class PinningDriver(FakeDriver):
    """Knows what is pinned, as long as nobody unpins it."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, int] = {}

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        for start, length in self.pinned.items():
            if start < address + size and address < start + length:
                return (ALREADY,)
        self.pinned[address] = size
        return (0,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return 0, address

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[PinningDriver]:
    with driven_by(PinningDriver(), monkeypatch) as fake:
        yield fake


def opened(places: int = 1) -> list[PinnedLink]:
    """Links of a chain of ranks, each opened by a thread of its own."""
    store = LauncherStore(vars(dist)["HashStore"](), 0, 2, 0)
    layout = SlotLayout(HEADER, (TensorSpec("x", (100,), "uint8"),), 1)
    found: dict[int, PinnedLink] = {}

    def run(place: int) -> None:
        shape, cpu = LinkShape(layout, layout, 2, 2, 7), torch.device("cpu")
        found[place] = PinnedLink(Position(place, places), store, shape, cpu, LIMIT_S)

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(places + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [found[place] for place in range(places + 1)]


@pytest.mark.parametrize(
    ("places", "sender"), [(places, sender) for places in (1, 2, 3) for sender in range(places + 1)]
)
def test_slots_arrive_whole_through_host_memory(
    driver: PinningDriver, places: int, sender: int
) -> None:
    links = opened(places)
    here, there = links[sender], links[(sender + 1) % len(links)]
    own = CudaStream()
    for index in range(20):
        place = index % len(here.out)
        here.out[place].tensors["x"].fill_(index)
        here.queue_header(index, (5, index))
        here.queue_send(index)
        there.queue_receive(index)
        assert not there.queue_wait(index, own)  # the count is there before the slot is fetched
        done = CudaEvent()
        there.receiving.record(done)
        wait_until(done.is_done)
        assert there.into[place].header.tolist() == [index, 7, 5, index]
        assert (there.into[place].tensors["x"] == index).all()


def test_close_unpins_so_that_a_further_link_can_lie_there(driver: PinningDriver) -> None:
    for _ in range(3):
        links: Any = opened()
        assert len(driver.pinned) == 4  # each end maps both hops
        for link in links:
            assert link.close()
            assert link.close()
        assert not driver.pinned


def test_memory_that_a_stream_still_waits_beside_stays_pinned(
    driver: PinningDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, back = opened()
    monkeypatch.setattr(device_counters, "RELEASE_LIMIT_NS", NS_PER_MS)
    moves = threading.Event()
    queue_call(front.receiving, lambda: moves.wait())
    assert not front.close()
    assert back.close()
    assert len(driver.pinned) == 2
    moves.set()
    for stream in (front.sending, front.receiving):  # they write there until they are idle
        idle = CudaEvent()
        stream.record(idle)
        wait_until(idle.is_done)
