"""GrootSocket: the ZeroMQ socket of GR00T's wire, with a bound on what its clients take of us.

ZeroMQ bounds the size of a part of a message, neither the number of parts nor that of connections.
So a message of many parts is read part by part, and its client hung up on; so is the newest of too
many connections. Messages are not decoded here.
"""

from __future__ import annotations

import asyncio
import os
import socket as sockets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ppstream.config.schema import GatewayConfig
from ppstream.core.clock import now_ns
from ppstream.wire.endpoints import bracketed
from ppstream.wire.zmq_socket import HANDSHAKE_MS, silent_for

CHOSEN: Final = "this client has set zmq.IDENTITY: leave that unset, others could get its actions"
RELAYED: Final = (
    "this request came through a proxy, which makes one robot of several: "
    "connect to the gateway itself"
)
GIVEN_BYTES: Final = 5  # of an address that ZeroMQ gives: a zero, which no client may begin with
NUMBER_BYTES: Final = 4  # of a request, which a client with REQ_CORRELATE puts in front of it
ENVELOPE_MAX: Final = 8  # frames in front of a request: so many come back with its answer
PARTS_MAX: Final = 64  # of a message that is still answered
SKIPPED_AT_ONCE: Final = 2048  # parts; a millisecond or two
WAITING_MAX: Final = 4  # requests, and replies, of one client that ZeroMQ keeps
READ_FACTOR: Final = 2  # a message so many times too large is still read, to be answered
SILENT_MIN_S: Final = 2  # the kernel's least
BYTES_PER_MB: Final = 1_000_000


class GrootMessage(NamedTuple):
    """One message, as it came."""

    envelope: list[bytes]  # back to its client
    body: bytes
    descriptor: int  # of its connection
    peer: str
    received_ns: int
    is_relayed: bool  # by a proxy: the connection may have other clients, too

    @property
    def client(self) -> bytes:
        """Address of its client."""
        return self.envelope[0]

    @property
    def has_own_address(self) -> bool:
        """False: the client chose one, which another may have chosen, too."""
        return len(self.client) == GIVEN_BYTES and self.client[0] == 0

    @property
    def refusal(self) -> str | None:
        """Reason why its client cannot be told from others; None: it can."""
        if not self.has_own_address:
            return CHOSEN
        return RELAYED if self.is_relayed else None


class GrootSocket:
    """A ROUTER on an event loop, one task of which receives.

    Args:
        connections_max: open at once; the newest beyond are cut off.
    """

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._monitor: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PAIR)
        self._open: dict[int, None] = {}  # descriptors of connections, oldest first
        self._port = 0
        # A second handle of a connection, taken beforehand: there may be no descriptor left.
        self._handle, self._nothing = sockets.socket(), sockets.socket()

    @property
    def address(self) -> str:
        """Address that it listens at."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def bind(self, gateway: GatewayConfig, host: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: it cannot listen there.
        """
        try:
            _bind(self._socket, gateway, host, port)
            self._monitor.set(zmq.RCVHWM, 0)  # a full one would stop the socket's own thread
            name = f"inproc://connections-{id(self)}"
            self._socket.monitor(name, zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
            self._monitor.connect(name)
        except BaseException as error:
            self.close(0)
            if isinstance(error, zmq.ZMQError):
                raise OSError(error.errno, error.strerror) from error
            raise
        self._port = int(self.address.rpartition(":")[2])

    def close(self, linger_ms: int) -> None:
        """End it once its last messages have left, or after the given time."""
        with suppress(zmq.ZMQError):  # there may be none yet
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=linger_ms)
        self._handle.close()
        self._nothing.close()

    async def receive(self, flags: int = 0) -> GrootMessage | None:
        """Receive one message; None: it had too many parts, and its client is hung up on.

        Raises:
            zmq.Again: with NOBLOCK, there is none.
        """
        await self._skip()  # the rest of one whose reading has failed
        part = await self._socket.recv(flags, copy=False)
        received_ns, envelope, parts = now_ns(), list[bytes](), 1
        while part.more:
            if parts <= ENVELOPE_MAX + 1:
                envelope.append(part.bytes)
            if parts == PARTS_MAX:
                self._hang_up(_origin(part)[0])
                await self._skip()
                return None
            part = self._plain.recv(zmq.NOBLOCK, copy=False)  # all of a message come together
            parts += 1
        is_relayed = _is_relayed(envelope[1:])
        if len(envelope) > ENVELOPE_MAX:
            envelope = [envelope[0], b""]
        return GrootMessage(envelope, part.bytes, *_origin(part), received_ns, is_relayed)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message; False: its client is gone, or reads nothing."""
        sent = asyncio.ensure_future(self._socket.send_multipart(frames, zmq.NOBLOCK))
        return sent.exception() is None  # with NOBLOCK it is done at once

    def ended(self) -> list[int]:
        """Descriptors of the connections that have ended since; cuts off those beyond the bound."""
        found: list[int] = []
        with suppress(zmq.Again):
            while True:
                told = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                descriptor = int(told["value"])
                self._open.pop(descriptor, None)
                if told["event"] == zmq.Event.ACCEPTED:
                    self._open[descriptor] = None
                else:
                    found.append(descriptor)
        for descriptor in list(self._open)[self._connections_max :]:
            self._hang_up(descriptor)
        return found

    def port_of(self, descriptor: int) -> int | None:
        """The port at a connection's other end; None: it has ended."""
        with suppress(OSError), self._shared(descriptor) as connection:
            return _port(connection.getpeername())
        return None

    def _hang_up(self, descriptor: int) -> None:
        """End a connection, unless another file has its descriptor by now."""
        with suppress(OSError), self._shared(descriptor) as connection:
            if _port(connection.getsockname()) == self._port:
                connection.shutdown(sockets.SHUT_RDWR)

    @contextmanager
    def _shared(self, descriptor: int) -> Iterator[sockets.socket]:
        """Another handle of what ZeroMQ may close at any time.

        Raises:
            OSError: it has.
        """
        handle = self._handle.fileno()
        os.dup2(descriptor, handle, inheritable=False)
        try:
            yield self._handle
        finally:
            os.dup2(self._nothing.fileno(), handle, inheritable=False)

    async def _skip(self) -> None:
        """Drop what is left of the message; the loop goes on meanwhile."""
        skipped, has_more = 0, bool(self._plain.get(zmq.RCVMORE))
        while has_more:  # a frame says so itself: asking the socket takes twice the time
            has_more = self._plain.recv(zmq.NOBLOCK, copy=False).more
            skipped += 1
            if skipped % SKIPPED_AT_ONCE == 0:
                await asyncio.sleep(0)


def _port(address: object) -> int | None:
    """Port of a socket's address; None: it has none, as those of this host alone."""
    return int(address[1]) if isinstance(address, tuple) else None


def _origin(part: zmq.Frame) -> tuple[int, str]:
    """Descriptor of the connection that a part came over, and its other end's address."""
    try:
        return int(part.get(zmq.SRCFD)), str(part.get("Peer-Address"))
    except zmq.ZMQError:
        return -1, "unknown"


def _is_relayed(added: list[bytes]) -> bool:
    """Tells whether anybody but the client itself added frames in front of its request."""
    if added in ([], [b""]):
        return False
    return [len(frame) for frame in added] != [NUMBER_BYTES, 0]


def _bind(socket: zmq.asyncio.Socket, gateway: GatewayConfig, host: str, port: int) -> None:
    """Raises ZMQError, or OSError: it cannot listen there."""
    options = {
        zmq.ROUTER_MANDATORY: 1,  # a client that has left is an error, not a silence
        zmq.ROUTER_HANDOVER: 1,  # who comes with a chosen address that is in use is refused, too
        zmq.MAXMSGSIZE: round(READ_FACTOR * gateway.message_mb * BYTES_PER_MB),
        zmq.RCVHWM: WAITING_MAX,
        zmq.SNDHWM: WAITING_MAX,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        **silent_for(max(SILENT_MIN_S, round(gateway.silence_s))),
        zmq.IPV6: int(":" in host),
    }
    for option, value in options.items():
        socket.set(option, value)
    address = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0][4][0]
    socket.bind(f"tcp://{bracketed(str(address))}:{port}")
