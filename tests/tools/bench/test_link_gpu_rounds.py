"""The rounds of ``bench/link_gpu.py`` over a driver of threads: what they time, in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from bench import link_gpu_rounds as link_rounds
from fake_cuda import FakeDriver, queue_call
from fake_put import FakePuts
from linked_ends import driven_by, linked

from ppstream.core.specs import TensorSpec
from ppstream.cuda.driver import CudaStream
from ppstream.links.device_counters import CountedLink
from ppstream.links.slots import LinkShape, SlotLayout

ROUNDS, TRIPS = 3, 5
WAY_S = (0.002, 0.006)  # of either end's sends
LIMIT_S = 10


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(link_rounds, "own_stream", lambda role: CudaStream())
    with driven_by(FakeDriver(), monkeypatch) as fake:
        yield fake


def slowed(link: CountedLink, way_s: float) -> CountedLink:
    """The same, each send of which takes so long."""
    send = link._send

    def late(message: int, stream: CudaStream) -> None:
        queue_call(stream, partial(time.sleep, way_s))
        send(message, stream)

    link._send = late  # type: ignore[method-assign]
    return link


@pytest.mark.parametrize("mode", ["queued", "hops"])
def test_a_round_trip_is_both_ways_of_one_slot(driver: FakeDriver, mode: str) -> None:
    layout = SlotLayout(link_rounds.HEADER, (TensorSpec("bytes", (100,), "uint8"),), 1)
    ends = [*map(slowed, linked(LinkShape(layout, layout, 2, 2), FakePuts), WAY_S)]
    met = threading.Barrier(2)
    trips_us: list[list[float]] = [[], []]

    def run(rank: int) -> None:
        device = torch.device("cpu")
        thrower = link_rounds.Thrower(ends[rank], mode, device, is_front=rank == 0)
        for _ in range(ROUNDS):
            trip_us, spent_s = thrower.round(TRIPS, lambda: met.wait(LIMIT_S) and None)
            assert 0 < spent_s < 1
            trips_us[rank].append(trip_us)

    back = threading.Thread(target=run, args=(1,), daemon=True)
    back.start()
    run(0)
    back.join(LIMIT_S)
    assert not back.is_alive()
    assert min(trips_us[0]) >= sum(WAY_S) * 1e6, trips_us
    assert min(trips_us[0]) < 2 * sum(WAY_S) * 1e6, trips_us  # a busy machine makes some longer
    assert [end._sent for end in ends] == [end._expected for end in ends]
    assert ends[0]._sent == ROUNDS * TRIPS
