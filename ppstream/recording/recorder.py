"""Recorder: what a run took in and gave out, handed over by its loops and written by a thread.

The loops copy some hundred bytes into a bounded queue and never wait. When the disk, or the reader
of a pipe, is slower than the run or gone, what does not fit is dropped and counted, and the run
goes on. What a recording looks like is ``mcap_writer.py``'s.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from ppstream.core.clock import now_ns
from ppstream.recording.items import (
    Cleared,
    Cut,
    Emitted,
    Item,
    LoggedLine,
    Row,
    RowTap,
    SamplesItem,
    WindowOwner,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ppstream.wire.robot_messages import ActionChunk, Emitter

logger = logging.getLogger("ppstream")

WRITE_INTERVAL_S: Final = 0.1  # a wake-up costs as much as a few messages: not too many
CLOSE_LIMIT_S: Final = 2.0
QUEUE_MAX: Final = 1 << 16  # items, whatever their size


class Sink(Protocol):
    """Destination of items; called by the recorder's thread alone, may block and raise OSError."""

    def write(self, items: Sequence[Item]) -> None: ...

    def close(self) -> None: ...


class RecorderStatistics(msgspec.Struct, frozen=True):
    """Counts of items: handed over = written + dropped + waiting."""

    written: int
    dropped: int
    waiting: int
    failure: str  # why nothing is written any more; empty: all is well


class Recorder:
    """A bounded queue between the loops and a thread that writes.

    ``tap`` and what it attaches belong to the thread that owns the rows, as does ``windows``;
    ``chunk``, ``line`` and ``record`` may be called from any one other thread each.

    Args:
        open_sink: opens what is written to; called by the thread, since it may block.
        queue_bytes: samples that may wait.
    """

    def __init__(self, open_sink: Callable[[], Sink], queue_bytes: int) -> None:
        self._open_sink = open_sink
        self._queue_bytes = queue_bytes
        self._queue: deque[Item] = deque()
        self._rows: list[RowTap] = []
        self._counts: dict[str, dict[str, int]] = {}
        self._offered_bytes = 0  # of samples: written by the rows' thread alone,
        self._taken_bytes = 0  # and by the recorder's
        self._written = 0
        self._dropped = 0  # by the threads that hand over,
        self._drop_lock = threading.Lock()
        self._lost = 0  # and by the recorder's own
        self._failure = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    # ---- what the loops call ---------------------------------------------------------------

    def tap(self, rows: Sequence[Row]) -> None:
        """Record what these rows' rings are given from now on; frames of cameras are not."""
        for row in rows:
            tap = RowTap(self, row, len(self._rows))
            self._rows.append(tap)
            for ring in row.rings.values():
                if ring.stream.image is None:
                    ring.tap = tap

    def samples(
        self, robot: str, stream: str, stamps: NDArray[Any], values: NDArray[Any], rx_ns: int
    ) -> None:
        """Copy what arrived; not called for more than one robot at a time."""
        counts = self._counts_of(robot)
        first = counts.get(stream, 0)
        counts[stream] = end = first + len(stamps)
        if self._failure:
            self._drop()
            return
        item = SamplesItem(robot, stream, first, end, stamps.tobytes(), values.tobytes(), rx_ns)
        size = item.size
        if self._offered_bytes - self._taken_bytes + size > self._queue_bytes:
            self._drop()
            return
        self._offered_bytes += size
        if not self._offer(item):
            self._offered_bytes -= size

    def cleared(self, robot: str, reason: str) -> None:
        self._offer(Cleared(robot, now_ns(), reason, dict(self._counts_of(robot))))

    def windows(
        self, at_ns: int, epoch: int, seq: int, phase: str, windows: Sequence[WindowOwner]
    ) -> None:
        """One envelope's windows were just cut, one of each row."""
        for tap, window in zip(self._rows, windows, strict=True):
            if window.present:
                robot = tap.robot
                ends = window.episode, window.window_end_ns, window.expires_ns
                counts = dict(self._counts_of(robot))
                self._offer(Cut(robot, at_ns, epoch, seq, phase, *ends, counts))

    def emitter(self, emitter: Emitter | None) -> Emitter:
        """An emitter that records what it hands on to ``emitter``."""
        return RecordedEmitter(self, emitter)

    def chunk(self, row: int, chunk: ActionChunk, dropped: str | None) -> None:
        actions = memoryview(bytes(chunk.actions))
        copied = msgspec.structs.replace(chunk, actions=actions, provenance=None)
        self._offer(Emitted(self._rows[row].robot, now_ns(), copied, dropped or ""))

    def line(self, line: Mapping[str, Any], /) -> None:
        """A line of the log; ledgers are not recorded."""
        if line["kind"] in ("event", "robot"):
            self._offer(LoggedLine(line["t"], line))

    def record(self, record: Any, /) -> None:
        """An envelope of the log: told when it was dropped."""
        if record.drop is not None and record.kind == "envelope":
            fields = {"name": "drop", "epoch": record.epoch, "seq": record.seq}
            at_ns = record.tDecode or now_ns()
            self._offer(LoggedLine(at_ns, {"kind": "event", **fields, "reason": record.drop}))

    def close(self) -> None:
        """Write what waits, and complete the file; bounded, whatever the disk does."""
        self._closing.set()
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._failure = f"the writer did not finish within {CLOSE_LIMIT_S:g} s"
        found = self.statistics()
        lost = found.dropped + found.waiting
        if found.failure or lost:
            logger.warning(
                "recording: %d items lost of %d%s", lost, lost + found.written, _why(found)
            )

    def statistics(self) -> RecorderStatistics:
        """A copy; from any thread."""
        dropped = self._dropped + self._lost
        return RecorderStatistics(self._written, dropped, len(self._queue), self._failure)

    def _offer(self, item: Item) -> bool:
        if len(self._queue) >= QUEUE_MAX or self._failure or self._closing.is_set():
            self._drop()
            return False
        self._queue.append(item)
        return True

    def _drop(self) -> None:
        with self._drop_lock:
            self._dropped += 1

    def _counts_of(self, robot: str) -> dict[str, int]:
        counts = self._counts.get(robot)
        if counts is None:
            counts = self._counts[robot] = {}
        return counts

    # ---- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            sink = self._open_sink()
            while not self._closing.wait(WRITE_INTERVAL_S):
                self._write_batch(sink)
            self._write_batch(sink)
            sink.close()
        except OSError as error:  # disk full or gone, reader left: the run matters more
            self._failure = error.strerror or str(error)
        except Exception as error:  # noqa: BLE001 - the top of a thread: the run goes on
            self._failure = f"{type(error).__name__}: {error}"
        if self._failure:
            self._lost += len(self._queue)
            self._queue.clear()
            logger.warning("recording stopped, the run goes on: %s", self._failure)

    def _write_batch(self, sink: Sink) -> None:
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        self._taken_bytes += sum(item.size for item in batch if isinstance(item, SamplesItem))
        if batch:
            try:
                sink.write(batch)
            except BaseException:
                self._lost += len(batch)
                raise
            self._written += len(batch)


class RecordedEmitter:
    """Hands chunks on, and tells the recorder what became of them."""

    def __init__(self, recorder: Recorder, emitter: Emitter | None) -> None:
        self._recorder = recorder
        self._emitter = emitter

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        dropped = None if self._emitter is None else self._emitter.emit(row, chunk)
        self._recorder.chunk(row, chunk, dropped)
        return dropped


def _why(found: RecorderStatistics) -> str:
    return f": {found.failure}" if found.failure else ""
