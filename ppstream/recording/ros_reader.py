"""Reads ROS 1 and ROS 2 bags through ``rosbags``; no ROS installation is needed.

Frames stay in the bag until they are asked for, as those of an MCAP file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ppstream.core.errors import ConfigError
from ppstream.recording.other_streams import OtherMessage, OtherStreams
from ppstream.recording.recording import IMAGES, Recording
from ppstream.recording.ros_bag import Bag, BagPlaces

if TYPE_CHECKING:
    from ppstream.config.schema import StreamConfig


DECODERS_MAX: Final = 64  # kept: generating one takes longer than reading many messages


def load_bag(path: Path, streams: Sequence[StreamConfig]) -> Recording:
    """The declared streams of a ``.bag`` file or of a ROS 2 bag's folder.

    Each sample is due when it was logged, and has the stamp of its header: a stream that came late
    comes late again.

    Raises:
        ConfigError: ``rosbags`` is not installed, or the bag lacks what is asked for.
    """
    need_rosbags()
    bag = Bag(path)
    wanted = OtherStreams(path, streams, lambda topic: partial(bag.data, topic))
    places = {topic: BagPlaces() for topic in wanted.cameras}
    try:
        connections = bag.reader.connections
        topics = {connection.topic for connection in connections}
        chosen = [c for c in connections if c.topic in wanted.topics]
        images: Counter[str] = Counter()
        for one in connections:
            if one.msgtype in IMAGES:
                images[one.topic] += one.msgcount
        for connection, at_ns, data in bag.reader.messages(chosen) if chosen else ():
            topic, kind = connection.topic, connection.msgtype
            place = places[topic].next(at_ns) if topic in places else None
            wanted.add(OtherMessage(topic, kind, at_ns, data, place), partial(bag.decoded, kind))
    finally:
        bag.close()
    return Recording(wanted.tracks(topics), images=images)


@lru_cache(DECODERS_MAX)
def cdr_decoder(name: str, definition: str) -> Callable[[bytes], object]:
    """Decodes messages of one ROS 2 type.

    Args:
        name: ``sensor_msgs/msg/Imu``.
        definition: of the message and of all that it is made of, as ``ros2msg``.

    Raises:
        ConfigError: ``rosbags`` is not installed.
    """
    need_rosbags()
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

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
