"""ItemQueue: a bounded queue between the loops of a run and a thread that writes what they saw.

The loops copy some hundred bytes into it and never wait. When the disk, or the reader of a pipe, is
slower than the run or gone, what does not fit is dropped and counted, and the run goes on. A full
disk that has room again is written to again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from ppstream.recording.items import Cleared, FrameItem, SamplesItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.recording.items import Item

logger = logging.getLogger("ppstream")

WRITE_INTERVAL_S: Final = 0.1  # a wake-up costs as much as a few messages: not too many
CLOSE_LIMIT_S: Final = 2.0
RESUME_INTERVAL_S: Final = 2.0  # between two attempts to begin again
THREAD: Final = "recorder"
FRAMES_SHARE: Final = 7 / 8  # of a queue's bytes
QUEUE_MAX: Final = 1 << 16  # items, whatever their size


class Sink(Protocol):
    """Destination of items; called by the queue's thread alone, may block and raise OSError."""

    def write(self, items: Sequence[Item]) -> None: ...

    def resume(self) -> bool:
        """Begin again behind an OSError; False: it never can, as a pipe whose reader has left."""

    def close(self) -> None: ...


class QueueStatistics(msgspec.Struct, frozen=True):
    """Counts of items: handed over = written + dropped + waiting."""

    written: int
    dropped: int
    waiting: int
    failure: str  # why nothing is written now; empty: all is well


class ItemQueue:
    """Items in the order in which they were put, to one sink.

    Frames are dropped from ``FRAMES_SHARE`` of ``queue_bytes`` on: they never displace samples.
    ``put`` may be called from any thread, with samples and frames from one alone.

    Args:
        name: in messages: the recording, the live view.
        open_sink: opens what is written to; called by the thread, since it may block.
        queue_bytes: of samples and frames that may wait.
        items_max: that may wait, whatever their size; as many resets may wait above it.
        remedy: of a queue that is too small.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        queue_bytes: int,
        items_max: int = QUEUE_MAX,
        remedy: str = "make its queue larger",
    ) -> None:
        self.name = name
        self._open_sink = open_sink
        self._queue_bytes = queue_bytes
        self._items_max = items_max
        self._remedy = remedy
        self._is_loss_said = False
        self._queue: deque[Item] = deque()
        self._offered_bytes = 0  # of samples and frames: written by the thread that puts them,
        self._taken_bytes = 0  # and by the queue's own
        self._written = 0
        self._dropped = 0  # by the threads that put: too much waits,
        self._refused = 0  # or nothing is written,
        self._drop_lock = threading.Lock()
        self._lost = 0  # and by the queue's own
        self._failure = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item, or drop and count it."""
        size = _size(item)
        waiting = self._offered_bytes - self._taken_bytes
        if (
            (size and waiting + size > self._queue_bytes)
            or (isinstance(item, FrameItem) and waiting > FRAMES_SHARE * self._queue_bytes)
            or len(self._queue) >= self._items_max * (1 + isinstance(item, Cleared))
            or (self._failure and not isinstance(item, Cleared))
            or self._closing.is_set()
        ):
            with self._drop_lock:
                if self._failure:
                    self._refused += 1
                else:
                    self._dropped += 1
            return
        if size:  # else another thread's sum would be overwritten
            self._offered_bytes += size
        self._queue.append(item)

    def close(self) -> None:
        """Write what waits, and close the sink; bounded, whatever the sink does."""
        self._closing.set()
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._failure = f"the writer did not finish within {CLOSE_LIMIT_S:g} s"
        found = self.statistics()
        lost = found.dropped + found.waiting
        self.say_loss()
        if found.failure or lost:
            why = f": {found.failure}" if found.failure else ""
            logger.warning("%s: %d items lost of %d%s", self.name, lost, lost + found.written, why)

    def say_loss(self) -> None:
        """Say once that items are lost, and the remedy; for who may wait for a log."""
        if self._dropped and not self._is_loss_said:
            self._is_loss_said = True
            text = "%s: loses items, %d so far: the disk, the CPU or the reader is too slow; %s"
            logger.warning(text, self.name, self._dropped, self._remedy)

    def statistics(self) -> QueueStatistics:
        """A copy; from any thread."""
        dropped = self._dropped + self._refused + self._lost
        return QueueStatistics(self._written, dropped, len(self._queue), self._failure)

    # ---- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            sink = self._open_sink()
            while self._is_writing(sink) and not self._closing.wait(WRITE_INTERVAL_S):
                pass
            if not self._failure:
                self._is_writing(sink)
            sink.close()
        except OSError as error:
            self._fail(error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - the top of a thread: the run goes on
            self._fail(f"{type(error).__name__}: {error}")

    def _is_writing(self, sink: Sink) -> bool:
        """Write what waits; behind a failure until it succeeds again. False: never, or closing."""
        try:
            self._write_batch(sink)
        except OSError as error:  # disk full or gone, reader left: the run matters more
            self._fail(error.strerror or str(error))
            return self._is_resumed(sink)
        return True

    def _is_resumed(self, sink: Sink) -> bool:
        while not self._closing.wait(RESUME_INTERVAL_S):
            with suppress(OSError):
                if not sink.resume():
                    return False
                lost = self.statistics().dropped
                logger.warning("%s goes on, %d items are lost", self.name, lost)
                self._failure = ""
                return True
        return False

    def _fail(self, why: str) -> None:
        if not self._failure:  # else close() has given up waiting, and said so
            self._failure = why
            logger.warning("%s stopped, the run goes on: %s", self.name, why)
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            self._taken_bytes += _size(item)
            if isinstance(item, Cleared):
                self._queue.append(item)
            else:
                self._lost += 1

    def _write_batch(self, sink: Sink) -> None:
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        self._taken_bytes += sum(map(_size, batch))
        if batch:
            try:
                sink.write(batch)
            except BaseException:
                resets = [item for item in batch if isinstance(item, Cleared)]
                self._queue.extendleft(reversed(resets))
                self._lost += len(batch) - len(resets)
                raise
            self._written += len(batch)


def _size(item: Item) -> int:
    return item.size if isinstance(item, SamplesItem | FrameItem) else 0
