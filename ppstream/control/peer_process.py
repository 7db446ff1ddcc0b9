"""HeldProcess: another process of this host, held by a descriptor of the process itself (pidfd).

Held are the other rank, so that a survivor never leaves it behind, the launcher, and whoever
started a robot. A later process that was given the same number is never taken for a held one. When
to end one is ``launch/rank_exit.py``'s and ``lookout.py``'s.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: struct ucred of SO_PEERCRED
MS_PER_S: Final = 1000
START_TIME: Final = 22 - 3  # field of /proc/PID/stat, counted behind the name
EXIT_STATUS: Final = 52 - 3
GUARDED: Final = "PPSTREAM_GUARDED_RANK"  # a rank's guard has this and no RANK (launch/guard.py)
STACKS_S: Final = 0.1  # for a rank that is about to be ended to write its stacks
BEREFT_S: Final = 2.0  # a module whose starter is gone ends by itself within this, or is made to
SAME: Final = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class HeldProcess:
    """A process by its number and descriptor. Threads may wait for one at the same time.

    Attributes:
        ended_with: its wait status in words, once it is seen to have ended; None: it is not yet.
            Empty: its parent was faster to take the status, or this process has killed it.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.ended_with: str | None = None
        self._fd = fd

    @classmethod
    def of(cls, pid: int) -> HeldProcess | None:
        """The process of this number now; None: there is none, or it cannot be held."""
        try:
            return cls(pid, os.pidfd_open(pid))
        except OSError:
            return None

    @classmethod
    def at_end_of(cls, fd: int) -> HeldProcess | None:
        """The process behind a connected socket; None: it is on another host, or gone.

        Args:
            fd: the socket's descriptor; it stays the caller's.
        """
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family != socket.AF_UNIX:
                return None
            pid, _ = _credentials(connection)
        if pid in (0, os.getpid()):  # in another PID namespace, or both ends are ours
            return None
        return cls.of(pid)

    @classmethod
    def parent(cls) -> HeldProcess | None:
        """Whoever started this process; None: it is in another PID namespace, or cannot be held.

        Raises:
            ProcessLookupError: it is gone.
        """
        pid = os.getppid()
        if not pid:
            return None
        process = cls.of(pid)
        if os.getppid() != pid:  # else the number may be another's by now
            raise ProcessLookupError(f"process {pid}, which started this one, is gone")
        return process

    def fileno(self) -> int:
        """Readable: it has ended."""
        return self._fd

    def wait_gone(self, limit_s: float) -> bool:
        """True when it has ended, waiting for it."""
        gone = select.poll()
        gone.register(self._fd, select.POLLIN)
        is_gone = bool(gone.poll(limit_s * MS_PER_S))
        if is_gone and self.ended_with is None:
            self.ended_with = self._wait_status()
        return is_gone

    def state(self) -> str:
        """As ps shows it: ``T`` stopped, ``R`` running, ``S`` asleep, ``D`` in the kernel."""
        fields = _stat(self.pid)
        return fields[0] if fields else "gone"

    def end(self) -> None:
        """Kill it, stopped or not."""
        self.ended_with = self.ended_with or ""
        self.signal(signal.SIGKILL)

    def end_with_stacks(self) -> None:
        """Kill it once it has had the time to write its stacks, also if its interpreter is held."""
        self.signal(signal.SIGQUIT)
        self.wait_gone(STACKS_S)
        self.end()

    def signal(self, number: int) -> None:
        """Send it a signal, unless it is gone."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Let go of it. Twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _wait_status(self) -> str:
        """The status that its parent has not taken yet, else empty."""
        fields = _stat(self.pid)
        try:
            signal.pidfd_send_signal(self._fd, 0)  # so its number was still its own
        except OSError:
            return ""
        return status_text(os.waitstatus_to_exitcode(int(fields[EXIT_STATUS]))) if fields else ""


def status_text(code: int) -> str:
    """Words for an exit code as ``subprocess`` has it: ``exit status 5``, ``signal 9 SIGKILL``."""
    if code >= 0:
        return f"exit status {code}"
    known = -code in set(signal.Signals)
    return f"signal {-code} {signal.Signals(-code).name}" if known else f"signal {-code}"


def kills_for_memory() -> int:
    """Counts processes of this host that the kernel has killed for want of memory; 0: not known."""
    words = _words(Path("/proc/vmstat"), None)
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def start_time(pid: int) -> int | None:
    """When a process began, in ticks since boot: with the boot it names it for ever."""
    fields = _stat(pid)
    return int(fields[START_TIME]) if fields else None


def user_at_end_of(connection: socket.socket) -> int:
    """The user of the process behind a connected UNIX socket."""
    return _credentials(connection)[1]


# ---- processes of a run -----------------------------------------------------------------------


def of_rank(
    rank: int, environment: Mapping[str, str], pids: Iterable[int]
) -> Iterator[HeldProcess]:
    """Those of ``pids`` that have the environment of a rank of the run: it, and what it started."""
    for pid in of_ranks((rank,), environment, pids):
        process = HeldProcess.of(pid)
        if process is None:
            continue
        if any(of_ranks((rank,), environment, (pid,))):  # the number may be another's by now
            yield process
        else:
            process.close()


def of_ranks(
    ranks: Iterable[int], environment: Mapping[str, str], pids: Iterable[int]
) -> Iterator[int]:
    """As ``of_rank``, of several ranks in one pass; numbers only, which may be others' by now."""
    run = {f"{name}={environment[name]}".encode() for name in SAME if name in environment}
    if not run:
        return
    wanted = {f"RANK={rank}".encode() for rank in ranks}
    for pid in pids:
        words = set(_content(f"/proc/{pid}/environ").split(b"\0"))
        if run <= words and not wanted.isdisjoint(words):
            yield pid


def ranks_started_by(launcher: int) -> dict[int, int]:
    """The processes of the ranks, or of their guards, that a launcher has started, by rank."""
    found = {}
    for pid in children(launcher):
        for word in _words(Path(f"/proc/{pid}/environ"), "\0"):
            name, _, value = word.partition("=")
            if name in ("RANK", GUARDED):
                found[int(value)] = pid
    return found


def children(pid: int) -> Iterator[int]:
    """Of a process, by all its threads."""
    with suppress(OSError):  # it is gone, or no descriptor is left to look
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, _words(thread / "children", None))


def descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on; not those whose parent has ended."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def everybody() -> Iterator[int]:
    """Every process of this host that can be seen."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def command(pid: int) -> str:
    """Returns the command line of a process, for people."""
    return " ".join(_words(Path(f"/proc/{pid}/cmdline"), "\0")).strip()


# ---- a module that ends with the process that started it --------------------------------------


def bound_command(module: str, *arguments: str) -> list[str]:
    """The command line of ``python -m module`` that ends with this process, however that ends."""
    code = f"from {__name__} import run_bound; run_bound({os.getpid()})"
    return [sys.executable, "-c", code, module, *arguments]


def environment_to_import() -> dict[str, str]:
    """The environment of a process that finds what this one does, as beside a configuration."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_bound(starter: int) -> None:
    """Run the module that the command line names; SIGTERM it when process ``starter`` ends."""
    process = HeldProcess.of(starter)
    if os.getppid() != starter:
        raise SystemExit(f"process {starter}, which started this one, is gone")
    if process is not None:
        threading.Thread(target=_leave_with, args=(process,), daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _leave_with(starter: HeldProcess) -> None:
    gone = select.poll()
    gone.register(starter.fileno(), select.POLLIN)
    gone.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(BEREFT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user behind a connected UNIX socket."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, user, _ = CREDENTIALS.unpack(found)
    return pid, user


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the process's name, which may hold anything, also ``)``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _words(file: Path, separator: str | None) -> list[str]:
    """Of a file of the kernel's; none where it is gone, or another user's."""
    return _content(file).decode(errors="replace").split(separator)


def _content(file: str | Path) -> bytes:
    try:
        with open(file, "rb", buffering=0) as opened:
            return opened.read()
    except OSError:
        return b""
