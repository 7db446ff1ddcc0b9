"""Rank 0's links to replicas as one: turns, slots, names and losses; over a driver of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from fake_cuda import FakeDriver
from hypothesis import given
from hypothesis import strategies as st
from linked_ends import driven_by, ends
from robot_rig import wait_until

from ppstream.core.specs import TensorSpec
from ppstream.core.waiter import Waiter
from ppstream.cuda.driver import CudaEvent, CudaStream
from ppstream.links import device_counters
from ppstream.links.device_counters import CountedLink
from ppstream.links.device_replicas import DeviceReplicas
from ppstream.links.slots import INDEX, LinkShape, SlotLayout

LAYOUT = SlotLayout(("index", "generation", "epoch", "seq"), (TensorSpec("x", (3,)),), 1)
SHAPE = LinkShape(LAYOUT, LAYOUT, 2, 2, 7)


class Replicas(NamedTuple):
    front: DeviceReplicas
    backs: list[CountedLink]


def joined(count: int, patch: pytest.MonkeyPatch) -> Replicas:
    """Rank 0's links share their streams, as on a GPU."""
    pairs = [ends(SHAPE) for _ in range(count)]
    shared: dict[str, CudaStream] = {}
    with patch.context() as of_rank0:
        of_rank0.setattr(
            device_counters, "stream", lambda role: shared.setdefault(role, CudaStream())
        )
        fronts = [end(0) for end in pairs]
    return Replicas(DeviceReplicas(fronts), [end(1) for end in pairs])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with driven_by(FakeDriver(), monkeypatch) as fake:
        yield fake


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    waiter = Waiter()
    yield waiter
    waiter.close()


@given(
    count=st.integers(2, 5),
    runs=st.lists(st.tuples(st.integers(0, 23), st.integers(0, 4)), max_size=4),
)
def test_turns_go_round_in_order_and_every_link_counts_its_own(
    count: int, runs: list[tuple[int, int]]
) -> None:
    """Before each loss some envelopes; at last some more."""
    with pytest.MonkeyPatch.context() as patch, driven_by(FakeDriver(), patch):
        front, _ = joined(count, patch)
        waiter = Waiter()
        given_to = [0] * count
        last, index = count - 1, 0
        slots_of = [set[int]() for _ in range(count)]
        for envelopes, lost in (*runs, (23, count)):
            for _ in range(envelopes):
                turn = front.turn(index)
                behind = [(last + n) % count for n in range(1, count + 1)]
                assert turn.replica == next(k for k in behind if k not in front.lost)
                assert turn.at == given_to[turn.replica]
                assert front.name_of(*turn) == index
                slots_of[turn.replica].add(front.out[index % len(front.out)].address)
                given_to[turn.replica], last, index = turn.at + 1, turn.replica, index + 1
            if lost < count and len(front.lost | {lost}) < count:
                front.lose(lost, waiter)
                front.line_up(index)
        waiter.close()
        assert front.close()
    for k, theirs in enumerate(slots_of):  # no slot is anybody else's
        assert theirs.isdisjoint(set().union(*slots_of[:k], *slots_of[k + 1 :]))


def send_back(back: CountedLink, index: int) -> None:
    back.queue_header(index, (0, index))
    back.queue_send(index)


def test_results_are_received_in_order_whoever_is_quicker(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, (first, second) = joined(2, monkeypatch)
    events = [CudaEvent() for _ in range(2)]
    for index, event in enumerate(events):
        front.queue_receive(index)
        front.receiving.record(event)
    send_back(second, 0)
    wait_until(second.sending.is_idle)
    assert not any(event.is_done() for event in events)
    send_back(first, 0)
    wait_until(lambda: all(event.is_done() for event in events))
    assert [front.into[index].header[INDEX] for index in range(2)] == [0, 0]  # each one's own
    assert front.close()


def test_a_lost_replica_that_still_counts_holds_nobody_up(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, waiter: Waiter
) -> None:
    """Its device has begun to count before it was told to end, and takes the release back."""
    front, (lost, other) = joined(2, monkeypatch)
    events = [CudaEvent() for _ in range(3)]
    for index, event in enumerate(events):
        front.queue_receive(index)
        front.receiving.record(event)
    front.lose(0, waiter)
    wait_until(events[0].is_done)
    send_back(lost, 0)
    wait_until(lost.sending.is_idle)
    send_back(other, 0)
    wait_until(events[1].is_done)
    wait_until(lambda: front.receiving.handle.stands)
    assert not events[2].is_done()
    front.end_waits_for_lost()
    wait_until(events[2].is_done)
    assert front.close()


def test_a_credit_from_before_the_newest_line_up_is_there(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, waiter: Waiter
) -> None:
    """Whatever the counter of a replica that was lost says by now."""
    front, (lost, other) = joined(2, monkeypatch)
    for index in range(4):
        front.queue_receive(index)
    for index in range(2):
        send_back(other, index)
    front.lose(0, waiter)
    wait_until(front.receiving.is_idle)
    front.line_up(4)
    send_back(lost, 0)  # its device comes to it now
    wait_until(lost.sending.is_idle)
    a, done = CudaStream(), CudaEvent()
    for index in range(4):
        assert front.queue_wait(index, a)
    a.record(done)
    wait_until(done.is_done)
    assert front.turn(4) == (1, 2)
    assert front.turn(5) == (1, 3)
    assert front.close()


def test_closing_releases_a_stream_that_waits_for_any_of_them(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _ = joined(3, monkeypatch)
    for index in (0, 1, 2, 3):
        front.queue_receive(index)
    assert front.close()
