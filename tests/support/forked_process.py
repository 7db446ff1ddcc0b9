"""Programs of ours in processes forked from a server that has imported torch.

The import takes two seconds. They are processes like any other, with their own arguments,
environment and output; what ``python -m`` adds is tested with ``ppstream.start``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final

from drill.processes import MARK
from fork_server import NOTHING

#: The longest environment that /proc/PID/environ of a forked process can tell.
ROOM = {"ROOM": "." * 8192}
LAUNCHERS = ("torch.distributed.run", "ppstream.launch.commands")
MS_PER_S: Final = 1000
ANSWER_BYTES: Final = 64
JOIN_TRIES: Final = 4


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
        cpus: those that it may use; all, if none is named.
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
        cpus: Sequence[int] = (),
    ) -> None:
        request = {
            "command": list(command),
            "environment": dict(environment),
            "output": os.path.abspath(output),
            "errors": os.path.abspath(errors or output),
            "own_session": own_session,
            "folder": os.path.abspath(folder or ""),
            "network": network,
            "cpus": list(cpus),
            "path": sys.path,
        }
        self._name = command[0]
        self._code: int | None = None
        self._lock = threading.Lock()
        self._connection = _server.connected()
        self._connection.send(json.dumps(request).encode())
        self.pid = int(self._connection.recv(ANSWER_BYTES))
        self._handle: int | None = None  # no other process has it, though the number may go on
        with suppress(ProcessLookupError):  # it has ended, and the server has seen that
            self._handle = os.pidfd_open(self.pid)
        _living.add(self)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self._code is not None:
                return self._code
            ended = select.poll()
            ended.register(self._connection, select.POLLIN)
        if not ended.poll(None if timeout is None else timeout * MS_PER_S):
            raise subprocess.TimeoutExpired(self._name, timeout or 0)
        with self._lock:
            if self._code is None:  # no other thread has read it
                self._code = int(self._connection.recv(ANSWER_BYTES))
                self._connection.close()
                if self._handle is not None:
                    os.close(self._handle)
                _living.discard(self)
            return self._code

    def send_signal(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError):  # it has ended; the server waits for it
            if self._code is None and self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)

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


def forked_popen(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any],
    stderr: IO[Any] | int,
    stdin: int = subprocess.DEVNULL,
    start_new_session: bool = False,
) -> ForkedProcess:
    """As ``subprocess.Popen`` of ``python [-m] PROGRAM``, of a forked process.

    Before ``python`` may stand ``ip netns exec NAME`` or ``taskset -c CPU``.

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
    is_pinned = command[0] == "taskset"
    network = command[at - 1] if at and not is_pinned else ""
    cpus = [int(command[at - 1])] if is_pinned else []
    variables = os.environ if env is None else env
    return ForkedProcess(
        program,
        variables,
        output,
        errors=errors,
        own_session=start_new_session,
        network=network,
        cpus=cpus,
    )


#: The module ``subprocess`` for code of ours that starts programs: they are forked.
FORKING: Final = SimpleNamespace(**vars(subprocess) | {"Popen": forked_popen})


class _Server:
    """This process's way to the session's server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: socket.socket | None = None  # while it is open, the server goes on
        self._started: subprocess.Popen[bytes] | None = None

    def connected(self) -> socket.socket:
        """A connection for one process."""
        with self._lock:
            if self._session is None:
                self._session = self._joined()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(_address())
        return connection

    def _joined(self) -> socket.socket:
        with tempfile.TemporaryFile() as errors:
            for _ in range(JOIN_TRIES):
                session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with suppress(ConnectionError):  # it was about to end
                    session.connect(_address())
                    session.send(NOTHING)
                    if session.recv(ANSWER_BYTES):
                        return session
                session.close()
                self._start(errors)
            errors.seek(0)
            raise RuntimeError(f"no fork server:\n{errors.read().decode()}")

    def _start(self, errors: IO[bytes]) -> None:
        """Returns once it can be reached, or another one has its address.

        It looks for modules where this process does, and torch asks it once.
        """
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **ROOM}
        environment.pop(MARK, None)  # it belongs to no drill, and outlives each
        program = f"import fork_server; fork_server.main({_address()!r})"
        self._started = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert self._started.stdout is not None
        with self._started.stdout as told:
            told.readline()


def _address() -> str:
    """In the kernel's own name space, where nothing is left behind; one for each session."""
    session = os.environ.get("FORK_SERVER_OF") or os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return f"\0ppstream-forks-{os.getuid()}-{session or os.getpid()}"


_server = _Server()
_living: set[ForkedProcess] = set()  # they end with this process, not when nobody holds them
