"""The contract of a hop on each hop of a chain of three ranks: first, middle and last."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppstream.control.launcher_store import LauncherStore
from ppstream.control.peer import Peer
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError, PpstreamError, ProtocolError
from ppstream.core.specs import TensorSpec
from ppstream.core.waiter import Waiter
from ppstream.links.factory import open_hops
from ppstream.links.protocol import Hops, Neighbours
from ppstream.links.slots import INDEX, LinkShape, Position, SlotLayout
from ppstream.pipeline.credits import CreditLedger

KINDS = ("host", "gloo")
PLACES = 3  # rank 0 and two policy ranks; hop k leads from place k to the next one
NAMES = ("envelope", "output of place 1", "result")
WAIT_NS = 20 * NS_PER_S
SIZES = (3, 5, 7)  # floats that each hop carries

torch.set_num_threads(1)

each_hop = pytest.mark.parametrize("hop", range(PLACES), ids=["first", "middle", "last"])
each_kind = pytest.mark.parametrize("kind", KINDS)


def layout_of(size: int) -> SlotLayout:
    header = ("index", "generation", "epoch", "seq")
    return SlotLayout(header, (TensorSpec("x", (size,)),), 1)


class Chain:
    """All ends of a chain of three ranks in this process, each opened by a thread of its own.

    Args:
        kind: of link.
        layouts: of each hop.
        odd: a place that has other layouts, or another generation, than the others think.
    """

    def __init__(
        self,
        kind: str,
        layouts: Sequence[SlotLayout],
        *,
        bounds: tuple[int, int] = (3, 2),
        odd: tuple[int, Sequence[SlotLayout], int] | None = None,
    ) -> None:
        pairs = [socket.socketpair() for _ in range(PLACES)]  # rank 0 and 1, 1 and 2, 2 and 0
        near = [Peer(pair[0], expects_fds=hop == PLACES - 1) for hop, pair in enumerate(pairs)]
        far = [Peer(pair[1], expects_fds=hop < PLACES - 1) for hop, pair in enumerate(pairs)]
        self.peers = [
            Neighbours(far[k - 1], near[k], Position(k, PLACES - 1)) for k in range(PLACES)
        ]
        self.waiter = Waiter()
        self.hops: dict[int, Hops] = {}
        self.failed: list[PpstreamError] = []
        store = LauncherStore(vars(dist)["HashStore"](), 0, PLACES, 0)

        def open_place(k: int) -> None:
            mine, generation = layouts, 0
            if odd is not None and odd[0] == k:
                _, mine, generation = odd
            first, second = (0, PLACES - 1) if k == 0 else (k - 1, k)
            shape = LinkShape(
                mine[first], mine[second], *bounds, generation, is_first_hop=first == 0
            )
            try:
                self.hops[k] = open_hops(kind, self.peers[k], store, shape, timeout_s=10.0)
            except PpstreamError as error:
                self.failed.append(error)

        threads = [threading.Thread(target=open_place, args=(k,)) for k in range(PLACES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for found in self.hops.values():
            found.into.register_with(self.waiter)

    def take_nowait(self, hop: int) -> int | None:
        """What has come over a hop; rank 0's own sockets are pumped by whoever owns them."""
        place = (hop + 1) % PLACES
        into = self.hops[place].into
        if (arrival := into.receive_nowait()) is not None:
            return arrival[0]
        if place < 2:
            self.peers[place].before.pump()
        into.on_ready(())
        return None

    def take(self, hop: int) -> int:
        deadline_ns = now_ns() + WAIT_NS
        while (index := self.take_nowait(hop)) is None:
            assert now_ns() < deadline_ns
            self.waiter.wait(NS_PER_S // 100)
        return index

    def sent(self, hop: int, index: int) -> Any:
        return self.hops[hop].out.slot(index)

    def came(self, hop: int, index: int) -> Any:
        return self.hops[(hop + 1) % PLACES].into.slot(index)

    def close(self) -> None:
        for found in self.hops.values():
            found.close()
        for ends in self.peers:
            ends.before.close()
            ends.behind.close()
        self.waiter.close()


@contextmanager
def opened(kind: str, sizes: Sequence[int] = SIZES, **more: Any) -> Iterator[Chain]:
    chain = Chain(kind, [layout_of(size) for size in sizes], **more)
    try:
        if chain.failed:
            raise chain.failed[0]
        yield chain
    finally:
        chain.close()


@each_kind
@each_hop
@pytest.mark.parametrize("size", [1, 4096, 1 << 20])
def test_payloads_of_any_size_are_bit_exact(kind: str, hop: int, size: int) -> None:
    sizes = [size if k == hop else 1 for k in range(PLACES)]
    with opened(kind, sizes) as chain:
        for index in range(4):
            payload = torch.randn(1, size)
            chain.sent(hop, index).tensors["x"].copy_(payload)
            chain.hops[hop].out.commit(index)
            assert chain.take(hop) == index
            assert torch.equal(chain.came(hop, index).tensors["x"], payload)


@each_kind
def test_all_fields_keep_their_places_on_every_hop(kind: str) -> None:
    with opened(kind) as chain:
        for hop in range(PLACES):
            chain.sent(hop, 0).header[2:] = (-5 - hop, 2**62 + hop)
            chain.hops[hop].out.commit(0)
            assert chain.take(hop) == 0
            assert chain.came(hop, 0).header.tolist() == [0, 0, -5 - hop, 2**62 + hop]


@each_kind
@pytest.mark.parametrize("bounds", [(1, 1), (2, 1), (3, 2), (5, 3)], ids=str)
def test_no_slot_is_overwritten_before_its_envelope_is_emitted(
    kind: str, bounds: tuple[int, int]
) -> None:
    """In a drawn order of what the credits allow: every slot in use holds what was written."""
    draw = random.Random(7)
    envelopes = 400 if kind == "host" else 60
    ledger = CreditLedger(*bounds)
    committed = emitted = 0
    here: list[deque[int]] = [deque() for _ in range(PLACES)]  # came over each hop, not passed on
    with opened(kind, bounds=bounds) as chain:

        def send(hop: int, index: int) -> None:
            chain.sent(hop, index).tensors["x"].fill_(PLACES * index + hop)
            chain.hops[hop].out.commit(index)

        until_ns = now_ns() + WAIT_NS
        while emitted < envelopes:
            assert now_ns() < until_ns
            hop = draw.randrange(PLACES)
            does = draw.choice(("take", "pass"))
            if does == "take" and (hop < PLACES - 1 or ledger.may_receive()):
                if (index := chain.take_nowait(hop)) is not None:
                    here[hop].append(index)
                    if hop == PLACES - 1:
                        ledger.receive(0)
                        if len(here[hop]) == 1:
                            ledger.begin_decode(0)
            elif does == "pass" and hop == 0 and committed < envelopes and ledger.may_commit():
                ledger.commit(0)
                send(0, committed)
                committed += 1
            elif does == "pass" and hop > 0 and here[hop - 1]:
                send(hop, here[hop - 1].popleft())
            elif does == "pass" and hop == 0 and here[-1]:
                assert here[-1].popleft() == emitted
                ledger.emit(0)
                emitted += 1
                if here[-1]:
                    ledger.begin_decode(0)
            for k, came in enumerate(here):
                for index in came:
                    assert bool((chain.came(k, index).tensors["x"] == PLACES * index + k).all())


@each_kind
@each_hop
def test_an_index_out_of_turn_is_refused(kind: str, hop: int) -> None:
    with opened(kind) as chain:
        out = chain.hops[hop].out
        with pytest.raises(ProtocolError, match=f"{NAMES[hop]} 1 was to be sent, 0 is due"):
            out.commit(1)
        out.commit(0)
        assert chain.take(hop) == 0
        with pytest.raises(ProtocolError, match=f"{NAMES[hop]} 0 was to be sent, 1 is due"):
            out.commit(0)


@each_kind
@each_hop
def test_another_generation_is_refused(kind: str, hop: int) -> None:
    layouts = [layout_of(size) for size in SIZES]
    with opened(kind, odd=((hop + 1) % PLACES, layouts, 4)) as chain:
        chain.hops[hop].out.commit(0)
        with pytest.raises(ProtocolError, match=rf"{NAMES[hop]} 0 \(generation 4\) holds 0"):
            chain.take(hop)


@each_hop
def test_a_slot_of_another_index_is_refused(hop: int) -> None:
    with opened("host") as chain:
        chain.hops[hop].out.commit(0)
        chain.take(hop)
        out = chain.hops[hop].out
        out.commit(1)
        out.slot(1).header[INDEX] = 5
        with pytest.raises(ProtocolError, match=f"slot of {NAMES[hop]} 1"):
            chain.take(hop)


@each_hop
def test_ranks_with_different_slots_do_not_open(hop: int) -> None:
    others = [layout_of(400 if k == hop else size) for k, size in enumerate(SIZES)]
    with (
        pytest.raises(ProtocolError, match="disagree"),
        opened("host", odd=((hop + 1) % PLACES, others, 0)),
    ):
        pass


@each_hop
def test_a_sender_that_is_gone_is_noticed_behind_what_it_has_sent(hop: int) -> None:
    with opened("host") as chain:
        chain.hops[hop].out.commit(0)
        ends = chain.peers[hop]
        for peer in (ends.before, ends.behind):
            with suppress(ValueError):
                chain.waiter.unregister(peer.fileno())
            peer.close()
        assert chain.take(hop) == 0
        with pytest.raises(PeerLostError):
            chain.take(hop)


@each_kind
def test_every_end_closes_within_a_second_and_nothing_leaks(kind: str) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with opened(kind):
        pass  # what a first use loads stays
    before = counts()
    for first in range(PLACES):
        with opened(kind) as chain:
            for hop in range(PLACES):
                chain.hops[hop].out.commit(0)
                chain.take(hop)
            began = now_ns()
            chain.hops[first].close()
            assert now_ns() - began < NS_PER_S

    def grown() -> bool:
        return any(now > then for now, then in zip(counts(), before, strict=True))

    until_ns = now_ns() + 5 * NS_PER_S  # the kernel counts a thread a moment after its end
    while grown() and now_ns() < until_ns:
        os.sched_yield()
    assert not grown(), f"{counts()} file descriptors and threads, {before} before"
