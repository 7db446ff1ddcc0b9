"""SharedSocket: a MessageSocket of ZeroMQ, which any thread may send on while its owner receives.

ZeroMQ sockets belong to one thread at a time, so every call is made under a lock, and nobody waits
inside it: the owner polls ``fd`` and then drains. That descriptor is edge-triggered and a send may
swallow its edge, so a send that leaves messages to be read calls ``wake``. One frame is one message
in both directions; a robot's address is put in front of it by ROUTER alone. No message is decoded
here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

import zmq

from ppstream.core.errors import ConfigError
from ppstream.wire.keys import ClientKeys, ServerKeys, public_half
from ppstream.wire.message_socket import (
    COPIED_BYTES,
    MAX_DRAIN,
    MAX_DRAIN_BYTES,
    MAX_FRAME_BYTES,
    NO_TAIL,
    Frame,
)
from ppstream.wire.zmq_auth import SocketGuard

SERVER_SEND_FRAMES: Final = 64  # per robot, in ZeroMQ; kernel buffers come on top
SERVER_RECEIVE_FRAMES: Final = 256  # per robot, not yet drained
CLIENT_SEND_FRAMES: Final = 256
SERVER_LINGER_MS: Final = 200  # the last phase still leaves; then the context ends
CLIENT_LINGER_MS: Final = 100  # the goodbye still leaves
RECONNECT_MS: Final = (20, 500)  # first and longest pause between TCP attempts
#: A connection whose other host says nothing for so long, not even that it got what was sent, is
#: broken. The kernels tell; ZeroMQ's own heartbeats abort the process once a queue was full.
SILENT_S: Final = 2
SERVER_SILENT_S: Final = 5
MS_PER_S: Final = 1000
HANDSHAKE_MS: Final = 2000  # a connection that does not say who it is ends


def _nothing() -> None:
    pass


class SharedSocket:
    """A ``MessageSocket``; ``malformed`` counts messages that were not exactly one frame."""

    def __init__(
        self,
        kind: int,
        endpoint: str,
        options: Mapping[int, int | bytes],
        keys: ServerKeys | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._routed = kind == zmq.ROUTER
        self._guard = SocketGuard(self._socket, keys) if self._routed else None
        self._lock = threading.Lock()
        self._closed = False
        self.wake: Callable[[], None] = _nothing
        self.malformed = 0
        self.has_more = False
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set(zmq.IPV6, int("[" in endpoint))
        for option, value in options.items():
            self._socket.set(option, value)
        self._start(endpoint)
        self.fd = _integer(self._socket.get(zmq.FD))
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)

    def send(self, body: bytes, peer: bytes = b"", tail: memoryview = NO_TAIL) -> bool:
        """As ``MessageSocket``."""
        if tail.nbytes:
            body = b"".join((body, tail))
        with self._lock:
            if self._closed:
                return False
            try:
                if self._routed:
                    self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
                self._socket.send(body, zmq.NOBLOCK)
                sent = True
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise
                sent = False
            is_readable = self._is_readable()
        if is_readable:
            self.wake()
        return sent

    def drain(self, limit: int = MAX_DRAIN) -> list[Frame]:
        """As ``MessageSocket``."""
        frames: list[Frame] = []
        self.has_more = False
        with self._lock:
            if self._closed:
                return frames
            try:
                left = MAX_DRAIN_BYTES - self._receive(frames)
                if not self._is_readable():
                    return frames  # the common case; an exception would cost twice the question
                while len(frames) < limit and left > 0:
                    left -= self._receive(frames)
            except zmq.Again:
                return frames
        self.has_more = True
        self.wake()  # the limit ended it, and the edge is spent
        return frames

    def packets_of(self, peer: bytes) -> None:
        """As ``MessageSocket``: ZeroMQ has frames."""

    def refused(self) -> dict[str, int]:
        """As ``MessageSocket``."""
        if self._guard is None or self._closed:
            return {}
        with self._lock:
            self._guard.count_refused(self._socket)
        return dict(self._guard.refused)

    def close(self) -> None:
        """Close the socket and end its context, after at most the linger time. Twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._guard is not None:
                self._guard.stop(self._socket)
            self._socket.close()
        self._context.term()

    def _start(self, endpoint: str) -> None:
        """Bind (server) or begin to connect (client)."""
        try:
            (self._socket.bind if self._routed else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            verb = "listen on" if self._routed else "connect to"
            raise ConfigError(
                [
                    f"cannot {verb} {endpoint!r}: {error}; give a free tcp://ADDRESS:PORT or unix://PATH"
                ]
            ) from error

    def _is_readable(self) -> bool:
        return bool(_integer(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _receive(self, frames: list[Frame]) -> int:
        """Receive one message; returns its bytes."""
        peer = self._socket.recv(zmq.NOBLOCK) if self._routed else b""
        part = self._socket.recv(zmq.NOBLOCK, copy=False)  # parts of one message arrive together
        size = len(part)
        if not part.more:
            frames.append(Frame(peer, part.bytes if size < COPIED_BYTES else part.buffer))
            return size
        self.malformed += 1
        while part.more:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
            size += len(part)
        return size


def bind_zmq(endpoint: str, keys: ServerKeys | None, frame_bytes_max: int) -> SharedSocket:
    """A ROUTER, as ``transports.bind_server`` promises."""
    return SharedSocket(
        zmq.ROUTER,
        endpoint,
        {
            zmq.ROUTER_MANDATORY: 1,  # a robot that left is a False, not a silence
            zmq.SNDHWM: SERVER_SEND_FRAMES,
            zmq.RCVHWM: SERVER_RECEIVE_FRAMES,
            zmq.MAXMSGSIZE: frame_bytes_max,
            zmq.LINGER: SERVER_LINGER_MS,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            **silent_for(SERVER_SILENT_S),
        },
        keys,
    )


def connect_zmq(endpoint: str, keys: ClientKeys | None) -> SharedSocket:
    """A DEALER, as ``transports.connect_client`` promises."""
    curve: dict[int, int | bytes] = {}
    if keys is not None:
        curve = {
            zmq.CURVE_SERVERKEY: keys.server,
            zmq.CURVE_SECRETKEY: keys.secret,
            zmq.CURVE_PUBLICKEY: public_half(keys.secret),
        }
    return SharedSocket(
        zmq.DEALER,
        endpoint,
        {
            **curve,
            zmq.IMMEDIATE: 1,  # without a connection a send is refused: data never waits and ages
            zmq.SNDHWM: CLIENT_SEND_FRAMES,
            zmq.LINGER: CLIENT_LINGER_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: RECONNECT_MS[1],
            **silent_for(SILENT_S),
        },
    )


def silent_for(limit_s: int) -> dict[int, int]:
    """Options of TCP with which a connection breaks once its other end was silent for so long."""
    return {
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 1,
        zmq.TCP_KEEPALIVE_INTVL: 1,
        zmq.TCP_KEEPALIVE_CNT: limit_s - 1,
        zmq.TCP_MAXRT: limit_s * MS_PER_S,
    }


def _integer(option: int | bytes) -> int:
    if isinstance(option, bytes):
        raise TypeError(f"expected an integer socket option, got {option!r}")
    return option
