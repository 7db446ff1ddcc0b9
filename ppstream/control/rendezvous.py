"""Discovery of rank 0's control socket: an address published in the launcher's store.

On one host it is a UNIX socket that has a name and no file, so that no kill leaves one behind; only
this user's processes are let in. Between hosts it is TCP on the given interface. Who may stay is
decided by the handshake, not here.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from typing import Final, Protocol

from ppstream.control.peer import LOOK_NS, Peer
from ppstream.control.peer_process import user_at_end_of
from ppstream.core.clock import NS_PER_S, POLL_NS_MAX, now_ns
from ppstream.core.errors import ConfigError, PeerLostError

ADDRESS_KEY: Final = "control/address"
BACKLOG: Final = 16
#: A firewall forgets a connection on which nothing is said, and the loops' one may be idle.
KEEPALIVE_S: Final = 30


class Store(Protocol):
    """Strings that all ranks of one generation share; the launcher's, or a test's."""

    def set(self, key: str, value: str) -> None:
        """Publish ``value``."""

    def get(self, key: str, timeout_s: float) -> str:
        """Returns the published value, and waits for it.

        Raises:
            PeerLostError: nothing was published within ``timeout_s``.
        """


class Listener:
    """Rank 0's end: accepts policy ranks until it is closed.

    Args:
        store: where the address is published.
        host: this host's own address or name that other hosts can reach; None: UNIX socket.
        key: under which it is published.

    Raises:
        ConfigError: ``host`` is no address of this host.
    """

    def __init__(self, store: Store, *, host: str | None = None, key: str = ADDRESS_KEY) -> None:
        if host is None:
            name = f"ppstream-{secrets.token_hex(16)}"
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(f"\0{name}")
            self._socket.listen(BACKLOG)
            address = f"unix:{name}"
        else:
            self._socket = _tcp_listener(host)
            address = f"tcp:{host}:{self._socket.getsockname()[1]}"
        store.set(key, address)

    def fileno(self) -> int:
        """Readable: ``accept`` returns at once."""
        return self._socket.fileno()

    def accept(self, timeout_s: float, name: str = "the policy rank") -> Peer:
        """The next connection of a rank of this user; the caller owns the peer.

        Raises:
            PeerLostError: nobody connected within ``timeout_s``.
        """
        deadline_ns = now_ns() + round(timeout_s * NS_PER_S)
        while (left_ns := deadline_ns - now_ns()) > 0:
            self._socket.settimeout(min(left_ns, LOOK_NS) / NS_PER_S)
            with suppress(TimeoutError):
                connection, _ = self._socket.accept()
                if (
                    connection.family != socket.AF_UNIX
                    or user_at_end_of(connection) == os.geteuid()
                ):
                    _prepare(connection)
                    return Peer(connection, name=name)
                connection.close()
        raise PeerLostError(
            f"no {name.removeprefix('the ')} connected within {timeout_s:.1f} s: "
            "did its process start?"
        )

    def close(self) -> None:
        """Stop listening; accepted peers stay. Twice is fine."""
        self._socket.close()


def connect(
    store: Store,
    timeout_s: float,
    *,
    expects_fds: bool = True,
    key: str = ADDRESS_KEY,
    name: str = "rank 0",
) -> Peer:
    """Rank 0, or another rank, at the address it published; the caller owns the peer.

    Args:
        store: where the address is published.
        timeout_s: bound of the whole.
        expects_fds: descriptors may come with frames, where both ranks share a host.
        key: under which the address is published.
        name: how errors call the other rank.

    Raises:
        PeerLostError: no address within ``timeout_s``, or nobody listens there.
    """
    address = store.get(key, timeout_s)
    kind, _, where = address.partition(":")
    try:
        connection = _connected(kind, where, timeout_s)
    except OSError as error:
        raise PeerLostError(f"{name} does not answer at {address}: {error}") from error
    _prepare(connection)
    return Peer(connection, name=name, expects_fds=expects_fds and kind == "unix")


def _connected(kind: str, where: str, timeout_s: float) -> socket.socket:
    timeout_s = min(timeout_s, POLL_NS_MAX / NS_PER_S)
    if kind != "unix":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)), timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(f"\0{where}")
    except OSError:
        connection.close()
        raise
    return connection


def _tcp_listener(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            [f"control host {host!r} cannot be listened on: {error}; give an own address"]
        ) from error


def _prepare(connection: socket.socket) -> None:
    """Over TCP: no delay, and the kernel says now and then that the connection is in use."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
