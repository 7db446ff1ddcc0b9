"""A packet that the core takes off a socket is what Python would have made of it; others stay."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from ppstream.wire.fields import DECODE_ERRORS, encoder
from ppstream.wire.robot_messages import NO_BYTES, Samples, from_robot
from ppstream.wire.unix_socket import seqpacket

pytestmark = pytest.mark.skipif(not native.is_used, reason="there is no compiled core")
SESSION, STREAM, DIM, CAPACITY = 1 << 40, 3, 2, 9
FIRST_NS = 7 * MS
EMPTY = memoryview(b"")
PREFIX = encoder.encode(Samples(SESSION, STREAM, EMPTY, EMPTY))[: -2 * len(NO_BYTES)]


class Receivers:
    """The same row twice, one with the core, and a socket to it."""

    def __init__(self, robot: socket.socket, rank0: socket.socket) -> None:
        self.robot, self.rank0 = robot, rank0
        self.pairs = []
        for made in (nullcontext(), in_python()):
            banks = {"joints": RingBank(stream("joints", DIM, max_gap_ms=5.0), 2, CAPACITY)}
            with made:
                row = RowInput(banks, 1, "joints")
            row.open(1)
            self.pairs.append((row, banks))
        self.rx_ns = FIRST_NS

    def states(self) -> list[Any]:
        return [state_of(*pair) for pair in self.pairs]

    def send(self, packet: bytes) -> int:
        """Both get a packet; returns how many samples the core took off the socket itself."""
        self.rx_ns += MS
        self.robot.send(packet)
        core, python = (row.reference for row, _ in self.pairs)
        before = self.states()[0]
        taken = core.receive(self.rank0.fileno(), PREFIX, self.rx_ns)
        if taken:
            message = from_robot.decode(packet)
            assert isinstance(message, Samples)
            assert (message.session, message.stream) == (SESSION, STREAM)
            assert python.append_message(message.stamps, message.values, self.rx_ns) == taken
            with pytest.raises(BlockingIOError):
                self.rank0.recv(1)
        else:
            assert self.states()[0] == before
            assert self.rank0.recv(1 << 16) == packet
            self._take(packet)
        states = self.states()
        assert states[0] == states[1]
        return taken

    def _take(self, packet: bytes) -> None:
        try:
            message = from_robot.decode(packet)
        except DECODE_ERRORS:
            return
        if not isinstance(message, Samples):
            return
        n, rest = divmod(len(message.stamps), 8)
        if n and not rest and len(message.values) == n * DIM * 4:
            for row, _ in self.pairs:
                row.reference.append_message(message.stamps, message.values, self.rx_ns)


@contextmanager
def receivers() -> Iterator[Receivers]:
    robot, rank0 = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with robot, rank0:
        rank0.settimeout(0)
        yield Receivers(robot, rank0)


def body(stamps: list[int], values: list[float], session: int = SESSION, dim: int = DIM) -> bytes:
    columns = np.array(values[:1] * (len(stamps) * dim), np.float32)
    data = memoryview(columns.tobytes())
    return encoder.encode(
        Samples(session, STREAM, memoryview(np.array(stamps, np.int64).tobytes()), data)
    )


steps = st.lists(st.integers(-MS, 3 * MS), min_size=1, max_size=40)
values = st.floats(width=32) | st.sampled_from([0.5, float("nan"), float("inf")])
sessions = st.sampled_from([SESSION, SESSION, SESSION, SESSION + 1, 1])
mutations = st.none() | st.tuples(st.integers(0, 60), st.integers(0, 255)) | st.integers(-9, 9)
packets = st.tuples(steps, values, sessions, st.sampled_from([DIM, DIM, 1, 40]), mutations)


@given(st.lists(packets, max_size=8))
def test_what_the_core_receives_is_what_python_takes_in(given_packets: list[Any]) -> None:
    with receivers() as both:
        newest = FIRST_NS
        for stamp_steps, value, session, dim, mutation in given_packets:
            stamps = [newest := newest + step for step in stamp_steps]
            packet = bytearray(body(stamps, [value], session, dim))
            if isinstance(mutation, tuple):
                packet[mutation[0] % len(packet)] = mutation[1]
            elif mutation is not None and mutation < 0:
                del packet[mutation:]
            elif mutation:
                packet += bytes(mutation)
            if packet:
                both.send(bytes(packet))


def test_usual_packets_are_taken_and_others_stay() -> None:
    with receivers() as both:
        both.send(body([FIRST_NS], [0.5]))  # the clock learns from the first
        assert both.send(body([both.rx_ns - MS // 2], [0.5])) == 1
        assert both.send(body([both.rx_ns - MS, both.rx_ns - MS // 2], [0.5])) == 2
        assert both.send(body([both.rx_ns], [float("nan")])) == 0
        assert both.send(body([both.rx_ns], [0.5], SESSION + 1)) == 0
        assert both.send(body([both.rx_ns], [0.5]) + b"\0") == 0
        assert both.send(body([both.rx_ns], [0.5])[:-1]) == 0
        assert both.send(body([both.rx_ns - MS // 2], [0.5])) == 1


def test_a_packet_with_a_descriptor_and_a_closed_socket_are_not_read() -> None:
    with receivers() as both:
        both.send(body([FIRST_NS], [0.5]))
        packet, ring = body([FIRST_NS + MS // 2], [0.5]), both.pairs[0][0].reference
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(both.robot, [packet], [nothing.fileno()])
        assert ring.receive(both.rank0.fileno(), PREFIX, both.rx_ns + MS) == 0
        got, fds, _, _ = socket.recv_fds(both.rank0, 1 << 16, 1)
        assert got == packet
        os.close(*fds)
        assert ring.receive(both.rank0.fileno(), PREFIX, both.rx_ns) == 0  # nothing is there
        both.robot.close()
        assert ring.receive(both.rank0.fileno(), PREFIX, both.rx_ns) == 0
    assert ring.receive(-1, PREFIX, both.rx_ns) == 0
    with seqpacket() as unconnected:
        assert ring.receive(unconnected.fileno(), PREFIX, both.rx_ns) == 0
