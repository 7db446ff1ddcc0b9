"""CPUs of this host, as Linux accounts them: how many may be used, their load, waits for one.

Reads affinity, cgroup quotas, ``/proc/stat`` and ``schedstat``. What a file does not say is None.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, combinations
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from ppstream.core.clock import thread_cpu_ns

SCHEDSTAT: Final = "/proc/thread-self/schedstat"
SCHEDSTAT_BYTES: Final = 64
SHORT_NS: Final = 300_000  # of a stage: what it costs is asked for now and then
ONE_OF: Final = 16
IDLE: Final = 3  # of the fields of /proc/stat, as the next
IO_WAIT: Final = 4
STEAL: Final = 7  # what a hypervisor took
COUNTED: Final = 8  # user to steal; guest time is in user already
UTIME: Final = 11  # of /proc/PID/stat behind the name
SPARE_CPUS: Final = 8  # of a host: a thread may keep one awake for part of a millisecond
TIMES: Final = 4  # from there: user and system, of itself and of children that have ended


class Machine(NamedTuple):
    """The load of a host over some time."""

    usable_cpus: float
    busy_threads: float  # of the run here, that work at the same time
    load_1min: float
    steal_share: float | None  # of all its CPUs' time; None: no time passed, or not known
    others_cpus: float | None = None  # that programs other than the run used, of the usable ones
    thread_cpus: Mapping[str, Sequence[int]] = MappingProxyType({})  # that each thread may use

    @property
    def is_short(self) -> bool:
        """Threads that work at the same time have to share a CPU."""
        return self.usable_cpus < self.busy_threads or bool(self.confined)

    @property
    def confined(self) -> tuple[str, ...]:
        """The fewest threads that may use fewer CPUs than they are."""
        return next((some for some in self._sets() if len(some) > self.cpus_for(some)), ())

    def holds(self, wanted: Mapping[str, float]) -> bool:
        """True when there are CPUs for what each thread wants of one, wherever it may run."""
        return all(
            sum(wanted.get(name, 0.0) for name in some) <= self.cpus_for(some)
            for some in (*self._sets(), tuple(wanted))
        )

    def cpus_for(self, threads: Sequence[str]) -> float:
        """CPUs that these threads may use together."""
        if not all(name in self.thread_cpus for name in threads):
            return self.usable_cpus
        cpus = {cpu for name in threads for cpu in self.thread_cpus[name]}
        return min(self.usable_cpus, len(cpus))

    def _sets(self) -> Iterator[tuple[str, ...]]:
        names = tuple(self.thread_cpus)
        return chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1))

    def text(self, title: Callable[[str], str] = str) -> str:
        """For people, as in a refusal; ``title`` names a thread for them."""
        stolen = "steal unknown" if self.steal_share is None else f"{self.steal_share:.0%} stolen"
        cpus = "1 usable CPU" if self.usable_cpus == 1 else f"{self.usable_cpus:g} usable CPUs"
        load = f"load {self.load_1min:.1f} on {cpus}, {stolen}"
        if self.others_cpus is not None:
            load += f", other programs take {self.others_cpus:.1f}"
        if confined := self.confined:
            shared = {cpu for name in confined for cpu in self.thread_cpus[name]}
            listed = ", ".join(map(str, sorted(shared)))
            names = " and ".join(map(title, confined))
            return f"{load}: {names} may use CPU {listed} only, and share it"
        if not self.is_short:
            return load
        return f"{load}: {self.busy_threads:g} threads work at the same time and share them"


class MachineMeter:
    """Measures the host from construction, or ``restart``, to each ``read``.

    Args:
        busy_threads: of the run on this host, that work at the same time.
        pids: further processes of the run, whose CPUs count as usable, beside this one.
        family: finds what these have started: it is of the run, too.
        root: where ``proc`` and ``sys`` are, for tests.
    """

    def __init__(
        self,
        busy_threads: int,
        pids: Iterable[int] = (),
        family: Callable[[], Iterable[int]] = tuple,
        root: Path = Path("/"),
    ) -> None:
        self._pids = (os.getpid(), *pids)
        self._family = family
        self._root = root
        self._cpus = _names(_affinity(pids))
        self._usable = usable_cpus(pids, root)
        self._busy_threads = busy_threads
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._begun, self._own = _ticks(self._root), self._own_ticks()

    def read(self, thread_cpus: Mapping[str, Sequence[int]] = MappingProxyType({})) -> Machine:
        """Since the restart; the load is the kernel's own mean of a minute.

        Args:
            thread_cpus: that each thread of the run may use. What others used of these counts.
        """
        cpus = _names(cpu for listed in thread_cpus.values() for cpu in listed) or self._cpus
        now, steal, others = _ticks(self._root), None, None
        passed = {
            cpu: [b - a for a, b in zip(self._begun[cpu], now[cpu], strict=True)]
            for cpu in now.keys() & self._begun.keys()
        }
        if (whole := passed.get("cpu")) is not None and sum(whole) > 0:
            steal = whole[STEAL] / sum(whole)
        usable = [ticks for cpu, ticks in passed.items() if cpu in cpus]
        if usable and (length := sum(map(sum, usable)) / len(usable)) > 0:
            used = sum(sum(ticks) - ticks[IDLE] - ticks[IO_WAIT] for ticks in usable)
            others = max(0.0, used - (self._own_ticks() - self._own)) / length
        load = os.getloadavg()[0]
        return Machine(self._usable, self._busy_threads, load, steal, others, thread_cpus)

    def _own_ticks(self) -> int:
        """CPU time so far of the run's processes and of what they have started, user and system."""
        ticks = 0
        for pid in {*self._pids, *self._family()}:
            with suppress(OSError, ValueError, IndexError):
                fields = (self._root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[UTIME : UTIME + TIMES]))
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


def has_spare_cpus(root: Path = Path("/")) -> bool:
    """True on a host of ``SPARE_CPUS`` and more without a quota below; affinity does not count."""
    return min([float(os.cpu_count() or 1), *_quotas(root)]) >= SPARE_CPUS


def preemptions() -> int:
    """Counts how often another thread took the calling thread's CPU, also by ``sched_yield``."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _affinity(pids: Iterable[int]) -> set[int]:
    cpus = set(os.sched_getaffinity(0))
    for pid in pids:
        with suppress(OSError):  # gone, or another user's
            cpus |= os.sched_getaffinity(pid)
    return cpus


def _names(cpus: Iterable[int]) -> set[str]:
    """As ``/proc/stat`` has them."""
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
        self._newest_ns: int | None = None
        self._taken_ns = 0

    def begin(self) -> None:
        """The calling thread is the one from now on, and starts at 0."""
        self.close()
        try:
            self._fd = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
        self._taken_ns = self.read_ns() or 0

    def read_ns(self) -> int | None:
        """The thread's total as of now, by a system call; None where the kernel counts none."""
        if self._fd >= 0:
            self._newest_ns = int(os.pread(self._fd, SCHEDSTAT_BYTES, 0).split()[1])
        return self._newest_ns

    def close(self) -> None:
        """Release the descriptor; the newest reading stays. Twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def pop_ns(self) -> int | None:
        """The time since this was last asked, up to the newest ``read_ns``."""
        if self._newest_ns is None:
            return None
        taken_ns, self._taken_ns = self._newest_ns - self._taken_ns, self._newest_ns
        return taken_ns


class StageCost:
    """CPU time of one stage of a thread, and time in it that the thread had no CPU.

    Asking takes four system calls, as much as a short stage: of one that usually takes less than
    ``SHORT_NS`` they are asked for one envelope of ``ONE_OF``, and None is told of the others.

    Attributes:
        cpu_ns: of the newest stage; None: not asked, as the next.
        delay_ns: also None where the kernel counts none.
    """

    def __init__(self, delay: RunDelay) -> None:
        self.cpu_ns: int | None = None
        self.delay_ns: int | None = None
        self._delay = delay
        self._usual_ns = 2 * SHORT_NS
        self._passed = 0
        self._entered: tuple[int, int | None] | None = None
        self._ended_cpu_ns: int | None = None

    def enter(self) -> None:
        """The stage begins."""
        self._passed += 1
        if self._usual_ns >= SHORT_NS or self._passed % ONE_OF == 0:
            before_ns = self._delay.read_ns()
            self._entered = thread_cpu_ns(), before_ns  # the stage pays for no reading

    def end(self) -> None:
        """The stage's time is over: the thread does other work before it calls ``leave``."""
        if self._entered is not None:
            self._ended_cpu_ns = thread_cpu_ns()

    def leave(self, took_ns: int) -> None:
        """It has ended, so long after it began."""
        self._usual_ns += (took_ns - self._usual_ns) >> 3
        self.cpu_ns = self.delay_ns = None
        if self._entered is not None:
            (cpu_ns, before_ns), self._entered = self._entered, None
            ended_ns, self._ended_cpu_ns = self._ended_cpu_ns, None
            self.cpu_ns = (thread_cpu_ns() if ended_ns is None else ended_ns) - cpu_ns
            if (after_ns := self._delay.read_ns()) is not None and before_ns is not None:
                self.delay_ns = after_ns - before_ns
