import socket
import time

import pytest

from ppstream.core.clock import now_ns
from ppstream.links.arrivals import SocketArrivals

BELL = b"\x03\0\0\0\x92\x06\x05"  # as short as a doorbell can be


class Reader:
    """The loop's side: reads only when it looks."""

    def __init__(self, sock):
        self.socket = sock
        self.bytes_read = 0

    def read(self):
        self.bytes_read += len(self.socket.recv(4096))


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    reader = Reader(ours)
    arrivals = SocketArrivals(ours.fileno(), lambda: reader.bytes_read)
    yield arrivals, reader, theirs
    arrivals.close()
    ours.close()
    theirs.close()


def settle() -> None:
    time.sleep(0.05)  # until the other thread has been woken: nothing tells


def test_bell_that_came_while_busy_has_the_time_it_came(ends):
    arrivals, reader, theirs = ends
    arrivals.watch()
    before = now_ns()
    theirs.send(BELL)
    settle()
    after = now_ns()
    settle()
    arrivals.rest()
    reader.read()
    (stamp,) = arrivals.take(1, now_ns())
    assert before <= stamp <= after


def test_several_bells_keep_their_order_and_their_times(ends):
    arrivals, reader, theirs = ends
    arrivals.watch()
    sent = []
    for _ in range(3):
        sent.append(now_ns())
        theirs.send(BELL)
        settle()
    arrivals.rest()
    reader.read()
    stamps = arrivals.take(3, now_ns())
    assert stamps == sorted(stamps)
    assert all(earliest <= stamp for earliest, stamp in zip(sent, stamps, strict=True))
    assert stamps[0] < sent[1]


def test_other_frames_never_make_a_time_earlier_than_true(ends):
    arrivals, reader, theirs = ends
    arrivals.watch()
    theirs.send(b"heartbeat.")
    settle()
    sent = now_ns()
    theirs.send(BELL)
    settle()
    arrivals.rest()
    reader.read()
    (stamp,) = arrivals.take(1, now_ns())
    assert stamp >= sent


def test_sighting_left_over_from_before_proves_nothing_of_a_later_bell(ends):
    arrivals, reader, theirs = ends
    arrivals.watch()
    theirs.send(BELL)
    settle()
    arrivals.rest()
    reader.read()  # the loop found this one by itself and did not ask
    sent = now_ns()
    theirs.send(BELL)
    settle()
    reader.read()
    now = now_ns()
    (stamp,) = arrivals.take(1, now)
    assert sent <= stamp == now


def test_nothing_is_noted_while_the_loop_looks_itself(ends):
    arrivals, reader, theirs = ends
    theirs.send(BELL * 2)
    settle()
    reader.read()
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
