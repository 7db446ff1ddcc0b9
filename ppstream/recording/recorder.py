"""Recorder: what a run took in and gave out, handed over by its loops to the queues that write it.

A recording's queue writes MCAP to disk, a live view's to the process that serves viewers; each
drops by itself what does not fit. What a recording looks like is ``mcap_writer.py``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.recording.items import (
    Cleared,
    Emitted,
    EnvelopeItem,
    FrameItem,
    FrameTap,
    Item,
    LoggedLine,
    RecordedRow,
    RowMark,
    RowTap,
    RowWindow,
    SamplesItem,
    WindowOwner,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ppstream.recording.item_queue import ItemQueue
    from ppstream.wire.robot_messages import ActionChunk, Emitter

FRAME_INTERVAL_NS: Final = 200 * NS_PER_MS  # of one camera in a live view: its frames are large
NAMES_MAX: Final = 1000  # each has channels of its own, in a recording and in a live view
ENVELOPE_INTERVAL_NS: Final = 10 * NS_PER_MS  # in a live view: bring-up may have thousands a second


logger = logging.getLogger("ppstream")


class Recorder:
    """Copies what the loops tell it, for a recording, a live view, or both.

    ``tap`` and what it attaches belong to the thread that owns the rows, as do ``marks`` and
    ``windows``; ``chunk``, ``line`` and ``record`` may be called from any one other thread each.

    Args:
        recording: takes samples, windows, chunks, resets, events and reports.
        view: takes the same, the ages of a hundred envelopes a second, and five frames a second of
            each camera.
        keeps_frames: the recording takes every frame, too.
        names_max: robots that are recorded by their names; others are by their row, ``row0``.
    """

    def __init__(
        self,
        recording: ItemQueue | None,
        view: ItemQueue | None = None,
        *,
        keeps_frames: bool = False,
        names_max: int = NAMES_MAX,
    ) -> None:
        self.recording = recording
        self._kept = recording if keeps_frames else None  # gets frames
        self.view = view
        self.queues = tuple(queue for queue in (recording, view) if queue is not None)
        self._rows: list[RowTap] = []
        self._names_max = names_max
        self._names: set[str] = set()
        self._is_full = False  # of names, and it was said
        self._counts: dict[str, dict[str, int]] = {}
        self._frames_ns: dict[tuple[str, str], int] = {}  # arrival of the newest one taken
        self._envelope_ns = 0  # end of the newest one taken
        self._dropped = dict.fromkeys(self.queues, 0)  # when it was looked at last,
        self._dropping: set[ItemQueue] = set()  # and those that had dropped something

    # ---- what the loops call ---------------------------------------------------------------

    def tap(self, rows: Sequence[RecordedRow]) -> None:
        """Record what these rows' rings are given from now on."""
        for row in rows:
            parts = self, row, len(self._rows), self._has_name
            tap = RowTap(*parts)
            self._rows.append(tap)
            for ring in row.rings.values():
                ring.tap = tap if ring.stream.image is None else FrameTap(*parts)

    def samples(
        self, robot: str, stream: str, stamps: NDArray[Any], values: NDArray[Any], rx_ns: int
    ) -> None:
        """Copy what arrived; not called for more than one robot at a time."""
        first, end = self._count(robot, stream, len(stamps))
        self._put(SamplesItem(robot, stream, first, end, stamps.tobytes(), values.tobytes(), rx_ns))

    def frames(
        self, robot: str, stream: str, stamps: NDArray[Any], values: NDArray[Any], rx_ns: int
    ) -> None:
        """Copy frames that arrived: for a recording all, for a view the newest one now and then."""
        camera, first = (robot, stream), 0
        is_shown = rx_ns >= self._frames_ns.get(camera, 0) + FRAME_INTERVAL_NS
        if self._kept is not None:
            first, _ = self._count(robot, stream, len(stamps))
        elif self.view is not None and is_shown:
            stamps, values = stamps[-1:], values[-1:]
        else:
            return
        for place, stamp_ns in enumerate(stamps.tolist()):
            pixels = values[place].tobytes()
            item = FrameItem(*camera, first + place, stamp_ns, pixels, rx_ns)
            if self._kept is not None:
                self._kept.put(item)
        if self.view is not None and is_shown:
            self._frames_ns[camera] = rx_ns
            self.view.put(item)

    def cleared(self, robot: str, reason: str) -> None:
        self._put(Cleared(robot, now_ns(), reason, dict(self._counts_of(robot))))

    def marks(self) -> list[RowMark]:
        """Returns what has come into each row by now, for windows that are told of later."""
        return [RowMark(tap.clears, dict(self._counts_of(tap.robot))) for tap in self._rows]

    def windows(
        self,
        at_ns: int,
        epoch: int,
        seq: int,
        phase: str,
        windows: Sequence[WindowOwner],
        marks: Sequence[RowMark] | None = None,
    ) -> None:
        """One envelope's windows were cut, one of each row: just now, or of what ``marks`` tells.

        A row that was emptied since has no window: its envelope is dropped, and a replay that
        emptied the row would find nothing to cut it from.
        """
        told = zip(self._rows, windows, self.marks() if marks is None else marks, strict=True)
        for tap, window, mark in told:
            if window.present and mark.clears == tap.clears:
                ends = window.episode, window.window_end_ns, window.expires_ns
                self._put(RowWindow(tap.robot, at_ns, epoch, seq, phase, *ends, mark.samples))

    def emitter(self, emitter: Emitter | None) -> Emitter:
        """An emitter that records what it hands on to ``emitter``."""
        return RecordedEmitter(self, emitter)

    def chunk(self, row: int, chunk: ActionChunk, dropped: str | None) -> None:
        actions = memoryview(bytes(chunk.actions))
        copied = msgspec.structs.replace(chunk, actions=actions, provenance=None)
        self._put(Emitted(self._rows[row].robot, now_ns(), copied, dropped or ""))

    def line(self, line: Mapping[str, Any], /) -> None:
        """A line of the log; ledgers are not recorded."""
        if line["kind"] in ("event", "robot"):
            self._put(LoggedLine(line["t"], line))

    def record(self, record: Any, /) -> None:
        """An envelope of the log: told when it was dropped, and to a live view now and then."""
        if record.kind != "envelope":
            return
        at_ns = record.tEmit or record.tDecode or now_ns()
        if record.drop is not None:
            fields = {"name": "drop", "epoch": record.epoch, "seq": record.seq}
            self._put(LoggedLine(at_ns, {"kind": "event", **fields, "reason": record.drop}))
        if self.view is not None and at_ns >= self._envelope_ns + ENVELOPE_INTERVAL_NS:
            self._envelope_ns = at_ns
            self.view.put(EnvelopeItem(at_ns, record))

    def losses(self) -> list[dict[str, Any]]:
        """Fields of an event for each queue that began or ceased to drop since the last call.

        A queue's first loss is said, too. One that has failed drops, whether anything comes or not.
        """
        news = []
        for queue in self.queues:
            queue.say_loss()
            found = queue.statistics()
            is_dropping = found.dropped > self._dropped[queue] or bool(found.failure)
            self._dropped[queue] = found.dropped
            if is_dropping != (queue in self._dropping):
                self._dropping ^= {queue}
                news.append({"to": queue.name, **msgspec.structs.asdict(found)})
        return news

    def close(self) -> list[dict[str, Any]]:
        """Write what waits, and complete the file; bounded, whatever disk and viewers do.

        Returns:
            Fields of an event for each queue: its items, and why it stopped, if it did.
        """
        for queue in self.queues:
            queue.close()
        return [{"to": one.name, **msgspec.structs.asdict(one.statistics())} for one in self.queues]

    def _has_name(self, robot: str) -> bool:
        """True when it is recorded by its name: a run may meet any number of robots."""
        if robot in self._names:
            return True
        if not robot:
            return False
        if len(self._names) < self._names_max:
            self._names.add(robot)
            return True
        if not self._is_full:
            self._is_full = True
            text = "%d robots were recorded by their names: %s and others are by row, as row0"
            logger.warning(text, self._names_max, robot)
        return False

    def _put(self, item: Item) -> None:
        for queue in self.queues:
            queue.put(item)

    def _count(self, robot: str, stream: str, samples: int) -> tuple[int, int]:
        """Number of the first of these samples in its stream, and the one behind the last."""
        counts = self._counts_of(robot)
        first = counts.get(stream, 0)
        counts[stream] = first + samples
        return first, first + samples

    def _counts_of(self, robot: str) -> dict[str, int]:
        counts = self._counts.get(robot)
        if counts is None:
            counts = self._counts[robot] = {}
        return counts


class RecordedEmitter:
    """Hands chunks on, and tells the recorder what became of them."""

    def __init__(self, recorder: Recorder, emitter: Emitter | None) -> None:
        self._recorder = recorder
        self._emitter = emitter

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        dropped = None if self._emitter is None else self._emitter.emit(row, chunk)
        self._recorder.chunk(row, chunk, dropped)
        return dropped
