"""Rank processes, forked from a server that has imported torch already: that takes two seconds.

They are processes like any other, with their own environment and output; what ``python -m`` adds
is tested with torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = [
    "ppstream.launch.run_policy_rank",
    "ppstream.launch.dry_run",
    "ppstream.launch.run_rank0",
    "ppstream.serve",
]


class RankProcess:
    """``python -m ppstream.serve`` with these arguments; has what is used of ``Popen``."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: Path
    ) -> None:
        self._process = _context.Process(
            target=_serve, args=(list(arguments), dict(environment), str(output)), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("ppstream.serve", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(arguments: list[str], environment: dict[str, str], output: str) -> None:
    """What the forked process does; the serve command leaves by itself."""
    from ppstream.serve import main

    with open(output, "a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(arguments))


_context = _fork_server()
