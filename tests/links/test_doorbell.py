from __future__ import annotations

import mmap
import os
import select
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ppstream.core.clock import NS_PER_S
from ppstream.core.waiter import Waiter
from ppstream.links.doorbell import Doorbell, doorbell_bytes

SLOTS = 4
LONG_NS = 10 * NS_PER_S


class Ends(NamedTuple):
    sender: Doorbell
    receiver: Doorbell

    def is_readable(self) -> bool:
        return bool(select.select([self.receiver], [], [], 0)[0])


@pytest.fixture(params=[True, False], ids=["stores-in-order", "stores-in-no-order"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    memory = mmap.mmap(-1, doorbell_bytes(SLOTS))
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    fds = (os.dup(fd), fd)  # as after a descriptor was passed
    ends = Ends(*(Doorbell(memory, SLOTS, one, is_ordered=request.param) for one in fds))
    yield ends
    ends.sender.close()
    ends.receiver.close()


def test_what_was_committed_comes_in_order_with_its_own_stamp(ends: Ends) -> None:
    assert not ends.receiver.is_rung
    for first in range(0, 40, 3):
        for index in range(first, first + 3):
            ends.sender.ring(index, at_ns=1000 + index, frames=0)
        taken = []
        while ends.receiver.is_rung:
            taken.append(ends.receiver.take())
        assert taken == [(index, 1000 + index) for index in range(first, first + 3)]


def test_it_tells_how_many_frames_belong_before_the_newest(ends: Ends) -> None:
    ends.sender.ring(0, at_ns=1, frames=0)
    ends.sender.ring(1, at_ns=2, frames=7)
    assert ends.receiver.is_rung
    assert ends.receiver.frames == 7


def test_a_sleeper_is_woken_once_and_may_sleep_again(ends: Ends) -> None:
    assert ends.receiver.sleep()
    ends.sender.ring(0, at_ns=1, frames=0)
    assert ends.is_readable()
    ends.receiver.wake()
    ends.receiver.clear()
    assert not ends.is_readable()
    assert ends.receiver.is_rung
    ends.receiver.take()
    assert ends.receiver.sleep()


def test_nobody_sleeps_over_what_was_committed_before(ends: Ends) -> None:
    ends.sender.ring(0, at_ns=1, frames=0)
    assert not ends.receiver.sleep()


def test_where_stores_are_in_order_only_a_sleeper_costs_a_system_call(ends: Ends) -> None:
    if not ends.receiver._is_ordered:
        pytest.skip("each commit is a system call there")
    ends.sender.ring(0, at_ns=1, frames=0)
    assert not ends.is_readable()
    ends.receiver.take()
    ends.receiver.sleep()
    ends.receiver.wake()
    ends.sender.ring(1, at_ns=2, frames=0)
    assert not ends.is_readable()


def test_where_they_are_not_a_count_is_believed_behind_the_system_call_alone() -> None:
    memory = mmap.mmap(-1, doorbell_bytes(SLOTS))
    mute, fd = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
    sender = Doorbell(memory, SLOTS, mute, is_ordered=False)
    receiver = Doorbell(memory, SLOTS, fd, is_ordered=False)
    sender.ring(0, at_ns=1, frames=0)  # the count is in memory, and the signal elsewhere
    assert not receiver.is_rung
    os.eventfd_write(fd, 1)
    assert receiver.is_rung
    sender.close()
    receiver.close()


def test_no_commit_is_slept_over_between_two_threads(ends: Ends) -> None:
    waiter, rounds = Waiter(), 20_000
    waiter.register_bell(ends.receiver)
    room = threading.Semaphore(SLOTS)

    def send() -> None:
        for index in range(rounds):
            room.acquire()
            ends.sender.ring(index, at_ns=index, frames=0)

    thread = threading.Thread(target=send)
    thread.start()
    for index in range(rounds):
        while not ends.receiver.is_rung:
            assert waiter.wait(LONG_NS), "a commit was slept over"
        assert ends.receiver.take() == (index, index)
        room.release()
    thread.join()
    waiter.close()


def test_closing_twice_is_fine(ends: Ends) -> None:
    ends.sender.close()
    ends.sender.close()
