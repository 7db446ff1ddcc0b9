"""``cuda_wait.Waits`` over ``fake_cuda``: a stream that looks, as the kernel compares."""

from __future__ import annotations

from typing import Any


class FakeWaits:
    def __init__(self, counter: int) -> None:
        self._counter = counter
        self.queued: list[Any] = []  # streams
        self.begun: list[tuple[Any, int]] = []  # a stream, and when it came to its wait

    def queue(self, count: int, stream: Any) -> None:
        self.queued.append(stream)

        def look() -> None:
            self.begun.append((stream, stream.now_ns))
            stream.see_count(self._counter, count)

        stream.queue(look)
