"""Train = serve: offline windows are bit for bit the envelopes of a scheduled replay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from camera_files import (
    HEIGHT,
    ORIGIN_NS,
    WIDTH,
    CameraFile,
    FoxgloveFile,
    arm,
    camera,
    two_cameras,
    write_cameras,
)
from recording_files import Samples, made_recording, picture, write_npz
from stream_cases import MS, Input, at_ms, config, ramp, stream

from ppstream.config.schema import (
    ImageConfig,
    PipelineConfig,
    RecordConfig,
    RecordedAs,
    StreamConfig,
)
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.data.cutting import BatchCutter
from ppstream.data.episode import episodes_of
from ppstream.ingest.sources import RecordedSource
from ppstream.pipeline.flight import owners_of
from ppstream.recording.load import load_recording

DATA = os.environ.get("PPSTREAM_TEST_DATA")
LEASE = 100 * MS
torch.set_num_threads(1)


def served(path: Path, settings: PipelineConfig) -> list[dict[str, bytes]]:
    """The envelopes of a replay, as stage A writes them."""
    pipeline = msgspec.structs.replace(settings.pipeline, windows="scheduled")
    case = Input(msgspec.structs.replace(settings, pipeline=pipeline))
    source = RecordedSource(path, case.config, case.rows, None)
    windows = []
    slot = torch.empty(case.layout.slot_bytes, dtype=torch.uint8)
    out = case.layout.views(slot)
    names = [n for n in out if n.endswith((".values", ".valid", ".age_s", ".frames"))]
    written = {n: out[n][0].view(-1).view(torch.uint8).numpy() for n in names}
    for window in range(source.windows):
        slot.fill_(0xCD)  # whatever is not written shows
        ends_ns = source.window_ends_ns(window)
        case.cutter.cut(out, ends_ns, LEASE)
        windows.append({n: one.tobytes() for n, one in written.items()})
        windows[-1]["window_end_ns"] = np.int64(ends_ns[0]).tobytes()
    return windows


def trained(path: Path, settings: PipelineConfig) -> list[dict[str, bytes]]:
    """The same windows, offline."""
    recording = load_recording(path, settings.streams, settings.record.robot)
    (episode,) = episodes_of(path, recording.select(settings.streams), settings, "replay").episodes
    cutter = BatchCutter(settings, shown=[camera.name for camera in settings.cameras])
    windows = []
    for chunk in cutter.chunks(episode):
        names = [n for n in chunk if not n.endswith(".frame_index")]
        columns = [bytes_of_rows(chunk[n]) for n in names]
        windows += [dict(zip(names, one, strict=True)) for one in zip(*columns, strict=True)]
    return windows


def bytes_of_rows(tensor: torch.Tensor) -> list[bytes]:
    """What each row ``tensor[n]`` is made of."""
    rows = tensor.contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy()
    return [row.tobytes() for row in rows]


def assert_same(path: Path, settings: PipelineConfig, least: int) -> None:
    live, offline = served(path, settings), trained(path, settings)
    assert len(live) == len(offline) >= least
    for number, (one, other) in enumerate(zip(live, offline, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == other[name], f"window {number}: {name}"


def recorded(name: str, topic: str, *fields: str, dim: int, rate_hz: float, **more: Any) -> Any:
    place = RecordedAs(topic=topic, fields=fields)
    return stream(name, dim=dim, rate_hz=rate_hz, recorded=place, **more)


@pytest.mark.skipif(DATA is None, reason="PPSTREAM_TEST_DATA names no folder of recordings")
@pytest.mark.parametrize("steps", [1, 16, 100])
def test_the_1_khz_arm(steps: int) -> None:
    assert DATA is not None
    joints = [stream(name, dim=7) for name in ("q", "dq", "tau")]
    pose = stream("ee_pose", dim=7, group="pose", interpolation="previous", max_gap_ms=2)
    settings = config(*joints, pose, steps=steps, dt_ms=5)
    assert_same(Path(DATA) / "franka_fr3_1khz.npy", settings, 1900)


@pytest.mark.skipif(DATA is None, reason="PPSTREAM_TEST_DATA names no folder of recordings")
def test_the_husky_s_bag() -> None:
    assert DATA is not None
    pytest.importorskip("rosbags")
    turn = [f"orientation.{axis}" for axis in "xyzw"]
    speed = ["twist.twist.linear.x", "twist.twist.angular.z"]
    odometry = "/husky_velocity_controller/odom"
    settings = config(
        recorded("turn", "/imu/data", *turn, dim=4, rate_hz=30, interpolation="slerp"),
        recorded("speed", odometry, *speed, dim=2, rate_hz=10, interpolation="angle"),
        recorded("fix", "/fix", "latitude", "longitude", dim=2, rate_hz=2.5, dtype="float64"),
        steps=10,
        dt_ms=100,
    )
    assert_same(Path(DATA) / "husky_imu_odom_gps.bag", settings, 3900)


@pytest.mark.skipif(DATA is None, reason="PPSTREAM_TEST_DATA names no folder of recordings")
def test_the_drone_s_log() -> None:
    assert DATA is not None
    pytest.importorskip("pyulog")
    settings = config(
        recorded("gyro", "sensor_combined", "gyro_rad", dim=3, rate_hz=250, max_gap_ms=20),
        recorded("q", "vehicle_attitude", "q", dim=4, rate_hz=84, interpolation="nearest"),
        steps=20,
        dt_ms=20,
    )
    assert_same(Path(DATA) / "px4_auav_x21.ulg", settings, 3000)


def joints_and_imu(**more: Any) -> PipelineConfig:
    return config(
        stream("joints", dim=3, rate_hz=1000),
        stream("imu", dim=2, rate_hz=200, group="imu", **more),
        steps=6,
        dt_ms=3,
    )


def test_a_made_recording(tmp_path: Path) -> None:
    assert_same(made_recording(tmp_path / "run.npz"), joints_and_imu(), 150)


@pytest.mark.parametrize("steps", [1, 2, 6, 16])
def test_cubics_which_read_a_sample_beyond_those_around_a_target(
    tmp_path: Path, steps: int
) -> None:
    joints = stream("joints", dim=3, rate_hz=1000, interpolation="cubic")
    imu = stream("imu", dim=2, rate_hz=200, group="imu", interpolation="cubic")
    path = made_recording(tmp_path / "run.npz")
    assert_same(path, config(joints, imu, steps=steps, dt_ms=3), 150)


def test_a_window_too_large_for_the_core(tmp_path: Path) -> None:
    stamps = at_ms(*range(400))
    arrays = {"joints.stamps_ns": stamps, "joints.values": np.sin(ramp(stamps, 200))}
    np.savez(tmp_path / "run.npz", allow_pickle=False, **arrays)
    settings = config(stream(dim=200), steps=50, dt_ms=3.3)
    assert_same(tmp_path / "run.npz", settings, 100)


def test_late_and_repeated_samples_are_refused_as_live(tmp_path: Path) -> None:
    path = write_npz(tmp_path, Samples.drawn())
    assert_same(path, config(stream("imu", dim=3, rate_hz=100), steps=4, dt_ms=7), 50)


def test_a_clock_that_began_anew_empties_the_windows_as_live(tmp_path: Path) -> None:
    stamps = at_ms(*range(1000, 1200), *range(300))
    values = np.random.default_rng(1).normal(size=(500, 2)).astype(np.float32)
    values[120, 1] = np.nan
    arrays = {"joints.stamps_ns": stamps, "joints.values": values}
    np.savez(tmp_path / "run.npz", allow_pickle=False, **arrays)
    assert_same(tmp_path / "run.npz", config(stream(), steps=5, dt_ms=4), 40)


def test_more_samples_than_a_ring_keeps(tmp_path: Path) -> None:
    stamps = at_ms(*np.arange(0, 1500, 0.5))
    arrays = {"joints.stamps_ns": stamps, "joints.values": ramp(stamps)}
    np.savez(tmp_path / "run.npz", allow_pickle=False, **arrays)
    slow = stream(rate_hz=100, max_age_ms=5, max_gap_ms=5)  # its ring is for a tenth of them
    assert_same(tmp_path / "run.npz", config(slow, steps=40, dt_ms=5), 200)


@pytest.mark.parametrize("name", ["run.mcap", "run.bag", "bag"])
@pytest.mark.parametrize("damaged", [(), (0, 1, 5, 11, 12)])
def test_frames_of_another_software_s_cameras(
    tmp_path: Path, damaged: tuple[int, ...], name: str
) -> None:
    write_cameras(tmp_path / name, damaged=damaged)
    assert_same(tmp_path / name, two_cameras(), 40)


def test_frames_in_protobuf(tmp_path: Path) -> None:
    write_cameras(tmp_path / "run.mcap", damaged=(0, 5), by=FoxgloveFile)
    write_cameras(tmp_path / "cdr.mcap", damaged=(0, 5))
    assert_same(tmp_path / "run.mcap", two_cameras(), 40)
    assert trained(tmp_path / "run.mcap", two_cameras()) == trained(
        tmp_path / "cdr.mcap", two_cameras()
    )


def test_a_frame_of_the_moment_at_which_a_window_ends_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with CameraFile(path) as file:
        for number in range(30):
            file.arm(ORIGIN_NS + number * 20 * MS, number, 1)
            file.image("/top", ORIGIN_NS + number * 20 * MS, picture(HEIGHT, WIDTH, number))
    settings = config(arm(), camera("top", "/top"), steps=2, dt_ms=20)
    assert_same(path, settings, 30)
    recording = load_recording(path, settings.streams).select(settings.streams)
    (episode,) = episodes_of(path, recording, settings, "replay").episodes
    (chunk,) = BatchCutter(settings).chunks(episode)
    assert chunk["top.frame_index"][:, 0].tolist() == list(range(30))
    assert not chunk["top.age_s"].any()


def test_more_frames_than_a_ring_keeps(tmp_path: Path) -> None:
    write_cameras(tmp_path / "run.mcap")
    settings = two_cameras(dt_ms=90)
    joints, *cameras = settings.streams
    slow = [msgspec.structs.replace(one, rate_hz=0.1, max_gap_ms=20_000) for one in cameras]
    settings = msgspec.structs.replace(settings, streams=(joints, *slow))
    assert_same(tmp_path / "run.mcap", settings, 9)


def test_cameras_alone(tmp_path: Path) -> None:
    write_cameras(tmp_path / "run.mcap")
    settings = two_cameras()
    assert_same(
        tmp_path / "run.mcap", msgspec.structs.replace(settings, streams=settings.cameras), 40
    )


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_frames_of_a_recorded_run(tmp_path: Path, form: str) -> None:
    joints = stream("joints", dim=3, rate_hz=1000)
    image = ImageConfig(height=9, width=14, frames=3, resize=(6, 5), dtype="float32")
    settings = config(joints, StreamConfig(name="top", rate_hz=200, image=image), steps=2)
    path = write_run(tmp_path, settings, paced=False, frames=form)
    assert_same(path, settings, 35)


def write_run(folder: Path, settings: PipelineConfig, *, paced: bool, frames: Any = "none") -> Path:
    """A run as rank 0 records it: windows cut now and then, and an episode that ended.

    ``paced``: samples come as far apart as their stamps; else all at once.
    """
    pytest.importorskip("mcap")
    from ppstream.recording.mcap_writer import open_recorder

    file = folder / "run.mcap"
    record = RecordConfig(file=str(file), frames=frames)
    case = Input(msgspec.structs.replace(settings, record=record))
    (row,) = case.rows
    row.open(1)
    recorder = open_recorder(case.config, "run")
    assert recorder is not None
    recorder.tap([row])
    rng = np.random.default_rng(4)
    out = case.slot()
    for number in range(300):
        came_ns = (9000 + number) * MS if paced else now_ns()
        for one in settings.streams:
            if number % (1 if one.rate_hz == 1000 else 5) == 0:
                stamps = at_ms(5000 + number + rng.uniform(0, 0.5))
                values = rng.normal(size=(1, one.dim)).astype(np.float32)
                if one.image is not None:
                    values = rng.integers(0, 256, (1, one.dim), np.uint8)
                row.rings[one.name].append(stamps, values, came_ns)
        if number == 150:
            row.new_episode()
        elif number % 7 == 3:
            ends_ns = case.cutter.cut(out, [None], LEASE).window_end_ns
            owners = owners_of(case.rows, ends_ns, LEASE)
            recorder.windows(now_ns(), 0, 0, "ready", owners)
    recorder.close()
    return file


def test_a_recorded_run_with_its_windows_as_they_were_cut(tmp_path: Path) -> None:
    settings = joints_and_imu()
    path = write_run(tmp_path, settings, paced=False)
    steps = load_recording(path).steps
    assert [step.reason for step in steps[15:25] if step.end_ns is None] == ["new_episode"]
    assert_same(path, settings, 35)


def test_on_a_grid_a_reset_ends_an_episode(tmp_path: Path) -> None:
    settings = joints_and_imu()
    path = write_run(tmp_path, settings, paced=True)
    recording = load_recording(path).select(settings.streams)
    first, second = episodes_of(path, recording, settings, "grid").episodes
    assert first.ends_ns[-1] < second.ends_ns[0]
    cutter = BatchCutter(settings)
    begun = next(iter(cutter.chunks(second)))["state.valid"][0, :, 0]
    assert not begun[0], "a sample of the episode before"
    assert begun[-1]


def write_episodes(path: Path, lost: int = 0) -> PipelineConfig:
    """Three episodes of 100 samples, each from the same time of the robot's clock on."""
    pytest.importorskip("mcap")
    from ppstream.recording.items import Cleared, SamplesItem
    from ppstream.recording.mcap_writer import RecordFile

    settings = config(stream("joints", dim=1, rate_hz=100), steps=4, dt_ms=10)
    file, items, count = RecordFile(path, settings, "made"), [], 0
    for episode in range(3):
        for number in range(100):
            came_ns = (100_000 + 2000 * episode + 10 * number) * MS
            if episode or not 40 <= number < 40 + lost:
                stamp, value = (
                    np.int64((1000 + 10 * number) * MS),
                    np.float32(1000 * episode + number),
                )
                pair = stamp.tobytes(), value.tobytes()
                items.append(SamplesItem("arm", "joints", count, count + 1, *pair, came_ns))
            count += 1
        items.append(Cleared("arm", came_ns + MS, "reset", {"joints": count}))
    file.write(items)
    file.close()
    return settings


@pytest.mark.parametrize("cut", ["grid", "whole"])
def test_a_robot_s_clock_may_begin_anew_with_each_episode(tmp_path: Path, cut: Any) -> None:
    """As a simulator's does; only arrivals go on."""
    path = tmp_path / "run.mcap"
    settings = write_episodes(path)
    recording = load_recording(path).select(settings.streams)
    found = episodes_of(path, recording, settings, cut).episodes
    assert len(found) == 3
    for number, episode in enumerate(found):
        chunks = list(BatchCutter(settings).chunks(episode))
        values = torch.cat([chunk["state.values"] for chunk in chunks])[50, :, 0]
        valid = torch.cat([chunk["state.valid"] for chunk in chunks])
        assert valid.float().mean() > 0.95
        assert torch.diff(values).tolist() == [1, 1, 1]
        assert 1000 * number <= values[0] < 1000 * number + 100


@pytest.mark.parametrize("cut", ["grid", "whole"])
def test_episodes_of_a_recorder_that_lost_samples_begin_where_they_did(
    tmp_path: Path, cut: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Resets count all that came: by those that are left the episodes behind would mix."""
    path = tmp_path / "run.mcap"
    settings = write_episodes(path, lost=10)
    recording = load_recording(path).select(settings.streams)
    found = episodes_of(path, recording, settings, cut).episodes
    assert [len(one.columns["joints"].stamps_ns) for one in found] == [90, 100, 100]
    for number, episode in enumerate(found):
        values = episode.columns["joints"].values[:, 0]
        assert (values[0], values[-1]) == (1000 * number, 1000 * number + 99)
    assert "the recorder lost samples (10 of 'joints'), a gap like any other" in caplog.text


def test_windows_of_a_run_whose_recorder_lost_samples_name_what_can_be_made_of_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.mcap"
    settings = write_episodes(path, lost=10)
    recording = load_recording(path).select(settings.streams)
    with pytest.raises(
        ConfigError, match=r"\(10 of 'joints'\).*; want --content episodes, --format"
    ):
        episodes_of(path, recording, settings, "replay")


def test_whole_episodes_interpolate_where_live_windows_hold(tmp_path: Path) -> None:
    stamps = at_ms(*range(0, 200, 10))
    arrays = {"joints.stamps_ns": stamps, "joints.values": ramp(stamps)}
    np.savez(tmp_path / "run.npz", allow_pickle=False, **arrays)
    settings: PipelineConfig = config(stream(rate_hz=100), steps=3, dt_ms=4)
    recording = load_recording(tmp_path / "run.npz").select(settings.streams)
    found = {}
    for cut in ("grid", "whole"):
        (episode,) = episodes_of(tmp_path, recording, settings, cut).episodes
        (chunk,) = BatchCutter(settings).chunks(episode)
        found[cut] = chunk["state.values"][:, -1, 0]
        ends_ms = chunk["window_end_ns"].double() / MS
    assert torch.equal(found["whole"].double(), ends_ms)
    assert torch.equal(found["grid"].double(), ends_ms // 10 * 10)
