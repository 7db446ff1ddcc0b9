"""Prometheus families of a GPU's memory; none where CUDA is not in use by this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ppstream.observe import gpu_memory
from ppstream.observe import metric_families as show

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ppstream.observe.gpu_memory import GpuMemory

KINDS: Final = ("allocated", "allocated_max", "reserved", "non_torch", "free", "total")


def gpu_families() -> Iterator[Metric]:
    """Of this rank's device, as noted last, some second ago; asks neither CUDA nor torch."""
    found = gpu_memory.newest()
    if found is not None:
        yield from memory_families(found[1])


def memory_families(now: GpuMemory) -> Iterator[Metric]:
    bytes_of = {kind: getattr(now, f"{kind}_bytes") for kind in KINDS}
    yield show.gauges("ppstream_gpu_memory_bytes", "Memory of the GPU.", "kind", bytes_of)
    yield show.counter(
        "ppstream_gpu_allocations",
        "Blocks asked of torch's allocator; flat once a run is warm.",
        now.allocations,
    )
    yield show.counter(
        "ppstream_gpu_segments",
        "Segments asked of CUDA: each one may stall the device.",
        now.segments,
    )
    yield show.counter(
        "ppstream_gpu_alloc_retries",
        "Caches emptied because memory ran short.",
        now.alloc_retries,
    )
    yield show.counter("ppstream_gpu_ooms", "Allocations refused.", now.ooms)
