"""OtherStreams: the declared streams of a file of other software, values and cameras' frames.

Which file it is, how its messages decode and where a frame is in it, is its reader's matter.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError
from ppstream.recording.camera_images import need_jpeg
from ppstream.recording.field_reader import STAMPS, FieldReader, need_streams, stamp_of
from ppstream.recording.file_frames import FileFrames, MessageReader
from ppstream.recording.image_messages import COMPRESSED, found_image
from ppstream.recording.recording import Track, arrivals_on_stamps_clock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig

logger = logging.getLogger("ppstream")

IMAGE_STAMPS: Final = (*STAMPS, "timestamp")  # of ROS's and of Foxglove's images
DELAY_MAX_NS: Final = NS_PER_S  # of the quickest message, where its stamp is of the same clock
NAMED: Final = 5  # of the frames that are left out

Decode = Callable[[bytes], object]  # of a topic's messages; pickles


class OtherMessage(NamedTuple):
    """One message of a file, still encoded."""

    topic: str
    kind: str  # name of its type
    at_ns: int  # when it was logged
    data: bytes
    place: Any  # in the file, of a camera's


class OtherStreams:
    """Collects the declared streams from messages, in the order in which they were logged.

    Args:
        path: of the file.
        streams: their ``recorded`` say what is wanted; several may read one topic.
        reader: makes what reads the messages of a topic again, for frames.

    ``topics`` has the wanted topics, ``cameras`` those of them whose messages are frames.

    Raises:
        ConfigError: there is no stream, or one does not say where it is recorded.
    """

    def __init__(
        self, path: Path, streams: Sequence[StreamConfig], reader: Callable[[str], MessageReader]
    ) -> None:
        need_streams(path, streams)
        self._names = [stream.name for stream in streams]
        plain = [stream for stream in streams if stream.image is None or stream.recorded is None]
        self._fields = FieldReader(path, plain)
        self._cameras = [
            OtherCamera(path, stream, reader) for stream in streams if stream not in plain
        ]
        self.cameras = {camera.topic for camera in self._cameras}
        self.topics = self._fields.topics | self.cameras

    def add(self, found: OtherMessage, decode: Decode) -> None:
        """One message of ``topics``.

        Raises:
            ConfigError: it lacks a field, or a field holds no numbers; no images of this kind or
                encoding are read.
        """
        if found.topic in self._fields.topics:
            self._fields.add(found.topic, decode(found.data), found.at_ns)
        for camera in self._cameras:
            if camera.topic == found.topic:
                camera.add(found, decode)

    def tracks(self, topics: Iterable[str]) -> dict[str, Track]:
        """Returns what was collected, in the streams' order, arrivals on the clock of stamps.

        A simulator stamps by its own time, a driver by its device's; both are logged by a host's.

        Args:
            topics: all that the file has, to say so when one is missing.

        Raises:
            ConfigError: a topic has no message, or of a camera none that is usable.
        """
        tracks = self._fields.tracks(topics)
        tracks |= {camera.name: camera.track(topics) for camera in self._cameras}
        return arrivals_on_stamps_clock({n: tracks[n] for n in self._names}, DELAY_MAX_NS)


class OtherImages(NamedTuple):
    """Decodes the images of a topic that other software recorded."""

    kind: str  # of messages
    decode: Decode

    def pixels(self, data: bytes) -> NDArray[np.uint8]:
        return found_image(self.kind, self.decode(data)).pixels()

    def encoded(self, data: bytes) -> bytes | None:
        return found_image(self.kind, self.decode(data)).encoded()


class OtherCamera:
    """Frames of one camera, as other software recorded them.

    A frame that does not decode, or has another size than the configuration states, is left out, as
    rank 0 refuses it from a robot; a warning counts such frames and names the first.

    Args:
        path: of the file.
        stream: its ``recorded`` has the topic, its ``image`` the size.
        reader: makes what reads a topic's messages again.
    """

    def __init__(
        self, path: Path, stream: StreamConfig, reader: Callable[[str], MessageReader]
    ) -> None:
        assert stream.recorded is not None
        assert stream.image is not None
        self.name, self.topic = stream.name, stream.recorded.topic
        self._path, self._stamp = path, stream.recorded.stamp
        self._size = stream.image.height, stream.image.width
        self._frames = FileFrames(path, self.topic, reader(self.topic))
        self._decoder: OtherImages | None = None
        self._stamps, self._arrivals = array("q"), array("q")
        self._count = 0
        self._left: list[int] = []  # numbers of the frames that are left out
        self._reason = ""  # of the first

    def add(self, found: OtherMessage, decode: Decode) -> None:
        """Raises ConfigError when no images of this kind or encoding are read."""
        if self._decoder is None:
            if found.kind.endswith(COMPRESSED):
                need_jpeg(f"{self._path}: {self.topic}")
            self._decoder = OtherImages(found.kind, decode)
        self._count += 1
        try:
            message = self._decoder.decode(found.data)
            image = found_image(self._decoder.kind, message)
            if image.size != self._size:
                (height, width), wanted = image.size, self._size
                raise ValueError(f"{height} x {width}, want {wanted[0]} x {wanted[1]}")
            image.check()
            stamp_ns = stamp_of(message, self._stamp, found.at_ns, IMAGE_STAMPS)
        except ConfigError as error:
            raise ConfigError([f"{self._about}{self.topic}: {error}"]) from error
        except Exception as error:  # noqa: BLE001 - what readers raise on damaged messages has no end
            self._left.append(self._count)
            self._reason = self._reason or str(error)
            return
        self._stamps.append(stamp_ns)
        self._arrivals.append(found.at_ns)
        self._frames.add(self._count, found.place)

    def track(self, topics: Iterable[str]) -> Track:
        """Frames in the order in which they were logged.

        Args:
            topics: all that the file has, to say so when this one is missing.

        Raises:
            ConfigError: there is no frame.
        """
        if not self._count:
            there = ", ".join(sorted(topics)) or "nothing"
            raise ConfigError([f"{self._path}: no message of {self.topic!r}, want one of {there}"])
        first = f"frame {self._left[0]}: {self._reason}" if self._left else ""
        if self._decoder is None or not len(self._frames):
            raise ConfigError(
                [f"{self._about}none of {self._count} frames of {self.topic} is usable; {first}"]
            )
        if self._left:
            numbers = ", ".join(map(str, self._left[:NAMED]))
            more = len(self._left) - NAMED
            logger.warning(
                "%s%d of %d frames of %s are left out, as a live run refuses them: %s%s; %s",
                *(self._about, len(self._left), self._count, self.topic, numbers),
                *(f" and {more} more" if more > 0 else "", first),
            )
        stamps, logged = (np.frombuffer(t, np.int64) for t in (self._stamps, self._arrivals))
        return Track(stamps, self._frames.frames(self._size, self._decoder), logged)

    @property
    def _about(self) -> str:
        return f"{self._path}: stream {self.name!r}: "
