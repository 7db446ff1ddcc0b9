"""Programs of ours in processes forked from a server that has imported torch.

The import takes two seconds. They are processes like any other, with their own arguments,
environment and output; what ``python -m`` adds is tested with torchrun.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = ["forked_imports"]


class ForkedProcess:
    """``python -m MODULE`` or ``python FILE.py``, with arguments; has what is used of ``Popen``.

    Args:
        command: a module with a ``main``, or the path of a script, and its arguments.
        environment: all variables of the process.
        output: file that standard output is appended to.
        errors: the same of standard error, ``output`` unless given.
        own_session: gives the process a session and a process group of its own.
        folder: where it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        *,
        errors: Path | None = None,
        own_session: bool = False,
        folder: Path | None = None,
    ) -> None:
        files = (str(output), str(errors or output))
        arguments = (list(command), dict(environment), files, own_session, folder)
        self._process = _context.Process(target=_run, args=arguments, daemon=True)
        with _server_finds_imports():
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run_forked(
    command: Sequence[str],
    timeout: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with captured text, of a ``ForkedProcess``."""
    with tempfile.TemporaryDirectory() as name:
        output, errors = Path(name, "output"), Path(name, "errors")
        variables = os.environ if environment is None else environment
        process = ForkedProcess(command, variables, output, errors=errors, folder=folder)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        texts = [path.read_text() if path.exists() else "" for path in (output, errors)]
        return subprocess.CompletedProcess(list(command), code, *texts)


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextmanager
def _server_finds_imports() -> Iterator[None]:
    """The server, which the first process starts, looks where this one does; torch asks it once."""
    before = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(
    command: list[str],
    environment: dict[str, str],
    files: tuple[str, str],
    own_session: bool,
    folder: Path | None,
) -> None:
    """The life of the forked process."""
    if own_session:
        os.setsid()
    for path, stream in zip(files, (sys.stdout, sys.stderr), strict=True):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    program, *arguments = command
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        sys.exit(importlib.import_module(program).main(arguments))


_context = _fork_server()
