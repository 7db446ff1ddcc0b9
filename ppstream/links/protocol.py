"""FrontLink and BackLink: what rank 0 and the policy rank ask of a link, whatever carries it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ppstream.links.arrivals import Arrivals
from ppstream.links.slots import Slot

if TYPE_CHECKING:
    pass


class FrontLink(Protocol):
    """Rank 0's end. One thread sends; one thread, which pumps the peer, receives.

    Attributes:
        name: the kind, for the log and the report.
        fds: to be waited for besides the peer's; readable: a result may be there.
    """

    name: str
    fds: tuple[int, ...]

    def envelope(self, index: int) -> Slot:
        """The slot to write envelope ``index`` into, while it is the next one due."""

    def commit(self, index: int) -> None:
        """Send envelope ``index``; its slot is the peer's until its result was received.

        Raises:
            ProtocolError: another index is due, or ``d_in`` are unanswered.
            PeerLostError: the peer is gone.
        """

    def receive_nowait(self) -> int | None:
        """Index of the next complete result, in order; the peer must have been pumped.

        Raises:
            ProtocolError: what arrived is not the next index of this generation.
            PeerLostError: the link's own connection broke.
        """

    def result(self, index: int) -> Slot:
        """The slot of a received result, valid until it is emitted."""

    def close(self) -> None:
        """Release what the link holds, within a second; slots still referred to stay readable."""


class BackLink(Protocol):
    """The policy rank's end; one thread. Attributes and errors as in ``FrontLink``."""

    name: str
    fds: tuple[int, ...]

    @property
    def arrivals(self) -> Arrivals:
        """When envelopes came while the thread was busy."""

    def receive_nowait(self) -> int | None:
        """Index of the next complete envelope, in order; the peer must have been pumped."""

    def envelope(self, index: int) -> Slot:
        """The slot of a received envelope, valid until it is answered."""

    def result(self, index: int) -> Slot:
        """The slot to write result ``index`` into."""

    def reply(self, index: int) -> None:
        """Send result ``index``: exactly one for each envelope, in order."""

    def close(self) -> None:
        """Release what the link holds, within a second."""
