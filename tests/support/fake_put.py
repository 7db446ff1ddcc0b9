"""``cuda_put.Puts`` and ``cuda_stamped.StampedLaunches`` over ``fake_cuda``: they read the same
packed arguments and move the same bytes.

Not a model of the kernel's inside: its threads, fences and vectors are tested on GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

from ppstream_kernels import cuda_put
from ppstream_kernels.cuda_put import Route, Stamps
from ppstream_kernels.cuda_wait import StampedWait

TAKES_NS = 1000  # a put, between its two stamps


class Message(ctypes.Structure):
    """As ``put.cu`` declares it."""

    _fields_ = [
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("counter", ctypes.c_uint64),
        ("arrived", ctypes.c_uint64),
        ("bytes", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("header_words", ctypes.c_int64),
        ("header", ctypes.c_int64 * cuda_put.HEADER_WORDS),
    ]

    def run(self, stream: Any) -> None:
        head = self.header_words * 8
        ctypes.memmove(self.target + head, self.source + head, self.bytes - head)
        ctypes.memmove(self.target, self.header, head)
        stream.wrote(self.counter, self.value % (1 << 32))
        ctypes.c_uint32.from_address(self.counter).value = self.value % (1 << 32)


class StampedMessage(ctypes.Structure):
    """As ``put.cu`` declares it."""

    _fields_ = [
        ("message", Message),
        ("now", ctypes.c_uint64),
        ("began", ctypes.c_uint64),
        ("ended", ctypes.c_uint64),
        ("named", ctypes.c_uint64),
        ("names", ctypes.c_uint64),
        ("name_words", ctypes.c_int64),
    ]

    def run(self, stream: Any) -> None:
        set_word(self.began, stream.now_ns)
        message = self.message
        message.value = get_word(self.now)
        ctypes.memmove(message.header, self.now + 8, message.header_words * 8)
        if self.name_words:
            ctypes.memmove(self.names, self.named, self.name_words * 8)
        stream.now_ns += TAKES_NS  # what it has counted, it has counted at its end
        message.run(stream)
        if self.ended:
            set_word(self.ended, stream.now_ns)


class StampedLook(ctypes.Structure):
    """As ``wait.cu`` declares it."""

    _fields_ = [
        ("counter", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
        ("now", ctypes.c_uint64),
        ("ended", ctypes.c_uint64),
    ]

    def run(self, stream: Any) -> None:
        stream.driver.spins.append((stream, stream.now_ns))
        if self.other:
            stream.see_count(self.other, get_word(self.now + 8))
        stream.see_count(self.counter, get_word(self.now))
        set_word(self.ended, stream.now_ns)


class FakeLaunch:
    def __init__(self, call: StampedMessage | StampedLook) -> None:
        self._call = call

    def queue(self, stream: Any) -> None:
        if isinstance(self._call, StampedLook):
            stream.driver.spinning.append(stream)
        stream.queue(partial(self._call.run, stream))

    def add_to(self, graph: list[Any], after: list[int]) -> int:
        assert after == [len(graph) - 1][: len(graph)], "not behind the part before it"
        graph.append((self._call.run, False, 1))
        return len(graph) - 1


class FakeStamped:
    def __init__(self, puts: int) -> None:
        self._left = puts

    def wait(self, call: StampedWait) -> FakeLaunch:
        return FakeLaunch(StampedLook.from_buffer_copy(call.packed()))

    def put(self, route: Route, counter: int, stamps: Stamps, header_words: int) -> FakeLaunch:
        assert self._left > 0, "more puts than were asked for"
        self._left -= 1
        packed = cuda_put.pack_stamped(route, counter, 0, stamps, header_words)
        return FakeLaunch(StampedMessage.from_buffer_copy(packed))


def get_word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def set_word(address: int, value: int) -> None:
    ctypes.c_int64.from_address(address).value = value


class FakePuts:
    def __init__(self, routes: Sequence[Route], counter: int) -> None:
        self._memory = ctypes.create_string_buffer(len(routes) * ctypes.sizeof(Message))
        for message, route in enumerate(routes):
            cuda_put.pack_route(self._memory, message, route, counter, 0)
        self.sent = 0

    def write_header(self, message: int, numbers: Sequence[int]) -> None:
        cuda_put.pack_header(self._memory, message, numbers)

    def queue(self, message: int, count: int, stream: Any) -> None:
        cuda_put.pack_count(self._memory, message, count)
        at = message * ctypes.sizeof(Message)
        message_now = Message.from_buffer_copy(self._memory, at)  # as a launch takes a copy
        stream.queue(partial(message_now.run, stream))
        self.sent += 1
