"""The server that a ``ForkedProcess`` asks for its process: it imports once, and forks itself.

One serves all processes of a session, and of others that set the same ``FORK_SERVER_OF``: the first
that asks starts it, and it ends with the last connection. A process that it forked ends with its
own. What it imports is out of the garbage collector's sight: a rank collects garbage before it
serves, and that would copy every page with an object in it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final, NoReturn

NEEDED = [
    "numpy.random",
    "ppstream.launch.commands",
    "ppstream.launch.dry_run",
    "ppstream.launch.launcher",
    "ppstream.launch.run_policy_rank",
    "ppstream.launch.run_rank0",
    "ppstream.pipeline.decode",
    "ppstream.serve",
    "ppstream.wire.zmq_auth",
    "ppstream.wire.zmq_socket",
    "ppstream_stages.simulated",
    "safetensors",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.utils.flop_counter",
    "ungated",
]
REQUEST_BYTES_MAX: Final = 1 << 20
#: Asks for no process: the answer says that the server goes on while this connection is open.
NOTHING: Final = b"null"
FIRST_LIMIT_S: Final = 60.0
BACKLOG: Final = 64
PEER: Final = struct.Struct("3i")  # process, user, group
ENV_START = 50 - 3  # field of /proc/PID/stat, counted behind the name
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def main(address: str) -> None:
    """Serves at an address of the kernel's own name space; returns at once where it is taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            return
        listener.listen(BACKLOG)
        print("bound", flush=True)
        _import()
        resource_tracker.ensure_running()  # one for all
        _Server(listener).serve()


def _import() -> None:
    from ppstream.config import load

    gc.disable()
    for name in NEEDED:
        importlib.import_module(name)
    # msgspec looks through its types once
    load.read(str(Path(__file__).with_name("small.toml")))
    gc.collect()
    gc.freeze()
    gc.enable()


class _Server:
    """Connections, and of each the process that it asked for."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._pids: dict[socket.socket, int] = {}  # 0: none, or it has ended

    def serve(self) -> None:
        """Until nobody is connected."""
        while True:
            found = self._selector.select(None if self._pids else FIRST_LIMIT_S)
            for key, _ in found:
                key.data()
            if not self._pids:
                return

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        _, user, _ = PEER.unpack(peer)
        if user != os.getuid():
            connection.close()
            return
        self._pids[connection] = 0
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection))

    def _hear(self, connection: socket.socket) -> None:
        request = connection.recv(REQUEST_BYTES_MAX)
        if not request:
            if pid := self._pids[connection]:
                os.kill(pid, signal.SIGKILL)
            self._forget(connection)
        elif request == NOTHING:
            connection.send(b"0")
        else:
            self._fork(connection, json.loads(request))

    def _fork(self, connection: socket.socket, request: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            live(lambda: _run(**request))
        self._pids[connection] = pid
        gone = os.pidfd_open(pid)
        reap = partial(self._reap, gone, connection, pid)
        self._selector.register(gone, selectors.EVENT_READ, reap)
        with suppress(OSError):
            connection.send(str(pid).encode())

    def _reap(self, gone: int, connection: socket.socket, pid: int) -> None:
        self._selector.unregister(gone)
        os.close(gone)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if self._pids.get(connection) == pid:
            self._pids[connection] = 0
            with suppress(OSError):  # nobody asks any more
                connection.send(str(code).encode())

    def _forget(self, connection: socket.socket) -> None:
        del self._pids[connection]
        self._selector.unregister(connection)
        connection.close()


# ---- in the fork ---------------------------------------------------------------------------------


def live(act: Callable[[], object]) -> NoReturn:
    """The life of a fork of this process: as of another program, which does ``act``."""
    code = 1
    try:
        _forget_the_parent()
        act()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - the top of a process
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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


def _run(
    *,
    command: list[str],
    environment: dict[str, str],
    output: str,
    errors: str,
    own_session: bool,
    folder: str,
    network: str,
    cpus: list[int],
    path: list[str],
) -> None:
    """What a ``ForkedProcess`` is."""
    if own_session:
        os.setsid()
    if network:
        _enter(network)
    if cpus:
        os.sched_setaffinity(0, cpus)
    for name, stream in ((output, sys.stdout), (errors, sys.stderr)):
        with open(name, "a") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(folder)
    sys.path[:] = path
    become(command, environment)


def _forget_the_parent() -> None:
    """What the execution of another program would do."""
    gc.freeze()  # nothing of the parent's is collected: its descriptors will be others'
    kept = resource_tracker.getfd()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup started the tests
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.current_thread().name = "MainThread"  # of whichever thread began the fork
    logging.disable(logging.NOTSET)


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
