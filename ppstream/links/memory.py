"""How much memory this process may still take, before it is taken.

Linux grants shared memory first and kills processes later; asking beforehand turns that into a
configuration error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2: Final = ("memory.max", "memory.current", "inactive_file")
KIB: Final = 1024


def available_bytes() -> int:
    """The least of what the machine has available and what each control group above us allows."""
    return min(_machine_bytes(), *map(_group_bytes, _groups()))


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * KIB
    raise OSError("/proc/meminfo has no MemAvailable: Linux 3.14 or newer is needed")


def _groups() -> list[Path]:
    """Directories of our control groups, up to the roots; in a container the roots are its own."""
    groups = [CGROUPS, CGROUPS / "memory"]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            parts = Path(path.lstrip("/")).parts
            groups += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return groups


def _group_bytes(group: Path) -> int:
    """What ``group`` may still take; page cache that can be dropped does not count as taken."""
    for limit, usage, droppable in (V2, V1):
        try:
            allowed = int((group / limit).read_text())
            taken = int((group / usage).read_text())
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
        except (OSError, ValueError):  # no such group, no such version, or "max"
            continue
        return max(0, allowed - taken + int(statistics.get(droppable, 0)))
    return 1 << 63
