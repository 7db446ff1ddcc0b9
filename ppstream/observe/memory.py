"""Memory of a rank: one ``memory`` line a second in its log, RAM and the GPU's if there is one.

The counters are torch's allocator's, beside what the device calls free; what is neither free nor
reserved belongs to CUDA itself, to libraries or to other processes.

Only the loop's thread may ask torch's allocator, between envelopes (``TimestampLog.take``). Out of
memory, the allocator gives cached memory back, which waits for the whole device, also for streams
that wait for another rank; it keeps its lock meanwhile, and asking for its counters takes that lock
without giving up the interpreter. Asked by another thread, no heartbeat and no watchdog would run
from then on. A thread writes the lines: it has the loop's thread note the counters at the next
envelope, and writes the newest note. While no envelope begins nothing new is noted.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ppstream.analysis.records import GpuMemory
from ppstream.cuda.startup import started, watched

if TYPE_CHECKING:
    from ppstream.observe.log_writer import TimestampLog

INTERVAL_S: Final = 1.0
CLOSE_LIMIT_S: Final = 1.0
STATM: Final = Path("/proc/self/statm")


class Noted:
    """The newest notes: each half replaced whole by its one writer; any thread reads."""

    allocator: Mapping[str, Any] | None = None
    room: tuple[int, int] | None = None  # free and total bytes
    others_bytes: int | None = None


noted: Final = Noted()


def note_allocator() -> None:
    """Read the allocator's counters; for the thread that allocates, some 20 µs."""
    device = started()
    if device is not None:
        noted.allocator = torch.cuda.memory_stats_as_nested_dict(device)


def note_room() -> None:
    """Ask the device what is free; may last as long as the device is stuck, the interpreter free.

    The rank's device becomes the calling thread's current one: in a new thread that is the first
    one, whatever the rank's own thread has chosen, and going back there would start CUDA on it.
    """
    device = started()
    if device is not None:
        torch.cuda.set_device(device)
        noted.room = torch.cuda.mem_get_info(device)
        gpu = watched()
        noted.others_bytes = None if gpu is None else gpu.others_bytes()


def newest() -> tuple[torch.device, GpuMemory] | None:
    """The device that this process started CUDA on, and what was noted last; calls nothing."""
    device = started()
    if device is None or noted.allocator is None or noted.room is None:
        return None
    gpu = watched()
    now = memory(noted.allocator, *noted.room)
    found = None if gpu is None else gpu.found_bytes
    return device, replace(now, others_bytes=noted.others_bytes, found_bytes=found)


def memory(statistics: Mapping[str, Any], free: int, total: int) -> GpuMemory:
    """From torch's nested ``memory_stats`` and the device's free and total bytes."""

    def count(name: str, what: str) -> int:
        return int(statistics.get(name, {}).get("all", {}).get(what, 0))

    reserved = count("reserved_bytes", "current")
    return GpuMemory(
        allocated_bytes=count("allocated_bytes", "current"),
        allocated_max_bytes=count("allocated_bytes", "peak"),
        reserved_bytes=reserved,
        non_torch_bytes=max(0, total - free - reserved),
        free_bytes=free,
        total_bytes=total,
        allocations=count("allocation", "allocated"),
        segments=count("segment", "allocated"),
        alloc_retries=int(statistics.get("num_alloc_retries", 0)),
        ooms=int(statistics.get("num_ooms", 0)),
    )


class MemoryLines:
    """Writes from construction until ``close``: at once, each second, at ready and at the end."""

    def __init__(self, log: TimestampLog, interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def on_phase(self, phase: str) -> None:
        """Writes a line as the run becomes ready, which later growth is counted from.

        For the thread that begins envelopes, between two of them.
        """
        if phase == "ready":
            note_allocator()
            write_line(self._log)

    def close(self) -> None:
        """Write the last line; bounded."""
        self._ended.set()
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            note_room()
            write_line(self._log)
            self._log.on_next_acquire = note_allocator
            is_over = self._ended.wait(self._interval_s)
        write_line(self._log)


def write_line(log: TimestampLog) -> None:
    """Writes what this process holds; ``device`` and what follows it only where CUDA is in use."""
    found = newest()
    if found is None:
        log.line("memory", resident_bytes=resident_bytes())
    else:
        device, now = found
        log.line("memory", resident_bytes=resident_bytes(), device=str(device), **asdict(now))


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize()
