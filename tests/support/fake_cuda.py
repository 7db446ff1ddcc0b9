"""A CUDA driver without a GPU: streams are threads, device memory is this process's own.

As much of cuda.bindings.driver as ``cuda/driver.py`` calls for loops and counted links, with its
order: what is queued on a stream runs one after the other, and streams wait for events and values
only. Time is CLOCK_MONOTONIC, but for how late a thread wakes up: what a stream does begins when it
was queued, or when what it waited for happened, whichever is later, and what is no kernel takes 1
µs. So stamps keep the order that a device would give them, however busy the machine is.
Not a model of speed, and kernels are plain functions (``queue_call``).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

OK, INVALID_HANDLE, NOT_READY = 0, 400, 600
CYCLE = 1 << 32
PLACES = 1000  # of a stream's queue: who launches into a full one is held up, as by the driver
NODES = 5000  # of graphs, that fill it, too
HELD_LIMIT_S = 3.0  # then the test fails: nobody may be held up so long
AGAIN_S = 0.02  # a wait looks by itself so often, for what no stream has done
STEP_NS = 1000


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
    """A thread that runs what is queued, in order; errors are kept for the test.

    Attributes:
        driver: whose it is.
        now_ns: the time that this stream has come to.
    """

    def __init__(self, driver: FakeDriver) -> None:
        self._queue: SimpleQueue[tuple[int, Callable[[], None], bool, int] | None] = SimpleQueue()
        self.now_ns = 0
        self.pending = 0
        self._nodes = 0  # of these, nodes of graphs
        self._awaited: Callable[[], bool] | None = None  # what it waits for now
        self._look = threading.Event()
        self._room = threading.Condition()
        self.driver = driver
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __int__(self) -> int:
        return id(self)

    def queue(self, work: Callable[[], None], *, takes_time: bool = False, nodes: int = 0) -> None:
        """Takes a place, or a share of one for each of ``nodes`` of a graph.

        Holds up the caller until the last of them would have room.
        """
        with self._room:
            if not self._has_room(nodes) and self._awaited is not None and not self._awaited():
                self.driver.stood_behind_waits += 1
            if not self._room.wait_for(lambda: self._has_room(nodes), HELD_LIMIT_S):
                who = threading.current_thread().name
                text = f"a launch by {who} stood for {HELD_LIMIT_S} s behind {self.pending}"
                self.driver.failures.append(TimeoutError(text))
                self.driver.ended = True
            self.pending += max(1, nodes)
            self._nodes += nodes
        self._queue.put((time.monotonic_ns(), work, takes_time, nodes))

    def saw(self, at_ns: int) -> None:
        """What runs now waited for something that happened then."""
        self.now_ns = max(self.now_ns, at_ns)

    def wrote(self, address: int, value: int) -> None:
        """What runs now is about to write a counter."""
        self.driver.written.setdefault(address, []).append((value, self.now_ns))

    def see_count(self, address: int, value: int) -> None:
        """Waits until the 32 bits at ``address`` have reached ``value``."""
        word = ctypes.c_uint32.from_address(address)
        self._wait_until(lambda: _reached(word.value, value))
        written = self.driver.written.get(address, [])
        self.saw(next((at for found, at in written if _reached(found, value)), self.now_ns))

    def see_event(self, record: Record) -> None:
        """Waits until an event was recorded."""
        self._wait_until(record.done.is_set)
        self.saw(record.at_ns)

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        self._awaited = happened
        self.driver.waiting.append(self)  # before the first look: what happens behind it wakes
        while not happened() and not self.is_ended:
            self._look.wait(AGAIN_S)
            self._look.clear()
        self.driver.waiting.remove(self)
        self._awaited = None

    @property
    def stands(self) -> bool:
        """Whether it has come to a wait for something that has not happened yet."""
        return (awaited := self._awaited) is not None and not awaited()

    def _has_room(self, nodes: int) -> bool:
        launches, nodes_before = self.pending - self._nodes, self._nodes + max(0, nodes - 1)
        return launches / PLACES + nodes_before / NODES < 1 or self.driver.ended

    @property
    def is_ended(self) -> bool:
        """The test is over: nothing is waited for any more."""
        return self.driver.ended

    def look(self) -> None:
        """Ends a wait for what has happened by now."""
        if (awaited := self._awaited) is not None and awaited():
            self._look.set()

    def let_go(self) -> None:
        self._look.set()
        with self._room:
            self._room.notify_all()

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            queued_ns, work, takes_time, nodes = queued
            self.saw(queued_ns)
            began_ns = time.monotonic_ns()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                self.driver.failures.append(error)
            self.now_ns += time.monotonic_ns() - began_ns if takes_time else STEP_NS
            if not takes_time:  # no kernel: it may have written a counter, or marked an event
                for stream in tuple(self.driver.waiting):
                    stream.look()
            with self._room:
                self.pending -= max(1, nodes)
                self._nodes -= nodes
                self._room.notify_all()


class FakeDriver:
    """Stands for the module; functions return tuples that begin with an error code."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.failures: list[BaseException] = []
        self.stood_behind_waits = 0  # launches into a full queue, for something yet to happen
        self.written: dict[int, list[tuple[int, int]]] = {}  # counters by address: values, and when
        self.spinning: list[FakeStream] = []  # those that were given a wait by a kernel
        self.spins: list[tuple[FakeStream, int]] = []  # and when each came to it
        self.graphs_launched = 0
        self.waiting: list[FakeStream] = []
        self.ended = False

    def close(self) -> None:
        """End all streams; whoever still waits is let go."""
        self.ended = True
        for stream in self.streams:
            stream.let_go()
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
            record.at_ns = stream.now_ns
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
        stream.queue(lambda: stream.see_event(record))
        return (OK,)

    def cuStreamWaitValue32(
        self, stream: FakeStream, address: int, value: int, flags: int
    ) -> tuple[int]:
        stream.queue(lambda: stream.see_count(address, value))
        return (OK,)

    def cuStreamWriteValue32(
        self, stream: FakeStream, address: int, value: int, flags: int
    ) -> tuple[int]:
        word = ctypes.c_uint32.from_address(address)

        def write() -> None:
            stream.wrote(address, value)
            word.value = value

        stream.queue(write)
        return (OK,)

    def cuMemcpyAsync(self, to: int, source: int, size: int, stream: FakeStream) -> tuple[int]:
        stream.queue(lambda: ctypes.memmove(to, source, size))
        return (OK,)

    def cuGraphCreate(self, flags: int) -> tuple[int, list[Any]]:
        return OK, []

    def cuGraphInstantiate(self, graph: list[Any], flags: int) -> tuple[int, list[Any]]:
        return OK, [*graph]

    def cuGraphDestroy(self, graph: list[Any]) -> tuple[int]:
        graph.clear()
        return (OK,)

    def cuGraphLaunch(self, graph: list[Any], stream: FakeStream) -> tuple[int]:
        self.graphs_launched += 1
        for work, takes_time, nodes in graph:
            stream.queue(partial(work, stream), takes_time=takes_time, nodes=nodes)
        return (OK,)

    def cuStreamQuery(self, stream: FakeStream) -> tuple[int]:
        return (NOT_READY if stream.pending else OK,)


def _reached(count: int, value: int) -> bool:
    """Whether a counter that only grows, and compares cyclically, has come to ``value``."""
    return (count - value) % CYCLE < CYCLE // 2


class FakePart:
    """A part of a graph that calls ``work`` when a stream is there; ``more`` nodes do nothing."""

    def __init__(self, work: Callable[[], None], more: int = 0) -> None:
        self._work, self._more = work, more

    def add_to(self, graph: list[Any], after: list[int]) -> int:
        assert after == [len(graph) - 1][: len(graph)], "not behind the part before it"
        graph.append((lambda stream: self._work(), True, 1))
        if self._more:
            graph.append((lambda stream: None, True, self._more))
        return len(graph) - 1


def queue_call(stream: Any, call: Callable[[], None], *, nodes: int = 0) -> None:
    """What a kernel is elsewhere, or so many of a graph; ``stream`` is a memops.CudaStream."""
    stream.handle.queue(call, takes_time=True, nodes=nodes)
