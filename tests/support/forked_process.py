"""Programs of ours in processes forked from a server that has imported torch.

The import takes two seconds. They are processes like any other, with their own arguments,
environment and output; what ``python -m`` adds is tested with ``ppstream.start``.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final

from drill.processes import MARK

PRELOADED = ["forked_imports"]
#: The longest environment that /proc/PID/environ of a forked process can tell.
ROOM = {"ROOM": "." * 8192}
ENV_START = 50 - 3  # field of /proc/PID/stat, counted behind the name
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
LAUNCHERS = ("torch.distributed.run", "ppstream.launch.commands")


class ForkedProcess:
    """``python -m MODULE`` or ``python FILE.py``, with arguments; has what is used of ``Popen``.

    Args:
        command: a module with a ``main``, or the path of a script, and its arguments.
        environment: all variables of the process.
        output: file that standard output is appended to.
        errors: the same of standard error, ``output`` unless given.
        own_session: gives the process a session and a process group of its own.
        folder: where it runs.
        network: name of the network namespace that it enters.
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
        network: str = "",
    ) -> None:
        files = (str(output), str(errors or output))
        arguments = (list(command), dict(environment), files, own_session, folder, network)
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


def start_server() -> None:
    """Starts it now, for code that would start one of its own by ``multiprocessing``."""
    with _server_finds_imports():
        forkserver.ensure_running()


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


def forked_popen(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any],
    stderr: IO[Any] | int,
    stdin: int = subprocess.DEVNULL,
    start_new_session: bool = False,
) -> ForkedProcess:
    """As ``subprocess.Popen`` of ``[ip netns exec NAME] python [-m] PROGRAM``, of a forked process.

    Launchers fork their ranks, too. A program that is bound to this process is not.
    """
    assert stdin == subprocess.DEVNULL
    at = command.index(sys.executable)
    program = [*command[at + 1 :]]
    if program[0] == "-m":
        del program[0]
    elif program[0] == "-c":  # as ``bound_command`` has it
        del program[:2]
    if program[0] in LAUNCHERS:
        program.insert(0, "forking_launcher")
    named, fd = isinstance(stdout.name, str), stdout.fileno()
    output = Path(stdout.name if named else f"/proc/{os.getpid()}/fd/{fd}")
    errors = output if isinstance(stderr, int) else Path(stderr.name)
    network = command[at - 1] if at else ""
    variables = os.environ if env is None else env
    return ForkedProcess(
        program,
        variables,
        output,
        errors=errors,
        own_session=start_new_session,
        network=network,
    )


#: The module ``subprocess`` for code of ours that starts programs: they are forked.
FORKING: Final = SimpleNamespace(**vars(subprocess) | {"Popen": forked_popen})


def become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a command in this process, which is a fork, to its end; may raise ``SystemExit``."""
    os.environ.clear()
    os.environ.update(environment)
    _tell(environment)
    program, *arguments = command
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        sys.exit(importlib.import_module(program).main(arguments))


def _tell(environment: Mapping[str, str]) -> None:
    """Has /proc/PID/environ, by which ranks are found, tell this environment.

    It shows the memory that held the one with which the server's program began.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[ENV_START : ENV_START + 2])
    text = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environment.items())
    if len(text) > end - start:
        raise RuntimeError(f"an environment of {len(text)} bytes, room for {end - start}: see ROOM")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _enter(network: str) -> None:
    """As ``ip netns exec``."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as file:
        if library.setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextmanager
def _server_finds_imports() -> Iterator[None]:
    """The server, which the first process starts, looks where this one does; torch asks it once.

    It inherits what the C library keeps; ``os.environ`` stays, which other threads read meanwhile.
    """
    path = os.pathsep.join(filter(None, sys.path))
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **ROOM}
    with _starting:
        for name, value in given.items():
            os.putenv(name, value)
        os.unsetenv(MARK)  # it belongs to no drill, and outlives each
        try:
            yield
        finally:
            for name in (*given, MARK):
                if name in os.environ:
                    os.putenv(name, os.environ[name])
                else:
                    os.unsetenv(name)


def _run(
    command: list[str],
    environment: dict[str, str],
    files: tuple[str, str],
    own_session: bool,
    folder: Path | None,
    network: str,
) -> None:
    """The life of the forked process."""
    multiprocessing.current_process().daemon = False  # it may start processes, as any program
    multiprocessing.set_start_method(None, force=True)  # by its own default
    if own_session:
        os.setsid()
    if network:
        _enter(network)
    for path, stream in zip(files, (sys.stdout, sys.stderr), strict=True):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream.fileno())
    if folder is not None:
        os.chdir(folder)
    become(command, environment)


_context = _fork_server()
_starting = threading.Lock()
