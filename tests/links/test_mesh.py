"""Envelopes inside a mesh: every member gets the leader's, in order, and none is overwritten."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist
from robot_rig import wait_until

from ppstream.core.specs import TensorSpec
from ppstream.core.waiter import Waiter
from ppstream.links.headers import ENVELOPE_HEADER, RESULT_HEADER
from ppstream.links.mesh import open_envelopes, open_member, with_members
from ppstream.links.protocol import Hops
from ppstream.links.slots import LinkShape, Slot, SlotLayout, new_slots

SPECS = (TensorSpec("x", (3,)),)
SHAPE = LinkShape(SlotLayout(ENVELOPE_HEADER, SPECS, 1), SlotLayout(RESULT_HEADER, SPECS, 1), 1, 1)
COUNT = 8
LIMIT_S = 60


class OneHost:
    """The peer of a rank on the same host."""

    name, local_host = "rank 0", None
    inbox: tuple[()] = ()

    def pump(self) -> None:
        """Nothing is said."""


class Envelopes:
    """The leader's incoming hop: ``COUNT`` envelopes, each filled with its number."""

    def __init__(self) -> None:
        self.asked = 0
        (self._slot,) = new_slots(SHAPE.envelope, 1)

    def receive_nowait(self) -> tuple[int, int] | None:
        if self.asked == COUNT:
            return None
        self._slot.tensors["x"].fill_(float(self.asked))
        self._slot.words[0] = self.asked
        self.asked += 1
        return self.asked - 1, 0

    def slot(self, _index: int) -> Slot:
        return self._slot


@pytest.fixture
def groups() -> list[Any]:
    """Of a leader and two members, in three threads, as their processes would open it."""
    store, opened = dist.HashStore(), dict[int, Any]()
    peer: Any = OneHost()

    def open_one(member: int) -> None:
        opened[member] = open_envelopes(store, peer, member, 3, LIMIT_S)

    threads = [threading.Thread(target=open_one, args=(member,)) for member in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [opened[member] for member in range(3)]


def hops_of(into: Any) -> Hops:
    return Hops("host", into, into, lambda: None)


def test_members_get_every_envelope_however_far_the_leader_is_ahead(groups: list[Any]) -> None:
    source, peer = Envelopes(), OneHost()
    lead = with_members(hops_of(source), groups[0], 3, SHAPE)
    members = [open_member(group, peer, SHAPE) for group in groups[1:]]  # type: ignore[arg-type]
    waiter = Waiter()
    for hops in members:
        hops.into.register_with(waiter)
    relaying = threading.Thread(target=lambda: [lead.into.receive_nowait() for _ in range(COUNT)])
    relaying.start()
    wait_until(lambda: source.asked > 4, seconds=LIMIT_S)  # more than a member has room for
    for index in range(COUNT):
        for hops in members:
            found: list[Any] = []

            def arrived(hops: Hops = hops, found: list[Any] = found) -> bool:
                found.append(hops.into.receive_nowait())
                return found[-1] is not None

            wait_until(arrived, seconds=LIMIT_S)
            assert found[-1][0] == index
            assert hops.into.slot(index).tensors["x"].tolist() == [[index] * 3]
            hops.out.commit(index)
    relaying.join(LIMIT_S)
    assert not relaying.is_alive()
    lead.close()
    for hops in members:
        hops.close()
    waiter.close()
