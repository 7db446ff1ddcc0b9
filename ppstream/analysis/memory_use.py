"""Memory that each rank held: the most of RAM and of its GPU, and its growth in service. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ppstream.analysis.records import MemoryLine, RunLog

GIB: Final = 1 << 30
GROWN_BYTES: Final = 64 << 20  # of RAM while serving: less is what any process does
GROWN_SHARE: Final = 0.10


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Of one rank's GPU; growth is since ready, or since its first line where it has no ready."""

    allocated_max_bytes: int
    reserved_max_bytes: int
    non_torch_max_bytes: int
    free_min_bytes: int
    total_bytes: int
    segments_grown: int  # asked of CUDA while serving: each may have stalled the device
    alloc_retries: int  # all of them, as the next
    ooms: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of one rank, in its newest generation."""

    rank: int
    resident_max_bytes: int
    resident_grown_bytes: int
    gpu: GpuUse | None

    @property
    def leaks(self) -> bool:
        """RAM grew by more than a steady process does."""
        return self.resident_grown_bytes > max(
            GROWN_BYTES, GROWN_SHARE * (self.resident_max_bytes - self.resident_grown_bytes)
        )


def memory_use(run: RunLog) -> list[MemoryUse]:
    """By rank; of ranks that logged any."""
    return [_use(lines, _serving(run, lines)) for lines in by_rank(run).values()]


def by_rank(run: RunLog) -> dict[int, list[MemoryLine]]:
    """Lines of each rank's newest generation, in their order."""
    newest: dict[int, int] = {}
    for line in run.memory:
        newest[line.rank] = max(line.generation, newest.get(line.rank, 0))
    found: dict[int, list[MemoryLine]] = {rank: [] for rank in sorted(newest)}
    for line in run.memory:
        if line.generation == newest[line.rank]:
            found[line.rank].append(line)
    return found


def _serving(run: RunLog, lines: Sequence[MemoryLine]) -> Sequence[MemoryLine]:
    """From the first one behind ready on, the newest alone of a run that never was ready.

    All of them where other ranks alone say when that was.
    """
    first = lines[0]
    ready = [
        event
        for event in run.events
        if event.generation == first.generation and event.phase == "ready" and event.t is not None
    ]
    if not ready:
        return lines[-1:]
    ready_ns = [event.t or 0 for event in ready if event.rank == first.rank]
    since_ns = ready_ns[-1] if ready_ns else 0
    return [line for line in lines if (line.t or 0) >= since_ns] or lines[-1:]


def _use(lines: Sequence[MemoryLine], serving: Sequence[MemoryLine]) -> MemoryUse:
    first, last = serving[0], serving[-1]
    return MemoryUse(
        rank=last.rank,
        resident_max_bytes=max(m.resident_bytes or 0 for m in lines),
        resident_grown_bytes=(last.resident_bytes or 0) - (first.resident_bytes or 0),
        gpu=_gpu(with_gpu(lines), with_gpu(serving)),
    )


def with_gpu(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    """Those that tell of a GPU: a rank's first ones may come before it was asked."""
    return [m for m in lines if m.total_bytes is not None]


def _gpu(lines: Sequence[MemoryLine], serving: Sequence[MemoryLine]) -> GpuUse | None:
    if not serving:
        return None
    first, last = serving[0], serving[-1]

    def most(name: str) -> int:
        return max(getattr(m, name) or 0 for m in lines)

    return GpuUse(
        allocated_max_bytes=most("allocated_max_bytes"),
        reserved_max_bytes=most("reserved_bytes"),
        non_torch_max_bytes=most("non_torch_bytes"),
        free_min_bytes=min(m.free_bytes or 0 for m in lines),
        total_bytes=last.total_bytes or 0,
        segments_grown=(last.segments or 0) - (first.segments or 0),
        alloc_retries=last.alloc_retries or 0,
        ooms=last.ooms or 0,
    )
