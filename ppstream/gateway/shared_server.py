"""SharedServer and HandedOver: connections of one ``[[gateway]]``, shared out among processes.

One process runs one thread of Python at a time, which robots with frames soon fill. So this one
accepts, counts all, and hands each connection to the process that has the fewest; that process
tells the end of each, and has its share of the gateway's sessions. A process that ends costs its
own robots alone: another takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from ppstream.config.gateway_rules import WIRES, listen_address, listen_of
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.control.peer_process import bound_command
from ppstream.core.cpus import usable_cpus
from ppstream.core.errors import ConfigError
from ppstream.wire.endpoints import bracketed

logger = logging.getLogger("ppstream")

PROCESSES_MAX: Final = 8  # that auto takes
START_LIMIT_S: Final = 25.0  # rank 0 waits 30 for all of a gateway
AGAIN_S: Final = 1.0  # after a process has ended, or no descriptor is left
END_LIMIT_S: Final = 6.0  # after SIGTERM; rank 0 waits 8
BACKLOG: Final = 128  # connections not accepted yet
BEGUN, ENDED = b"+", b"-"  # of a connection: comes with its descriptor, goes back without
WORDS: Final = 4096  # read at once


def process_count(config: PipelineConfig, gateway: GatewayConfig) -> int:
    """Processes that serve a gateway; auto leaves half of the CPUs to the ranks."""
    if not WIRES[gateway.wire].is_shared:
        return 1
    if gateway.processes != "auto":
        return gateway.processes
    return max(1, min(PROCESSES_MAX, config.batch.rows, int(usable_cpus()) // 2))


def share_of(total: int, processes: int) -> int:
    """Of ``total``, for each process: together they have no fewer.

    Each connection goes to the process with the fewest, so one that is full is so like all others.
    """
    return -(-total // processes)


class HandedOver(socket.socket):
    """A listening socket, as asyncio takes one, whose connections another process accepts.

    Args:
        fd: of the channel between the two; taken over.
        on_end: called once the other process is gone.
    """

    def __init__(self, fd: int, on_end: Callable[[], None]) -> None:
        super().__init__(fileno=fd)
        self._on_end = on_end
        self._untold = 0  # ends that the channel had no room for

    def listen(self, _backlog: int = 0) -> None:
        """Nothing: the other process listens."""

    def accept(self) -> tuple[socket.socket, Any]:
        """As of any listening socket, also its errors."""
        word, fds, _, _ = socket.recv_fds(self, 1, 1)
        if not word:
            self._on_end()
            raise BlockingIOError
        if not fds:  # none was left for it
            self.tell_end()
            raise ConnectionAbortedError
        os.set_inheritable(fds[0], False)  # noqa: FBT003 - takes no name
        connection = _Accepted(fds[0], self.tell_end)
        try:
            return connection, connection.getpeername()
        except OSError as error:  # its client has left
            connection.close()
            raise ConnectionAbortedError from error

    def tell_end(self) -> None:
        """Say that a connection has ended, and its session."""
        self._untold += 1
        with suppress(OSError):
            self._untold -= self.send(ENDED * self._untold)


class _Accepted(socket.socket):
    """A connection whose end is told when it is closed, also before its protocol has begun."""

    def __init__(self, fd: int, tell_end: Callable[[], None]) -> None:
        super().__init__(fileno=fd)
        self._tell_end: Callable[[], None] | None = tell_end

    def close(self) -> None:
        """As of any socket; twice is fine."""
        super().close()
        tell_end, self._tell_end = self._tell_end, None
        if tell_end is not None:
            tell_end()


class Room:
    """Connections that a server may have open."""

    def __init__(self, connections_max: int) -> None:
        self._left = connections_max

    def take(self) -> bool:
        """Count one more; False: there are too many."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def leave(self) -> None:
        """Count one less."""
        self._left += 1


class BoundedListener(socket.socket):
    """A listening socket, as asyncio takes one, that has room for so many connections.

    asyncio itself tells of one once its TLS handshake is done: silent ones would not count.
    """

    def __init__(self, listener: socket.socket, room: Room) -> None:
        super().__init__(fileno=listener.detach())
        self._room = room

    def accept(self) -> tuple[socket.socket, Any]:
        """As of any listening socket, also its errors."""
        connection, address = super().accept()
        if not self._room.take():
            connection.close()
            raise ConnectionAbortedError
        return _Accepted(connection.detach(), self._room.leave), address


class SharedServer:
    """One ``[[gateway]]`` that several processes serve, as ``WireServer``.

    Args:
        gateway: of the configuration.
        index: its place there.
        processes: 2 or more.
        sockets_max: connections of all of them together; a further one is cut off.
        arguments: of a ``ppstream gateway`` with the same configuration.
    """

    def __init__(
        self,
        gateway: GatewayConfig,
        index: int,
        processes: int,
        sockets_max: int,
        arguments: Sequence[str],
    ) -> None:
        self._gateway = gateway
        self._sockets_max = sockets_max
        self._path = f"gateway[{index}]"
        self._command = [*bound_command("ppstream.gateway", *arguments), "--serve", str(index)]
        self._workers = [_Worker() for _ in range(processes)]
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """As ``WireServer``."""
        host, port = self._listeners[0].getsockname()[:2]
        return f"{'ws' if self._gateway.certfile is None else 'wss'}://{bracketed(host)}:{port}"

    async def __aenter__(self) -> SharedServer:
        address = listen_address(listen_of(self._gateway))
        assert address is not None, "checked with the configuration"
        self._listeners = listen(*address)
        try:
            await asyncio.gather(*map(self._start, self._workers))
        except BaseException:
            await self.__aexit__()
            raise
        self._tasks = [asyncio.create_task(self._accept(one)) for one in self._listeners]
        self._tasks += [asyncio.create_task(self._keep(one)) for one in self._workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for listener in self._listeners:
            listener.close()
        await asyncio.gather(*(worker.end() for worker in self._workers))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # it has left, or no descriptor is left
                logger.error("%s: a client cannot be accepted: %s", self._path, error.strerror)
                await asyncio.sleep(AGAIN_S)
                continue
            with connection:
                self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        """Give it to whoever has the fewest; where nobody can take it, its client is cut off."""
        worker = min(self._workers, key=_Worker.load)
        is_full = sum(one.connections for one in self._workers) >= self._sockets_max
        if worker.channel is not None and not is_full:
            with suppress(OSError):
                socket.send_fds(worker.channel, (BEGUN,), (connection.fileno(),))
                worker.connections += 1

    async def _start(self, worker: _Worker) -> None:
        """Start a process, and wait until it serves.

        Raises:
            ConfigError: it ends, or does not serve in time.
        """
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        pipe = asyncio.subprocess.PIPE
        command = [*self._command, "--connections", str(fd)]
        with theirs:
            worker.process = await asyncio.create_subprocess_exec(
                *command, stdout=pipe, pass_fds=(fd,), start_new_session=True
            )
        ours.settimeout(0)
        assert worker.process.stdout is not None, "a pipe"
        try:
            line = await asyncio.wait_for(worker.process.stdout.readline(), START_LIMIT_S)
        except (TimeoutError, asyncio.TimeoutError):
            line = b""
        if not line:
            ours.close()
            raise ConfigError([f"{self._path}.processes: one of them does not serve; see above"])
        worker.take(ours)

    async def _keep(self, worker: _Worker) -> None:
        """Start another process whenever one has ended."""
        while True:
            if worker.process is not None:
                code = await worker.process.wait()
                worker.drop()
                logger.error("%s: a process ended with code %d: its robots hold", self._path, code)
            await asyncio.sleep(AGAIN_S)
            try:
                await self._start(worker)
            except (ConfigError, OSError) as error:
                logger.error("%s", error)


class _Worker:
    """One process, and how many connections it has."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.channel: socket.socket | None = None  # None: it serves nobody now
        self.connections = 0

    def load(self) -> float:
        return float("inf") if self.channel is None else self.connections

    def take(self, channel: socket.socket) -> None:
        self.channel, self.connections = channel, 0
        asyncio.get_running_loop().add_reader(channel, self._hear)

    def _hear(self) -> None:
        """Connections have ended, or the process has."""
        assert self.channel is not None, "it was read"
        with suppress(OSError):
            if words := self.channel.recv(WORDS):
                self.connections -= len(words)
                return
        self.drop()

    def drop(self) -> None:
        """Hand nothing more to it. Twice is fine."""
        if self.channel is not None:
            asyncio.get_running_loop().remove_reader(self.channel)
            self.channel.close()
            self.channel = None
            self.connections = 0  # its robots' have ended with it

    async def end(self) -> None:
        """End the process, after what it still has to say."""
        self.drop()
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), END_LIMIT_S)
        except (TimeoutError, asyncio.TimeoutError):
            self.process.kill()
            await self.process.wait()


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets at each address of ``host``. Raises OSError: one cannot be bound."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            listeners.append(socket.create_server(address, family=family, backlog=BACKLOG))
            listeners[-1].settimeout(0)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
