"""Recordings made by others: PX4 ULog, ROS bags and MCAP, with what is wrong in them kept."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording_files import Samples, write_mcap_alone
from stream_cases import MS, Input, config, stream

from ppstream.config.schema import RecordedAs, StreamConfig
from ppstream.core.errors import ConfigError
from ppstream.ingest.sources import RecordedSource
from ppstream.recording.field_reader import FieldReader, nanoseconds
from ppstream.recording.load import load_recording
from ppstream.recording.recording import Track

DATA = os.environ.get("PPSTREAM_TEST_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="PPSTREAM_TEST_DATA names no recordings")
S = 1000 * MS
LEASE = 100 * MS

IMU_FIELDS = (
    "angular_velocity.x",
    "angular_velocity.y",
    "angular_velocity.z",
    "linear_acceleration.x",
)


def mapped(
    name: str, topic: str, *fields: str, stamp: str | None = None, **more: Any
) -> StreamConfig:
    return stream(name, recorded=RecordedAs(topic=topic, fields=fields, stamp=stamp), **more)


def gaps_ms(track: Track) -> Any:
    return np.diff(track.stamps_ns) / MS


def delays_ms(track: Track) -> Any:
    assert track.arrivals_ns is not None
    return (track.arrivals_ns - track.stamps_ns) / MS


def repeats(track: Track) -> float:
    return float((track.values[1:] == track.values[:-1]).all(axis=1).mean())


# ---- real robots ----------------------------------------------------------------------------


def husky() -> tuple[Path, StreamConfig, StreamConfig]:
    assert DATA is not None
    imu = mapped("imu", "/imu/data", *IMU_FIELDS, dim=4, rate_hz=30)
    odom = mapped(
        "odom",
        "/husky_velocity_controller/odom",
        "pose.pose.position.x",
        "twist.twist.linear.x",
        dim=2,
        rate_hz=10,
        max_gap_ms=300,
    )
    return Path(DATA) / "husky_imu_odom_gps.bag", imu, odom


@needs_data
def test_a_husky_s_bag_keeps_its_rates_gaps_repeats_and_delays() -> None:
    pytest.importorskip("rosbags")
    path, *streams = husky()
    tracks = load_recording(path, streams).select(streams).tracks
    imu, odom = tracks["imu"], tracks["odom"]
    assert (len(imu.stamps_ns), len(odom.stamps_ns)) == (11865, 3952)
    assert np.median(gaps_ms(imu)) == pytest.approx(33.320, abs=1e-3)
    assert gaps_ms(odom).max() == pytest.approx(208.2, abs=0.1)
    assert (repeats(imu), repeats(odom)) == (0, pytest.approx(0.026, abs=0.001))
    assert np.percentile(delays_ms(imu), [50, 99]) == pytest.approx([25.2, 35.9], abs=0.1)
    assert delays_ms(odom).max() == pytest.approx(0.9, abs=0.1)
    assert np.isfinite(imu.values).all()
    assert np.linalg.norm(imu.values[:, :3], axis=1).max() < 3  # rad/s: a ground robot's
    assert imu.values.dtype == np.float32


@needs_data
def test_a_husky_s_imu_comes_as_late_in_a_replay_as_it_was() -> None:
    pytest.importorskip("rosbags")
    path, *streams = husky()
    case = Input(config(*streams, steps=4, dt_ms=33.3))
    source = RecordedSource(path, case.config, case.rows, 1.0)
    first_ns = load_recording(path, streams).first_ns
    rings = case.rows[0].rings
    ages_ms: dict[str, list[float]] = {name: [] for name in rings}
    out = case.slot()
    for step in range(300):  # 6 s of it
        passed_ns = step * 20 * MS
        source.drain(5_000 * S + passed_ns)
        case.cutter.cut(out, [None], LEASE)
        for name, ring in rings.items():
            if ring.count:
                ages_ms[name].append((first_ns + passed_ns - ring.newest_ns) / MS)
    assert rings["imu"].accepted == pytest.approx(180, abs=3)
    assert rings["imu"].ledger.dropped == rings["odom"].ledger.dropped == {}
    assert 25 <= min(ages_ms["imu"]) < 40  # never younger than it was
    assert 0 < min(ages_ms["odom"]) < 20
    source.close()


@needs_data
def test_a_px4_s_log_keeps_its_rates_gaps_and_repeats() -> None:
    pytest.importorskip("pyulog")
    assert DATA is not None
    path = Path(DATA) / "px4_auav_x21.ulg"
    streams = (
        mapped("gyro", "sensor_combined", "gyro_rad", dim=3, rate_hz=250),
        mapped("attitude", "vehicle_attitude", "q[0]", "q[1]", "q[2]", "q[3]", dim=4, rate_hz=83),
        mapped("setpoint", "vehicle_attitude_setpoint[0]", "roll_body", dim=1, rate_hz=50),
    )
    tracks = load_recording(path, streams).select(streams).tracks
    assert {name: len(track.stamps_ns) for name, track in tracks.items()} == {
        "gyro": 17070,
        "attitude": 6461,
        "setpoint": 3272,
    }
    assert np.median(gaps_ms(tracks["gyro"])) == pytest.approx(4.0)
    assert gaps_ms(tracks["gyro"]).max() == pytest.approx(64.8, abs=0.1)  # the logger dropped
    assert int((gaps_ms(tracks["gyro"]) > 1.5 * 4).sum()) == 8
    assert repeats(tracks["setpoint"]) == 1.0
    norms = np.linalg.norm(tracks["attitude"].values, axis=1)
    assert norms == pytest.approx(1, abs=1e-3)


@needs_data
def test_a_px4_s_log_plays_through_windows_that_mask_its_gaps() -> None:
    pytest.importorskip("pyulog")
    assert DATA is not None
    gyro = mapped("gyro", "sensor_combined", "gyro_rad", dim=3, rate_hz=250, max_gap_ms=20)
    attitude = mapped("attitude", "vehicle_attitude", "q", dim=4, rate_hz=83, max_gap_ms=50)
    case = Input(config(gyro, attitude, steps=8, dt_ms=10, windows="scheduled"))
    source = RecordedSource(Path(DATA) / "px4_auav_x21.ulg", case.config, case.rows, None)
    out = case.slot()
    valid = []
    for window in range(source.windows):
        case.cutter.cut(out, source.window_ends_ns(window), LEASE)
        valid.append(out["state.valid"][0].numpy().copy())
    masked = 1 - np.array(valid)[8:].mean(axis=(0, 1))
    assert source.windows == pytest.approx(6890, abs=20)
    assert 0 < masked[0] < 0.01
    assert 0 < masked[1] < 0.01
    for ring in case.rows[0].rings.values():
        assert ring.ledger.dropped == {}
    case.check()


# ---- JSON in MCAP, made here --------------------------------------------------------------------


def write_json(path: Path, *, encoding: str = "json") -> Path:
    """Three messages: one stamp comes twice, the last is older."""
    writers = pytest.importorskip("mcap.writer")
    with path.open("wb") as file:
        writer = writers.Writer(file)
        writer.start()
        schema = writer.register_schema("Pose", "jsonschema", b'{"type": "object"}')
        channel = writer.register_channel("/pose", encoding, schema)
        for number, stamp_ms in enumerate((10, 10, 5)):
            body = {
                "header": {"stamp": {"sec": 1, "nsec": stamp_ms * MS}},
                "boot_ns": stamp_ms * MS,
                "joints": [number, 2.5],
                "frame": "base",
            }
            at_ns = S + (20 + number) * MS
            writer.add_message(channel, at_ns, json.dumps(body).encode(), at_ns)
        writer.finish()
    return path


def test_json_of_others_is_mapped_by_topic_field_and_stamp(tmp_path: Path) -> None:
    path = write_json(tmp_path / "run.mcap")
    track = load_recording(path, [mapped("q", "/pose", "joints[1]", "joints")]).tracks["q"]
    assert track.values.tolist() == [[2.5, 0, 2.5], [2.5, 1, 2.5], [2.5, 2, 2.5]]
    assert (track.stamps_ns - S).tolist() == [10 * MS, 10 * MS, 5 * MS]
    assert delays_ms(track).tolist() == [10, 11, 17]


def test_arrivals_are_told_by_the_clock_of_stamps_that_are_another_s(tmp_path: Path) -> None:
    """A device's uptime, or a simulator's time: else windows would end where no sample is."""
    boot = mapped("q", "/pose", "joints", stamp="boot_ns")
    track = load_recording(write_json(tmp_path / "run.mcap"), [boot]).tracks["q"]
    assert track.stamps_ns.tolist() == [10 * MS, 10 * MS, 5 * MS]
    assert delays_ms(track).tolist() == [0, 1, 7]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (stream("q"), r"'q' does not say where .*; give it recorded = \{ topic"),
        (mapped("q", "/poses", "joints"), "no message of '/poses', want one of /pose"),
        (mapped("q", "/pose", "speed"), "stream 'q' in /pose: no field 'speed'"),
        (mapped("q", "/pose", "joints[7]"), "stream 'q' in /pose: no field list index"),
        (mapped("q", "/pose", "frame"), "could not convert string to float"),
        (mapped("q", "/pose", "joints", stamp="frame"), "no stamp: 'base'; want integer nano"),
    ],
)
def test_what_a_mapping_lacks_is_said(tmp_path: Path, wanted: StreamConfig, said: str) -> None:
    path = write_json(tmp_path / "run.mcap")
    with pytest.raises(ConfigError, match=said):
        load_recording(path, [wanted])


def test_an_encoding_that_nobody_here_reads_is_named(tmp_path: Path) -> None:
    path = write_json(tmp_path / "run.mcap", encoding="flatbuffer")
    with pytest.raises(ConfigError, match="/pose is encoded as 'flatbuffer', want json, protobuf"):
        load_recording(path, [mapped("q", "/pose", "joints")])


def test_values_that_change_their_number_are_refused() -> None:
    reader = FieldReader(Path("x"), [mapped("q", "/pose", "joints")])
    reader.add("/pose", {"joints": [1, 2]}, 0)
    with pytest.raises(ConfigError, match="1 values, 2 before"):
        reader.add("/pose", {"joints": [1]}, 0)


@pytest.mark.parametrize(
    "stamp", [5 * S + 7, {"sec": 5, "nanosec": 7}, {"sec": 5, "nsec": 7}, np.int64(5 * S + 7)]
)
def test_stamps_of_every_form_are_nanoseconds(stamp: object) -> None:
    assert nanoseconds(stamp) == 5 * S + 7


@pytest.mark.parametrize(
    ("package", "name", "said"),
    [
        ("mcap", "run.mcap", r"MCAP needs a package .* pip install 'ppstream\[record\]'"),
        ("pyulog", "run.ulg", r"ULog needs a package .* pip install 'ppstream\[replay\]'"),
        ("rosbags", "run.bag", r"ROS bags need a package .* pip install 'ppstream\[replay\]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, name: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=said):
        load_recording(tmp_path / name, [mapped("q", "/q", "x")])


@pytest.mark.parametrize(
    ("package", "name"),
    [("mcap", "run.mcap"), ("pyulog", "run.ulg"), ("rosbags", "run.bag"), ("rosbags", "bag")],
)
@pytest.mark.parametrize("content", [None, b"", b"plain text, and quite some of it" * 100])
def test_a_file_that_is_no_recording_is_a_config_error_with_its_name(
    tmp_path: Path, package: str, name: str, content: bytes | None
) -> None:
    pytest.importorskip(package)
    path = tmp_path / name
    if name == "bag":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        load_recording(path, [mapped("q", "/q", "x")])


# ---- damaged files ---------------------------------------------------------------------------

DAMAGES = 40  # of each kind of file, drawn from one seed
BEGINNING = 300  # bytes: magic, headers and sizes


def damaged(path: Path, draw: random.Random) -> bytes:
    """As a bad disk or a broken copy leaves a file: some bytes are others, or the end is gone."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 2, 8))):
        at = draw.randrange(draw.choice((min(len(data), BEGINNING), len(data))))
        data[at] = draw.randrange(256)
    return bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)


def write_npz(path: Path, save: Any = np.savez) -> Path:
    save(
        path, **{"q.stamps_ns": np.arange(50), "q.values": np.random.default_rng(1).random((50, 3))}
    )
    return path


def write_npy(path: Path) -> Path:
    np.save(path, np.random.default_rng(1).random((20, 42)))
    return path


def given_bag(_path: Path) -> Path:
    if DATA is None:
        pytest.skip("PPSTREAM_TEST_DATA names no recordings")
    return Path(DATA) / "husky_imu_odom_gps.bag"


POSE = mapped("q", "/pose", "joints", dim=2)
IMU = mapped("imu", "/imu", "angular_velocity.x")
HUSKY = mapped("imu", "/imu/data", *IMU_FIELDS, dim=4, rate_hz=30)


@pytest.mark.parametrize(
    ("write", "name", "package", "wanted"),
    [
        (write_json, "run.mcap", "mcap", POSE),
        (lambda path: write_mcap_alone(path.parent, Samples.drawn()), "x", "rosbags", IMU),
        (write_npz, "run.npz", "numpy", POSE),
        (lambda path: write_npz(path, np.savez_compressed), "run.npz", "numpy", POSE),
        (write_npy, "run.npy", "numpy", POSE),
        (given_bag, "", "rosbags", HUSKY),
    ],
    ids=["mcap", "ros-2-mcap", "npz", "npz-compressed", "npy", "ros-1-bag"],
)
@pytest.mark.filterwarnings("ignore")  # of the readers, before they give up
def test_a_damaged_file_is_read_or_one_error_with_its_name(
    tmp_path: Path, write: Any, name: str, package: str, wanted: StreamConfig
) -> None:
    pytest.importorskip(package)
    whole = write(tmp_path / name)
    load_recording(whole, [wanted])
    draw = random.Random(20)
    refused = 0
    damages = DAMAGES if whole.stat().st_size < 10**6 else DAMAGES // 4
    for _ in range(damages):
        path = tmp_path / f"damaged{whole.suffix}"
        path.write_bytes(damaged(whole, draw))
        try:
            load_recording(path, [wanted])
        except ConfigError as error:
            refused += 1
            (problem,) = error.problems
            assert problem.startswith(str(path))
            assert "\n" not in problem
    assert refused > damages / 4


def test_an_mcap_file_that_ends_early_is_read_as_far_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_json(tmp_path / "run.mcap")
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\x02")])  # its summary is cut
    assert len(load_recording(path, [mapped("q", "/pose", "joints")]).tracks["q"].stamps_ns) == 3
    assert "run.mcap ends early" in caplog.text


def test_a_damaged_chunk_is_named_and_nothing_behind_it_is_lost_in_silence(tmp_path: Path) -> None:
    path = write_json(tmp_path / "run.mcap")
    data = bytearray(path.read_bytes())
    data[data.index(b"\x28\xb5\x2f\xfd") + 12] ^= 0xFF  # behind zstandard's magic number
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"run\.mcap: .*record \d+: .*mcap recover FILE"):
        load_recording(path, [mapped("q", "/pose", "joints")])
