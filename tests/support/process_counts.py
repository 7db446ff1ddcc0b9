"""Counts of what running processes do: system calls by ``strace``, instructions by ``perf``."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path
from types import TracebackType

END_LIMIT_S = 10.0
INSTRUCTIONS = "instructions:u"


class CallCount:
    """Counts the system calls of all threads of a process in a ``with`` block, into ``calls``.

    Calls that return after the block are not counted.

    Args:
        pid: the process.
        file: ``strace`` writes its summary here.
    """

    def __init__(self, pid: int, file: Path) -> None:
        self._file = file
        self._command = ["strace", "-f", "-c", "-U", "calls,name", "-o", str(file), "-p", str(pid)]
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> CallCount:
        self._strace = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._strace.stderr is not None
        if "attached" not in (line := self._strace.stderr.readline()):
            self._strace.kill()
            self._strace.communicate()
            raise RuntimeError(f"strace counts nothing: {line.strip()}")
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        self._strace.send_signal(signal.SIGINT)  # it detaches, then writes
        try:
            self._strace.communicate(timeout=END_LIMIT_S)
        finally:
            self._strace.kill()
            self._strace.wait()
        for line in self._file.read_text().splitlines():
            calls, _, name = line.strip().partition(" ")
            if calls.isdecimal() and name.strip() != "total":
                self.calls[name.strip()] += int(calls)


def sleeps(pid: int) -> int:
    """Times that a process's first thread has slept so far."""
    status = Path("/proc", str(pid), "status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def no_strace() -> str:
    """Returns why system calls cannot be counted here; empty when they can."""
    return _refusal(["strace", "-f", "-c", "-o", "/dev/null", "true"])


def no_instructions() -> str:
    """Returns why instructions cannot be counted here; empty when they can."""
    return _refusal(["perf", "stat", "-x,", "-e", INSTRUCTIONS, "true"]) or _unsupported("true")


def instructions(pid: int, seconds: float) -> int:
    """In user mode, of all threads of a process, in the next ``seconds``."""
    return int(_perf("-p", str(pid), "sleep", str(seconds)).split(",")[0])


def _refusal(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, capture_output=True, text=True)
    return f"{command[0]} is refused: {done.stderr.strip()[:200]}" if done.returncode else ""


def _unsupported(*command: str) -> str:
    line = _perf(*command)
    return "" if line.split(",")[0].isdecimal() else f"perf counts no instructions here: {line}"


def _perf(*arguments: str) -> str:
    """The line of the count."""
    command = ["perf", "stat", "-x,", "-e", INSTRUCTIONS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(line for line in done.stderr.splitlines() if INSTRUCTIONS in line)
