"""Hops inside a mesh: every envelope of the leader goes on to each member, in a group of its own.

The leader alone has hops to other places. A member computes what the leader computes, on the same
envelope with its epoch, episodes and instructions, and its results go nowhere: collectives of the
policy, in a group of their own, are all that the leader hears of it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import now_ns
from ppstream.links.gloo import CLOSE_LIMIT_NS, GlooIn, GlooOut, open_group
from ppstream.links.protocol import Hops
from ppstream.links.slots import Order, new_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.links.gloo import Group
    from ppstream.links.protocol import InHop
    from ppstream.links.slots import LinkShape, Slot

LEADER: Final = 0  # inside the group
GROUP: Final = "mesh"
WHAT: Final = "envelope inside the mesh"


def open_envelopes(store: Store, rank0: Peer, member: int, size: int, timeout_s: float) -> Group:
    """The group that envelopes travel in; all ranks of the mesh open it, behind that of the policy.

    Raises:
        PeerLostError: a rank of the mesh did not come within ``timeout_s``.
    """
    return open_group(rank0, store, GROUP, member, timeout_s, size)


def with_members(hops: Hops, group: Group, size: int, shape: LinkShape) -> Hops:
    """The leader's hops, whose envelopes go on to all members."""
    layout, count = shape.envelope, shape.envelope_slots
    members = [
        GlooOut(group, member, layout, count, Order(WHAT, shape.generation))
        for member in range(1, size)
    ]

    def end() -> None:
        for member in members:
            member.end()
        hops.end()

    def close() -> None:
        end()
        hops.close()
        for member in members:
            member.close(member.close_by_ns)

    return Hops(hops.name, hops.out, _Relay(hops.into, members), close, end)


def open_member(group: Group, rank0: Peer, shape: LinkShape) -> Hops:
    """A member's hops: envelopes from the leader, results to nobody."""
    count = shape.envelope_slots
    room = threading.Semaphore(count)
    out = _Unsent(shape, room)
    order = Order(WHAT, shape.generation)
    into = GlooIn(group, LEADER, shape.envelope, count, order, out, rank0, room)
    return Hops("gloo", out, into, lambda: into.close(now_ns() + CLOSE_LIMIT_NS))


class _Relay:
    """The leader's incoming hop: whoever receives an envelope here has sent it on."""

    def __init__(self, into: InHop, members: Sequence[GlooOut]) -> None:
        self._into = into
        self._members = members

    def register_with(self, waiter: Waiter) -> frozenset[int]:
        """As ``InHop``."""
        return self._into.register_with(waiter)

    def unregister_from(self, waiter: Waiter) -> None:
        """As ``InHop``."""
        self._into.unregister_from(waiter)

    def on_ready(self, ready: Sequence[int]) -> None:
        """As ``InHop``."""
        self._into.on_ready(ready)

    def receive_nowait(self) -> tuple[int, int] | None:
        """As ``InHop``; waits for a member that is a whole queue of envelopes behind.

        Raises:
            PeerLostError: a member is gone, too.
        """
        arrival = self._into.receive_nowait()
        if arrival is not None:
            raw = self._into.slot(arrival[0]).raw
            for member in self._members:
                member.slot(arrival[0]).raw.copy_(raw)
                member.commit(arrival[0])
        return arrival

    def slot(self, index: int) -> Slot:
        """As ``InHop``."""
        return self._into.slot(index)


class _Unsent:
    """A member's outgoing hop: results stay, and the envelope's slot is free again."""

    def __init__(self, shape: LinkShape, room: threading.Semaphore) -> None:
        self._slots = new_slots(shape.result, shape.result_slots)
        self._room = room

    def slot(self, index: int) -> Slot:
        """As ``OutHop``."""
        return self._slots[index % len(self._slots)]

    def commit(self, index: int) -> None:
        """As ``OutHop``."""
        self._room.release()

    def end(self) -> None:
        """Nobody waits for an end."""
