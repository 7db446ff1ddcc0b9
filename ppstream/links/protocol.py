"""Hop: the bounded one-way queue between two neighbours; its two ends, whatever carries it.

Rank 0 holds one outgoing and one incoming hop, and so does a policy rank; with one policy rank
both lead to the same peer. Permission to send is the ledger's (``pipeline/credits.py``): a result
that was received gives the slots of its envelope back, so a hop has no call for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.links.slots import Position, Slot


class OutHop(Protocol):
    """The end that sends; one thread."""

    def slot(self, index: int) -> Slot:
        """The slot to write ``index`` into, while it is the next one due."""

    def commit(self, index: int) -> None:
        """Send ``index``; its slot is the receiver's until the ledger gives it back.

        Raises:
            ProtocolError: another index is due.
            PeerLostError: the peer is gone.
        """


class InHop(Protocol):
    """The end that receives; one thread."""

    def register_with(self, waiter: Waiter) -> frozenset[int]:
        """Have ``waiter`` woken by what comes; returns the descriptors that it will name."""

    def unregister_from(self, waiter: Waiter) -> None:
        """Nothing more is received: what comes wakes nobody any more."""

    def on_ready(self, ready: Sequence[int]) -> None:
        """The waiter has named these descriptors, or none: anything may have happened."""

    def receive_nowait(self) -> tuple[int, int] | None:
        """Index of the next complete one, in order, and when it was complete, by this host's clock.

        None also while control frames that the sender sent before it lie in the peer's inbox: the
        owner takes them first.

        Raises:
            ProtocolError: what arrived is not the next index of this generation.
            PeerLostError: the hop's own connection broke.
        """

    def slot(self, index: int) -> Slot:
        """The slot of a received index, valid until the ledger gives it back."""


class Neighbours(NamedTuple):
    """The peers at the far ends of a rank's hops, in a chain of ranks that ends where it begins.

    Attributes:
        before: whose hop leads here.
        behind: where this rank's hop leads; with one policy rank the same peer.
        position: of this rank.
    """

    before: Peer
    behind: Peer
    position: Position

    @classmethod
    def pair(cls, position: Position, peer: Peer) -> Neighbours:
        """Of two ranks: ``FRONT`` is rank 0, ``BACK`` the policy rank."""
        return cls(peer, peer, position)

    @property
    def owner_pumps_before(self) -> bool:
        """True where the hops' owner reads the control socket of ``before``: rank 0's, or to it."""
        return self.position.place <= 1


class Hops(NamedTuple):
    """Both hops of a rank.

    Attributes:
        name: kind of link, for the log and the report.
        close: releases what both hold, within a second of ``end``; slots still referred to stay
            readable.
        end: says that nothing more will come; ``close`` does so, too. Of several, all are ended
            before one is closed, so that their seconds are one.
        rouse: wakes a sleeping receiver of ``out`` before a commit; None: it has no such call.
    """

    name: str
    out: OutHop
    into: InHop
    close: Callable[[], None]
    end: Callable[[], None] = lambda: None
    rouse: Callable[[], None] | None = None
