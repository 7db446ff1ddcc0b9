"""Frames of a camera in a recording: written, read back, and refused when they are damaged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

pytest.importorskip("mcap")
pytest.importorskip("PIL")

from mcap.reader import make_reader
from mcap.writer import Writer
from recording_files import picture, with_camera
from robot_rig import MS, make_config, make_rows

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.ingest.rows import RowInput
from ppstream.ingest.sources import RecordedSource
from ppstream.recording.items import FrameItem, SamplesItem
from ppstream.recording.load import load_recording
from ppstream.recording.mcap_schema import (
    CompressedImage,
    JointBatch,
    JointState,
    RawImage,
    Time,
    json_schema,
    schema_name,
)
from ppstream.recording.mcap_writer import RecordFile, open_recorder
from ppstream.recording.recording import RecordedFrames
from ppstream.wire import jpeg

LEAST_DB = 35  # as record-and-replay.md says
ORIGIN_NS = 10**18  # of the robot's clock


class Recorded(NamedTuple):
    """A recording of some frames, the frames, and what it was made with."""

    path: Path
    frames: list[np.ndarray[Any, Any]]
    config: PipelineConfig

    def track(self) -> Any:
        return load_recording(self.path).select(self.config.streams).tracks["wrist"]


def record(folder: Path, form: str, height: int, width: int, count: int = 5) -> Recorded:
    """Frames at 30 Hz, and joints beside them, as rank 0 records them."""
    path = folder / "run.mcap"
    config = with_camera(make_config(), height, width, file=str(path), frames=form, queue_mb=512)
    recorder, frames = open_recorder(config, "run"), []
    assert recorder is not None
    rows = make_rows(config)
    rows[0].open(1)
    rows[0].robot = "arm"
    recorder.tap(rows)
    for number in range(count):
        stamp = np.array([ORIGIN_NS + number * 33 * MS])
        frames.append(picture(height, width, number))
        rows[0].rings["wrist"].append(stamp, frames[-1].reshape(1, -1), now_ns())
        rows[0].rings["joints"].append(stamp, np.full((1, 3), number, "f4"), now_ns())
        rows[0].rings["imu"].append(stamp, np.zeros((1, 2)), now_ns())
    (told,) = recorder.close()
    assert (told["dropped"], told["failure"]) == (0, "")
    return Recorded(path, frames, config)


@pytest.mark.parametrize("size", [(130, 127), (2, 3), (480, 640)])
def test_raw_frames_come_back_bit_for_bit(size: tuple[int, int], tmp_path: Path) -> None:
    recorded = record(tmp_path, "raw", *size)
    track = recorded.track()
    assert track.stamps_ns.tolist() == [ORIGIN_NS + number * 33 * MS for number in range(5)]
    assert track.values[1:4].shape == (3, size[0] * size[1] * 3)
    for number in (4, 0, 2, 1, 3):
        assert track.values[number : number + 1].tobytes() == recorded.frames[number].tobytes()


def test_jpeg_frames_come_back_near_enough_and_in_the_same_shape(tmp_path: Path) -> None:
    recorded = record(tmp_path, "jpeg", 480, 640)
    track = recorded.track()
    for number, sent in enumerate(recorded.frames):
        found = track.values[number : number + 1]
        assert (found.shape, found.dtype) == ((1, sent.size), np.uint8)
        error = np.mean((found.reshape(sent.shape).astype(float) - sent) ** 2)
        assert 10 * np.log10(255**2 / error) > LEAST_DB
    size = recorded.path.stat().st_size
    assert size < sum(frame.nbytes for frame in recorded.frames) / 8


@pytest.mark.parametrize(("form", "name"), [("raw", "RawImage"), ("jpeg", "CompressedImage")])
def test_viewers_find_the_schema_that_they_know(form: str, name: str, tmp_path: Path) -> None:
    recorded = record(tmp_path, form, 16, 24)
    with recorded.path.open("rb") as file:
        reader = make_reader(file)
        assert reader.get_header().profile == "ppstream"
        schema, channel, message = next(reader.iter_messages(topics=["/arm/cameras/wrist"]))
    assert (schema.name, channel.message_encoding) == (f"foxglove.{name}", "json")
    body = msgspec.json.decode(message.data)
    assert body["timestamp"] == {"sec": ORIGIN_NS // 10**9, "nsec": 0}
    assert body["frame_id"] == "wrist"
    assert body.get("format", "jpeg") == "jpeg"
    assert {"width": 24, "height": 16, "encoding": "rgb8", "step": 72}.items() >= {
        (key, value) for key, value in body.items() if key in ("width", "height", "encoding")
    }


@pytest.mark.parametrize("body", [RawImage, CompressedImage, JointState])
def test_a_schema_has_the_fields_of_the_viewers_own(body: type[Any]) -> None:
    messages = pytest.importorskip("foxglove.messages")
    pool = pytest.importorskip("google.protobuf.descriptor_pb2")
    name = body.__name__ if body is not JointState else "JointStates"
    files = pool.FileDescriptorSet.FromString(getattr(messages, name).get_schema().data)
    theirs = {
        message.name: {field.name for field in message.field}
        for file in files.file
        for message in file.message_type
    }
    ours = set(body.__struct_fields__)
    assert ours <= theirs[body.__name__]
    assert ours == theirs[body.__name__] or body is JointState  # all but position is optional
    if body is JointState:
        assert theirs["JointStates"] <= set(JointBatch.__struct_fields__)
        assert schema_name(JointBatch) == "foxglove.JointStates"
    else:
        data = msgspec.json.decode(json_schema(body))["properties"]["data"]
        assert data == {"type": "string", "contentEncoding": "base64"}


# ---- what windows and replays make of it -----------------------------------------------------


def played(recorded: Recorded, rows: list[RowInput]) -> RecordedSource:
    shape = msgspec.structs.replace(recorded.config.pipeline, windows="scheduled")
    config = msgspec.structs.replace(recorded.config, pipeline=shape)
    return RecordedSource(recorded.path, config, rows, None)


def test_a_replay_reads_no_frame_that_no_ring_would_keep(tmp_path: Path) -> None:
    recorded = record(tmp_path, "jpeg", 16, 24, count=40)
    rewrite(recorded.path, lambda number, body: hollow(body) if number <= 32 else body)
    rows = make_rows(recorded.config, ring_samples=8)
    played(recorded, rows).feed(2 * ORIGIN_NS, now_ns())
    ring = rows[0].rings["wrist"]
    ring.check()
    assert (ring.count, ring.ledger.received) == (8, 40)
    assert ring.ledger.dropped == {"overwritten": 32}
    for number in range(32, 40):
        slot = int((ring.bank.stamps_ns[0] == ORIGIN_NS + number * 33 * MS).nonzero())
        wanted = jpeg.decode(jpeg.encode(recorded.frames[number]), 16, 24)
        assert ring.bank.values[0, slot].numpy().tobytes() == wanted.tobytes()


def test_a_frame_that_the_recorder_lost_is_told_by_its_number(tmp_path: Path) -> None:
    recorded = record(tmp_path, "raw", 4, 6)
    rewrite(recorded.path, lambda number, body: None if number in (2, 3) else body)
    assert load_recording(recorded.path).lost == {"wrist": 2}
    with pytest.raises(
        ConfigError, match=r"samples \(2 of 'wrist'\).* 'live', or a recording with"
    ):
        played(recorded, make_rows(recorded.config))


def test_frames_keep_their_numbers_where_the_queue_dropped_some(tmp_path: Path) -> None:
    config = with_camera(make_config(), 4, 6)
    file = RecordFile(tmp_path / "run.mcap", config, "run", "raw")
    for number in (0, 3, 4):
        pixels = picture(4, 6, number).tobytes()
        file.write([FrameItem("arm", "wrist", number, number, pixels, number * MS)])
    file.close()
    recording = load_recording(tmp_path / "run.mcap")
    assert recording.lost == {"wrist": 2}
    assert recording.tracks["wrist"].values[1:2].tobytes() == picture(4, 6, 3).tobytes()


def test_a_stream_of_joints_is_told_with_their_names_and_read_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    config = with_camera(make_config(), 4, 6, file=str(path))
    joints = msgspec.structs.replace(config.streams[0], joints=("base", "elbow", "wrist/turn"))
    config = msgspec.structs.replace(config, streams=(joints, *config.streams[1:]))
    recorder = open_recorder(config, "run")
    assert recorder is not None
    stamps = np.array([5, 9], np.int64) * MS
    values = np.array([[np.nan, 0.1, 3e38], [1, np.inf, 3]], np.float32)
    recorder.samples("arm", "joints", stamps, values, now_ns())
    recorder.close()
    with path.open("rb") as file:
        schema, _, message = next(make_reader(file).iter_messages())
    body = msgspec.json.decode(message.data)
    assert schema.name == "foxglove.JointStates"
    assert body["timestamp"] == {"sec": 0, "nsec": 9 * MS}
    assert body["joints"] == [
        {"name": "base", "position": 1.0},
        {"name": "elbow", "position": None},
        {"name": "wrist/turn", "position": 3.0},
    ]
    track = load_recording(path).tracks["joints"]
    assert track.stamps_ns.tolist() == stamps.tolist()
    assert np.isnan(track.values).tolist() == (~np.isfinite(values)).tolist()
    finite = np.isfinite(values)
    assert track.values.astype(np.float32)[finite].tobytes() == values[finite].tobytes()


# ---- damage ------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[int, dict[str, Any]], dict[str, Any] | None]) -> None:
    """Write the recording anew, its images changed, or left out; ``change`` gets their numbers."""
    with path.open("rb") as file:
        reader = make_reader(file)
        metadata = [*reader.iter_metadata()]
        found = [*reader.iter_messages()]
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        for one in metadata:
            writer.add_metadata(one.name, one.metadata)
        channels: dict[str, int] = {}
        for schema, channel, message in found:
            data, number = message.data, message.sequence
            assert schema is not None
            if "/cameras/" in channel.topic:
                body = change(number, msgspec.json.decode(data))
                if body is None:
                    continue
                data = msgspec.json.encode(body)
            if channel.topic not in channels:
                about = writer.register_schema(schema.name, schema.encoding, schema.data)
                channels[channel.topic] = writer.register_channel(channel.topic, "json", about)
            times = message.log_time, data, message.publish_time
            writer.add_message(channels[channel.topic], *times, sequence=number)
        writer.finish()


def cut_short(body: dict[str, Any], kept: float = 0.5) -> dict[str, Any]:
    return {**body, "data": body["data"][: int(len(body["data"]) * kept) // 4 * 4]}


def with_pixels(body: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    about = Time(**body["timestamp"]), body["frame_id"]
    frame = picture(height, width)
    if "format" in body:
        image: Any = CompressedImage(*about, jpeg.encode(frame), "jpeg")
    else:
        image = RawImage(*about, width, height, "rgb8", 3 * width, frame.tobytes())
    return msgspec.to_builtins(image)


@pytest.mark.parametrize(
    ("form", "change", "says"),
    [
        ("raw", cut_short, "bytes of rgb8 in rows of 72, want 1152 of rgb8: 16 x 24"),
        ("raw", lambda body: {**body, "encoding": "mono8"}, "bytes of mono8"),
        ("raw", lambda body: {**body, "width": 23}, "want 1104 of rgb8: 16 x 23"),
        ("raw", lambda body: {**body, "data": "%"}, "ValidationError"),
        ("raw", lambda body: with_pixels(body, 8, 24), r"got height and width \(8, 24\)"),
        ("jpeg", cut_short, "bytes that are no complete JPEG"),
        ("jpeg", lambda body: cut_short(body, 7 / 8), "bytes that are no complete JPEG"),
        ("jpeg", lambda body: {**body, "data": ""}, "0 bytes that are no complete JPEG"),
        ("jpeg", lambda body: with_pixels(body, 24, 16), r"got height and width \(24, 16\)"),
    ],
)
def test_a_damaged_frame_is_one_error_with_its_place(
    form: str, change: Callable[[Any], Any], says: str, tmp_path: Path
) -> None:
    recorded = record(tmp_path, form, 16, 24)
    rewrite(recorded.path, lambda number, body: change(body) if number == 3 else body)
    with pytest.raises(ConfigError, match=says) as error:
        load_recording(recorded.path)
    assert len(error.value.problems) == 1
    assert f"{recorded.path}: cannot be read as MCAP: frame 3 of /arm/cameras/wrist: " in str(
        error.value
    )


def hollow(body: dict[str, Any]) -> dict[str, Any]:
    """The JPEG's header and end alone."""
    whole = msgspec.convert(body, CompressedImage).data
    data = whole[: whole.index(b"\xff\xda")] + b"\xff\xd9"
    return {**body, "data": msgspec.to_builtins(data)}


def test_a_jpeg_with_a_header_alone_is_an_error_once_it_is_played(tmp_path: Path) -> None:
    recorded = record(tmp_path, "jpeg", 16, 24)
    rewrite(recorded.path, lambda number, body: hollow(body) if number == 3 else body)
    frames = recorded.track().values
    assert frames[0:2].shape == (2, 1152)
    assert frames[2:2].shape == (0, 1152)
    with pytest.raises(ConfigError, match=r"frame 3 of /arm/cameras/wrist: .* no JPEG of 16 x 24"):
        frames[2:3]
    assert frames.encoded(1) == jpeg.encode(recorded.frames[1])
    with pytest.raises(ConfigError, match=r"frame 3 of /arm/cameras/wrist: .* does not decode"):
        frames.encoded(2)


def test_a_recording_that_is_gone_when_a_frame_is_wanted_is_named(tmp_path: Path) -> None:
    recorded = record(tmp_path, "raw", 16, 24)
    frames = recorded.track().values
    recorded.path.unlink()
    with pytest.raises(ConfigError, match=r"run\.mcap: cannot be read as MCAP: No such file"):
        frames[2:3]


def test_a_recording_that_ends_in_a_frame_is_read_up_to_it(tmp_path: Path) -> None:
    path, config = tmp_path / "run.mcap", with_camera(make_config(), 480, 640)
    file = RecordFile(path, config, "run", "raw")
    stamp, sizes = ORIGIN_NS.to_bytes(8, "little"), {"joints": 12, "imu": 16}
    samples = [SamplesItem("arm", s, 0, 1, stamp, bytes(n), 0) for s, n in sizes.items()]
    file.write(samples)
    frames, ends = [picture(480, 640, number).tobytes() for number in range(5)], []
    for number, pixels in enumerate(frames):
        file.write([FrameItem("arm", "wrist", number, ORIGIN_NS + number, pixels, number)])
        ends.append(path.stat().st_size)  # a frame is larger than what waits for the next one
    file.close()
    path.write_bytes(path.read_bytes()[: (ends[-2] + ends[-1]) // 2])
    track = load_recording(path).select(config.streams).tracks["wrist"]
    assert len(track.values) == 4
    assert track.values[3:4].tobytes() == frames[3]


@pytest.mark.parametrize(
    ("size", "says"), [((16, 25), "16 x 25"), ((24, 16), "24 x 16"), ((8, 8), "8 x 8")]
)
def test_frames_of_another_size_are_refused_with_both(
    size: tuple[int, int], says: str, tmp_path: Path
) -> None:
    recorded = record(tmp_path, "jpeg", 16, 24)
    other = with_camera(make_config(), *size)
    text = f"streams: 'wrist' has frames of {says}, recorded with frames of 16 x 24"
    with pytest.raises(ConfigError, match=text):
        load_recording(recorded.path).select(other.streams)


def test_a_recording_without_frames_says_which_key_keeps_them(tmp_path: Path) -> None:
    recorded = record(tmp_path, "none", 16, 24)
    recording = load_recording(recorded.path)
    assert [*recording.tracks] == ["joints", "imu"]
    with pytest.raises(ConfigError, match=r"'wrist' is not recorded.*record\.frames = \"jpeg\""):
        recording.select(recorded.config.streams)


def test_without_its_package_jpeg_is_refused_and_raw_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "jpeg").mkdir()
    recorded, raw = record(tmp_path / "jpeg", "jpeg", 16, 24), record(tmp_path, "raw", 16, 24)
    monkeypatch.setitem(sys.modules, "PIL", None)
    for use in (recorded.track, lambda: open_recorder(recorded.config, "run")):
        with pytest.raises(ConfigError, match=r"pip install 'ppstream\[record\]'"):
            use()
    assert isinstance(raw.track().values, RecordedFrames)
