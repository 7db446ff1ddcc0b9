"""``cuda_wait.Waits`` over ``fake_cuda``: a stream that looks, as the kernel compares."""

from __future__ import annotations

import ctypes
import time
from typing import Any

CYCLE = 1 << 32
POLL_S = 0.0001


class FakeWaits:
    def __init__(self, counter: int) -> None:
        self._word = ctypes.c_uint32.from_address(counter)
        self.queued: list[Any] = []  # streams
        self.begun: list[tuple[Any, int]] = []  # a stream, and when it came to its wait

    def queue(self, count: int, stream: Any) -> None:
        self.queued.append(stream)

        def look() -> None:
            self.begun.append((stream, time.monotonic_ns()))
            while (self._word.value - count) % CYCLE >= CYCLE // 2 and not stream.is_ended:
                time.sleep(POLL_S)

        stream.queue(look)
