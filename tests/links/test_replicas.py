"""Hops to replicas: envelopes go out in turn, results come back in order, lost ones at once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from ppstream.core.errors import PeerLostError, ProtocolError
from ppstream.core.specs import TensorSpec
from ppstream.core.waiter import Waiter
from ppstream.links.headers import (
    ENVELOPE_HEADER,
    EPOCH,
    FAILED,
    REPLICA_LOST,
    RESULT_HEADER,
    SEQ,
)
from ppstream.links.protocol import Hops
from ppstream.links.replicas import ReplicasIn, in_turn
from ppstream.links.slots import INDEX, LinkShape, Order, Slot, SlotLayout, new_slots

D_IN, D_OUT = 4, 2
VALUE = (TensorSpec("value", (1,)),)
SHAPE = LinkShape(
    SlotLayout(ENVELOPE_HEADER, VALUE, 1), SlotLayout(RESULT_HEADER, VALUE, 1), D_IN, D_OUT
)


class Line:
    """One hop in this process: what was sent and not received."""

    def __init__(self, layout: SlotLayout, count: int) -> None:
        self.slots = new_slots(layout, count)
        self.sent: deque[int] = deque()
        self.out, self.into = Order("envelope", 0), Order("envelope", 0)
        self.is_broken = False
        self.watched = 0

    def slot(self, index: int) -> Slot:
        return self.slots[index % len(self.slots)]

    def commit(self, index: int) -> None:
        if self.is_broken:
            raise PeerLostError("broken")
        self.out.send(index, self.slot(index))
        self.sent.append(index)

    def register_with(self, waiter: Waiter) -> frozenset[int]:
        self.watched += 1
        return frozenset((id(self),))

    def unregister_from(self, waiter: Waiter) -> None:
        self.watched -= 1

    def on_ready(self, ready: Sequence[int]) -> None:
        """Nothing to read."""

    def receive_nowait(self) -> tuple[int, int] | None:
        if self.is_broken:
            raise PeerLostError("broken")
        if not self.sent:
            return None
        index = self.sent.popleft()
        return self.into.receive(index, self.slot(index)), 1


class Replicas:
    """Rank 0's two hops, and the far ends of each replica's."""

    def __init__(self, count: int) -> None:
        self.there = [Line(SHAPE.envelope, SHAPE.envelope_slots) for _ in range(count)]
        self.back = [Line(SHAPE.result, SHAPE.result_slots) for _ in range(count)]
        pairs = zip(self.there, self.back, strict=True)
        hops = in_turn([Hops("line", *pair, lambda: None) for pair in pairs], SHAPE)
        self.out, self.into = hops.out, hops.into
        assert isinstance(self.into, ReplicasIn)
        self.turns = self.into.turns
        self.waiter: Any = None

    def send(self, index: int) -> None:
        slot = self.out.slot(index)
        slot.words[EPOCH], slot.words[SEQ] = 7, index
        slot.arrays["value"][:] = index
        self.out.commit(index)

    def answer(self, replica: int) -> bool:
        """The replica answers its oldest envelope; returns False when it has none."""
        arrival = self.there[replica].receive_nowait()
        if arrival is None:
            return False
        envelope, result = (hop[replica].slot(arrival[0]) for hop in (self.there, self.back))
        result.words[EPOCH], result.words[SEQ] = envelope.words[EPOCH], envelope.words[SEQ]
        result.arrays["value"][:] = envelope.arrays["value"]
        self.back[replica].commit(arrival[0])
        return True

    def receive(self) -> tuple[int, int] | None:
        """Index and value of the next result."""
        arrival = self.into.receive_nowait()
        if arrival is None:
            return None
        return arrival[0], int(self.into.slot(arrival[0]).arrays["value"][0, 0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_order_whatever_order_replicas_answer_in(count: int) -> None:
    replicas, source = Replicas(count), random.Random(count)
    sent = received = 0
    while received < 200:
        if sent - received < D_IN and source.random() < 0.5:
            replicas.send(sent)
            assert replicas.turns.of(sent).replica == sent % count
            sent += 1
        replicas.answer(source.randrange(count))
        if (found := replicas.receive()) is not None:
            assert found == (received, received)
            received += 1


def test_a_result_that_is_there_waits_for_the_one_before() -> None:
    replicas = Replicas(2)
    replicas.send(0)
    replicas.send(1)
    replicas.answer(1)
    assert replicas.receive() is None
    assert not replicas.back[1].sent, "a bell that goes on ringing ends every wait"
    replicas.answer(0)
    assert [replicas.receive(), replicas.receive(), replicas.receive()] == [(0, 0), (1, 1), None]


def test_an_envelope_out_of_turn_is_refused() -> None:
    with pytest.raises(ProtocolError, match="envelope 2 was to be sent, 0 is due"):
        Replicas(2).out.slot(2)


def test_what_a_lost_replica_owes_fails_at_once_and_the_others_go_on() -> None:
    replicas = Replicas(3)
    replicas.into.register_with(replicas.waiter)
    for index in range(4):
        replicas.send(index)
    for replica in (0, 1, 2):
        replicas.answer(replica)  # the first of each: envelope 3 is replica 0's second
    replicas.into.lose(0, replicas.waiter)
    assert [line.watched for line in replicas.back] == [0, 1, 1]
    found = [replicas.receive() for _ in range(3)]
    assert found == [(0, 0), (1, 1), (2, 2)], "what has come is received"
    arrival = replicas.into.receive_nowait()
    assert arrival is not None
    words = replicas.into.slot(3).words
    assert (arrival[0], words[EPOCH], words[SEQ], words[FAILED]) == (3, 7, 3, REPLICA_LOST)
    for index in range(4, 40):
        replicas.send(index)
        assert replicas.turns.of(index).replica == 1 + index % 2
        replicas.answer(1 + index % 2)
        assert replicas.receive() == (index, index)
    assert list(replicas.there[0].sent) == [1], "none went there any more"


def test_an_envelope_that_is_being_built_fails_once_it_is_sent() -> None:
    replicas = Replicas(2)
    replicas.out.slot(0)
    replicas.into.lose(0, replicas.waiter)
    assert replicas.receive() is None, "it was not sent"
    replicas.send(0)
    assert replicas.into.receive_nowait() is not None
    assert replicas.into.slot(0).words[FAILED] == REPLICA_LOST


@pytest.mark.parametrize("end", ["there", "back"])
def test_a_broken_hop_is_told_and_holds_nobody_who_was_before(end: str) -> None:
    replicas = Replicas(2)
    replicas.send(0)
    replicas.answer(0)
    getattr(replicas, end)[1].is_broken = True
    replicas.send(1)
    assert replicas.receive() == (0, 0)
    assert replicas.receive() is None
    assert isinstance(replicas.turns.broken[1], PeerLostError)
    replicas.into.lose(1, replicas.waiter)
    replicas.into.receive_nowait()
    assert replicas.into.slot(1).words[FAILED] == REPLICA_LOST


def test_an_index_of_a_replica_names_the_run_s_envelope() -> None:
    replicas = Replicas(2)
    for index in range(20):
        replicas.send(index)
        turn = replicas.turns.of(index)
        assert replicas.into.name_of(*turn) == index
        assert replicas.there[turn.replica].slot(turn.at).words[INDEX] == turn.at
        replicas.answer(turn.replica)
        replicas.receive()
    assert replicas.into.name_of(0, 0) is None, "it left long ago"
