"""Connections that one process accepts and another serves; whole gateways stand in test_run.py."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
from gateway_rig import certificate, has_ended

from ppstream.config.gateway_rules import gateway_problems
from ppstream.config.load import read
from ppstream.gateway.shared_server import (
    BEGUN,
    ENDED,
    HandedOver,
    SharedServer,
    process_count,
    share_of,
)
from ppstream.gateway.wires import sessions_max, sockets_max

DROID = str(Path(__file__).parents[1] / "support" / "droid.toml")


class Channel:
    """Both ends of one, and connections to hand over."""

    def __init__(self, stack: ExitStack) -> None:
        self.ours, theirs = socket.socketpair()
        self.ends: list[str] = []
        self.listener = HandedOver(theirs.detach(), lambda: self.ends.append("end"))
        self._server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._stack = stack
        for one in (self.ours, self.listener):
            one.settimeout(20)
            stack.enter_context(one)

    def hand_over(self) -> socket.socket:
        """Returns the client's end."""
        client = self._stack.enter_context(socket.create_connection(self._server.getsockname()))
        accepted, _ = self._server.accept()
        with accepted:
            socket.send_fds(self.ours, (BEGUN,), (accepted.fileno(),))
        return client


@pytest.fixture
def channel() -> Iterator[Channel]:
    with ExitStack() as stack:
        yield Channel(stack)


def test_connections_arrive_one_by_one_and_their_ends_are_told(channel: Channel) -> None:
    clients = [channel.hand_over() for _ in range(3)]
    for client in clients:
        served, address = channel.listener.accept()
        with served:
            assert address == client.getsockname()
            assert not os.get_inheritable(served.fileno())
            client.sendall(b"hello")
            assert served.recv(5) == b"hello"
        served.close()
        assert channel.ours.recv(64) == ENDED


def test_a_client_whose_tls_handshake_fails_is_told_as_ended(
    channel: Channel, tmp_path: Path
) -> None:
    """Else whoever looks at the port counts as a robot for ever."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path))

    async def serve() -> bytes:
        loop = asyncio.get_running_loop()
        channel.ours.settimeout(0)
        channel.listener.settimeout(0)
        server = await loop.create_server(asyncio.Protocol, sock=channel.listener, ssl=context)
        async with server, asyncio.timeout(60):
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return await loop.sock_recv(channel.ours, 64)

    client = channel.hand_over()
    assert asyncio.run(serve()) == ENDED


def test_a_client_that_has_left_meanwhile_is_told_as_ended(channel: Channel) -> None:
    client = channel.hand_over()
    linger = (1).to_bytes(4, "little") + bytes(4)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    client.close()  # with a reset: the connection has no peer any more
    with pytest.raises(ConnectionAbortedError):
        channel.listener.accept()
    assert channel.ours.recv(64) == ENDED


def test_ends_that_the_channel_has_no_room_for_are_told_with_a_later_one(channel: Channel) -> None:
    channel.listener.settimeout(0)
    for _ in range(10_000):
        channel.listener.tell_end()  # nobody hears them meanwhile
    told = 0
    channel.ours.settimeout(0)
    with suppress(BlockingIOError):
        while True:
            told += len(channel.ours.recv(1 << 20))
    assert told < 10_000, "it had room for all"
    channel.listener.tell_end()
    assert len(channel.ours.recv(1 << 20)) + told == 10_001


@pytest.mark.parametrize(("rows", "processes"), [(1, 2), (4, 4), (16, 6), (3, 64)])
def test_processes_together_have_the_sessions_of_one_gateway(rows: int, processes: int) -> None:
    total = sessions_max(read(DROID, [f"batch.rows={rows}"]))
    each = share_of(total, processes)
    assert total <= each * processes < total + processes


def test_connections_are_limited_by_what_all_processes_have_together(tmp_path: Path) -> None:
    """Further ones are cut off at once, and a place that is given back serves another."""
    config = read(
        DROID, [f"service.endpoint=unix://{tmp_path}/nobody", "gateway.0.listen=127.0.0.1:0"]
    )
    settings = ["--config", DROID, "--set", f"service.endpoint=unix://{tmp_path}/nobody"]

    async def live() -> None:
        most = 5
        async with SharedServer(config.gateway[0], 0, 2, most, settings) as server:
            port = int(server.address.rpartition(":")[2])
            with ExitStack() as stack:
                idle = [
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    for _ in range(most + 3)
                ]
                await until(lambda: sum(map(has_ended, idle)) == 3)
                assert not any(map(has_ended, idle[:most]))
                idle[0].close()
                await until(lambda: is_kept(stack, port))

    asyncio.run(live())
    assert sockets_max(config) == config.batch.rows + 72


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(is_so):
            await asyncio.sleep(0.02)


def is_kept(stack: ExitStack, port: int) -> bool:
    """A further connection is handed over: its process answers, if only that nobody is ready."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
    connection.settimeout(0.5)
    try:
        return bool(connection.recv(1))
    except OSError:
        return False


def test_the_end_of_the_accepting_process_is_told(channel: Channel) -> None:
    channel.ours.close()
    with pytest.raises(BlockingIOError):
        channel.listener.accept()
    assert channel.ends == ["end"]


def test_a_connection_that_ends_behind_the_accepting_process_raises_nothing(
    channel: Channel,
) -> None:
    channel.hand_over()
    served, _ = channel.listener.accept()
    channel.ours.close()
    served.close()


def test_auto_takes_a_process_for_each_row_and_leaves_half_of_the_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count(rows: int, processes: str) -> int:
        config = read(DROID, [f"batch.rows={rows}", f"gateway.0.processes={processes}"])
        return process_count(config, config.gateway[0])

    monkeypatch.setattr("ppstream.gateway.shared_server.usable_cpus", lambda: 12.5)
    assert [count(rows, "auto") for rows in (1, 4, 16)] == [1, 4, 6]
    assert count(1, "3") == 3
    monkeypatch.setattr("ppstream.gateway.shared_server.usable_cpus", lambda: 1.0)
    assert count(16, "auto") == 1


def test_a_wire_whose_connections_cannot_be_shared_takes_no_number_of_processes() -> None:
    config = read(DROID)
    (openpi,) = config.gateway
    groot = msgspec.structs.replace(openpi, wire="groot", processes=2)
    found = [*gateway_problems(msgspec.structs.replace(config, gateway=(groot,)))]
    assert "gateway[0].processes: got 2, want none: wire 'groot' has none" in found
    auto = msgspec.structs.replace(groot, processes="auto")
    assert process_count(msgspec.structs.replace(config, gateway=(auto,)), auto) == 1
