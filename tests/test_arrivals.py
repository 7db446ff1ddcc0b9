import socket
import time

import pytest

from ppstream.arrivals import Arrivals
from ppstream.clock import now_ns


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    arrivals = Arrivals((ours.fileno(),))
    yield arrivals, ours, theirs
    arrivals.close()
    ours.close()
    theirs.close()


def settle() -> None:
    time.sleep(0.05)  # until the other thread has been woken: nothing tells


def test_frame_that_came_while_busy_has_the_time_it_came(ends):
    arrivals, _, theirs = ends
    arrivals.watch()
    before = now_ns()
    theirs.send(b"x")
    settle()
    after = now_ns()
    settle()
    arrivals.rest()
    (stamp,) = arrivals.take(1, now_ns())
    assert before <= stamp <= after


def test_several_frames_keep_their_order_and_their_times(ends):
    arrivals, _, theirs = ends
    arrivals.watch()
    sent = []
    for _ in range(3):
        sent.append(now_ns())
        theirs.send(b"x")
        settle()
    stamps = arrivals.take(3, now_ns())
    assert stamps == sorted(stamps)
    assert all(earliest <= stamp for earliest, stamp in zip(sent, stamps, strict=True))
    assert stamps[0] < sent[1]


def test_other_frames_never_make_a_time_earlier_than_true(ends):
    arrivals, _, theirs = ends
    arrivals.watch()
    theirs.send(b"heartbeat")
    settle()
    sent = now_ns()
    theirs.send(b"envelope")
    settle()
    (stamp,) = arrivals.take(1, now_ns())
    assert stamp >= sent


def test_nothing_is_stamped_while_the_loop_looks_itself(ends):
    arrivals, _, theirs = ends
    theirs.send(b"x")
    settle()
    now = now_ns()
    assert arrivals.take(2, now) == [now, now]


def test_dead_peer_does_not_make_the_thread_spin(ends):
    arrivals, _, theirs = ends
    theirs.close()
    settle()
    cpu = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - cpu < 0.1
    arrivals.watch()
    arrivals.rest()
