"""A launcher, ``ppstream run`` or torchrun, that forks its ranks: it has imported what they need.

``forking_launcher MODULE ARGUMENT...`` is the command of a ``ForkedProcess``. Agent, store, signals
and restarts are torch's own, and the ranks are children of the launcher, as programs would be.
"""

from __future__ import annotations

import importlib
import os
import select
import subprocess
from collections.abc import Mapping, Sequence

from fork_server import become, live
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

MS_PER_S = 1000


class Fork:
    """``python -m MODULE`` as a fork of this process: what torch's agent uses of ``Popen``."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: None,
        stderr: None,
        *,
        start_new_session: bool,
    ) -> None:
        assert (stdout, stderr, start_new_session) == (None, None, True)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            live(lambda: _run(args[args.index("-m") + 1 :], env))
        self._fd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            gone = select.poll()
            gone.register(self._fd, select.POLLIN)
            if not gone.poll(None if timeout is None else timeout * MS_PER_S):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._fd)
        return self.returncode


def main(arguments: Sequence[str]) -> int | None:
    """Runs the launcher that ``arguments`` name."""
    subprocess_handler.Popen = Fork
    found: int | None = importlib.import_module(arguments[0]).main(arguments[1:])
    return found


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    os.setsid()
    become(command, environment)
