"""MessageSocket: whole messages between robots and rank 0, whichever way they travel.

``unix://PATH`` serves robots on rank 0's host (``unix_socket.py``), ``tcp://ADDRESS:PORT`` all
others (``zmq_socket.py``). Both promise what is written here; no message is decoded in either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec

from ppstream.core.errors import ConfigError
from ppstream.wire.endpoints import endpoint_problem, is_local, unix_path

if TYPE_CHECKING:
    from ppstream.wire.keys import ClientKeys, ServerKeys

MAX_FRAME_BYTES: Final = 4 * 1024 * 1024  # a larger one loses its sender the connection
MAX_DRAIN: Final = 256  # frames taken by one drain; about 1 ms
MAX_DRAIN_BYTES: Final = 1 << 20  # of them; the frame that reaches it is the last one
COPIED_BYTES: Final = 1 << 16  # a copy of 1 MiB takes 0.1 to 1 ms, and may be of a flood's
#: As it was read: its bytes, none at the end of a connection; a descriptor or -1; ``msg_flags``.
Packet: TypeAlias = tuple[bytes, int, int]
NO_TAIL: Final = memoryview(b"")


class Frame(msgspec.Struct, frozen=True):
    """One message: who sent it (empty on a robot's side) and its bytes, where they arrived."""

    peer: bytes
    body: bytes | memoryview


class PacketSource(Protocol):
    """One peer's connection, from which the owner of its socket may read, too."""

    def fileno(self) -> int:
        """-1: it is closed."""
        ...

    def messages(self, packets: Sequence[Packet]) -> list[Frame]:
        """The messages of packets that were read here: as ``MessageSocket.drain``."""
        ...


class MessageSocket(Protocol):
    """Made by ``bind_server`` or ``connect_client``. Any thread sends, its owner receives.

    ``fd``: poll it for reading, then drain. ``endpoint``: where the server listens, with the port
    that the system chose for ``:0``.
    ``wake`` is called, from any thread and outside all locks, when there is something to drain that
    ``fd`` will not announce. ``malformed`` counts what arrived and was no message.
    ``has_more``: a limit ended the last drain.
    """

    fd: int
    endpoint: str
    wake: Callable[[], None]
    malformed: int
    has_more: bool

    def send(self, body: bytes, peer: bytes = b"", tail: memoryview = NO_TAIL) -> bool:
        """Hand over one message, ``body`` and ``tail`` as one; never waits.

        Returns:
            False when nobody is there, or what waits for the receiver is as much as may.
        """
        ...

    def drain(self, limit: int = MAX_DRAIN) -> list[Frame]:
        """All messages that are there, at most ``limit``; for the owner alone, never waits.

        They end with the one that makes them ``MAX_DRAIN_BYTES``: a sender of large frames that is
        as quick as their copies could else keep the caller for as long as it likes.
        """
        ...

    def packets_of(self, peer: bytes) -> PacketSource | None:
        """Returns the source of ``peer``'s packets, for the owner to read; None: it has none."""
        ...

    def refused(self) -> dict[str, int]:
        """Connections turned away or ended, by reason; for the owner, about once a second."""
        ...

    def close(self) -> None:
        """Release the socket; what was sent still leaves. Twice is fine."""
        ...


def bind_server(
    endpoint: str,
    keys: ServerKeys | None = None,
    frame_bytes_max: int = MAX_FRAME_BYTES,
    allowed_uids: Collection[int] = (),
) -> MessageSocket:
    """A server on ``endpoint``.

    Args:
        endpoint: ``unix://PATH`` or ``tcp://ADDRESS:PORT``.
        keys: encrypt, and serve allowed robots alone; of ``tcp://``.
        frame_bytes_max: a larger frame loses its sender the connection before memory is taken.
        allowed_uids: users who may connect; none: this process's own; of ``unix://``.

    Raises:
        ConfigError: the endpoint is malformed, taken, or not on this host; other hosts could reach
            it and there are no keys; or other users could replace the socket's file.
    """
    _check("listen on", endpoint, has_keys=keys is not None)
    if unix_path(endpoint) is not None:
        from ppstream.wire.unix_socket import UnixServer

        return UnixServer(endpoint, frame_bytes_max, allowed_uids)
    from ppstream.wire.zmq_socket import bind_zmq

    return bind_zmq(endpoint, keys, frame_bytes_max)


def connect_client(endpoint: str, keys: ClientKeys | None = None) -> MessageSocket:
    """A client that keeps trying to reach ``endpoint`` and queues nothing while nobody is there.

    Raises:
        ConfigError: the endpoint is malformed; or on another host, and there are no keys.
    """
    _check("connect to", endpoint, has_keys=keys is not None)
    if unix_path(endpoint) is not None:
        from ppstream.wire.unix_socket import UnixClient

        return UnixClient(endpoint)
    from ppstream.wire.zmq_socket import connect_zmq

    return connect_zmq(endpoint, keys)


def _check(verb: str, endpoint: str, *, has_keys: bool) -> None:
    """Raises ConfigError: the endpoint cannot be one, or keys are missing or of no use there."""
    problem = endpoint_problem(endpoint)
    if problem is None and has_keys and unix_path(endpoint) is not None:
        problem = "keys are of tcp:// endpoints alone; leave them out"
    if problem is None and not has_keys and not is_local(endpoint):
        problem = (
            "other hosts can reach it, and there are no keys; make them with ppstream keys, or use "
            "tcp://127.0.0.1:PORT through a tunnel"
        )
    if problem is not None:
        raise ConfigError([f"cannot {verb} {endpoint!r}: {problem}"])
