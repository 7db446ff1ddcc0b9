"""CPUs of this host, as Linux accounts them: how many may be used, their load, waits for one.

Reads affinity, cgroup quotas, ``/proc/stat`` and ``schedstat``. What a file does not say is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

SCHEDSTAT: Final = "/proc/thread-self/schedstat"
SCHEDSTAT_BYTES: Final = 64
IDLE: Final = 3  # of the fields of /proc/stat, as the next
IO_WAIT: Final = 4
STEAL: Final = 7  # what a hypervisor took
COUNTED: Final = 8  # user to steal; guest time is in user already
UTIME: Final = 11  # of /proc/PID/stat behind the name; system time follows


class Machine(NamedTuple):
    """The load of a host over some time."""

    usable_cpus: float
    busy_threads: float  # of the run here, that work at the same time
    load_1min: float
    steal_share: float | None  # of all its CPUs' time; None: no time passed, or not known
    others_cpus: float | None = None  # that programs other than the run used, of the usable ones

    @property
    def is_short(self) -> bool:
        """Threads that work at the same time have to share a CPU."""
        return self.usable_cpus < self.busy_threads

    def text(self) -> str:
        """For people, as in a refusal."""
        stolen = "steal unknown" if self.steal_share is None else f"{self.steal_share:.0%} stolen"
        cpus = "1 usable CPU" if self.usable_cpus == 1 else f"{self.usable_cpus:g} usable CPUs"
        load = f"load {self.load_1min:.1f} on {cpus}, {stolen}"
        if self.others_cpus is not None:
            load += f", other programs take {self.others_cpus:.1f}"
        if not self.is_short:
            return load
        return f"{load}: {self.busy_threads:g} threads work at the same time and share them"


class MachineMeter:
    """Measures the host from construction, or ``restart``, to each ``read``.

    Args:
        busy_threads: of the run on this host, that work at the same time.
        pids: further processes of the run, whose CPUs count as usable, beside this one.
        root: where ``proc`` and ``sys`` are, for tests.
    """

    def __init__(self, busy_threads: int, pids: Iterable[int] = (), root: Path = Path("/")) -> None:
        self._pids = (os.getpid(), *pids)
        self._root = root
        self._cpus = _affinity(pids)
        self._usable = usable_cpus(pids, root)
        self._busy_threads = busy_threads
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._begun, self._own = _ticks(self._root), self._own_ticks()

    def read(self) -> Machine:
        """Since the restart; the load is the kernel's own mean of a minute."""
        now, steal, others = _ticks(self._root), None, None
        passed = {
            cpu: [b - a for a, b in zip(self._begun[cpu], now[cpu], strict=True)]
            for cpu in now.keys() & self._begun.keys()
        }
        if (whole := passed.get("cpu")) is not None and sum(whole) > 0:
            steal = whole[STEAL] / sum(whole)
        usable = [ticks for cpu, ticks in passed.items() if cpu in self._cpus]
        if usable and (length := sum(map(sum, usable)) / len(usable)) > 0:
            used = sum(sum(ticks) - ticks[IDLE] - ticks[IO_WAIT] for ticks in usable)
            others = max(0.0, used - (self._own_ticks() - self._own)) / length
        return Machine(self._usable, self._busy_threads, os.getloadavg()[0], steal, others)

    def _own_ticks(self) -> int:
        """CPU time of the run's processes so far, user and system."""
        ticks = 0
        for pid in self._pids:
            with suppress(OSError, ValueError, IndexError):
                fields = (self._root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[UTIME]) + int(fields[UTIME + 1])
        return ticks


def _ticks(root: Path) -> dict[str, list[int]]:
    """Of all CPUs together (``cpu``), and of each; empty where the kernel does not say."""
    found = {}
    with suppress(OSError, ValueError):
        for line in (root / "proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if not name.startswith("cpu"):
                break
            if len(fields) >= COUNTED:
                found[name] = [int(field) for field in fields[:COUNTED]]
    return found


def usable_cpus(pids: Iterable[int] = (), root: Path = Path("/")) -> float:
    """CPUs that this process and ``pids`` may run on together; a cgroup quota may be a fraction."""
    return min([float(len(_affinity(pids))), *_quotas(root)])


def _affinity(pids: Iterable[int]) -> set[str]:
    """As ``/proc/stat`` names them."""
    cpus = set(os.sched_getaffinity(0))
    for pid in pids:
        with suppress(OSError):  # gone, or another user's
            cpus |= os.sched_getaffinity(pid)
    return {f"cpu{cpu}" for cpu in cpus}


def _quotas(root: Path) -> Iterator[float]:
    """CPUs that every cgroup above this process allows, of cgroup v2 and v1.

    Inside a container the path may be the host's: then its mount's own root counts.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = ["sys/fs/cgroup"]
        elif "cpu" in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"]
        else:
            continue
        for mount in mounts:
            inner = root / mount / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder == root / "sys/fs":
                    break
                yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)  # "max" is no number: no quota
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            yield quota_us / int((folder / "cpu.cfs_period_us").read_text())


class RunDelay:
    """Time that one thread was runnable without a CPU; for that thread alone."""

    def __init__(self) -> None:
        self._fd = -1
        self._seen_ns = 0

    def begin(self) -> None:
        """The calling thread is the one from now on, and starts at 0."""
        if self._fd >= 0:
            os.close(self._fd)
        try:
            self._fd = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
        self.take_ns()

    def take_ns(self) -> int | None:
        """The time since this was last asked; None where the kernel does not count it."""
        if self._fd < 0:
            return None
        now_ns = int(os.pread(self._fd, SCHEDSTAT_BYTES, 0).split()[1])
        taken_ns, self._seen_ns = now_ns - self._seen_ns, now_ns
        return taken_ns
