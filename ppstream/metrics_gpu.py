"""Prometheus families of a GPU's memory; none where CUDA is not in use by this process.

Host-side counters of torch's allocator, and what the device says is free: what is neither free nor
reserved belongs to CUDA itself, to libraries or to other processes (``non_torch``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ppstream import metric_families as show

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def gpu_families() -> Iterator[Metric]:
    """Of the current device; never starts CUDA by itself."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    said = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    yield from memory_families(said, free, total)


def memory_families(said: dict[str, int], free: int, total: int) -> Iterator[Metric]:
    """From torch's ``memory_stats`` and the device's free and total bytes."""
    reserved = said.get("reserved_bytes.all.current", 0)
    found = {
        "allocated": said.get("allocated_bytes.all.current", 0),
        "reserved": reserved,
        "allocated_max": said.get("allocated_bytes.all.peak", 0),
        "non_torch": max(0, total - free - reserved),
        "free": free,
        "total": total,
    }
    yield show.gauges("ppstream_gpu_memory_bytes", "Memory of the GPU.", "kind", found)
    yield show.counter(
        "ppstream_gpu_allocations",
        "Blocks asked of torch's allocator; flat once a run is warm.",
        said.get("allocation.all.allocated", 0),
    )
    yield show.counter(
        "ppstream_gpu_segments",
        "Segments asked of CUDA: each one may stall the device.",
        said.get("segment.all.allocated", 0),
    )
    yield show.counter(
        "ppstream_gpu_alloc_retries",
        "Caches emptied because memory ran short.",
        said.get("num_alloc_retries", 0),
    )
    yield show.counter("ppstream_gpu_ooms", "Allocations refused.", said.get("num_ooms", 0))
