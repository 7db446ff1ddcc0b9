"""A gateway on a thread beside rank 0's ingest, and robots that are plain WebSocket clients.

Other wires bring robots of their own.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from robot_rig import HORIZON, MS, Server, make_chunk, make_config, serving
from websockets.sync.client import ClientConnection, connect

from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.gateway.request_log import RequestCounts
from ppstream.gateway.wires import Access, wire_of
from ppstream.wire.openpi import decode, encode

MAP = {"joints": "state/joints", "imu": "imu.values"}
SHAPE = (HORIZON, 2)
LONG_NS = 100_000 * MS  # no chunk is too late on a busy machine
CERTIFICATE = (
    *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
    *("-addext", "subjectAltName=DNS:localhost"),
)
LONG_LIVED = {"dt_ns": LONG_NS, "lease_ns": LONG_NS}


def slow_config(
    endpoint: str | None = None, *, rows: int = 1, instructions: bool = False
) -> PipelineConfig:
    """The rig's, with leases that no busy machine outlasts."""
    config = make_config(endpoint, rows=rows)
    return msgspec.structs.replace(
        config,
        actions=msgspec.structs.replace(config.actions, lease_ms=LONG_NS / MS),
        policy=msgspec.structs.replace(config.policy, instructions=instructions),
    )


def certificate(folder: Path) -> tuple[str, str]:
    """Files of a new certificate of ``localhost``, and of its key."""
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [*CERTIFICATE, "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


def gateway_config(config: PipelineConfig, endpoint: str, **changes: Any) -> GatewayConfig:
    fields: dict[str, Any] = {
        "wire": "openpi",
        "map": MAP,
        "listen": "127.0.0.1:0",
        "endpoint": endpoint,
        "timeout_ms": 10_000.0,
    }
    if config.policy.instructions:
        fields["map"] = MAP | {"prompt": "prompt"}
    return GatewayConfig(**{**fields, **changes})


def observation(value: float = 0.5, **changes: Any) -> dict[str, Any]:
    """What the map wants; ``changes`` replace or, with None, take away."""
    found = {"state/joints": np.full(3, value), "imu": {"values": [value, value]}, **changes}
    return {key: one for key, one in found.items() if one is not None}


class Robot:
    """Asks as openpi's client does; a text frame is given back as it is."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.metadata = self.receive()

    def receive(self, timeout_s: float = 20) -> Any:
        frame = self.connection.recv(timeout_s)
        return frame if isinstance(frame, str) else decode(frame)

    def ask(self, message: Any = None) -> Any:
        self.send(observation() if message is None else message)
        return self.receive()

    def send(self, message: Any) -> None:
        frame = message if isinstance(message, str | bytes) else encode(message)
        self.connection.send(frame)


class Gateway:
    """The server of a gateway's wire, on an event loop of its own."""

    def __init__(self, config: PipelineConfig, gateway: GatewayConfig, access: Access) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.requests = RequestCounts(gateway.wire)
        self.server = wire_of(gateway).build(config, gateway, access, self.requests)
        self._started: threading.Event = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), daemon=True
        )
        self._thread.start()
        assert self._started.wait(60)

    @property
    def port(self) -> int:
        return int(self.server.address.rpartition(":")[2])

    @contextmanager
    def robot(self, path: str = "", **options: Any) -> Iterator[Robot]:
        uri = self.server.address.replace("127.0.0.1", "localhost") + path
        with connect(uri, compression=None, max_size=None, proxy=None, **options) as connection:
            yield Robot(connection)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the gateway does not end"
        self._loop.close()

    async def _run(self) -> None:
        async with self.server:
            self._started.set()
            await self._stop.wait()


@contextmanager
def gateway_to(
    rank0: Server,
    config: PipelineConfig,
    *,
    tls: ssl.SSLContext | None = None,
    api_key: str | None = None,
    **changes: Any,
) -> Iterator[Gateway]:
    wanted = gateway_config(config, rank0.sessions.endpoint, **changes)
    gateway = Gateway(config, wanted, Access(api_key, tls))
    try:
        yield gateway
    finally:
        gateway.close()


@contextmanager
def gated(
    *,
    rows: int = 1,
    instructions: bool = False,
    answers: bool = True,
    phase: str = "ready",
    **changes: Any,
) -> Iterator[tuple[Server, Gateway]]:
    """Rank 0 that answers each observation, behind a gateway; every ring's ledger balances."""
    config = slow_config(rows=rows, instructions=instructions)
    with (
        serving(config, answers=answers, phase=phase, **LONG_LIVED) as rank0,
        gateway_to(rank0, config, **changes) as gateway,
    ):
        yield rank0, gateway


def emit(rank0: Server, seq: int, **changes: Any) -> None:
    """Have rank 0 give row 0 a chunk of its newest window."""
    row = rank0.rows[0]

    def act() -> None:
        end_ns = row.rings["joints"].newest_ns
        fields = {"session": row.session, "episode": row.session_epoch, "end_ns": end_ns}
        fields |= {"dt_ns": LONG_NS, "expires_ns": end_ns + LONG_NS}
        rank0.sessions.emit(0, make_chunk(seq, **{**fields, **changes}))

    rank0.order(act)


def has_ended(connection: socket.socket) -> bool:
    """The other side has closed it; one that is closed here has no other side."""
    if connection.fileno() < 0:
        return False
    try:
        return connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
