"""Cameras in ROS bags: the frames of an MCAP file with the same messages, read in any order."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import random
import sys
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from camera_files import (
    HEIGHT,
    IMAGE,
    ORIGIN_NS,
    WIDTH,
    CameraBag,
    CameraFile,
    CameraWriter,
    arm,
    camera,
    opened,
    saved,
    two_cameras,
    write_cameras,
)
from recording_files import picture
from stream_cases import MS

from ppstream.config.schema import StreamConfig
from ppstream.core.errors import ConfigError
from ppstream.recording import ros_bag
from ppstream.recording.load import load_recording
from ppstream.recording.recording import RecordedFrames, Track

pytest.importorskip("rosbags")

FRAMES = [picture(HEIGHT, WIDTH, number) for number in range(6)]
ALPHA = np.full((HEIGHT, WIDTH, 1), 9, np.uint8)
BAGS: dict[str, tuple[str, dict[str, str]]] = {
    "ROS 1": ("run.bag", {}),
    "ROS 2, SQLite": ("bag", {}),
    "ROS 2, MCAP": ("bag", {"storage": "MCAP"}),
    "ROS 2, compressed messages": ("bag", {"compression": "MESSAGE"}),
    "ROS 2, compressed file": ("bag", {"compression": "FILE"}),
}


@pytest.fixture(params=BAGS)
def bag(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Place of a bag, and how it is written."""
    name, more = BAGS[request.param]
    return tmp_path / name, more


def tracks(path: Path, *streams: StreamConfig) -> dict[str, Track]:
    return load_recording(path, streams).select(streams).tracks


def frames(found: Track) -> RecordedFrames:
    assert isinstance(found.values, RecordedFrames)
    return found.values


def seen(found: Track) -> list[bytes]:
    return seen_of(frames(found))


def seen_of(found: RecordedFrames) -> list[bytes]:
    return [found.pixels(number).tobytes() for number in range(len(found))]


def stamps(count: int) -> list[int]:
    return [ORIGIN_NS + number * 30 * MS for number in range(count)]


def write_everything(file: CameraWriter) -> None:
    """Each encoding, rows with padding, a flag that says big endian; one frame came out of turn."""
    for stamp_ns, frame in zip(stamps(6), FRAMES, strict=True):
        file.arm(stamp_ns, 1, 2)
        late_ns = (40 if stamp_ns == stamps(3)[2] else 4) * MS
        bgr, grey = frame[..., ::-1], frame[..., 1]
        file.image("/rgb", stamp_ns, frame, late_ns=late_ns, is_bigendian=1)
        file.image("/bgr", stamp_ns, bgr, "bgr8", padding=3)
        file.image("/rgba", stamp_ns, np.concatenate([frame, ALPHA], 2), "rgba8", padding=4)
        file.image("/bgra", stamp_ns, np.concatenate([bgr, ALPHA], 2), "bgra8", is_bigendian=1)
        file.image("/mono", stamp_ns, grey, "mono8", padding=1)
        file.compressed("/jpeg", stamp_ns, saved(frame), "bgr8; jpeg compressed bgr8")
        file.compressed("/png", stamp_ns, saved(frame, "PNG"), "png", late_ns=7 * MS)


TOPICS = ("rgb", "bgr", "rgba", "bgra", "mono", "jpeg", "png")


def test_frames_of_each_encoding_are_those_of_an_mcap_file_with_the_same_messages(
    bag: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    path, more = bag
    with CameraBag(path, **more) as file:
        write_everything(file)
    with CameraFile(tmp_path / "same.mcap") as file:
        write_everything(file)
    streams = (*(camera(name, f"/{name}") for name in TOPICS), arm())
    found, expected = tracks(path, *streams), tracks(tmp_path / "same.mcap", *streams)
    assert [*found] == [*TOPICS, "arm"]
    for name in TOPICS:
        one, other = found[name], expected[name]
        assert one.arrivals_ns is not None
        assert other.arrivals_ns is not None
        order = other.arrivals_ns.argsort(kind="stable")  # a bag's messages come in order of time
        assert one.stamps_ns.tolist() == other.stamps_ns[order].tolist()
        assert one.arrivals_ns.tolist() == other.arrivals_ns[order].tolist()
        assert seen(one) == [seen(other)[number] for number in order]
        encoded = [frames(one).encoded(number) for number in range(6)]
        assert encoded == [frames(other).encoded(int(number)) for number in order]
        assert (encoded[0] is not None) == (name in ("jpeg", "png"))
    assert seen(found["bgr"]) == [frame.tobytes() for frame in FRAMES]
    assert np.all(found["arm"].values[:] == [1, 2])


def test_frames_are_read_in_any_order_also_where_several_were_logged_at_once(
    bag: tuple[Path, dict[str, str]],
) -> None:
    path, more = bag
    pictures = [picture(HEIGHT, WIDTH, number) for number in range(40)]
    with CameraBag(path, **more) as file:
        for number, frame in enumerate(pictures):
            stamp_ns = ORIGIN_NS + number * 10 * MS
            at_ns = ORIGIN_NS + number // 3 * 30 * MS
            file.image("/top", stamp_ns, frame, late_ns=at_ns - stamp_ns)
            file.image("/other", stamp_ns, frame[::-1], late_ns=at_ns - stamp_ns)
    both = tracks(path, camera("top", "/top"), camera("other", "/other"))
    top, other = (frames(both[name]) for name in ("top", "other"))
    draw = random.Random(3)
    places = [
        *range(40),
        *(draw.randrange(40) for _ in range(60)),
        *range(5, 30),
        *range(39, 0, -1),
    ]
    for place in places:
        assert top.pixels(place).tobytes() == pictures[place].tobytes(), place
        assert other.pixels(place).tobytes() == pictures[place][::-1].tobytes(), place


def test_files_of_a_split_bag_that_overlap_in_time_are_read_in_their_order(tmp_path: Path) -> None:
    """As a recorder leaves them: the second file begins before the first one ends."""
    path = tmp_path / "bag"
    for part, first in (("a", 0), ("b", 4)):
        with CameraBag(tmp_path / part) as file:
            for number in range(6):
                stamp_ns = ORIGIN_NS + (first + number) * 30 * MS
                file.image("/top", stamp_ns, picture(HEIGHT, WIDTH, 2 * first + number))
    path.mkdir()
    about = (tmp_path / "a" / "metadata.yaml").read_text()
    for part in ("a", "b"):
        (tmp_path / part / f"{part}.db3").rename(path / f"{part}.db3")
    about = about.replace("- a.db3", "- a.db3\n  - b.db3")
    (path / "metadata.yaml").write_text(about)
    found = tracks(path, camera("top", "/top"))["top"]
    expected = [picture(HEIGHT, WIDTH, number).tobytes() for number in (*range(6), *range(8, 14))]
    assert seen(found) == expected
    for number in (6, 7, 4, 5, 6, 7, 11, 0):
        assert frames(found).pixels(number).tobytes() == expected[number]


def test_frames_that_do_not_decode_are_left_out_counted_and_named(
    bag: tuple[Path, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    path, more = bag
    with CameraBag(path, **more) as file:
        for number, (stamp_ns, frame) in enumerate(zip(stamps(6), FRAMES, strict=True)):
            data = saved(frame)
            file.compressed("/jpeg", stamp_ns, data[: len(data) * 9 // 10] if number == 1 else data)
            body = HEIGHT, WIDTH, "rgb8", 0, WIDTH * 3, frame.reshape(-1)[: -(number == 2) or None]
            if number == 4:
                file.raw("/raw", IMAGE, stamp_ns, b"\x00\x01\x00\x00\x00")
            else:
                file.ros("/raw", IMAGE, stamp_ns, 0, *body)
    with caplog.at_level(logging.WARNING, "ppstream"):
        found = tracks(path, camera("jpeg", "/jpeg"), camera("raw", "/raw"))
    assert seen(found["raw"]) == [FRAMES[number].tobytes() for number in (0, 1, 3, 5)]
    assert found["raw"].stamps_ns.tolist() == [stamps(6)[number] for number in (0, 1, 3, 5)]
    assert len(frames(found["jpeg"])) == 5
    jpeg, raw = caplog.messages
    assert f"{path}: stream 'jpeg': 1 of 6 frames of /jpeg are left out" in jpeg
    assert "2; frame 2: a JPEG that does not decode" in jpeg
    assert f"{path}: stream 'raw': 2 of 6 frames of /raw are left out" in raw
    assert "3, 5; frame 3: 719 bytes of rgb8 in rows of 60, want 12 rows" in raw


@pytest.mark.parametrize("encoding", ["16UC1", "bayer_rggb8", "rgb16"])
def test_an_encoding_that_is_not_known_is_one_error_with_its_topic(
    bag: tuple[Path, dict[str, str]], encoding: str
) -> None:
    path, more = bag
    with CameraBag(path, **more) as file:
        file.image("/depth", ORIGIN_NS, np.zeros((HEIGHT, WIDTH, 2)), encoding, is_bigendian=1)
    with pytest.raises(ConfigError) as error:
        tracks(path, camera("depth", "/depth"))
    (problem,) = error.value.problems
    assert problem.startswith(f"{path}: stream 'depth': /depth: frames are encoded as {encoding!r}")


def test_a_topic_that_is_no_camera_s_or_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.bag"
    write_cameras(path)
    with pytest.raises(ConfigError, match=r"/arm: messages of 'arm_msgs/msg/Joints' are not read"):
        tracks(path, camera("top", "/arm"))
    with pytest.raises(ConfigError, match="no message of '/front', want one of /arm, /top, /wrist"):
        tracks(path, camera("front", "/front"))
    top = StreamConfig(name="top", rate_hz=30, image=camera("top", "/top").image)
    with pytest.raises(ConfigError, match=r"'top' .*does not say where .*recorded = \{ topic = "):
        tracks(path, top)


def test_a_big_endian_message_is_read(tmp_path: Path) -> None:
    with CameraBag(tmp_path / "bag") as file:
        types = file.store.types
        stamp = types["builtin_interfaces/msg/Time"](*divmod(ORIGIN_NS, 1000 * MS))
        header = types["std_msgs/msg/Header"](stamp, "camera")
        message = types[IMAGE](header, HEIGHT, WIDTH, "rgb8", 1, WIDTH * 3, FRAMES[0].reshape(-1))
        data = bytes(file.store.serialize_cdr(message, IMAGE, little_endian=False))
        file.raw("/top", IMAGE, ORIGIN_NS, data)
    found = tracks(tmp_path / "bag", camera("top", "/top"))["top"]
    assert seen(found) == [FRAMES[0].tobytes()]
    assert found.stamps_ns.tolist() == [ORIGIN_NS]


def test_frames_are_pickled_as_places(bag: tuple[Path, dict[str, str]]) -> None:
    path, more = bag
    expected = write_cameras(path, by=partial(CameraBag, **more))
    for name, found in tracks(path, *two_cameras().cameras).items():
        frames(found).pixels(3)  # has opened the bag
        copied = pickle.dumps(frames(found).part(0, 9))
        assert len(copied) < 9 * HEIGHT * WIDTH
        again: RecordedFrames = pickle.loads(copied)
        assert len(again) == 9
        order = [3, 4, 0, 8]
        if name == "top":  # whose frames come in order
            assert [again.pixels(number).tobytes() for number in order] == [
                expected["top"][number].tobytes() for number in order
            ]


def test_a_forked_process_opens_the_bag_anew(tmp_path: Path) -> None:
    """Two processes that share an open file move one place in it."""
    path, size = tmp_path / "run.bag", (120, 160)
    pictures = [picture(*size, number) for number in range(30)]  # of several chunks
    with CameraBag(path) as file:
        for number, frame in enumerate(pictures):
            file.image("/top", ORIGIN_NS + number * MS, frame, size=size)
    found = frames(tracks(path, camera("top", "/top", size))["top"])
    assert found.pixels(3).tobytes() == pictures[3].tobytes()
    (before,) = places_in(path)
    forked = multiprocessing.get_context("fork")
    receive, send = forked.Pipe(duplex=False)
    child = forked.Process(target=read_last, args=(found, send))
    child.start()
    assert receive.poll(60), "no answer of the forked process"
    assert receive.recv() == pictures[-1].tobytes()
    child.join(60)
    assert places_in(path) == [before]
    assert seen_of(found) == [frame.tobytes() for frame in pictures]


def read_last(found: RecordedFrames, send: Connection) -> None:
    send.send(found.pixels(len(found) - 1).tobytes())


def places_in(path: Path) -> list[str]:
    """Where this process is in a file, for each time that it has the file open."""
    open_files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    found = [one.name for one in open_files if one.is_symlink() and one.resolve() == path]
    return [Path(f"/proc/self/fdinfo/{name}").read_text().split()[1] for name in found]


def test_few_bags_are_open_at_a_time_and_none_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ros_bag, "OPEN_MAX", 2)
    paths = [tmp_path / f"{number}.bag" for number in range(5)]
    expected = [write_cameras(path, number)["top"] for number, path in enumerate(paths)]
    (top,) = two_cameras().cameras[:1]
    found = [frames(tracks(path, top)["top"]) for path in paths]
    assert open_bags(tmp_path) == 0
    for frame in (3, 4, 1):
        for one, pictures in zip(found, expected, strict=True):
            assert one.pixels(frame).tobytes() == pictures[frame].tobytes()
            assert 1 <= open_bags(tmp_path) <= 2
    found.clear()
    del one
    gc.collect()
    assert open_bags(tmp_path) == 0


def open_bags(folder: Path) -> int:
    return sum(len(places_in(path)) for path in folder.iterdir())


def test_a_bag_that_is_gone_or_changed_since_names_the_frame(tmp_path: Path) -> None:
    path = tmp_path / "run.bag"
    write_cameras(path)
    found = frames(tracks(path, *two_cameras().cameras[:1])["top"])
    path.unlink()
    write_cameras(path, 1)
    text = r"run\.bag: cannot be read as a ROS bag: frame 4 of /top: .*no message of \d+ ns"
    with pytest.raises(ConfigError, match=text):
        found.pixels(3)
    path.write_bytes(path.read_bytes()[:50])
    again: Any = pickle.loads(pickle.dumps(found))
    with pytest.raises(
        ConfigError, match=r"run\.bag: cannot be read as a ROS bag: frame 5 of /top"
    ):
        again.pixels(4)


def test_jpegs_need_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bag"
    with CameraBag(path) as file:
        file.compressed("/top", ORIGIN_NS, saved(FRAMES[0]))
    assert [opened(saved(FRAMES[0])).tobytes()] == seen(tracks(path, camera("top", "/top"))["top"])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"/top: .*Pillow: pip install 'ppstream\[record\]'"):
        tracks(path, camera("top", "/top"))
