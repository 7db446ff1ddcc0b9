"""The same samples, written in every format that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from stream_cases import MS, Input, config, stream

from ppstream.config.schema import ImageConfig, PipelineConfig, RecordConfig, StreamConfig
from ppstream.core.clock import now_ns
from ppstream.recording.items import SamplesItem

S = 1000 * MS
COUNT = 40


class Samples(NamedTuple):
    """An imu at 100 Hz that comes 30 ms late; one stamp comes twice, one sample is older."""

    stamps_ns: Any
    arrivals_ns: Any
    values: Any  # [n, 3] float32

    @classmethod
    def drawn(cls) -> Samples:
        arrivals_ns = 100 * S + np.arange(COUNT, dtype=np.int64) * 10 * MS
        stamps_ns = arrivals_ns - 30 * MS
        stamps_ns[5] = stamps_ns[4]
        stamps_ns[20] -= 35 * MS
        values = np.random.default_rng(1).normal(size=(COUNT, 3)).astype(np.float32)
        values[7] = values[6]
        return cls(stamps_ns, arrivals_ns, values)


def write_npz(folder: Path, samples: Samples, save: Any = np.savez) -> Path:
    arrays = {"imu.stamps_ns": samples.stamps_ns, "imu.values": samples.values}
    save(folder / "run.npz", allow_pickle=False, **arrays)
    return folder / "run.npz"


def write_compressed(folder: Path, samples: Samples) -> Path:
    return write_npz(folder, samples, np.savez_compressed)


def write_json(folder: Path, samples: Samples) -> Path:
    writers = pytest.importorskip("mcap.writer")
    with (folder / "run.mcap").open("wb") as file:
        writer = writers.Writer(file)
        writer.start()
        schema = writer.register_schema("Imu", "jsonschema", b'{"type": "object"}')
        channel = writer.register_channel("/imu", "json", schema)
        for stamp_ns, at_ns, values in zip(*samples, strict=True):
            stamp = {"sec": int(stamp_ns) // S, "nsec": int(stamp_ns) % S}
            body = {"header": {"stamp": stamp}, "joints": values.tolist()}
            writer.add_message(channel, int(at_ns), json.dumps(body).encode(), int(at_ns))
        writer.finish()
    return folder / "run.mcap"


def write_own(folder: Path, samples: Samples) -> Path:
    """As rank 0 records a run: each message as it came, also what no ring took."""
    pytest.importorskip("mcap")
    from ppstream.recording.mcap_writer import open_recorder

    record = RecordConfig(file=str(folder / "run.mcap"))
    recorded = msgspec.structs.replace(config(stream("imu", dim=3, rate_hz=100)), record=record)
    (row,) = Input(recorded).rows
    row.open(1)
    recorder = open_recorder(recorded, "run")
    assert recorder is not None
    recorder.tap([row])
    for stamp_ns, _, values in zip(*samples, strict=True):
        row.rings["imu"].append(np.array([stamp_ns]), values[None], now_ns())
    recorder.close()
    return folder / "run.mcap"


def write_bag(folder: Path, samples: Samples, storage: str) -> Path:
    pytest.importorskip("rosbags")
    from rosbags import rosbag1, rosbag2
    from rosbags.typesys import Stores, get_typestore

    is_ros1 = storage == "ROS1"
    store: Any = get_typestore(Stores.ROS1_NOETIC if is_ros1 else Stores.ROS2_HUMBLE)
    types = store.types
    vector, quaternion = types["geometry_msgs/msg/Vector3"], types["geometry_msgs/msg/Quaternion"]
    if is_ros1:
        bag: Any = rosbag1.Writer(folder / "run.bag")
    else:
        plugin = getattr(rosbag2.StoragePlugin, storage)
        bag = rosbag2.Writer(folder / "bag", version=9, storage_plugin=plugin)
    number = (0,) if is_ros1 else ()
    with bag as writer:
        connection = writer.add_connection("/imu", "sensor_msgs/msg/Imu", typestore=store)
        serialize = store.serialize_ros1 if is_ros1 else store.serialize_cdr
        for stamp_ns, at_ns, values in zip(*samples, strict=True):
            stamp = types["builtin_interfaces/msg/Time"](int(stamp_ns) // S, int(stamp_ns) % S)
            header = types["std_msgs/msg/Header"](*number, stamp, "base")
            turn, still = vector(*values.astype(float)), vector(0, 0, 9.81)
            parts = (quaternion(0, 0, 0, 1), np.zeros(9), turn, np.zeros(9), still, np.zeros(9))
            message = types["sensor_msgs/msg/Imu"](header, *parts)
            data = serialize(message, "sensor_msgs/msg/Imu")
            writer.write(connection, int(at_ns), bytes(data))
    return folder / ("run.bag" if is_ros1 else "bag")


def write_images(folder: Path, samples: Samples, frames: int = 7) -> Path:
    """As ``write_json``, with JPEGs of Foxglove's and raw frames of ROS's kind beside it."""
    writers = pytest.importorskip("mcap.writer")
    with (folder / "run.mcap").open("wb") as file:
        writer = writers.Writer(file)
        writer.start()
        imu, jpeg, raw = (
            writer.register_channel(topic, encoding, writer.register_schema(name, form, b"{}"))
            for topic, encoding, name, form in (
                ("/imu", "json", "Imu", "jsonschema"),
                ("/top", "json", "foxglove.CompressedImage", "jsonschema"),
                ("/wrist/image_raw", "cdr", "sensor_msgs/msg/Image", "ros2msg"),
            )
        )
        for stamp_ns, at_ns, values in zip(*samples, strict=True):
            stamp = {"sec": int(stamp_ns) // S, "nsec": int(stamp_ns) % S}
            body = {"header": {"stamp": stamp}, "joints": values.tolist()}
            writer.add_message(imu, int(at_ns), json.dumps(body).encode(), int(at_ns))
        for at_ns in samples.arrivals_ns[:frames].tolist():
            writer.add_message(jpeg, at_ns, b'{"format": "jpeg", "data": ""}', at_ns)
            writer.add_message(raw, at_ns, bytes(16), at_ns)
            writer.add_message(raw, at_ns, bytes(16), at_ns)
        writer.finish()
    return folder / "run.mcap"


def write_sqlite(folder: Path, samples: Samples) -> Path:
    return write_bag(folder, samples, "SQLITE3")


def write_mcap_bag(folder: Path, samples: Samples) -> Path:
    return write_bag(folder, samples, "MCAP")


def write_mcap_alone(folder: Path, samples: Samples) -> Path:
    return next(write_mcap_bag(folder, samples).glob("*.mcap"))


def write_ros1(folder: Path, samples: Samples) -> Path:
    return write_bag(folder, samples, "ROS1")


def with_camera(config: PipelineConfig, height: int, width: int, **record: Any) -> PipelineConfig:
    """The configuration with a camera ``wrist``; ``record`` are fields of its recording."""
    camera = StreamConfig(name="wrist", rate_hz=30, image=ImageConfig(height=height, width=width))
    streams = (*config.streams, camera)
    return msgspec.structs.replace(config, streams=streams, record=RecordConfig(**record))


def picture(height: int, width: int, step: int = 0) -> np.ndarray[Any, Any]:
    """A frame ``[height, width, 3]`` as cameras give them: slopes, waves, a sensor's noise."""
    y, x = np.mgrid[0:height, 0:width]
    slopes = np.stack([x / width, y / height, (x + y) / (width + height)], axis=-1) * 255
    waves = 30 * np.sin((x + step) / 5)[..., None] * np.cos(y / 7)[..., None]
    noise = np.random.default_rng(step).normal(0, 4, slopes.shape)
    return np.clip(slopes + waves + noise, 0, 255).astype(np.uint8)


def write_late_recording(path: Path, seconds: float = 2.0) -> None:
    """Two streams of a robot: joints that come at once, and an imu that comes 8 ms late."""
    from ppstream.recording.mcap_writer import RecordFile

    streams = stream("joints", 3, 500), stream("imu", 2, 200)
    rng = np.random.default_rng(4)
    items = []
    for one, late_ns in zip(streams, (0, 8 * MS), strict=True):
        for number in range(round(one.rate_hz * seconds)):
            stamp_ns = S + round(number * S / one.rate_hz) + int(rng.integers(MS))
            values = rng.uniform(-0.4, 0.4, one.dim).astype(np.float32).tobytes()
            place = one.name, number, number + 1
            stamp = np.int64(stamp_ns).tobytes()
            items.append(SamplesItem("arm", *place, stamp, values, stamp_ns + late_ns))
    file = RecordFile(path, config(*streams), "made")
    file.write(sorted(items, key=lambda item: item.received_ns))
    file.close()


def made_recording(path: Path, seconds: float = 0.5) -> Path:
    """Two streams of another rate each, with jitter."""
    rng = np.random.default_rng(3)
    arrays = {}
    for name, rate_hz, dim in (("joints", 1000, 3), ("imu", 200, 2)):
        stamps = np.cumsum(rng.uniform(0.6, 1.4, round(rate_hz * seconds)) / rate_hz * 1e9).astype(
            np.int64
        )
        arrays[f"{name}.stamps_ns"] = stamps + 10**15
        arrays[f"{name}.values"] = rng.normal(size=(len(stamps), dim)).astype(np.float32)
    np.savez(path, **arrays)
    return path
