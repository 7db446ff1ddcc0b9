"""What rank 0 and its policy ranks say to each other in a run, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from peers import pump_until, two_peers
from pipeline_in_process import small_config

from ppstream.control.peer import Peer
from ppstream.core.errors import PeerLostError
from ppstream.core.user_code import Fault
from ppstream.core.waiter import Waiter
from ppstream.links.replicas import ReplicaTurn, Turns
from ppstream.links.slots import LinkShape, SlotLayout
from ppstream.pipeline.policy_rank_peer import PolicyRankPeer, instruct_all
from ppstream.wire.rank_messages import Control, Instructed, Instruction, PolicyFault


class Rank:
    """A policy rank as rank 0 has it, and the far end of its socket."""

    def __init__(self, number: int, waiter: Waiter) -> None:
        self.near, self.far = two_peers()
        self.known = PolicyRankPeer(self.near, small_config(), number)
        self.logged: list[tuple[str, dict[str, int]]] = []
        rank0: Any = SimpleNamespace(waiter=waiter, log_fault=self.log_fault)
        self.known.attach(rank0)

    def log_fault(self, stage: str, fault: Fault, rank: int, **fields: int) -> None:
        self.logged.append((fault.what, fields))

    def say(self, frame: Control) -> None:
        """Rank 0 hears of it."""
        self.far.send(frame)
        pump_until(self.near, lambda: bool(self.near.inbox))
        self.known.on_control_frame(self.near.inbox.popleft())

    def answer(self, number: int, fault: str = "") -> None:
        """It has taken in a text."""
        self.say(Instructed(number, fault))

    def texts(self, count: int) -> list[int]:
        pump_until(self.far, lambda: len(self.far.inbox) == count)
        return [frame.id for frame in self.far.inbox if isinstance(frame, Instruction)]

    def die(self) -> None:
        close(self.far)
        with pytest.raises(PeerLostError):
            pump_until(self.near, lambda: False)


def close(*peers: Peer) -> None:
    for peer in peers:
        assert peer.heart is not None
        peer.heart.close()
        peer.close()


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    waiter = Waiter()
    both = Rank(1, waiter), Rank(2, waiter)
    yield both
    for rank in both:
        close(rank.near, rank.far)
    waiter.close()


class Desk:
    """Sends texts to all ranks; keeps what is said of each."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks = tuple(rank.known for rank in ranks)
        self.heard: list[tuple[int, str]] = []

    def send(self, *numbers: int) -> None:
        for number in numbers:
            instruct_all(self.ranks, None, number, "a text", self.hear)

    def hear(self, number: int, fault: str) -> None:
        self.heard.append((number, fault))


def test_each_text_under_way_has_its_own_fault(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    desk = Desk(first, second)
    desk.send(1, 2)
    first.answer(1, "no such word")
    first.answer(2)
    assert desk.heard == []  # the other rank has said nothing
    second.answer(2)
    second.answer(1)
    assert desk.heard == [(2, ""), (1, "no such word")]


def test_texts_under_way_need_no_answer_of_a_replica_that_is_lost(
    ranks: tuple[Rank, Rank],
) -> None:
    left, lost = ranks
    desk = Desk(left, lost)
    desk.send(1, 2)
    left.answer(1)
    lost.known.forget()
    assert desk.heard == [(1, "")]
    left.answer(2)
    assert desk.heard == [(1, ""), (2, "")]


def test_a_text_that_is_sent_while_a_replica_is_being_lost_is_answered(
    ranks: tuple[Rank, Rank],
) -> None:
    left, lost = ranks
    desk = Desk(left, lost)  # with split threads another one may lose it now
    lost.known.bears_loss = lambda: True
    lost.die()
    lost.known.forget()
    desk.send(1)
    assert left.texts(1) == [1]
    left.answer(1)
    assert desk.heard == [(1, "")]


def test_a_fault_that_is_told_long_after_its_envelope_left_is_told_without_its_name(
    ranks: tuple[Rank, Rank],
) -> None:
    """Between hosts results come over a connection of their own, which may be the faster one."""
    layout = SlotLayout((), (), 1)
    turns = Turns(2, LinkShape(layout, layout, d_in=2, d_out=2))
    for index in range(20):
        turns.give(index)
    replica, _ = ranks
    replica.known.name_of = lambda at: turns.name_of(ReplicaTurn(0, at))
    replica.say(PolicyFault(9, "ValueError", "", "ValueError: newest"))
    replica.say(PolicyFault(1, "ValueError", "", "ValueError: late"))
    assert replica.logged == [("ValueError: newest", {"index": 18}), ("ValueError: late", {})]
