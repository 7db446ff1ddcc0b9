"""Cameras in MCAP files of other software: every frame that decodes, at its place and time."""

from __future__ import annotations

import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from camera_files import (
    COMPRESSED,
    HEIGHT,
    ORIGIN_NS,
    WIDTH,
    CameraFile,
    FoxgloveFile,
    arm,
    camera,
    opened,
    saved,
    two_cameras,
    write_cameras,
)
from recording_files import picture
from stream_cases import MS, stream

from ppstream.config.schema import RecordedAs, StreamConfig
from ppstream.core.errors import ConfigError
from ppstream.recording.load import load_recording
from ppstream.recording.mcap_messages import protobuf_decoder
from ppstream.recording.recording import RecordedFrames, Track

FRAMES = [picture(HEIGHT, WIDTH, number) for number in range(6)]


def track(path: Path, *streams: StreamConfig) -> Track:
    """The first stream's."""
    return load_recording(path, streams).select(streams).tracks[streams[0].name]


def seen(found: Track) -> list[bytes]:
    assert isinstance(found.values, RecordedFrames)
    return [found.values.pixels(number).tobytes() for number in range(len(found.values))]


def stamps(count: int) -> list[int]:
    return [ORIGIN_NS + number * 30 * MS for number in range(count)]


@pytest.mark.parametrize("writer", [{}, {"chunk_size": 4000}, {"use_chunking": False}])
def test_frames_of_two_cameras_are_those_that_were_written(
    tmp_path: Path, writer: dict[str, Any]
) -> None:
    path = tmp_path / "run.mcap"
    with CameraFile(path, **writer) as file:
        for stamp_ns, frame in zip(stamps(6), FRAMES, strict=True):
            file.arm(stamp_ns, 1, 2)
            file.image("/top", stamp_ns, frame[..., ::-1], "bgr8", late_ns=4 * MS, padding=3)
            file.compressed("/wrist", stamp_ns, saved(frame), late_ns=7 * MS)
    streams = (camera("top", "/top"), camera("wrist", "/wrist"), arm())
    tracks = load_recording(path, streams).select(streams).tracks
    assert [*tracks] == ["top", "wrist", "arm"]
    top, wrist = tracks["top"], tracks["wrist"]
    assert seen(top) == [frame.tobytes() for frame in FRAMES]
    assert seen(wrist) == [opened(saved(frame)).tobytes() for frame in FRAMES]
    for one, late_ms in ((top, 4), (wrist, 7)):
        assert one.arrivals_ns is not None
        assert one.stamps_ns.tolist() == stamps(6)
        assert set((one.arrivals_ns - one.stamps_ns).tolist()) == {late_ms * MS}
    assert isinstance(top.values, RecordedFrames)
    for number in (4, 0, 5, 1):
        assert top.values[number : number + 1].tobytes() == FRAMES[number].tobytes()
    assert top.values[2:2].shape == (0, HEIGHT * WIDTH * 3)


def test_foxglove_s_images_in_json_are_frames_with_their_own_time(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with CameraFile(path) as file:
        for stamp_ns, frame in zip(stamps(3), FRAMES, strict=False):
            about = {"width": WIDTH, "height": HEIGHT, "step": WIDTH * 3, "encoding": "bgr8"}
            file.foxglove("/a", stamp_ns, "RawImage", data=frame[..., ::-1].tobytes(), **about)
            data = saved(frame, "PNG")
            file.foxglove("/b", stamp_ns, "CompressedImage", data=data, format="png")
    for topic in ("/a", "/b"):
        found = track(path, camera("top", topic))
        assert found.stamps_ns.tolist() == stamps(3)
        assert seen(found) == [frame.tobytes() for frame in FRAMES[:3]]


# ---- protobuf ------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", [{}, {"chunk_size": 4000}, {"use_chunks": False}])
def test_foxglove_s_images_in_protobuf_are_frames_with_their_own_time(
    tmp_path: Path, writer: dict[str, Any]
) -> None:
    path = tmp_path / "run.mcap"
    with FoxgloveFile(path, **writer) as file:
        for stamp_ns, frame in zip(stamps(6), FRAMES, strict=True):
            file.image("/top", stamp_ns, frame[..., ::-1], "bgr8", late_ns=4 * MS, padding=3)
            file.image("/grey", stamp_ns, frame[..., 1], "mono8")
            file.compressed("/wrist", stamp_ns, saved(frame), late_ns=7 * MS)
            file.compressed("/side", stamp_ns, saved(frame, "PNG"), "png")
    top, grey, wrist, side = (
        track(path, camera(name, f"/{name}")) for name in ("top", "grey", "wrist", "side")
    )
    assert seen(top) == seen(side) == [frame.tobytes() for frame in FRAMES]
    assert seen(grey) == [np.stack([frame[..., 1]] * 3, 2).tobytes() for frame in FRAMES]
    assert seen(wrist) == [opened(saved(frame)).tobytes() for frame in FRAMES]
    for one, late_ms in ((top, 4), (wrist, 7), (side, 0)):
        assert one.arrivals_ns is not None
        assert one.stamps_ns.tolist() == stamps(6)
        assert set((one.arrivals_ns - one.stamps_ns).tolist()) == {late_ms * MS}
    again = pickle.loads(pickle.dumps(top))
    assert seen(again) == seen(top)


def test_values_in_protobuf_are_mapped_by_field(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with FoxgloveFile(path) as file:
        from foxglove.messages import JointState

        for number, stamp_ns in enumerate(stamps(3)):
            joints = [JointState(name="a", position=number), JointState(name="b", position=0.5)]
            file.foxglove("JointStates", "/arm", stamp_ns, 9 * MS, joints=joints)
    fields = ("joints[1].position", "joints[0].position")
    for stamp, late_ms in (("timestamp", 0), (None, 9)):
        recorded = RecordedAs(topic="/arm", fields=fields, stamp=stamp)
        found = track(path, stream("arm", dim=2, recorded=recorded))
        assert found.values[:].tolist() == [[0.5, 0], [0.5, 1], [0.5, 2]]
        assert found.stamps_ns.tolist() == [stamp_ns + late_ms * MS for stamp_ns in stamps(3)]
    missing = RecordedAs(topic="/arm", fields=("joints[0].speed",))
    with pytest.raises(ConfigError, match=r"stream 'arm' in /arm: .*speed"):
        track(path, stream("arm", dim=1, recorded=missing))


def test_an_image_in_protobuf_without_a_time_has_that_of_its_logging(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with FoxgloveFile(path) as file:
        file.image("/top", None, FRAMES[0], late_ns=3 * MS)
        file.image("/top", ORIGIN_NS + 30 * MS, FRAMES[1])
    found = track(path, camera("top", "/top"))
    assert found.stamps_ns.tolist() == [ORIGIN_NS + 3 * MS, ORIGIN_NS + 30 * MS]


def test_protobuf_that_does_not_decode_is_left_out_and_another_encoding_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.mcap"
    with FoxgloveFile(path) as file:
        from foxglove.messages import RawImage

        for number, stamp_ns in enumerate(stamps(4)):
            frame = FRAMES[number]
            about = {"width": WIDTH, "height": HEIGHT, "step": 3 * WIDTH, "encoding": "rgb8"}
            data = RawImage(data=frame.tobytes(), **about).encode()
            file.raw("/top", "RawImage", stamp_ns, data[: -(number == 1) or None])
            file.image("/other", stamp_ns, frame, **({"step": 59} if number == 2 else {}))
            file.image("/depth", stamp_ns, frame, "16UC1")
    with caplog.at_level(logging.WARNING, "ppstream"):
        assert seen(track(path, camera("top", "/top"))) == [
            FRAMES[number].tobytes() for number in (0, 2, 3)
        ]
        assert len(track(path, camera("other", "/other")).stamps_ns) == 3
    top, other = caplog.messages
    assert "stream 'top': 1 of 4 frames of /top are left out" in top
    assert "3; frame 3: 720 bytes of rgb8 in rows of 59, want 12 rows" in other
    with pytest.raises(ConfigError, match="/depth: frames are encoded as '16UC1', want rgb8, bgr8"):
        track(path, camera("depth", "/depth"))


def test_types_of_protobuf_may_be_defined_in_any_order() -> None:
    messages = pytest.importorskip("foxglove.messages")
    descriptors = pytest.importorskip("google.protobuf.descriptor_pb2")
    image = messages.RawImage(width=7, timestamp=messages.Timestamp(5, 6))
    found = descriptors.FileDescriptorSet.FromString(image.get_schema().data)
    assert len(found.file) > 1
    for files in (found.file, reversed(found.file)):
        definition = descriptors.FileDescriptorSet(file=[*files]).SerializeToString()
        message: Any = protobuf_decoder("foxglove.RawImage", definition)(image.encode())
        assert (message.width, message.timestamp.nanos) == (7, 6)
    found.file[0].dependency.append(found.file[1].name)
    found.file[1].dependency.append(found.file[0].name)
    with pytest.raises(ValueError, match="need each other"):
        protobuf_decoder("foxglove.RawImage", found.SerializeToString())


def test_without_protobuf_its_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.mcap"
    with FoxgloveFile(path) as file:
        file.image("/top", ORIGIN_NS, FRAMES[0])
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(ConfigError, match=r"protobuf .* pip install 'ppstream\[replay\]'"):
        track(path, camera("top", "/top"))


# ---- what is left out ----------------------------------------------------------------------------


def test_frames_that_do_not_decode_are_left_out_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.mcap"
    with CameraFile(path) as file:
        for number, stamp_ns in enumerate(stamps(12)):
            data = saved(picture(HEIGHT, WIDTH, number))
            if number == 4:
                data = saved(picture(HEIGHT + 1, WIDTH))
            elif number in (1, 3, 6, 7, 8, 9):
                data = data[: len(data) * 9 // 10]
            if number == 2:
                file.raw("/top", COMPRESSED, stamp_ns, b"\x00\x01")
            else:
                file.compressed("/top", stamp_ns, data)
    with caplog.at_level(logging.WARNING, "ppstream"):
        found = track(path, camera("top", "/top"))
    whole = [0, 5, 10, 11]
    assert found.stamps_ns.tolist() == [stamps(12)[number] for number in whole]
    expected = [opened(saved(picture(HEIGHT, WIDTH, number))).tobytes() for number in whole]
    assert seen(found) == expected
    (said,) = caplog.messages
    assert f"{path}: stream 'top': 8 of 12 frames of /top are left out" in said
    assert "2, 3, 4, 5, 7 and 3 more; frame 2: a JPEG that does not decode" in said


def test_a_topic_without_one_usable_frame_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with CameraFile(path) as file:
        for stamp_ns, frame in zip(stamps(6), FRAMES, strict=True):
            file.image("/top", stamp_ns, frame)
    text = rf"none of 6 frames of /top is usable; frame 1: {HEIGHT} x {WIDTH}, want 9 x 9"
    with pytest.raises(ConfigError, match=text):
        track(path, camera("top", "/top", (9, 9)))
    with pytest.raises(ConfigError, match="no message of '/wrist', want one of /top"):
        track(path, camera("wrist", "/wrist"))


def test_an_encoding_that_is_not_known_is_one_error_with_its_topic(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with CameraFile(path) as file:
        for stamp_ns in stamps(3):
            file.image("/depth", stamp_ns, np.zeros((HEIGHT, WIDTH, 2)), "16UC1")
    with pytest.raises(ConfigError) as error:
        track(path, camera("depth", "/depth"))
    (problem,) = error.value.problems
    assert problem.startswith(f"{path}: stream 'depth': /depth: frames are encoded as '16UC1'")
    assert "want rgb8, bgr8" in problem


def test_a_camera_says_where_it_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    write_cameras(path)
    top = StreamConfig(name="top", rate_hz=30, image=camera("top", "/top").image)
    with pytest.raises(ConfigError, match=r"'top' .*does not say where .*recorded = \{ topic = "):
        track(path, top)


def test_a_recording_of_cameras_is_pickled_as_places(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    frames = write_cameras(path)
    streams = two_cameras().streams
    tracks = load_recording(path, streams).select(streams).tracks
    for name, expected in frames.items():
        values = tracks[name].values
        assert isinstance(values, RecordedFrames)
        values.pixels(3)  # has read a part of the file
        copied = pickle.dumps(values.part(2, 9))
        assert len(copied) < path.stat().st_size / 10
        again: RecordedFrames = pickle.loads(copied)
        assert len(again) == 7
        assert again.pixels(1).tobytes() == expected[3].tobytes()


def test_without_pillow_jpegs_are_refused_with_its_extra_and_raw_frames_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.mcap"
    frames = write_cameras(path)
    top, wrist = (stream for stream in two_cameras().streams if stream.image is not None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"/wrist: .*Pillow: pip install 'ppstream\[record\]'"):
        track(path, wrist)
    assert seen(track(path, top)) == [frame.tobytes() for frame in frames["top"]]


def test_a_file_that_changed_since_names_the_frame(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    write_cameras(path)
    found = track(path, *two_cameras().cameras[:1])
    path.write_bytes(path.read_bytes()[:50])
    assert isinstance(found.values, RecordedFrames)
    with pytest.raises(ConfigError, match=r"run\.mcap: cannot be read as MCAP: frame 4 of /top: "):
        found.values.pixels(3)
