"""The time-stamp logger: the loops fill preallocated records, a thread writes them as JSON lines.

The loops never format, never touch a file and never wait here. When the disk is slower than the
loop the ring runs full: records are then counted as lost, and the run goes on. What is written is
flushed with every batch, so a killed process loses at most the last ``DRAIN_INTERVAL_S``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from ppstream.analysis.records import EnvelopeLine, PolicyLine
from ppstream.core.clock import now_ns

logger = logging.getLogger("ppstream")

DRAIN_INTERVAL_S: Final = 0.1
FLUSH_TIMEOUT_S: Final = 2.0
LINES_MAX: Final = 65536  # events waiting for the disk
FILE_MODE: Final = 0o640


def _record(name: str, line: type) -> Any:
    """Returns a struct with the fields of ``line``: cheaper to copy, fill and encode."""
    declared = [(each.name, Any, each.default) for each in fields(line)]
    return msgspec.defstruct(
        name, [*declared, ("done", bool, False)], module=__name__, gc=False, omit_defaults=True
    )


if TYPE_CHECKING:

    class EnvelopeRecord(EnvelopeLine):
        """One envelope as rank 0 saw it.

        Owned by the loop between ``TimestampLog.take`` and ``commit``, by the log otherwise.
        """

        done: bool = False  # the log's own mark, never written

    class PolicyRecord(PolicyLine):
        """One envelope as the policy rank saw it."""

        done: bool = False  # the log's own mark, never written

else:
    EnvelopeRecord = _record("EnvelopeRecord", EnvelopeLine)
    PolicyRecord = _record("PolicyRecord", PolicyLine)


class Watcher(Protocol):
    """Sees all that the log writes, on the drain thread; may keep what it is given."""

    def record(self, record: Any, /) -> None: ...

    def line(self, line: Mapping[str, Any], /) -> None: ...


class LogStatistics(msgspec.Struct, frozen=True):
    """Fate of the records so far."""

    written: int
    lost: int  # the ring was full, or the disk refused
    write_errors: int
    refused: str = ""  # why the disk did so last; empty: it never did


class TimestampLog:
    """A ring of ``size`` records between one loop and one file.

    ``take`` belongs to the thread that begins envelopes, ``commit`` to the one that ends them;
    ``event`` and ``line`` may be called from any thread. The file is private to user and group.

    Attributes:
        mode: ``throughput``, or ``trace`` while a profiler runs.
        apart: written in place of ``throughput``, of envelopes that nobody judges; empty: nothing.
        on_acquire: called by ``take``, between two envelopes of its thread; None: nobody asked.
        on_next_acquire: as ``on_acquire``, once; a later assignment replaces an earlier one.
        queues_ahead: the loop queues on a device, and heeds ``on_idle``.
        on_idle: until the loop has run dry and called it, it queues nothing new; None: go on.
        watchers: one that raises is left out from then on.
    """

    def __init__(
        self,
        path: Path,
        record: type[EnvelopeRecord] | type[PolicyRecord],
        size: int,
        *,
        run_id: str,
        generation: int,
    ) -> None:
        kind = "envelope" if record is EnvelopeRecord else "stage1"
        self.path = path
        self.mode = "throughput"
        self.apart = ""
        self.on_acquire: Callable[[], None] | None = None
        self.on_next_acquire: Callable[[], None] | None = None
        self.queues_ahead = False
        self.on_idle: Callable[[], None] | None = None
        self.watchers: list[Watcher] = []
        self.run_id = run_id
        self.generation = generation
        self._constant = {"run_id": run_id, "generation": generation}
        make: Callable[..., Any] = record
        self._blank = make(
            kind=kind, run_id=run_id, generation=generation, lane=0, mode="throughput"
        )
        self._ring = [replace(self._blank) for _ in range(size)]
        self._spare = replace(self._blank)
        self._taken = 0
        self._drained = 0
        self._lines: deque[dict[str, Any]] = deque()
        self._encoder = msgspec.json.Encoder()
        self._written = 0
        self._lost = 0
        self._write_errors = 0
        self._refused = ""
        self._torn = False  # the last write stopped in the middle of a line
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, FILE_MODE)
        self._wake = threading.Event()
        self._drained_once = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._drain, name="timestamps", daemon=True)
        self._thread.start()

    def acquire(self) -> Any:
        """A blank record to fill; a spare that goes nowhere when the ring is full."""
        if self.on_acquire is not None:
            self.on_acquire()
        if self.on_next_acquire is not None:
            act, self.on_next_acquire = self.on_next_acquire, None
            act()
        if self._taken - self._drained >= len(self._ring):
            self._lost += 1
            return self._spare
        record = self._ring[self._taken % len(self._ring)]
        self._taken += 1
        record.mode = self.record_mode
        return record

    @property
    def record_mode(self) -> str:
        """Mode of the next record: what its times are worth."""
        return self.apart if self.apart and self.mode == "throughput" else self.mode

    def when_idle(self, act: Callable[[], None]) -> None:
        """Have ``act`` called when nothing of the loop is queued: now, unless it queues ahead.

        To be called where ``on_acquire`` is; ``act`` is called on the same thread.
        """
        if self.queues_ahead:
            self.on_idle = act
        else:
            act()

    def run_when_idle(self) -> None:
        """The loop is idle: call the action that waits for that."""
        act, self.on_idle = self.on_idle, None
        if act is not None:
            act()

    def commit(self, record: Any) -> None:
        """The record is complete: the drain thread may write it."""
        record.done = True

    def event(self, name: str, **fields: Any) -> None:
        """One rare thing that happened (a phase, a cut, a fault), stamped now."""
        self.line("event", name=name, **fields)

    def line(self, kind: str, **fields: Any) -> None:
        """A line of another kind (``ledger``, ``robot``), stamped now."""
        if len(self._lines) >= LINES_MAX:
            self._lost += 1
            return
        self._lines.append({"kind": kind, **self._constant, "t": now_ns(), **fields})

    def flush(self) -> bool:
        """Wait until everything committed before this call is in the file; False after 2 s."""
        for _ in range(2):  # a pass that had begun before this call may have missed the newest
            self._drained_once.clear()
            self._wake.set()
            if not self._drained_once.wait(FLUSH_TIMEOUT_S):
                return False
        return True

    def close(self) -> None:
        """Write what is left, tell what is lost, and close the file; bounded."""
        self._closing = True
        self._wake.set()
        self._thread.join(FLUSH_TIMEOUT_S)
        if self._lost:
            why = self._refused or "log.ring was full, or they are no JSON"
            lines = self._lost + self._written
            logger.warning("%s lacks %d of %d lines: %s", self.path, self._lost, lines, why)
        if not self._thread.is_alive():
            os.close(self._file)

    def statistics(self) -> LogStatistics:
        return LogStatistics(self._written, self._lost, self._write_errors, self._refused)

    def _drain(self) -> None:
        while not self._closing:
            self._wake.wait(DRAIN_INTERVAL_S)
            self._wake.clear()
            self._write_batch()
            self._drained_once.set()
        self._write_batch()

    def _write_batch(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        records = []
        while self._drained < self._taken:
            record = self._ring[self._drained % len(self._ring)]
            if not record.done:
                break
            record.done = False
            records.append(record)
            self._ring[self._drained % len(self._ring)] = replace(self._blank)
            self._drained += 1
        if lines or records:
            batch = [*lines, *records]  # of a tuple msgspec 0.22 keeps an object for good
            try:
                data = self._encoder.encode_lines(batch)
            except Exception:  # noqa: BLE001 - the log goes on, whatever it is given
                found: list[bytes] = []
                lines, records = (
                    [one for one in part if self._add(one, found)] for part in (lines, records)
                )
                data = b"".join(found)
            self._write(data)
        for watcher in tuple(self.watchers):
            self._show(watcher, lines, records)

    def _add(self, line: Any, encoded: list[bytes]) -> bool:
        """Encodes a line once; False of one that is no JSON, as of a lone surrogate: lost alone."""
        try:
            encoded.append(self._encoder.encode(line) + b"\n")
        except Exception as error:  # noqa: BLE001 - as above
            self._lost += 1
            logger.error("a line of the log is lost: %s", error)
            return False
        return True

    def _show(self, watcher: Watcher, lines: list[dict[str, Any]], records: list[Any]) -> None:
        try:
            for line in lines:
                watcher.line(line)
            for record in records:
                watcher.record(record)
        except Exception:  # the top of a thread, too: the log outlives its watchers
            logger.exception("%s stopped watching the log", type(watcher).__name__)
            self.watchers.remove(watcher)

    def _write(self, data: bytes) -> None:
        lines = data.count(b"\n")
        if self._torn:
            data = b"\n" + data
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:  # disk full or gone: the run matters more than its log
            if not self._write_errors:
                logger.warning(
                    "cannot write to %s: %s; its lines are lost until it can: make room, as by "
                    "deleting old runs, and set a smaller log.keep",
                    self.path,
                    error.strerror or type(error).__name__,
                )
            self._write_errors += 1
            self._refused = error.strerror or type(error).__name__
            self._torn = True
        else:
            self._torn = False
        lost = min(lines, data.count(b"\n"))  # those before the first cut one are there
        self._lost += lost
        self._written += lines - lost
