"""SocketGuard: who may connect to a server's socket, and how many were turned away.

With keys, a thread of pyzmq's answers for every connection whether its public key is allowed; the
connection is encrypted or it is none. Refusals are counted from the socket's own events, which wait
without a bound, since a full queue would stop the socket's thread: when more come in a second than
are read, as they do when no descriptor is left, nothing is told until the next one. Messages are
not looked at here.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Final

import zmq

from ppstream.wire.keys import ServerKeys

if TYPE_CHECKING:  # both bring asyncio along, which a robot's process need not load
    from zmq.auth.thread import ThreadAuthenticator

DOMAIN: Final = "ppstream"
EVENTS: Final = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "key",  # not in the allow-list
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "handshake",  # another mechanism, or no ZeroMQ at all
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "handshake",
    zmq.Event.ACCEPT_FAILED: "accept",  # no descriptor left
    zmq.Event.DISCONNECTED: "closed",  # by either side; an oversized frame is one reason
}
EVENTS_PER_LOOK: Final = 1000  # some ms: a flood of connections cannot keep the caller
UNCOUNTED: Final = "uncounted"  # seconds of which only the first events were counted
_event: Final = struct.Struct("=H")  # begins an event's first part
_names: Final = count()

logger = logging.getLogger("ppstream.auth")


class SocketGuard:
    """Made before the socket is bound, for its context; ``stop`` before that context ends.

    Args:
        socket: a ROUTER.
        keys: whom to serve; None serves everybody who can reach the endpoint.
    """

    def __init__(self, socket: zmq.Socket[bytes], keys: ServerKeys | None) -> None:
        self.refused: Counter[str] = Counter()
        self._allowed = {} if keys is None else keys.allowed
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = self._demand(socket, keys)
        self._monitor: zmq.Socket[bytes] | None = _monitor(socket)

    def callback(self, domain: str, key: bytes) -> bool:
        """True when ``key`` may connect; asked by the authenticator's thread."""
        return key in self._allowed

    def count_refused(self, socket: zmq.Socket[bytes]) -> None:
        """Count what was turned away since; for the socket's owner, about once a second."""
        if self._monitor is None:  # a flood stopped it
            try:
                self._monitor = _monitor(socket)
            except zmq.ZMQError:  # it needs descriptors, too
                self.refused[UNCOUNTED] += 1
            return
        for _ in range(EVENTS_PER_LOOK):
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.refused[EVENTS[zmq.Event(*_event.unpack_from(event))]] += 1
        self.refused[UNCOUNTED] += 1
        self._stop_monitor(socket)

    def stop(self, socket: zmq.Socket[bytes]) -> None:
        """Close what was opened here."""
        self._stop_monitor(socket)
        if self._authenticator is not None:
            self._authenticator.stop()

    def _stop_monitor(self, socket: zmq.Socket[bytes]) -> None:
        """Stops the monitor; what it has not reported yet is lost with it."""
        if self._monitor is not None:
            socket.disable_monitor()  # first: the socket's thread would wait for a reader
            self._monitor.close(linger=0)
            self._monitor = None

    def _demand(self, socket: zmq.Socket[bytes], keys: ServerKeys) -> ThreadAuthenticator:
        """Encrypt; from now on only allowed keys connect, and nobody if the thread is not there."""
        from zmq.auth.thread import ThreadAuthenticator

        authenticator = ThreadAuthenticator(socket.context, log=logger)
        authenticator.start()
        authenticator.configure_curve_callback(DOMAIN, credentials_provider=self)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return authenticator


def _monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket with the events of ``socket``."""
    address = f"inproc://monitor-{next(_names)}"  # one that stopped may not have gone yet
    wanted = 0
    for event in EVENTS:
        wanted |= event
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.set(zmq.RCVHWM, 0)  # a full one would stop the socket's own thread
    try:
        socket.monitor(address, wanted)
    except zmq.ZMQError:
        monitor.close()
        raise
    monitor.connect(address)
    return monitor
