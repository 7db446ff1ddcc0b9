"""How a policy rank finds rank 0's control socket: an address published in the launcher's store.

On one host it is a UNIX socket in a private directory (mode 0700), between hosts TCP on the given
interface. Who may stay is decided by the handshake, not here.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Final, Protocol

from ppstream.control import Peer
from ppstream.errors import ConfigError, PeerLostError

ADDRESS_KEY: Final = "control/address"
UNIX_PATH_BYTES_MAX: Final = 107  # sockaddr_un.sun_path less its zero
BACKLOG: Final = 16


class Store(Protocol):
    """Strings that all ranks of one generation share; the launcher's, or a test's."""

    def set(self, key: str, value: str) -> None:
        """Publish ``value``."""

    def get(self, key: str, timeout_s: float) -> str:
        """What was published, waiting for it.

        Raises:
            PeerLostError: nothing was published within ``timeout_s``.
        """


class Listener:
    """Rank 0's end: accepts policy ranks until it is closed.

    Args:
        store: where the address is published.
        host: this host's own address or name that other hosts can reach; None: UNIX socket.

    Raises:
        ConfigError: ``host`` is no address of this host.
    """

    def __init__(self, store: Store, *, host: str | None = None) -> None:
        self._directory: str | None = None
        if host is None:
            self._directory = _private_directory()
            path = f"{self._directory}/control"
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(path)
            self._socket.listen(BACKLOG)
            address = f"unix:{path}"
        else:
            self._socket = _tcp_listener(host)
            address = f"tcp:{host}:{self._socket.getsockname()[1]}"
        store.set(ADDRESS_KEY, address)

    def fileno(self) -> int:
        """Readable: ``accept`` returns at once."""
        return self._socket.fileno()

    def accept(self, timeout_s: float) -> Peer:
        """The next rank that connects; the caller owns the peer.

        Raises:
            PeerLostError: nobody connected within ``timeout_s``.
        """
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            raise PeerLostError(
                f"no policy rank connected within {timeout_s:.1f} s: did its process start?"
            ) from None
        _without_delay(connection)
        return Peer(connection, name="the policy rank")

    def close(self) -> None:
        """Stop listening and remove the socket's directory; accepted peers stay. Twice is fine."""
        self._socket.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def connect(store: Store, timeout_s: float) -> Peer:
    """Rank 0, at the address it published; the caller owns the peer.

    Raises:
        PeerLostError: no address within ``timeout_s``, or nobody listens there.
    """
    address = store.get(ADDRESS_KEY, timeout_s)
    kind, _, where = address.partition(":")
    try:
        connection = _connected(kind, where, timeout_s)
    except OSError as error:
        raise PeerLostError(f"rank 0 does not answer at {address}: {error}") from error
    _without_delay(connection)
    return Peer(connection, name="rank 0", expects_fds=kind == "unix")


def _connected(kind: str, where: str, timeout_s: float) -> socket.socket:
    if kind != "unix":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)), timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(where)
    except OSError:
        connection.close()
        raise
    return connection


def _private_directory() -> str:
    """A new directory that only this user can enter, short enough for a socket's name."""
    directory = tempfile.mkdtemp(prefix="ppstream-")
    if len(os.fsencode(f"{directory}/control")) > UNIX_PATH_BYTES_MAX:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix="ppstream-", dir="/tmp")
    return directory


def _tcp_listener(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            [f"control host {host!r} cannot be listened on: {error}; give an own address"]
        ) from error


def _without_delay(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
