"""A policy rank of two that answers each envelope with its own bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ppstream.control.launcher_store import join_store
from ppstream.control.rendezvous import connect
from ppstream.core.errors import PeerLostError
from ppstream.core.specs import TensorSpec
from ppstream.core.waiter import Waiter
from ppstream.links.factory import open_hops
from ppstream.links.protocol import Neighbours
from ppstream.links.slots import BACK, LinkShape, SlotLayout

LIMIT_S = 20.0


def main(arguments: Sequence[str]) -> None:
    """Takes the kind of link, a payload's bytes and how many envelopes come; ends with its peer."""
    kind, size, envelopes = arguments[0], int(arguments[1]), int(arguments[2])
    store = join_store()
    peer = connect(store, LIMIT_S)
    header = ("index", "generation", "epoch", "seq")
    layout = SlotLayout(header, (TensorSpec("x", (size,), "uint8"),), 1)
    shape = LinkShape(layout, layout, 2, 2)
    hops = open_hops(kind, Neighbours.pair(BACK, peer), store, shape, timeout_s=LIMIT_S)
    waiter = Waiter()
    waiter.register(peer.fileno())
    hops.into.register_with(waiter)
    done = 0
    while done < envelopes:
        waiter.wait(None)
        peer.pump()
        while (arrival := hops.into.receive_nowait()) is not None:
            index = arrival[0]
            hops.out.slot(index).tensors["x"].copy_(hops.into.slot(index).tensors["x"])
            hops.out.commit(index)
            done += 1
    with suppress(PeerLostError):  # the last answer may not have been taken
        while True:
            peer.pump()
            waiter.wait(None)
    hops.close()
