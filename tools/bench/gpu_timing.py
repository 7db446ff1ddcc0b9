"""Times on a GPU: CUDA-graph replays of back-to-back calls over inputs that have left the L2 cache.

Not a measure of launching: what a call costs the host is ``host_us``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

ROTATED_BYTES: Final = 200_000_000  # of all input sets together: several times L2
MOST_SETS: Final = 128
CALLS_PER_GRAPH: Final = 32  # at least: a graph's own start is not a call's
ROUNDS: Final = 7
_ROUND_US: Final = 1500.0

Calls = Sequence[Callable[[], object]]


def sets_for(call_bytes: int) -> int:
    """Returns how many input sets make a call find nothing of its own in L2."""
    return max(2, min(MOST_SETS, ROTATED_BYTES // call_bytes + 1))


def capture(calls: Calls) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph that goes through ``calls`` and how many it holds; all are warmed up before."""
    repeats = -(-CALLS_PER_GRAPH // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in (*calls[:2], *calls[-1:]):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    return graph, repeats * len(calls)


def graphed_us(ways: dict[str, Calls]) -> dict[str, float]:
    """Per call of each way, the median of rounds that go through all ways in turn."""
    graphs = {name: capture(calls) for name, calls in ways.items()}
    replays = {name: _replays(*entry) for name, entry in graphs.items()}
    rounds = [
        {name: _replayed_us(*graphs[name], replays[name]) for name in graphs} for _ in range(ROUNDS)
    ]
    return {name: sorted(one[name] for one in rounds)[ROUNDS // 2] for name in graphs}


def _replays(graph: torch.cuda.CUDAGraph, calls: int) -> int:
    _replayed_us(graph, calls, 1)
    once_us = _replayed_us(graph, calls, 1) * calls
    return max(1, int(_ROUND_US / once_us))


def _replayed_us(graph: torch.cuda.CUDAGraph, calls: int, replays: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()  # keeps the GPU busy while the host queues what is timed
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3 / (replays * calls)


def host_us(call: Callable[[], object], calls: int = 300) -> float:
    """Measures a call's cost for the calling thread, on a GPU that never pushes back; p50."""
    times_us = []
    for _ in range(calls):
        start_ns = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        if len(times_us) % 50 == 0:
            torch.cuda.synchronize()
    return sorted(times_us)[calls // 2]
