"""RecordFile: a run's recording as MCAP with JSON messages, which Foxglove and others read.

The only file that writes through ``mcap``. Log times are rank 0's monotonic clock and never go
back; a message's publish time is when it happened, which may lie a moment before. A file whose disk
ran full ends behind its last whole record.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.interpreter import InterpreterPauses
from ppstream.recording.camera_images import Form, encoded_image, need_jpeg
from ppstream.recording.item_queue import ItemQueue
from ppstream.recording.items import (
    Cleared,
    Emitted,
    EnvelopeItem,
    FrameItem,
    Item,
    LoggedLine,
    RowWindow,
    SamplesItem,
)
from ppstream.recording.mcap_schema import (
    ACTIONS,
    CAMERAS,
    ENVELOPES_TOPIC,
    EVENTS_TOPIC,
    GOES_ON,
    METADATA,
    REPORTS_TOPIC,
    RESETS,
    SAMPLES,
    VERSION,
    WINDOWS,
    Body,
    Chunk,
    EnvelopeAges,
    Event,
    JointBatch,
    JointState,
    Report,
    Reset,
    SampleBatch,
    Time,
    WindowHeader,
    json_schema,
    need_mcap,
    schema_name,
    topic,
)
from ppstream.recording.parts import create, new_file, part_of
from ppstream.recording.recorder import NAMES_MAX, Recorder

if TYPE_CHECKING:
    from ppstream.analysis.records import EnvelopeLine
    from ppstream.config.schema import PipelineConfig, StreamConfig

CHUNK_BYTES: Final = 1 << 17  # what a killed run loses at most
CHANNELS_MAX: Final = (1 << 16) - 1  # MCAP numbers them with 16 bits; each topic has one
OF_ALL: Final = EVENTS_TOPIC, REPORTS_TOPIC, ENVELOPES_TOPIC
OF_ROBOT: Final = WINDOWS, ACTIONS, RESETS  # beside one for each stream
MB: Final = 1_000_000
ROOM_BYTES: Final = 100 * MB  # on a disk that was full, unless a part is smaller
BATCH_NS: Final = 20 * NS_PER_MS  # samples of one message arrived within it
VIEW_ITEMS: Final = 4096  # that may wait for the live view: people want to see what is new
EVENT_FIELDS: Final = frozenset({"kind", "run_id", "generation", "t", "name", "text"})

encode: Final = msgspec.json.Encoder().encode


def open_recorder(
    config: PipelineConfig, run_id: str, view_fd: int | None = None
) -> Recorder | None:
    """The recorder that the configuration asks for, or None.

    Args:
        config: of the run.
        run_id: as in the log.
        view_fd: a pipe to the live view, the recorder's from now on; None: there is none.

    Raises:
        ConfigError: ``mcap``, or what encodes frames, is not installed.
    """
    record, recording, view = config.record, None, None
    if record.file is None and view_fd is None:
        return None
    need_mcap()
    form: Form = "raw" if record.frames == "raw" else "jpeg"
    keeps_frames = record.frames != "none" and bool(config.cameras)
    if record.file is not None:
        if keeps_frames and form == "jpeg":
            need_jpeg("record.frames")
        file, size = Path(record.file), round(record.queue_mb * MB)
        remedy = f"raise record.queue_mb ({record.queue_mb:g} MB)"
        if keeps_frames:
            other = "jpeg" if form == "raw" else "none"
            remedy += f', or set record.frames = "{other}"'
        recording = ItemQueue(
            "recording", lambda: RecordFile(file, config, run_id, form), size, remedy=remedy
        )
    if view_fd is not None:
        size = round(config.view.queue_mb * MB)
        remedy = f"raise view.queue_mb ({config.view.queue_mb:g} MB)"
        view = ItemQueue(
            "live view", lambda: RecordFile(view_fd, config, run_id), size, VIEW_ITEMS, remedy
        )
    most = names_max(config)
    return Recorder(recording, view, keeps_frames=keeps_frames, names_max=most)


def names_max(config: PipelineConfig) -> int:
    """Robots that have topics of their own: with those of every row they fit a file."""
    robots = (CHANNELS_MAX - len(OF_ALL)) // (len(OF_ROBOT) + len(config.streams))
    return min(NAMES_MAX, robots - config.batch.rows)


class McapMessage(NamedTuple):
    """A message to write, and when it happened."""

    at_ns: int
    topic: str
    schema: type[Body]
    data: bytes  # JSON
    number: int | None = None  # of a frame in its stream

    @classmethod
    def of(cls, at_ns: int, topic: str, body: Body) -> McapMessage:
        return cls(at_ns, topic, type(body), encode(body))


class RecordFile:
    """A sink of the recorder; belongs to its thread.

    A file that has grown to ``record.part_mb`` is completed, and the recording goes on in another:
    the index of a file is in memory until its end.

    Args:
        target: a path, of which a new file beside it is taken when it is there already, and a named
            pipe is written to once somebody reads it; or a descriptor, closed with the file.
            A pipe gets each message at once, a file larger chunks.
        config: streams, actions, and the size of a part.
        run_id: as in the log.
        frames: their form.
    """

    def __init__(
        self, target: Path | int, config: PipelineConfig, run_id: str, frames: Form = "preview"
    ) -> None:
        self._streams = {stream.name: stream for stream in config.streams}
        self._form: Form = frames
        self._facts = _facts(config, run_id)
        self._part_bytes = round(config.record.part_mb * MB)
        self._numbers: dict[str, int] = {}  # of the newest message, by topic
        self._newest_ns = 0
        self._parts = 0
        self._path: Path | None = None  # of the newest part; None: a pipe, which has none
        fd = target
        if not isinstance(fd, int):
            path, fd = new_file(fd)
            self._path = None if path.is_fifo() else path
        self._part = self._begun(fd, self._path)

    def write(self, items: Sequence[Item]) -> None:
        """Raises OSError when the disk is full or a pipe's reader has left; then see ``resume``."""
        try:
            self._write(items)
        except OSError:
            self._part.abandon()
            if self._path is not None and self._part.is_empty:
                self._path.unlink(missing_ok=True)
                self._parts -= 1
            raise

    def resume(self) -> bool:
        """Go on in a next part behind an OSError; False: a pipe. Raises OSError: not yet."""
        if self._path is None:
            return False
        disk, wanted = os.statvfs(self._path.parent), min(self._part_bytes, ROOM_BYTES)
        if disk.f_bavail * disk.f_frsize < wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._begin(self._path, 0 if self._part.is_empty else 1)
        return True

    def _write(self, items: Sequence[Item]) -> None:
        pauses = InterpreterPauses()
        singles = (self._message(item, pauses) for item in _single(items))
        found = [*_batches(items, self._streams), *singles]
        for message in sorted(found, key=lambda message: message.at_ns):
            is_full = self._part.size >= self._part_bytes and not self._part.is_empty
            if self._path is not None and is_full:
                self._part.close(goes_on=True)
                self._begin(self._path, 1)
            self._newest_ns = max(self._newest_ns, message.at_ns)
            before = self._numbers.get(message.topic, 0)
            number = before + 1 if message.number is None else message.number + 1
            self._numbers[message.topic] = number
            self._part.add(message, number, self._newest_ns)
        self._part.flush()

    def close(self) -> None:
        """Write the index; the file is complete, unless it was given up."""
        if self._part.is_open:
            self._part.close()

    def _begin(self, path: Path, step: int) -> None:
        """Begin the part so many places behind ``path``."""
        following = part_of(path, step)
        assert following is not None
        self._part = self._begun(create(following), following)
        self._path = following

    def _begun(self, fd: int, path: Path | None) -> McapPart:
        try:
            part = McapPart(fd, self._facts | {"part": str(self._parts + 1)})
        except OSError:
            os.close(fd)
            if path is not None:
                path.unlink(missing_ok=True)
            raise
        self._parts += 1
        return part

    def _message(self, item: Single, pauses: InterpreterPauses) -> McapMessage:
        if isinstance(item, FrameItem):
            name = topic(item.robot, CAMERAS, item.stream)
            image = encoded_image(item, self._streams[item.stream], self._form, pauses)
            return McapMessage(item.received_ns, name, *image, item.number)
        return _message(item)


class McapPart:
    """One file or pipe with messages.

    Args:
        fd: a descriptor, closed with it.
        facts: of the recording.
    """

    def __init__(self, fd: int, facts: dict[str, str]) -> None:
        from mcap.writer import CompressionType, Writer

        self._output = McapOutput(fd)
        output: Any = self._output  # no IO[bytes] of the standard library's, but all that is used
        self._writer: Any = Writer(
            output,
            chunk_size=CHUNK_BYTES,
            compression=CompressionType.LZ4,
            use_chunking=not self._output.is_pipe,
        )
        self._schemas: dict[type[Body], int] = {}
        self._channels: dict[str, int] = {}
        self._writer.start(profile="ppstream", library="ppstream")
        self._writer.add_metadata(METADATA, facts)
        self.flush()
        self._empty_size = self.size

    @property
    def is_open(self) -> bool:
        return self._output.is_open

    @property
    def is_empty(self) -> bool:
        """True when no message was written."""
        return self.size == self._empty_size

    @property
    def size(self) -> int:
        """Bytes written so far, without the chunk that is being filled."""
        return self._output.tell()

    def add(self, message: McapMessage, number: int, log_ns: int) -> None:
        channel = self._channels.get(message.topic)
        if channel is None:
            schema = self._schema(message.schema)
            channel = self._writer.register_channel(message.topic, "json", schema)
            self._channels[message.topic] = channel
        times = {"log_time": log_ns, "publish_time": message.at_ns}
        self._writer.add_message(channel, data=message.data, sequence=number, **times)

    def flush(self) -> None:
        """A pipe's reader gets what was added."""
        self._output.flush()

    def close(self, *, goes_on: bool = False) -> None:
        """Write the index; the file is complete, and says so when the recording goes on."""
        try:
            if goes_on:
                self._writer.add_metadata(GOES_ON, {})
            self._writer.finish()
            self._output.flush()
        finally:
            self._output.close()

    def abandon(self) -> None:
        """Leave the file as it is, without an index."""
        if self.is_open:
            self._output.close()

    def _schema(self, body: type[Body]) -> int:
        if body not in self._schemas:
            name, data = schema_name(body), json_schema(body)
            self._schemas[body] = self._writer.register_schema(name, "jsonschema", data)
        return self._schemas[body]


class McapOutput:
    """A file or pipe for the writer; of a file what was begun when it failed is cut off again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._written = 0
        self._waiting = bytearray()  # for flush(), if it is a pipe: one write for many messages
        self.is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        self.is_open = True

    def write(self, data: bytes) -> int:
        if self.is_pipe:
            self._waiting += data
        else:
            self._write_all(data)
        self._written += len(data)
        return len(data)

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """A pipe's reader gets what was written."""
        self._write_all(self._waiting)
        self._waiting = bytearray()

    def close(self) -> None:
        self.is_open = False
        os.close(self._fd)

    def _write_all(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            if not self.is_pipe:
                os.ftruncate(self._fd, self._written)
            raise


def _facts(config: PipelineConfig, run_id: str) -> dict[str, str]:
    streams = [
        {"name": s.name, "dim": s.dim, "dtype": s.dtype} for s in config.streams if not s.image
    ]
    return {
        "version": str(VERSION),
        "run_id": run_id,
        "streams": encode(streams).decode(),
        "actions": encode(config.actions.names).decode(),
        "clock": "log times: CLOCK_MONOTONIC of rank 0 in ns; stamps: the robot's own clock",
    }


def _batches(items: Sequence[Item], streams: Mapping[str, StreamConfig]) -> Iterator[McapMessage]:
    """Samples of one stream that came within ``BATCH_NS``, without a gap, together."""
    open_batches: dict[tuple[str, str], list[SamplesItem]] = {}
    for item in items:
        if not isinstance(item, SamplesItem):
            continue
        key = item.robot, item.stream
        batch = open_batches.get(key)
        if batch is not None:
            if item.received_ns - batch[0].received_ns < BATCH_NS and item.first == batch[-1].end:
                batch.append(item)
                continue
            yield _batch(batch, streams[item.stream])
        open_batches[key] = [item]
    for batch in open_batches.values():
        yield _batch(batch, streams[batch[0].stream])


def _batch(parts: list[SamplesItem], stream: StreamConfig) -> McapMessage:
    received: list[int] = []
    for part in parts:
        received += [part.received_ns] * (part.end - part.first)
    values: list[Any] = np.frombuffer(b"".join(p.values for p in parts), stream.dtype).tolist()
    stamps: list[int] = np.frombuffer(b"".join(p.stamps for p in parts), np.int64).tolist()
    first, dim = parts[0], stream.dim
    newest = values[-dim:]
    batch = first.first, dim, stamps, received, values, newest
    body: Body = SampleBatch(*batch)
    if stream.joints:
        joints = [JointState(*pair) for pair in zip(stream.joints, newest, strict=True)]
        body = JointBatch(*batch, Time(*divmod(stamps[-1], NS_PER_S)), joints)
    return McapMessage.of(received[-1], topic(first.robot, SAMPLES, stream.name), body)


#: Items of which each makes a message.
Single = RowWindow | Cleared | Emitted | LoggedLine | FrameItem | EnvelopeItem


def _single(items: Sequence[Item]) -> Iterator[Single]:
    for item in items:
        if not isinstance(item, SamplesItem):
            yield item


def _message(
    item: RowWindow | Cleared | Emitted | LoggedLine | EnvelopeItem,
) -> McapMessage:
    match item:
        case RowWindow():
            ends = item.window_end_ns, item.expires_ns
            header = WindowHeader(
                item.epoch, item.seq, item.phase, *item.episode, *ends, item.samples
            )
            return McapMessage.of(item.at_ns, topic(item.robot, WINDOWS), header)
        case Cleared():
            return McapMessage.of(
                item.at_ns, topic(item.robot, RESETS), Reset(item.reason, item.samples)
            )
        case Emitted():
            return McapMessage.of(item.at_ns, topic(item.robot, ACTIONS), _chunk(item))
        case LoggedLine():
            return _line(item)
        case EnvelopeItem():
            return McapMessage.of(item.at_ns, ENVELOPES_TOPIC, _envelope(item.line))


def _chunk(item: Emitted) -> Chunk:
    chunk = item.chunk
    actions: list[float] = np.frombuffer(chunk.actions, np.float32).tolist()
    fields: dict[str, Any] = {name: getattr(chunk, name) for name in Chunk.__struct_fields__[:-2]}
    return Chunk(**fields, actions=actions, dropped=item.dropped)


def _line(item: LoggedLine) -> McapMessage:
    found = item.fields
    if found["kind"] == "robot":
        report = Report(*(found[name] for name in Report.__struct_fields__))
        return McapMessage.of(item.at_ns, REPORTS_TOPIC, report)
    rest = {key: value for key, value in found.items() if key not in EVENT_FIELDS}
    event = Event(found["name"], str(found.get("text", "")), rest)
    return McapMessage.of(item.at_ns, EVENTS_TOPIC, event)


def _envelope(line: EnvelopeLine) -> EnvelopeAges:
    a_ns = None if line.tA0 is None or line.tA1 is None else line.tA1 - line.tA0
    times = line.age_rank0_ns, dict(line.input_age_ns or {}), a_ns, line.B_ns
    return EnvelopeAges(line.epoch, line.seq, line.phase or "", line.drop or "", *times)
