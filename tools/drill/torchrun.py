"""Runs as torchrun starts them, and what is left of a run's processes."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from drill.judging import ORPHAN_S
from drill.processes import MARK, marked
from drill.scene import CONFIG, Failed
from real_runs import POLL_S, environment_with_sources

LAUNCHER_END_S: Final = 60.0
SERVE: Final = "ppstream.serve"
NO_MORE: Final[Mapping[str, str]] = {}


@contextmanager
def launched(
    output: Path,
    launcher: Sequence[str],
    settings: Sequence[str],
    prefix: Sequence[str] = (),
    *,
    config: str = CONFIG,
    module: str = SERVE,
    environment: Mapping[str, str] = NO_MORE,
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Torchrun, and the mark by which its ranks are found; none of them outlives the block.

    Args:
        output: file that torchrun and its ranks write into.
        launcher: torchrun's own arguments.
        settings: as ``--set``.
        prefix: of the command, to run it elsewhere.
        config: as ``--config``.
        module: that each rank runs.
        environment: variables besides this process's.
    """
    mark = secrets.token_hex(8)
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *launcher]
    command += ["-m", module, "--config", config]
    for setting in settings:
        command += ["--set", setting]
    found = environment_with_sources()
    clean = {k: v for k, v in found.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    env = clean | environment | {MARK: mark, "OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        yield process, mark
    finally:
        for pid in (*marked(mark), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def rank_pids(mark: str) -> dict[int, int]:
    """Processes of the ranks, by rank: they have the mark and torchrun's RANK."""
    found = {}
    for pid, environ in marked(mark).items():
        ranks = [item.partition(b"=")[2] for item in environ if item.startswith(b"RANK=")]
        if ranks:
            found[int(ranks[0])] = pid
    return found


def expect_end(launcher: subprocess.Popen[bytes]) -> None:
    """Wait until torchrun is gone; raises Failed when it stays."""
    try:
        launcher.wait(LAUNCHER_END_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"torchrun did not end within {LAUNCHER_END_S:g} s") from None


def no_orphans(*marks: str) -> str:
    """``none``, once no process has one of these marks; raises Failed when one stays."""

    def left() -> list[int]:
        return [pid for mark in marks for pid in marked(mark)]

    until("no orphan", ORPHAN_S, lambda: not left())
    return "none"


def until(what: str, limit_s: float, look: Callable[[], bool]) -> None:
    """Wait until ``look`` is true; raises Failed after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not look():
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {limit_s:g} s")
        time.sleep(POLL_S)
