"""MessageSocket: whole messages between robots and rank 0, whichever way they travel.

``unix://PATH`` serves robots on rank 0's host (``unix_socket.py``), ``tcp://ADDRESS:PORT`` all
others (``zmq_socket.py``). Both promise what is written here; no message is decoded in either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from ppstream.wire.message_memory import LargeMessage

MAX_FRAME_BYTES: Final = 4 * 1024 * 1024  # a larger one loses its sender the connection
MAX_DRAIN: Final = 256  # frames taken by one drain; about 1 ms
MAX_DRAIN_BYTES: Final = 1 << 20  # of them; the frame that reaches it is the last one
COPIED_BYTES: Final = 1 << 16  # a copy of 1 MiB takes 0.1 to 1 ms, and may be of a flood's
#: As it was read: its bytes, none at the end of a connection; descriptors; ``msg_flags``.
Packet: TypeAlias = tuple[bytes, tuple[int, ...], int]
NO_TAIL: Final = memoryview(b"")
Message: TypeAlias = bytes | memoryview | LargeMessage


class Frame(msgspec.Struct, frozen=True):
    """One message: who sent it (empty on a robot's side), and it as it arrived."""

    peer: bytes
    message: Message

    @property
    def body(self) -> bytes | memoryview:
        """Its bytes: where they arrived, or a copy of what lies in its sender's memory.

        Raises:
            ProtocolError: that cannot be read.
        """
        message = self.message
        return message.head(len(message)) if isinstance(message, LargeMessage) else message


class PacketSource(Protocol):
    """One peer's connection, from which the owner of its socket may read, too."""

    def fileno(self) -> int:
        """-1: it is closed."""
        ...

    def messages(self, packets: Sequence[Packet]) -> list[Frame]:
        """The messages of packets that were read here: as ``MessageSocket.drain``."""
        ...


class MessageSocket(Protocol):
    """Made by ``transports.py``. Any thread sends, its owner receives.

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
        """Hand over one message, ``body`` and ``tail`` as one; never waits, and keeps neither.

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
