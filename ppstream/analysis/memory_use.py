"""Memory that each rank held: the most of RAM and of its GPU, and its growth in service. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ppstream.analysis.records import MemoryLine, RunLog

GIB: Final = 1 << 30
GROWN_BYTES: Final = 64 << 20  # of RAM while serving: less is what any process does
GROWN_SHARE: Final = 0.10
SHARED_BYTES: Final = 512 << 20  # more than a desktop takes
OF_RANK0: Final = frozenset("AC")
OF_POLICY: Final = frozenset("B")


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
    others_bytes: int | None  # that programs outside the run held at most, or at its start
    is_at_start: bool  # NVML did not list the processes: it is not known whether they stayed

    @property
    def is_shared(self) -> bool:
        """Other programs held more of it than a desktop takes."""
        return (self.others_bytes or 0) >= SHARED_BYTES

    def others_text(self, whose: str = "") -> str:
        """For people, where it is shared."""
        when = " when the run began" if self.is_at_start else ""
        return f"{(self.others_bytes or 0) / GIB:.2f} GiB{whose}{when}"


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
    ranks = by_rank(run)
    return [_use(lines, _serving(run, lines), _found(run, ranks, r)) for r, lines in ranks.items()]


def _found(run: RunLog, ranks: Mapping[int, Sequence[MemoryLine]], rank: int) -> int | None:
    """In use on a rank's device before the first rank of the run used it; None: not known."""
    devices = dict(enumerate(run.topology.devices))
    found = [
        line.found_bytes
        for other, lines in ranks.items()
        if devices.get(other) == devices.get(rank)
        for line in with_gpu(lines)
    ]
    return None if None in found else min((n for n in found if n is not None), default=None)


def shared_gpus(run: RunLog, stages: Collection[str]) -> list[str]:
    """Clauses, one for each rank that runs one of these stages on a GPU that others used."""
    return [
        f"other programs held {use.gpu.others_text(whose)}, which may be "
        "why: end them, or use another GPU"
        for use in memory_use(run)
        for whose in (f" of rank {use.rank}'s GPU",)
        if use.gpu is not None
        and use.gpu.is_shared
        and not (OF_RANK0 if use.rank == 0 else OF_POLICY).isdisjoint(stages)
    ]


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


def _use(
    lines: Sequence[MemoryLine], serving: Sequence[MemoryLine], found: int | None
) -> MemoryUse:
    first, last = serving[0], serving[-1]
    return MemoryUse(
        rank=last.rank,
        resident_max_bytes=max(m.resident_bytes or 0 for m in lines),
        resident_grown_bytes=(last.resident_bytes or 0) - (first.resident_bytes or 0),
        gpu=_gpu(with_gpu(lines), with_gpu(serving), found),
    )


def with_gpu(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    """Those that tell of a GPU: a rank's first ones may come before it was asked."""
    return [m for m in lines if m.total_bytes is not None]


def _gpu(
    lines: Sequence[MemoryLine], serving: Sequence[MemoryLine], found: int | None
) -> GpuUse | None:
    if not serving:
        return None
    first, last = serving[0], serving[-1]
    listed = [m.others_bytes for m in serving if m.others_bytes is not None]

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
        others_bytes=max(listed) if listed else found,
        is_at_start=not listed,
    )
