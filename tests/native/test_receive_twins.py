"""A packet that the core takes off a socket is what Python would have made of it; others stay."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_cases import MS, stream
from twin_rows import in_python, state_of

from ppstream import native
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput
from ppstream.recording.items import RowTap
from ppstream.recording.recorder import Recorder
from ppstream.wire.fields import DECODE_ERRORS, encoder
from ppstream.wire.robot_messages import NO_BYTES, Samples, from_robot
from ppstream.wire.unix_socket import PACKET_BYTES_MAX, seqpacket

pytestmark = pytest.mark.skipif(not native.is_used, reason="there is no compiled core")
SESSION, CAPACITY, MOST = 1 << 40, 9, 4
DIMS = {"joints": 2, "force": 1}  # by stream, in the order of the session
FIRST_NS = 7 * MS
EMPTY = memoryview(b"")
PREFIXES = [
    encoder.encode(Samples(SESSION, index, EMPTY, EMPTY))[: -2 * len(NO_BYTES)] for index in (0, 1)
]


class Receivers:
    """The same row twice, one with the core, and a socket to it."""

    def __init__(self, robot: socket.socket, rank0: socket.socket) -> None:
        self.robot, self.rank0 = robot, rank0
        self.pairs = []
        for made in (nullcontext(), in_python()):
            streams = [stream(name, dim, max_gap_ms=5.0) for name, dim in DIMS.items()]
            banks = {one.name: RingBank(one, 2, CAPACITY) for one in streams}
            with made:
                row = RowInput(banks, 1, "joints", 300 * MS)
            row.open(1)
            self.pairs.append((row, banks))
        rings = self.pairs[0][0].rings.values()
        pairs = zip(rings, PREFIXES, strict=True)
        self.lines = tuple(ring.line(prefix) for ring, prefix in pairs)
        self.rx_ns = FIRST_NS

    def states(self) -> list[Any]:
        return [state_of(*pair) for pair in self.pairs]

    def receive(self, most: int = MOST) -> tuple[int, int, list[Any]]:
        return native.receive(self.rank0.fileno(), self.lines, self.rx_ns, most)

    def send(self, *packets: bytes) -> list[int]:
        """Both get packets; returns how many samples the core took at once, then the next time."""
        self.rx_ns += MS
        for packet in packets:
            self.robot.send(packet)
        left, found = [*packets], []
        while left:
            taken, count, others = self.receive()
            found.append(taken)
            assert taken == sum(self._take_python(packet) for packet in left[:count])
            assert others == [(packet, (), 0) for packet in left[count : count + len(others)]]
            assert others or count == len(left) or count >= MOST
            states = self.states()
            assert states[0] == states[1]
            for packet in left[count : count + len(others)]:
                self._take_both(packet)
            del left[: count + len(others)]
        assert self.receive() == (0, 0, [])
        return found

    def _take_python(self, packet: bytes) -> int:
        message = from_robot.decode(packet)
        assert isinstance(message, Samples)
        assert message.session == SESSION
        ring = [*self.pairs[1][0].rings.values()][message.stream]
        n = ring.append_message(message.stamps, message.values, self.rx_ns)
        assert n
        return n

    def _take_both(self, packet: bytes) -> None:
        try:
            message = from_robot.decode(packet)
        except DECODE_ERRORS:
            return
        if not isinstance(message, Samples) or message.stream >= len(DIMS):
            return
        n, rest = divmod(len(message.stamps), 8)
        if n and not rest and len(message.values) == n * [*DIMS.values()][message.stream] * 4:
            for row, _ in self.pairs:
                ring = [*row.rings.values()][message.stream]
                ring.append_message(message.stamps, message.values, self.rx_ns)


@contextmanager
def receivers() -> Iterator[Receivers]:
    robot, rank0 = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with robot, rank0:
        rank0.settimeout(0)
        yield Receivers(robot, rank0)


def body(
    stamps: list[int],
    values: list[float],
    session: int = SESSION,
    dim: int | None = None,
    index: int = 0,
) -> bytes:
    dim = [*DIMS.values(), 1][index] if dim is None else dim
    columns = np.array(values[:1] * (len(stamps) * dim), np.float32)
    data = memoryview(columns.tobytes())
    return encoder.encode(
        Samples(session, index, memoryview(np.array(stamps, np.int64).tobytes()), data)
    )


steps = st.lists(st.integers(-MS, 3 * MS), min_size=1, max_size=20)
values = st.floats(width=32) | st.sampled_from([0.5, float("nan"), float("inf")])
sessions = st.sampled_from([SESSION, SESSION, SESSION, SESSION + 1, 1])
dims = st.sampled_from([None, None, None, 2, 40])
mutations = st.none() | st.tuples(st.integers(0, 60), st.integers(0, 255)) | st.integers(-9, 9)
usual = st.tuples(
    st.lists(st.integers(1, MS), min_size=1, max_size=4), st.just(0.5), st.just(SESSION)
)
packets = st.tuples(steps, values, sessions, st.sampled_from([0, 0, 1, 2]), dims, mutations)
good_packets = st.tuples(usual, st.sampled_from([0, 1])).map(
    lambda found: (*found[0], found[1], None, None)
)


@given(st.lists(st.lists(packets | good_packets, max_size=7), max_size=4))
def test_what_the_core_receives_is_what_python_takes_in(bursts: list[list[Any]]) -> None:
    with receivers() as both:
        newest = [FIRST_NS] * 3
        for burst in bursts:
            sent = []
            for stamp_steps, value, session, index, dim, mutation in burst:
                _, *stamps = accumulate(stamp_steps, initial=newest[index])
                newest[index] = stamps[-1]
                packet = bytearray(body(stamps, [value], session, dim, index))
                if isinstance(mutation, tuple):
                    packet[mutation[0] % len(packet)] = mutation[1]
                elif mutation is not None and mutation < 0:
                    del packet[mutation:]
                elif mutation:
                    packet += bytes(mutation)
                if packet:
                    sent.append(bytes(packet))
            both.send(*sent)


def test_usual_packets_are_taken_and_others_stay() -> None:
    with receivers() as both:
        assert both.send(body([FIRST_NS], [0.5])) == [1]  # the clock learns from the first
        assert both.send(body([both.rx_ns - MS // 2], [0.5])) == [1]
        assert both.send(body([both.rx_ns - MS, both.rx_ns - MS // 2], [0.5])) == [2]
        assert both.send(body([both.rx_ns], [float("nan")])) == [0]
        assert both.send(body([both.rx_ns], [0.5], SESSION + 1)) == [0]
        assert both.send(body([both.rx_ns], [0.5], index=2)) == [0]
        assert both.send(body([both.rx_ns], [0.5]) + b"\0") == [0]
        assert both.send(body([both.rx_ns], [0.5])[:-1]) == [0]
        assert both.send(body([both.rx_ns - MS // 2], [0.5])) == [1]


def test_one_call_takes_packets_of_all_streams_up_to_one_that_is_another() -> None:
    with receivers() as both:
        at_ns = FIRST_NS
        first = [body([at_ns + i], [0.5], index=i % 2) for i in range(3)]
        then = [body([at_ns + 5 + i, at_ns + 9 + i], [0.5]) for i in (0, 9, 18, 27, 36)]
        assert both.send(*first) == [3]
        assert both.send(*then, body([at_ns + 99], [0.5], SESSION + 1), *first) == [10]
        assert both.send(*[body([at_ns + 100 + i], [0.5]) for i in range(20)]) == [16, 4]


def test_samples_that_no_window_used_are_dropped_when_the_ring_is_full() -> None:
    with receivers() as both:
        for _ in range(4):
            at_ns = both.rx_ns
            assert both.send(body([at_ns + i for i in range(1, 7)], [0.5])) == [6]
        ring = both.pairs[0][0].reference
        assert ring.ledger.dropped == {"overwritten": 24 - CAPACITY}
        ring.check()


def test_a_recorded_ring_is_left_to_python() -> None:
    with receivers() as both:
        ring = both.pairs[0][0].reference
        tap = RowTap(Recorder(None), both.pairs[0][0], 0)
        ring.tap = tap
        packet = body([FIRST_NS], [0.5])
        both.robot.send(packet)
        assert both.receive() == (0, 0, [(packet, (), 0)])
        ring.tap = None
        both.robot.send(packet)
        assert both.receive() == (1, 1, [])


def test_what_the_clock_raises_comes_out() -> None:
    with receivers() as both:
        row, _ = both.pairs[0]
        both.send(body([FIRST_NS], [0.5]))
        prefix, ring, ledger, _ = both.lines[0]
        both.robot.send(body([FIRST_NS + 1], [0.5]))
        with pytest.raises(TypeError):
            native.receive(both.rank0.fileno(), ((prefix, ring, ledger, row),), both.rx_ns, MOST)
        both.robot.send(body([FIRST_NS + 1], [0.5]))
        with pytest.raises(AttributeError):
            native.receive(
                both.rank0.fileno(), ((prefix, ring, ledger, native.Clock()),), both.rx_ns, MOST
            )
        assert both.receive() == (0, 0, [])  # the packets of then are gone


def test_a_packet_with_a_descriptor_and_the_end_are_handed_on() -> None:
    with receivers() as both:
        both.send(body([FIRST_NS], [0.5]))
        packet = body([FIRST_NS + MS // 2], [0.5])
        open_before = len(os.listdir("/proc/self/fd"))
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(both.robot, [packet], [nothing.fileno()])
            socket.send_fds(both.robot, [packet], [nothing.fileno()] * 253)
        both.robot.send(bytes(PACKET_BYTES_MAX + 1))
        both.robot.close()
        assert both.rank0.fileno() >= 0
        taken, count, others = both.receive()
        assert (taken, count) == (0, 0)
        (one, fds, flags), (two, more, same), (_, none, too_long), end = others
        assert (one, two, flags, same) == (packet, packet, 0, 0)
        assert (none, too_long) == ((), socket.MSG_TRUNC)
        assert end == (b"", (), 0)
        assert (len(fds), len(more)) == (1, 253)
        for fd in (*fds, *more):
            assert os.path.samestat(os.fstat(fd), os.stat(os.devnull))
            os.close(fd)
        assert len(os.listdir("/proc/self/fd")) == open_before - 1  # the robot's is closed
        assert native.receive(-1, both.lines, both.rx_ns, MOST) == (0, 0, [])
        with seqpacket() as unconnected:
            assert native.receive(unconnected.fileno(), both.lines, both.rx_ns, MOST)[:2] == (0, 0)


def with_descriptors(robot: socket.socket, packet: bytes, times: int) -> None:
    with open(os.devnull, "rb") as nothing:
        for _ in range(times):
            socket.send_fds(robot, [packet], [nothing.fileno()])


def test_descriptors_behind_an_empty_packet_are_handed_on_and_its_repetition_is_not() -> None:
    with receivers() as both:
        open_before = len(os.listdir("/proc/self/fd"))
        both.robot.send(b"")
        both.robot.send(body([FIRST_NS], [0.5]))
        with_descriptors(both.robot, b"behind", 5)
        both.robot.close()
        taken, count, (end, *behind) = both.receive()
        assert (taken, count, end) == (0, 0, (b"", (), 0))
        assert [packet for packet, _, _ in behind] == [b"behind"] * 5
        for _, fds, _ in behind:
            for fd in fds:
                os.close(fd)
        assert len(os.listdir("/proc/self/fd")) == open_before - 1  # the robot's


def test_what_is_raised_leaves_no_descriptor() -> None:
    with receivers() as both:
        row, _ = both.pairs[0]
        prefix, ring, ledger, _ = both.lines[0]
        open_before = len(os.listdir("/proc/self/fd"))
        for n in (0, 9):
            both.robot.send(body([FIRST_NS + n], [0.5]))
            with_descriptors(both.robot, b"behind", 5)
            with pytest.raises(TypeError):
                native.receive(
                    both.rank0.fileno(), ((prefix, ring, ledger, row),), both.rx_ns, MOST
                )
        assert len(os.listdir("/proc/self/fd")) == open_before
