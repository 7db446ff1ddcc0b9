"""Rounds of the two ranks of ``bench/link_gpu.py``: one slot back and forth. Not a benchmark.

Everything of a round is queued before a gate opens, so no host is on the path; one way is half of
a round trip by the events of one device.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ppstream.control.launcher_store import LauncherStore
from ppstream.core.specs import TensorSpec
from ppstream.cuda.driver import CudaEvent, CudaStream, checked, driver
from ppstream.cuda.streams import stream as own_stream
from ppstream.links.nccl import NcclLink
from ppstream.links.peer_memory import PeerLink
from ppstream.links.pinned_memory import PinnedLink
from ppstream.links.slots import BACK, FRONT, LinkShape, SlotLayout

ROUNDS: Final = 9
TRIPS: Final = 60  # queued together: far below what a stream takes
SENT_BYTES: Final = 1 << 30  # of a round, at most
WAIT_S: Final = 20.0
RUN_LIMIT_S: Final = 30.0
HEADER: Final = ("index", "generation", "epoch", "seq")
EVERY_SIZE: Final = 1 << 30


class LinkRun(NamedTuple):
    """One row of the table."""

    way: str  # put or copy (both ``peer``), pinned, nccl
    size: int
    mode: str  # graph, queued, or hops: received in a stage's stream, sent by the link's


class Thrown(NamedTuple):
    """Result of a run at this end."""

    one_way_us: list[float]  # by round
    cpu_s: float  # of this end's thread, queueing
    messages: int  # sent by this end, and as many received


def throw(run: LinkRun, store: LauncherStore, device: torch.device) -> Thrown:
    """This rank's part of ``run``, over a link of its own.

    A run that does not end says where it stands, and ends this process.
    """
    faulthandler.dump_traceback_later(RUN_LIMIT_S, exit=True)
    here = _store_of(run, store)
    link = _open(run, here, device)
    trips = min(TRIPS, max(10, SENT_BYTES // run.size))
    thrower = Thrower(link, run.mode, device, is_front=store.rank == 0)
    one_way_us: list[float] = []
    cpu_s = 0.0
    for number in range(ROUNDS + 1):
        trip_us, spent_s = thrower.round(trips, _barrier(here, str(number)))
        if number:  # the first one warms
            one_way_us.append(trip_us / 2)
            cpu_s += spent_s
    assert link.close(), "a stream still waits"
    faulthandler.cancel_dump_traceback_later()
    return Thrown(one_way_us, cpu_s, ROUNDS * trips)


class Thrower:
    """One end."""

    def __init__(self, link: Any, mode: str, device: torch.device, *, is_front: bool) -> None:
        self._link, self._mode, self._device, self._is_front = link, mode, device, is_front
        self._gate = torch.zeros(1, dtype=torch.int32, device=device)
        self._rounds = self._index = 0
        self._first, self._last = CudaEvent(), CudaEvent()
        self._stage = CudaStream()
        self._recording = CudaStream()
        self._events = [CudaEvent() for _ in range(TRIPS)]
        torch.cuda.synchronize(device)

    def round(self, trips: int, meet: Callable[[], None]) -> tuple[float, float]:
        """Returns µs of a round trip, and s of this thread's time for all of them."""
        self._rounds += 1
        stream = self._stage if self._mode == "hops" else self._link.receiving
        queue = self._prepared(trips)
        if self._is_front:
            stream.wait_value(self._gate.data_ptr(), self._rounds)
        stream.record(self._first)
        begun_ns = time.thread_time_ns()
        queue()
        spent_s = (time.thread_time_ns() - begun_ns) / 1e9
        stream.record(self._last)
        meet()
        if self._is_front:
            own_stream("release").write_value(self._gate.data_ptr(), self._rounds)
        self._last.wait()
        span_ns = self._last.ns_since(self._first)
        assert span_ns is not None, "it was waited for"
        return span_ns / trips / 1e3, spent_s

    def _prepared(self, trips: int) -> Callable[[], None]:
        """Returns a call that queues the trips of a round."""
        stream = self._link.receiving
        if self._mode == "hops":
            return partial(self._trips_with_hops, trips)
        if self._mode == "graph":
            return partial(self._recorded(trips), stream.handle)
        return partial(self._trips, trips, stream)

    def _recorded(self, trips: int) -> Callable[[Any], None]:
        """The trips as a graph of one use: it holds the counts of this round.

        It is on the device before anything waits: the first start of a graph would stand behind
        the gate, and with it the host that is to open it.
        """
        cuda, stream = driver(), self._recording
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(cuda.cuStreamBeginCapture(stream.handle, mode), "recording")
        try:
            self._trips(trips, stream)
        finally:
            (graph,) = checked(cuda.cuStreamEndCapture(stream.handle), "recording")
        (executable,) = checked(cuda.cuGraphInstantiate(graph, 0), "a graph")
        checked(cuda.cuGraphUpload(executable, stream.handle), "a graph")
        checked(cuda.cuStreamSynchronize(stream.handle), "a graph")

        def start(handle: Any) -> None:
            checked(cuda.cuGraphLaunch(executable, handle), "the start of a graph")

        return start

    def _trips(self, trips: int, stream: CudaStream) -> None:
        for _ in range(trips):
            self._trip(stream)

    def _trip(self, stream: CudaStream) -> None:
        """There and back, in one stream."""
        index, link = self._index, self._link
        self._index += 1
        if self._is_front:
            link.queue_send(index, stream)
            link.queue_receive(index, stream)
        else:
            link.queue_receive(index, stream)
            link.queue_send(index, stream)

    def _trips_with_hops(self, trips: int) -> None:
        """As the loops: received in the stream of a stage, sent behind it by the link's own."""
        link, stage, events = self._link, self._stage, iter(self._events)
        for _ in range(trips):
            index, done = self._index, next(events)
            self._index += 1
            if not self._is_front:
                link.queue_receive(index, stage)
            stage.record(done)
            link.sending.wait_for(done)
            link.queue_send(index)
            if self._is_front:
                link.queue_receive(index, stage)


def _barrier(store: LauncherStore, key: str) -> Callable[[], None]:
    """Goes on when the other end is there, too."""

    def meet() -> None:
        store.set(f"{key}/{store.rank}", "1")
        store.get(f"{key}/{1 - store.rank}", WAIT_S)

    return meet


def _store_of(run: LinkRun, store: LauncherStore) -> LauncherStore:
    prefix = f"{run.way}/{run.size}/{run.mode}"
    raw = dist.PrefixStore(prefix, store.raw)  # type: ignore[attr-defined]
    return LauncherStore(raw, store.rank, store.world_size, store.generation)


def _open(run: LinkRun, here: LauncherStore, device: torch.device) -> Any:
    side = FRONT if here.rank == 0 else BACK
    layout = SlotLayout(HEADER, (TensorSpec("bytes", (run.size,), "uint8"),), 1)
    shape = LinkShape(layout, layout, 2, 2)
    if run.way == "pinned":
        return PinnedLink(side, here, shape, device, WAIT_S)
    if run.way == "nccl":
        return NcclLink(side, here.raw, shape, device, WAIT_S)
    put_bytes = EVERY_SIZE if run.way == "put" else 0
    return PeerLink(side, here, shape, device, WAIT_S, put_bytes=put_bytes)
