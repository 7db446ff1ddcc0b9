"""``cuda_put.Puts`` over ``fake_cuda``: reads the same packed arguments, moves the same bytes.

Not a model of the kernel's inside: its threads, fences and vectors are tested on GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

from ppstream_kernels import cuda_put
from ppstream_kernels.cuda_put import Route


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
