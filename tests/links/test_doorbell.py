from __future__ import annotations

import itertools
import mmap
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from ppstream import native
from ppstream.core.clock import NS_PER_S
from ppstream.core.waiter import PythonWaiter, Waiter
from ppstream.links.doorbell import SLEEPS, WORD_BYTES, Doorbell, PythonDoorbell, doorbell_bytes

SLOTS = 4
LONG_NS = 10 * NS_PER_S
ROUNDS = 8_000
TWINS = {"python": PythonDoorbell, "core": Doorbell}
ORDERS = {"in-order": True, "in-no-order": False}
CASES = ["-".join(case) for case in itertools.product(TWINS, TWINS, ORDERS)]


class Ends(NamedTuple):
    sender: PythonDoorbell
    receiver: PythonDoorbell
    memory_fd: int
    is_ordered: bool

    def is_readable(self) -> bool:
        return bool(select.select([self.receiver], [], [], 0)[0])

    def is_asleep(self) -> bool:
        """The receiver wants the descriptor, says the memory of the hop."""
        word = os.pread(self.memory_fd, WORD_BYTES, SLEEPS * WORD_BYTES)
        return bool(int.from_bytes(word, sys.byteorder))

    def waiter(self) -> PythonWaiter:
        """A thread of the receiver's process has the same twin of both."""
        return Waiter() if isinstance(self.receiver, Doorbell) else PythonWaiter()

    def fence(self) -> bool:
        """Both have barriers, or the processor needs none."""
        return self.is_ordered or all(isinstance(end, Doorbell) for end in self[:2])


@pytest.fixture(params=CASES)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Sender's and receiver's twin, each with a mapping and a descriptor of its own."""
    sender, receiver, order = request.param.split("-", 2)
    if "core" in (sender, receiver) and not native.is_used:
        pytest.skip(f"no compiled core: {native.why_not}")
    memory_fd = os.memfd_create("hop")
    os.truncate(memory_fd, doorbell_bytes(SLOTS))
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    ends = Ends(
        *(
            TWINS[name](mmap.mmap(memory_fd, 0), SLOTS, one, is_ordered=ORDERS[order])
            for name, one in ((sender, os.dup(fd)), (receiver, fd))
        ),
        memory_fd,
        ORDERS[order],
    )
    yield ends
    ends.sender.close()
    ends.receiver.close()
    os.close(memory_fd)


def test_what_was_committed_comes_in_order_with_its_own_stamp(ends: Ends) -> None:
    assert not ends.receiver.is_rung
    for first in range(0, 40, 3):
        for index in range(first, first + 3):
            ends.sender.ring(index, 1000 + index, 0)
        taken = []
        while ends.receiver.is_rung:
            taken.append(ends.receiver.pop())
        assert taken == [(index, 1000 + index) for index in range(first, first + 3)]


def test_it_tells_how_many_frames_belong_before_the_newest(ends: Ends) -> None:
    ends.sender.ring(0, 1, 0)
    ends.sender.ring(1, 2, 7)
    assert ends.receiver.is_rung
    assert ends.receiver.frames == 7


def test_a_sleeper_is_woken_once_and_may_sleep_again(ends: Ends) -> None:
    assert ends.receiver.sleep()
    ends.sender.ring(0, 1, 0)
    assert ends.is_readable()
    ends.receiver.wake()
    ends.receiver.clear()
    assert not ends.is_readable()
    assert ends.receiver.is_rung
    ends.receiver.pop()
    assert ends.receiver.sleep()


def test_nobody_sleeps_over_what_was_committed_before(ends: Ends) -> None:
    ends.sender.ring(0, 1, 0)
    assert not ends.receiver.sleep()


def test_a_rouse_wakes_a_sleeper_alone_and_promises_nothing(ends: Ends) -> None:
    ends.sender.rouse()
    assert not ends.is_readable()
    assert ends.receiver.sleep()
    ends.sender.rouse()
    assert ends.is_readable()
    assert not ends.is_asleep()
    ends.receiver.wake()
    ends.receiver.clear()
    assert not ends.receiver.is_rung
    assert ends.receiver.sleep()
    ends.sender.ring(0, 1, 0)  # it went back to sleep: the commit wakes it, too
    assert ends.is_readable()
    assert ends.receiver.is_rung


def test_where_both_fence_only_a_sleeper_costs_a_system_call(ends: Ends) -> None:
    ends.receiver.sleep()  # a compiled one says here that it fences
    ends.receiver.wake()
    ends.sender.ring(0, 1, 0)
    assert ends.is_readable() == (not ends.fence())
    assert ends.receiver.is_rung
    ends.receiver.pop()
    ends.receiver.clear()
    ends.receiver.sleep()
    ends.sender.ring(1, 2, 0)
    assert ends.is_readable()


def test_where_one_does_not_a_count_is_believed_behind_the_system_call_alone(ends: Ends) -> None:
    elsewhere, fd = os.eventfd(0), os.dup(ends.sender.fileno())
    os.dup2(elsewhere, ends.sender.fileno(), inheritable=False)
    ends.sender.ring(0, 1, 0)  # the count is in memory, and the signal elsewhere
    assert ends.receiver.is_rung == ends.fence()
    os.eventfd_write(fd, 1)
    assert ends.receiver.is_rung
    os.close(elsewhere)
    os.close(fd)


def receive_all(ends: Ends, release: Callable[[], object]) -> None:
    """Take each commit of the rounds in turn; ``release`` gives its slot back.

    The sender has one slot to begin with: no later commit makes good for one that was slept over.
    """
    waiter = ends.waiter()
    waiter.register_bell(ends.receiver)
    for index in range(ROUNDS):
        while not ends.receiver.is_rung:
            assert waiter.wait(LONG_NS), "a commit was slept over"  # or a rouse
        assert ends.receiver.pop() == (index, 7 * index)
        for _ in range(SLOTS if index == ROUNDS // 2 else 1):
            release()
    waiter.close()


def test_no_commit_is_slept_over_between_two_threads(ends: Ends) -> None:
    room = threading.Semaphore(1)

    def send() -> None:
        for index in range(ROUNDS):
            room.acquire()
            ends.sender.rouse()
            ends.sender.ring(index, 7 * index, 0)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    receive_all(ends, room.release)
    thread.join()


#: The sender of ``ROUNDS`` in an interpreter of its own: a fork of this one could inherit a lock
#: that a thread holds, the sanitizers' allocator's among them.
SENDER = """
import mmap, os, sys
from ppstream.links import doorbell
kind, slots, rounds, memory_fd, fd, free, is_ordered = sys.argv[1], *map(int, sys.argv[2:])
memory = mmap.mmap(memory_fd, 0)
bell = getattr(doorbell, kind)(memory, slots, fd, is_ordered=bool(is_ordered))
for index in range(rounds):
    if not os.read(free, 1):
        sys.exit("the receiver is gone")
    bell.rouse()
    bell.ring(index, 7 * index, 0)
while os.read(free, slots):  # of the last rounds
    pass
"""


def test_no_commit_is_slept_over_between_two_processes(ends: Ends) -> None:
    free, give = os.pipe()
    sender = ends.sender
    passed = ends.memory_fd, sender.fileno(), free
    told = SLOTS, ROUNDS, *passed, int(ends.is_ordered)
    command = [sys.executable, "-c", SENDER, type(sender).__name__, *map(str, told)]
    with subprocess.Popen(command, pass_fds=passed) as process:
        os.close(free)  # the end of the parent is the end of the pipe
        try:
            os.write(give, b".")
            receive_all(ends, lambda: os.write(give, b"."))
        finally:
            os.close(give)
            status = process.wait(LONG_NS / NS_PER_S)
    assert status == 0


def test_a_wait_leaves_the_receiver_awake_however_it_ends(ends: Ends) -> None:
    waiter = ends.waiter()
    waiter.register_bell(ends.receiver)
    assert not waiter.wait(0)
    assert not ends.is_asleep()
    ends.sender.ring(0, 1, 0)
    assert waiter.wait(LONG_NS) == [ends.receiver.fileno()]
    assert not ends.is_asleep()
    while ends.receiver.is_rung:
        ends.receiver.pop()
    timer = threading.Timer(0.02, lambda: ends.sender.ring(1, 2, 0))
    timer.start()
    assert waiter.wait(LONG_NS) == [ends.receiver.fileno()]
    timer.join()
    assert not ends.is_asleep()
    assert not ends.is_readable()
    while ends.receiver.is_rung:
        ends.receiver.pop()
    gone = os.eventfd(0)
    waiter.register(gone)
    os.close(gone)
    with pytest.raises(OSError, match=r"closed|Bad file"):
        waiter.wait(LONG_NS)
    assert not ends.is_asleep()
    waiter.close()


def test_closing_twice_is_fine(ends: Ends) -> None:
    ends.sender.close()
    ends.sender.close()
