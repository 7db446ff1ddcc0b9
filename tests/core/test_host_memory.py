"""Memory that the machine and its control groups allow, read from files as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppstream.core.host_memory import available_bytes, limit_bytes

MIB = 1 << 20
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host(root: Path, own: str, groups: dict[str, tuple[str, str, str]], version: int) -> Path:
    """A root whose control groups have a limit, a usage and droppable page cache each."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    (root / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    409600 kB\n")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, usage, droppable = (
        v1 if version == 1 else ("memory.max", "memory.current", "inactive_file")
    )
    for name, (allowed, taken, cache) in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{allowed}\n")
        (folder / usage).write_text(f"{taken}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{droppable} {cache}\n")
    return root


@pytest.mark.parametrize(
    ("own", "groups", "version"),
    [
        ("0::/pod/run\n", {"pod": (300 * MIB, 200 * MIB, MIB), "pod/run": ("max", 0, 0)}, 2),
        ("0::/\n", {"": (300 * MIB, 200 * MIB, MIB)}, 2),
        ("4:memory:/a\n0::/\n", {"memory/a": (300 * MIB, 200 * MIB, MIB)}, 1),
        ("4:memory:/of-the-host\n", {"memory": (300 * MIB, 200 * MIB, MIB)}, 1),
    ],
    ids=["a group above", "a container", "version 1", "version 1 in a container"],
)
def test_the_smallest_control_group_counts(
    own: str, groups: dict[str, tuple[str, str, str]], version: int, tmp_path: Path
) -> None:
    root = host(tmp_path, own, groups, version)
    assert limit_bytes(root) == 300 * MIB
    assert available_bytes(root) == 101 * MIB


@pytest.mark.parametrize("allowed", ["max", str(1 << 62)])
def test_the_machine_counts_where_no_group_allows_less(allowed: str, tmp_path: Path) -> None:
    root = host(tmp_path, "0::/pod\n", {"pod": (allowed, "0", "0")}, 2)
    assert limit_bytes(root) == MACHINE
    assert available_bytes(root) == 400 * MIB


def test_the_machine_counts_where_the_kernel_has_no_control_groups(tmp_path: Path) -> None:
    root = host(tmp_path, "", {}, 2)
    (root / "proc/self/cgroup").unlink()
    assert limit_bytes(root) == MACHINE
    assert available_bytes(root) == 400 * MIB
