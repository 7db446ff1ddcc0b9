"""Reads MCAP: a run that ppstream recorded, or messages that others did.

Of our own recordings the windows are read, too, so that they can be cut again exactly as they were.
A file that ends early, because its run was killed or its disk was full, is read as far as it goes.
Frames stay in the file until they are asked for: a minute of them may be larger than the memory.
"""

from __future__ import annotations

import itertools
import logging
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.recording.mcap_cameras import McapRecords, OwnCamera
from ppstream.recording.mcap_messages import EncodedMessage, FilePosition, MessageDecoder
from ppstream.recording.mcap_schema import (
    CAMERAS,
    GOES_ON,
    METADATA,
    RESETS,
    SAMPLES,
    WINDOWS,
    Reset,
    SampleBatch,
    WindowHeader,
    need_mcap,
    parse_topic,
)
from ppstream.recording.other_streams import OtherMessage, OtherStreams
from ppstream.recording.parts import part_of
from ppstream.recording.recording import (
    IMAGES,
    RecordedStep,
    RecordedSteps,
    Recording,
    Track,
    arrivals_on_stamps_clock,
    unreadable,
)
from ppstream.recording.sample_numbers import SampleNumbers

if TYPE_CHECKING:
    from ppstream.config.schema import StreamConfig

logger = logging.getLogger("ppstream")

DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    SAMPLES: msgspec.json.Decoder(SampleBatch),
    WINDOWS: msgspec.json.Decoder(WindowHeader),
    RESETS: msgspec.json.Decoder(Reset),
}
READ: Final = (CAMERAS, *DECODERS)  # kinds of topics; what was sent is made again


class McapMetadata(NamedTuple):
    """A record of metadata."""

    name: str
    values: dict[str, str]


def load_mcap(path: Path, streams: Sequence[StreamConfig], robot: str | None) -> Recording:
    """The recording in an MCAP file.

    Args:
        path: the file.
        streams: where a file made by others has them (``recorded``).
        robot: whose samples, of a run with several robots.

    Raises:
        ConfigError: it is no MCAP file, or lacks what is asked for.
    """
    need_mcap()
    records = read_mcap(path)
    for record in records:
        if isinstance(record, EncodedMessage):
            return _of_others(path, itertools.chain([record], records), streams)
        if record.name == METADATA:
            return _of_ours(path, records, robot, int(record.values.get("part", "1")))
    raise ConfigError([f"{path}: holds no message"])


def read_mcap(path: Path) -> Iterator[EncodedMessage | McapMetadata]:
    """Messages and metadata in the order of the file, as far as it is whole.

    Of a run that ppstream recorded those of the parts behind it follow.

    Raises:
        ConfigError: it cannot be opened, does not begin as an MCAP file, or is damaged inside.
    """
    part: Path | None = path
    run_id, goes_on = None, False
    while part is not None:
        for found in _read_part(part):
            if isinstance(found, McapMetadata):
                run_id = found.values.get("run_id") if found.name == METADATA else run_id
                goes_on = found.name == GOES_ON
            yield found
        part = _part_behind(part, run_id, goes_on=goes_on)


def _part_behind(path: Path, run_id: str | None, *, goes_on: bool) -> Path | None:
    """The next part of a run's recording, if it has one."""
    following = part_of(path, 1)
    assert following is not None
    if run_id is None or not (goes_on or following.exists()):
        return None
    try:
        facts = next((f for f in _read_part(following) if isinstance(f, McapMetadata)), None)
    except (ConfigError, OSError) as error:
        why = error if isinstance(error, ConfigError) else unreadable(following, error)
        logger.warning("what comes behind %s is not read: %s", path, why)
        return None
    if facts is None or facts.values.get("run_id") != run_id:
        if goes_on:
            text = "what comes behind %s is not read: %s is of another run"
            logger.warning(text, path, following.name)
        return None
    return following


def _read_part(path: Path) -> Iterator[EncodedMessage | McapMetadata]:
    from mcap.records import Channel, Message, Metadata, Schema

    schemas: dict[int, Any] = {}
    channels: dict[int, Any] = {}
    for record, position in _records(path):
        if isinstance(record, Schema):
            schemas[record.id] = record
        elif isinstance(record, Channel):
            channels[record.id] = record
        elif isinstance(record, Metadata):
            yield McapMetadata(record.name, dict(record.metadata))
        elif isinstance(record, Message):
            channel = channels[record.channel_id]
            about = channel.topic, channel.message_encoding, schemas.get(channel.schema_id)
            times = record.log_time, record.publish_time
            yield EncodedMessage(*about, *times, record.data, record.sequence, position)


def _records(path: Path) -> Iterator[tuple[Any, FilePosition]]:
    from mcap.exceptions import EndOfFile
    from mcap.stream_reader import StreamReader

    whole = 0  # records
    begin = end = behind = 0  # of the records that came together, as a chunk
    with path.open("rb") as file:
        found = StreamReader(file, validate_crcs=True).records
        while True:
            try:
                record = next(found, None)
            except Exception as error:
                is_short = isinstance(error, EndOfFile | struct.error) and not file.read(1)
                if whole and is_short:
                    logger.warning("%s ends early: its first %d records are read", path, whole)
                    return
                raise unreadable(path, error, f"record {whole + 1}: ") from error
            if record is None:
                return
            whole += 1
            behind += 1
            if file.tell() != end:
                begin, end, behind = end, file.tell(), 0
            yield record, FilePosition(path, begin, behind)


def _of_others(
    path: Path, records: Iterator[EncodedMessage | McapMetadata], streams: Sequence[StreamConfig]
) -> Recording:
    wanted = OtherStreams(path, streams, lambda _: McapRecords())
    topics: set[str] = set()
    images: Counter[str] = Counter()
    decoders: dict[str, MessageDecoder] = {}
    for found in records:
        if not isinstance(found, EncodedMessage):
            continue
        topics.add(found.topic)
        if found.kind in IMAGES:
            images[found.topic] += 1
        if found.topic in wanted.topics:
            decode = decoders.get(found.topic)
            if decode is None:
                decode = decoders[found.topic] = MessageDecoder(path, found)
            about = found.topic, found.kind, found.at_ns, found.data, found.position
            wanted.add(OtherMessage(*about), decode)
    return Recording(wanted.tracks(topics), images=images)


def _of_ours(
    path: Path, records: Iterator[EncodedMessage | McapMetadata], robot: str | None, part: int
) -> Recording:
    robots: dict[str, _Robot] = {}
    sampled: dict[str, None] = {}  # names, in order: who only came is none of them
    for found in records:
        parts = parse_topic(found.topic) if isinstance(found, EncodedMessage) else None
        if not isinstance(found, EncodedMessage) or parts is None or parts[1] not in READ:
            continue
        name, kind, stream = parts
        if kind in (CAMERAS, SAMPLES):
            sampled.setdefault(name)
        if name != (next(iter(sampled), name) if robot is None else robot):
            continue  # a run of many robots may be larger than the memory
        one = robots.setdefault(name, _Robot(name, part))
        if kind == CAMERAS:
            one.add_frame(stream, path, found)
        else:
            one.add(stream, DECODERS[kind].decode(found.data))
    names = ", ".join(sorted(sampled)) or "nobody"
    if robot is None and len(sampled) > 1:
        raise ConfigError([f"record.robot: missing, want one of {names} in {path}"])
    chosen = next(iter(sampled), None) if robot is None else robot
    if chosen not in sampled:
        raise ConfigError([f"{path}: has no samples of {chosen or 'a robot'}; recorded: {names}"])
    return robots[chosen].recording()


class _Stream:
    """Samples of one stream, as they come."""

    def __init__(self, *, begins_late: bool) -> None:
        self.numbers = SampleNumbers(begins_late=begins_late)
        self._dim = 0
        self._stamps, self._received, self._values = array("q"), array("q"), array("d")

    def add(self, batch: SampleBatch) -> None:
        self.numbers.add(batch.first, len(batch.stamps_ns))
        self._dim = batch.dim
        self._stamps.extend(batch.stamps_ns)
        self._received.extend(batch.received_ns)
        self._values.frombytes(np.array(batch.values, np.float64).tobytes())

    def track(self) -> Track:
        """With arrivals on rank 0's clock."""
        stamps, received = (np.frombuffer(t, np.int64) for t in (self._stamps, self._received))
        values = np.frombuffer(self._values, np.float64)
        return Track(stamps, values.reshape(-1, self._dim), received)


class _Robot:
    """A run's samples, and when its windows were cut, of one robot."""

    def __init__(self, name: str, part: int) -> None:
        self._name = name
        self._part = part
        self.streams: dict[str, _Stream | OwnCamera] = {}
        self._steps = RecordedSteps()

    def add_frame(self, stream: str, path: Path, found: EncodedMessage) -> None:
        camera = self.streams.get(stream)
        if camera is None:
            camera = OwnCamera(path, found.topic, begins_late=self._part > 1)
            self.streams[stream] = camera
        assert isinstance(camera, OwnCamera), f"{stream} is a camera's and another stream's name"
        camera.add(found)

    def add(self, stream: str, body: SampleBatch | WindowHeader | Reset) -> None:
        if isinstance(body, SampleBatch):
            samples = self.streams.setdefault(stream, _Stream(begins_late=self._part > 1))
            assert isinstance(samples, _Stream), f"{stream} is a camera's and another stream's name"
            samples.add(body)
        elif isinstance(body, WindowHeader):
            self._steps.append(RecordedStep(body.window_end_ns, "", body.samples))
        else:
            self._steps.append(RecordedStep(None, body.reason, body.samples))

    def recording(self) -> Recording:
        """With stamps as they are, and arrivals told in the robot's clock."""
        tracks = {name: stream.track() for name, stream in self.streams.items()}
        shifted = arrivals_on_stamps_clock(tracks)
        lost = {
            name: stream.numbers.lost
            for name, stream in self.streams.items()
            if stream.numbers.lost
        }
        cameras = [one for one in self.streams.values() if isinstance(one, OwnCamera)]
        images = {camera.topic: camera.count for camera in cameras}
        steps = RecordedSteps(
            step._replace(samples=self._held(step)) if step.end_ns is None else step
            for step in self._steps
            if step.end_ns is None or (not lost and self._part == 1 and self._is_whole(step))
        )
        return Recording(shifted, steps, lost, self._name, images, self._part)

    def _is_whole(self, step: RecordedStep) -> bool:
        """True when all samples of a window are in the file."""
        return all(
            name in self.streams and self.streams[name].numbers.end >= count
            for name, count in step.samples.items()
        )

    def _held(self, step: RecordedStep) -> dict[str, int]:
        """Samples before a reset that are in the file."""
        counts = step.samples.items()
        return {
            name: self.streams[name].numbers.held(count)
            for name, count in counts
            if name in self.streams
        }
