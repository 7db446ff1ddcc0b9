"""Reads ROS 1 and ROS 2 bags through ``rosbags``; no ROS installation is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppstream.core.errors import ConfigError
from ppstream.recording.field_reader import FieldReader, need_streams
from ppstream.recording.recording import IMAGES, Recording

if TYPE_CHECKING:
    from ppstream.config.schema import StreamConfig


def load_bag(path: Path, streams: Sequence[StreamConfig]) -> Recording:
    """The declared streams of a ``.bag`` file or of a ROS 2 bag's folder.

    Each sample is due when it was logged, and has the stamp of its header: a stream that came late
    comes late again.

    Raises:
        ConfigError: ``rosbags`` is not installed, or the bag lacks what is asked for.
    """
    need_rosbags()
    from rosbags.highlevel import AnyReader
    from rosbags.typesys import Stores, get_typestore

    need_streams(path, streams)
    fields = FieldReader(path, streams)
    with AnyReader([path], default_typestore=get_typestore(Stores.LATEST)) as reader:
        topics = {connection.topic for connection in reader.connections}
        chosen = [c for c in reader.connections if c.topic in fields.topics]
        images: Counter[str] = Counter()
        for one in reader.connections:
            if one.msgtype in IMAGES:
                images[one.topic] += one.msgcount
        for connection, at_ns, data in reader.messages(connections=chosen) if chosen else ():
            message = reader.deserialize(data, connection.msgtype)
            fields.add(connection.topic, message, at_ns)
    return Recording(fields.tracks(topics), images=images)


def cdr_decoder(name: str, form: str, definition: str) -> Callable[[bytes], object]:
    """Decodes messages of one ROS 2 type.

    Args:
        name: ``sensor_msgs/msg/Imu``.
        form: of the definition, ``ros2msg`` or ``ros2idl``.
        definition: of the message and of all that it is made of.

    Raises:
        ConfigError: ``rosbags`` is not installed, or the form is another.
    """
    need_rosbags()
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

    if form != "ros2msg":
        raise ConfigError([f"{name} is defined as {form!r}, want ros2msg"])
    store: Any = get_typestore(Stores.EMPTY)
    store.register(get_types_from_msg(definition, name))
    return lambda data: store.deserialize_cdr(data, name)


def need_rosbags() -> None:
    """Raises ConfigError unless ROS messages can be read here."""
    try:
        import rosbags  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            ["ROS bags need a package that is not installed: pip install 'ppstream[replay]'"]
        ) from error
