import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from robot_rig import wait_until

from ppstream.links.arrivals import SocketArrivals

BELL = b"\x03\0\0\0\x92\x06\x05"  # as short as a doorbell can be
NOW_NS = 1_000  # later than all that is seen


class Reader:
    """The loop's side: reads only when it looks. Whatever is seen meanwhile is 10 ns later."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.bytes_read = 0
        self.seen_ns: list[int] = []

    def clock(self) -> int:
        self.seen_ns.append(10 * len(self.seen_ns) + 10)
        return self.seen_ns[-1]

    def read(self) -> None:
        self.bytes_read += len(self.socket.recv(4096))


@contextmanager
def watching(sock: socket.socket) -> Iterator[tuple[SocketArrivals, Reader]]:
    reader = Reader(sock)
    arrivals = SocketArrivals(sock.fileno(), lambda: reader.bytes_read, reader.clock)
    yield arrivals, reader
    arrivals.close()


Ends = tuple[SocketArrivals, Reader, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with ours, theirs, watching(ours) as (arrivals, reader):
        yield arrivals, reader, theirs


def send_seen(reader: Reader, send: Callable[[bytes], object], frame: bytes = BELL) -> None:
    """Send, and wait until the thread has looked."""
    before = len(reader.seen_ns)
    send(frame)
    wait_until(lambda: len(reader.seen_ns) > before)


def test_bells_that_came_while_busy_have_the_times_they_came(ends: Ends) -> None:
    arrivals, reader, theirs = ends
    arrivals.watch()
    for _ in range(3):
        send_seen(reader, theirs.send)
    arrivals.rest()
    reader.read()
    assert arrivals.take(3, NOW_NS) == [10, 20, 30]


def test_other_frames_never_make_a_time_earlier_than_true(ends: Ends) -> None:
    arrivals, reader, theirs = ends
    arrivals.watch()
    send_seen(reader, theirs.send, b"heartbeat.")
    send_seen(reader, theirs.send)
    arrivals.rest()
    reader.read()
    assert arrivals.take(1, NOW_NS) == [20]


def test_sighting_left_over_from_before_proves_nothing_of_a_later_bell(ends: Ends) -> None:
    arrivals, reader, theirs = ends
    arrivals.watch()
    send_seen(reader, theirs.send)
    arrivals.rest()
    reader.read()  # the loop found this one by itself and did not ask
    theirs.send(BELL)
    reader.read()
    assert arrivals.take(1, NOW_NS) == [NOW_NS]


def test_nothing_is_noted_while_the_loop_looks_itself(ends: Ends) -> None:
    arrivals, reader, theirs = ends
    with watching(reader.socket) as (beside, other):
        beside.watch()
        for _ in range(20):
            send_seen(other, theirs.send)  # the thread beside it is awake each time
    reader.read()
    assert arrivals.take(20, NOW_NS) == [NOW_NS] * 20
    assert reader.seen_ns == []


def test_a_dead_peer_ends_the_thread_which_would_spin(ends: Ends) -> None:
    arrivals, _, theirs = ends
    *_, watcher = (thread for thread in threading.enumerate() if thread.name == "arrivals")
    theirs.close()
    wait_until(lambda: not watcher.is_alive())
    arrivals.watch()
    arrivals.rest()
