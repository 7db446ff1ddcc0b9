"""Cores that are busy with anything but this process and those that it started."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

TICKS_HZ: Final = os.sysconf("SC_CLK_TCK")
IDLE: Final = (3, 4)  # of the fields of /proc/stat: idle, iowait


class Cores:
    """Begins to count when it is made. Time that the host took from the machine counts, too.

    Attributes:
        began: the monotonic time, ticks of all cores, and own ones.
    """

    def __init__(self) -> None:
        self.began = (time.monotonic(), _busy(), own_ticks())

    def foreign(self) -> float:
        """Cores busy with anything else since then, on average."""
        began, busy, ours = self.began
        foreign = (_busy() - busy - (own_ticks() - ours)) / TICKS_HZ
        return max(0.0, foreign / (time.monotonic() - began))


def _busy() -> int:
    """Ticks of all cores since the machine started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(int(ticks) for place, ticks in enumerate(fields) if place not in IDLE)


def own_ticks() -> int:
    """Ticks of this process, of all that descend from it, and of those of them that ended."""
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # user and system, own and of ended children
    return sum(each for pid, each in ticks.items() if _descends(pid, parents))


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parents.get(pid, 0)
    return False
