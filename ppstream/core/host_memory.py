"""Memory of this host that the process may take: the machine's, and what control groups allow.

Reads ``/proc`` and control groups of versions 2 and 1; in a container their roots are its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
KIB: Final = 1024
V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2: Final = ("memory.max", "memory.current", "inactive_file")


def limit_bytes(root: Path = ROOT) -> int:
    """The least of what the machine has and what each control group above us allows."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, *(allowed for allowed, _ in _groups(root)))


def available_bytes(root: Path = ROOT) -> int:
    """The least of what the machine has available and what these groups may still take.

    Droppable page cache is free.
    """
    return min(_machine_bytes(root), *(left for _, left in _groups(root)))


def _machine_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * KIB
    raise OSError("/proc/meminfo has no MemAvailable: Linux 3.14 or newer is needed")


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields what each group allows, and what is left of it; first one without a limit."""
    yield 1 << 63, 1 << 63
    for group in _folders(root):
        for limit, usage, droppable in (V2, V1):
            try:
                allowed = int((group / limit).read_text())
                taken = int((group / usage).read_text())
                statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
            except (OSError, ValueError):  # no such group, no such version, or "max"
                continue
            yield allowed, max(0, allowed - taken + int(statistics.get(droppable, 0)))


def _folders(root: Path) -> list[Path]:
    """Directories of our control groups, up to the roots."""
    top = root / "sys/fs/cgroup"
    groups = [top, top / "memory"]
    try:
        own = (root / "proc/self/cgroup").read_text()
    except OSError:  # a kernel without control groups
        own = ""
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            parts = Path(path.lstrip("/")).parts
            inner = top / controllers
            groups += [inner.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return groups
