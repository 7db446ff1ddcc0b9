"""Recordings with cameras, as other software writes them: MCAP files and ROS bags."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from recording_files import picture
from stream_cases import MS, config, stream

from ppstream.config.schema import ImageConfig, PipelineConfig, RecordedAs, StreamConfig

S = 1000 * MS
ORIGIN_NS = 100 * S
HEIGHT, WIDTH = 12, 20
IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
JOINTS, JOINTS_DEFINITION = "arm_msgs/msg/Joints", "std_msgs/Header header\nfloat64[] joints"

Frame = np.ndarray[Any, Any]


class CameraWriter:
    """A recording in the making; of topic ``/arm`` two joints, of cameras what they are given."""

    is_ros1 = False

    def __init__(self) -> None:
        pytest.importorskip("rosbags")
        pytest.importorskip("PIL")
        from rosbags.typesys import Stores, get_types_from_msg, get_typestore

        self.store: Any = get_typestore(Stores.ROS1_NOETIC if self.is_ros1 else Stores.ROS2_HUMBLE)
        self.store.register(get_types_from_msg(JOINTS_DEFINITION, JOINTS))

    def arm(self, stamp_ns: int, *values: float, late_ns: int = 0) -> None:
        self.ros("/arm", JOINTS, stamp_ns, late_ns, np.array(values, np.float64))

    def image(
        self,
        topic: str,
        stamp_ns: int,
        data: Any,
        encoding: str = "rgb8",
        *,
        padding: int = 0,
        late_ns: int = 0,
        size: tuple[int, int] = (HEIGHT, WIDTH),
        is_bigendian: int = 0,
    ) -> None:
        """A raw one; ``data`` are its rows ``[height, bytes]`` without padding."""
        rows = np.asarray(data, np.uint8).reshape(size[0], -1)
        rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=7)
        body = (*size, encoding, is_bigendian, rows.shape[1], rows.reshape(-1))
        self.ros(topic, IMAGE, stamp_ns, late_ns, *body)

    def compressed(
        self, topic: str, stamp_ns: int, data: bytes, form: str = "jpeg", *, late_ns: int = 0
    ) -> None:
        self.ros(topic, COMPRESSED, stamp_ns, late_ns, form, np.frombuffer(data, np.uint8))

    def ros(self, topic: str, kind: str, stamp_ns: int, late_ns: int, *body: Any) -> None:
        """A message of a type of ROS that begins with a header."""
        types = self.store.types
        stamp = types["builtin_interfaces/msg/Time"](*divmod(stamp_ns, S))
        number = (0,) if self.is_ros1 else ()
        message = types[kind](types["std_msgs/msg/Header"](*number, stamp, "camera"), *body)
        serialize = self.store.serialize_ros1 if self.is_ros1 else self.store.serialize_cdr
        self.raw(topic, kind, stamp_ns + late_ns, bytes(serialize(message, kind)))

    def raw(self, topic: str, kind: str, at_ns: int, data: bytes) -> None:
        """Any bytes as a message of a type of ROS."""
        raise NotImplementedError


class CameraFile(CameraWriter):
    """An MCAP file, whose joints are JSON."""

    def __init__(self, path: Path, **writer: Any) -> None:
        writers = pytest.importorskip("mcap.writer")
        super().__init__()
        self._file = path.open("wb")
        self._writer = writers.Writer(self._file, **writer)
        self._writer.start()
        self._channels: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def __enter__(self) -> CameraFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._writer.finish()
        self._file.close()

    def arm(self, stamp_ns: int, *values: float, late_ns: int = 0) -> None:
        body = {"header": {"stamp": _stamp(stamp_ns)}, "joints": values}
        self._add("/arm", "Arm", stamp_ns + late_ns, json.dumps(body).encode())

    def foxglove(self, topic: str, stamp_ns: int, kind: str, **fields: Any) -> None:
        body = {"timestamp": _stamp(stamp_ns), "frame_id": "c"} | fields
        body["data"] = base64.b64encode(body["data"]).decode()
        self._add(topic, f"foxglove.{kind}", stamp_ns, json.dumps(body).encode())

    def raw(self, topic: str, kind: str, at_ns: int, data: bytes) -> None:
        definition = self.store.generate_msgdef(kind, ros_version=2)[0]
        self._add(topic, kind, at_ns, data, "cdr", definition)

    def _add(
        self,
        topic: str,
        kind: str,
        at_ns: int,
        data: bytes,
        encoding: str = "json",
        definition: str = '{"type": "object"}',
    ) -> None:
        if topic not in self._channels:
            form = "jsonschema" if encoding == "json" else "ros2msg"
            schema = self._writer.register_schema(kind, form, definition.encode())
            self._channels[topic] = self._writer.register_channel(topic, encoding, schema)
        number = self._numbers[topic] = self._numbers.get(topic, 0) + 1
        self._writer.add_message(self._channels[topic], at_ns, data, at_ns, sequence=number)


class CameraBag(CameraWriter):
    """A ROS bag by ``rosbags``: of ROS 1 for a name that ends in ``.bag``, else a ROS 2 folder.

    Args:
        path: of the file or folder.
        storage: of a folder, ``SQLITE3`` or ``MCAP``.
        compression: of a folder, ``FILE`` or ``MESSAGE``.
    """

    def __init__(self, path: Path, storage: str = "SQLITE3", compression: str = "") -> None:
        self.is_ros1 = path.suffix == ".bag"
        super().__init__()
        from rosbags import rosbag1, rosbag2

        if self.is_ros1:
            self._bag: Any = rosbag1.Writer(path)
        else:
            plugin = rosbag2.StoragePlugin[storage]
            self._bag = rosbag2.Writer(path, version=9, storage_plugin=plugin)
        if compression:
            kinds = rosbag2.CompressionFormat, rosbag2.CompressionMode
            self._bag.set_compression(kinds[1][compression], kinds[0].ZSTD)
        self._connections: dict[tuple[str, str], Any] = {}

    def __enter__(self) -> CameraBag:
        self._bag.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._bag.close()

    def raw(self, topic: str, kind: str, at_ns: int, data: bytes) -> None:
        if (topic, kind) not in self._connections:
            made = self._bag.add_connection(topic, kind, typestore=self.store)
            self._connections[topic, kind] = made
        self._bag.write(self._connections[topic, kind], at_ns, data)


class FoxgloveFile(CameraWriter):
    """An MCAP file by Foxglove's SDK: images are protobuf, joints JSON."""

    def __init__(self, path: Path, **writer: Any) -> None:
        self.sdk = pytest.importorskip("foxglove")
        super().__init__()
        from foxglove.mcap import MCAPWriteOptions

        self.context = self.sdk.Context()
        options = MCAPWriteOptions(**writer)
        self._writer = self.sdk.open_mcap(path, context=self.context, writer_options=options)
        self._channels: dict[str, Any] = {}

    def __enter__(self) -> FoxgloveFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def arm(self, stamp_ns: int, *values: float, late_ns: int = 0) -> None:
        body = {"header": {"stamp": _stamp(stamp_ns)}, "joints": values}
        made = partial(self.sdk.Channel, schema={"type": "object"})
        self._log(made, "/arm", body, stamp_ns + late_ns)

    def image(  # type: ignore[override]  # what ROS alone has
        self,
        topic: str,
        stamp_ns: int | None,
        data: Any,
        encoding: str = "rgb8",
        *,
        padding: int = 0,
        late_ns: int = 0,
        **more: Any,
    ) -> None:
        """``stamp_ns`` None: the message has none."""
        rows = np.asarray(data, np.uint8).reshape(HEIGHT, -1)
        rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=7)
        fields = {"height": HEIGHT, "width": WIDTH, "step": rows.shape[1], "data": rows.tobytes()}
        self.foxglove("RawImage", topic, stamp_ns, late_ns, encoding=encoding, **fields | more)

    def compressed(
        self, topic: str, stamp_ns: int, data: bytes, form: str = "jpeg", *, late_ns: int = 0
    ) -> None:
        self.foxglove("CompressedImage", topic, stamp_ns, late_ns, format=form, data=data)

    def foxglove(
        self, kind: str, topic: str, stamp_ns: int | None, late_ns: int = 0, **fields: Any
    ) -> None:
        from foxglove import channels, messages

        if stamp_ns is not None:
            fields["timestamp"] = messages.Timestamp(*divmod(stamp_ns, S))
        body = getattr(messages, kind)(**fields)
        at_ns = (stamp_ns or ORIGIN_NS) + late_ns
        self._log(getattr(channels, f"{kind}Channel"), topic, body, at_ns)

    def raw(self, topic: str, kind: str, at_ns: int, data: bytes) -> None:
        """Any bytes as a message of a type of Foxglove."""
        from foxglove import messages

        schema = getattr(messages, kind).get_schema()
        made = partial(self.sdk.Channel, message_encoding="protobuf", schema=schema)
        self._log(made, topic, data, at_ns)

    def _log(self, made: Any, topic: str, body: Any, at_ns: int) -> None:
        if topic not in self._channels:
            self._channels[topic] = made(topic, context=self.context)
        self._channels[topic].log(body, log_time=at_ns)


def _stamp(stamp_ns: int) -> dict[str, int]:
    return {"sec": stamp_ns // S, "nsec": stamp_ns % S}


def saved(frame: Frame, form: str = "JPEG", **options: Any) -> bytes:
    """An image file of a frame."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(frame).save(file, form, **options)
    return file.getvalue()


def opened(data: bytes) -> Frame:
    """Its RGB, by Pillow alone."""
    from PIL import Image

    return np.asarray(Image.open(BytesIO(data)).convert("RGB"))


def camera(
    name: str, topic: str, size: tuple[int, int] = (HEIGHT, WIDTH), **more: Any
) -> StreamConfig:
    image = ImageConfig(height=size[0], width=size[1], **{"dtype": "float32"} | more)
    recorded = RecordedAs(topic=topic)
    return StreamConfig(name=name, rate_hz=30, image=image, recorded=recorded, max_age_ms=100)


def arm(**more: Any) -> StreamConfig:
    recorded = RecordedAs(topic="/arm", fields=("joints",))
    return stream("arm", dim=2, rate_hz=100, recorded=recorded, **more)


def two_cameras(**more: Any) -> PipelineConfig:
    """An arm, a raw camera and one of JPEGs whose newest two frames are read."""
    top = camera("top", "/top", resize=(8, 9), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    wrist = camera("wrist", "/wrist", frames=2, dtype="bfloat16", mean=(0.3, 0.2, 0.1))
    return config(arm(), top, wrist, steps=3, **{"dt_ms": 20} | more)


def write_cameras(
    path: Path,
    number: int = 0,
    seconds: float = 1.0,
    *,
    damaged: tuple[int, ...] = (),
    by: Callable[[Path], Any] | None = None,
) -> dict[str, list[Frame]]:
    """A recording for ``two_cameras``; returns what a reader sees of all frames.

    Its writer is ``by``, else ``CameraFile`` for a name that ends in ``.mcap``, else ``CameraBag``.
    The cameras' periods fit neither each other nor the window's; the JPEGs come 25 ms late, and two
    of them out of turn. ``damaged``: of JPEGs, by number from 0, that are cut short.
    """
    events: list[tuple[int, str, int]] = []
    for kind, period_ms, late_ms in (("arm", 10, 0), ("top", 33, 4), ("wrist", 41, 25)):
        for count, at_ms in enumerate(range(0, round(1000 * seconds), period_ms)):
            late = late_ms + (60 if kind == "wrist" and count == 7 else 0)
            events.append((ORIGIN_NS + number * 10 * S + at_ms * MS, kind, late * MS))
    frames: dict[str, list[Frame]] = {"top": [], "wrist": []}
    counts = {"arm": 0, "top": 0, "wrist": 0}
    with (by or (CameraFile if path.suffix == ".mcap" else CameraBag))(path) as file:
        for stamp_ns, kind, late_ns in sorted(events, key=lambda event: event[0] + event[2]):
            count = counts[kind]
            counts[kind] += 1
            frame = picture(HEIGHT, WIDTH, 100 * number + count)
            if kind == "arm":
                file.arm(stamp_ns, np.sin(count), number, late_ns=late_ns)
            elif kind == "top":
                file.image("/top", stamp_ns, frame[..., ::-1], "bgr8", late_ns=late_ns)
                frames[kind].append(frame)
            else:
                data = saved(frame)
                cut = data[: len(data) * 9 // 10] if count in damaged else data
                file.compressed("/wrist", stamp_ns, cut, late_ns=late_ns)
                frames[kind].append(opened(data))
    return frames
