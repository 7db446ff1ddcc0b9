"""One ``memory`` line a second in a rank's log: RAM, and the GPU's memory if there is one.

A thread of its own writes them. It never asks torch's allocator (``gpu_memory.py`` says why): it
has the loop's thread note its counters at the next envelope, and writes what was noted last. While
no envelope begins nothing new is noted, and next to nothing allocated.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppstream.observe import gpu_memory

if TYPE_CHECKING:
    from ppstream.observe.log_writer import TimestampLog

INTERVAL_S: Final = 1.0
CLOSE_LIMIT_S: Final = 1.0
STATM: Final = Path("/proc/self/statm")


class MemoryLines:
    """Writes from construction until ``close``, the first line at once and one at the end."""

    def __init__(self, log: TimestampLog, interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last line; bounded."""
        self._ended.set()
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            gpu_memory.note_room()
            write_line(self._log)
            self._log.on_next_take = gpu_memory.note_allocator
            is_over = self._ended.wait(self._interval_s)
        write_line(self._log)


def write_line(log: TimestampLog) -> None:
    """What this process holds; ``device`` and what follows it only where CUDA is in use."""
    found = gpu_memory.newest()
    if found is None:
        log.line("memory", resident_bytes=resident_bytes())
    else:
        device, now = found
        log.line("memory", resident_bytes=resident_bytes(), device=str(device), **now._asdict())


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize()
