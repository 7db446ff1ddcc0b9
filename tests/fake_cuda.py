"""A CUDA driver without a GPU: streams are threads, device memory is this process's own.

As much of cuda.bindings.driver as ``memops.py`` calls for loops and counted links, with its order:
what is queued on a stream runs one after the other, and streams wait for events and values only.
Time is CLOCK_MONOTONIC. Not a model of speed, and kernels are plain functions (``queue_call``).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

OK, INVALID_HANDLE, NOT_READY = 0, 400, 600
CYCLE = 1 << 32
POLL_S = 0.0001


class Record:
    """One ``record`` of an event."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.at_ns = 0


class FakeEvent:
    def __init__(self) -> None:
        self.newest = Record()
        self.newest.done.set()  # never recorded: nothing to wait for
        self.is_recorded = False


class FakeStream:
    """A thread that runs what is queued, in order; errors are kept for the test."""

    def __init__(self, driver: FakeDriver) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.pending = 0
        self._lock = threading.Lock()
        self._driver = driver
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def queue(self, work: Callable[[], None]) -> None:
        with self._lock:
            self.pending += 1
        self._queue.put(work)

    @property
    def is_ended(self) -> bool:
        """The test is over: nothing is waited for any more."""
        return self._driver.ended

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                self._driver.failures.append(error)
            with self._lock:
                self.pending -= 1


class FakeDriver:
    """Stands for the module; functions return tuples that begin with an error code."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.failures: list[BaseException] = []
        self.ended = False

    def close(self) -> None:
        """End all streams; whoever still waits is let go."""
        self.ended = True
        for stream in self.streams:
            stream.end()

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int, int]:
        return OK, 0, -1

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int, FakeStream]:
        self.streams.append(FakeStream(self))
        return OK, self.streams[-1]

    def cuEventCreate(self, flags: int) -> tuple[int, FakeEvent]:
        return OK, FakeEvent()

    def cuEventRecord(self, event: FakeEvent, stream: FakeStream) -> tuple[int]:
        record = event.newest = Record()
        event.is_recorded = True

        def mark() -> None:
            record.at_ns = time.monotonic_ns()
            record.done.set()

        stream.queue(mark)
        return (OK,)

    def cuEventQuery(self, event: FakeEvent) -> tuple[int]:
        return (OK if event.newest.done.is_set() else NOT_READY,)

    def cuEventSynchronize(self, event: FakeEvent) -> tuple[int]:
        event.newest.done.wait()
        return (OK,)

    def cuEventElapsedTime(self, start: FakeEvent, end: FakeEvent) -> tuple[int, float]:
        if not (start.is_recorded and end.is_recorded):
            return INVALID_HANDLE, 0.0
        if not end.newest.done.is_set():
            return NOT_READY, 0.0
        return OK, (end.newest.at_ns - start.newest.at_ns) / 1e6

    def cuStreamWaitEvent(self, stream: FakeStream, event: FakeEvent, flags: int) -> tuple[int]:
        record = event.newest
        stream.queue(lambda: self._until(record.done.is_set))
        return (OK,)

    def cuStreamWaitValue32(
        self, stream: FakeStream, address: int, value: int, flags: int
    ) -> tuple[int]:
        word = ctypes.c_uint32.from_address(address)
        stream.queue(lambda: self._until(lambda: (word.value - value) % CYCLE < CYCLE // 2))
        return (OK,)

    def cuStreamWriteValue32(
        self, stream: FakeStream, address: int, value: int, flags: int
    ) -> tuple[int]:
        word = ctypes.c_uint32.from_address(address)

        def write() -> None:
            word.value = value

        stream.queue(write)
        return (OK,)

    def cuMemcpyAsync(self, to: int, source: int, size: int, stream: FakeStream) -> tuple[int]:
        stream.queue(lambda: ctypes.memmove(to, source, size))
        return (OK,)

    def cuStreamQuery(self, stream: FakeStream) -> tuple[int]:
        return (NOT_READY if stream.pending else OK,)

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() and not self.ended:
            time.sleep(POLL_S)


def queue_call(stream: Any, call: Callable[[], None]) -> None:
    """What a kernel is elsewhere; ``stream`` is a memops.CudaStream."""
    stream.handle.queue(call)
