"""``cuda_wait.Waits`` over ``fake_cuda``: a stream that looks, as the kernel compares."""

from __future__ import annotations

from typing import Any


class FakeWaits:
    def __init__(self, counter: int) -> None:
        self._counter = counter

    def queue(self, count: int, stream: Any) -> None:
        stream.driver.spinning.append(stream)

        def look() -> None:
            stream.driver.spins.append((stream, stream.now_ns))
            stream.see_count(self._counter, count)

        stream.queue(look)
