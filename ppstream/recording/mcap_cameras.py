"""Cameras of an MCAP file: where each frame is in it, and its pixels when they are asked for.

``OwnCamera`` has the frames that ppstream recorded, ``OtherCamera`` those of other software.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.recording.camera_images import OwnImages, image_facts, need_jpeg
from ppstream.recording.field_reader import STAMPS, stamp_of
from ppstream.recording.image_messages import COMPRESSED, found_image
from ppstream.recording.mcap_schema import FOXGLOVE, CompressedImage
from ppstream.recording.recording import RecordedFrames, Track, unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig
    from ppstream.recording.mcap_messages import EncodedMessage, FilePosition, MessageDecoder

logger = logging.getLogger("ppstream")

IMAGE_STAMPS: Final = (*STAMPS, "timestamp")  # of ROS's and of Foxglove's images
NAMED: Final = 5  # of the frames that are left out
Found = TypeVar("Found")


class ImageDecoder(Protocol):
    """Decodes the messages of one topic."""

    def pixels(self, data: bytes) -> NDArray[np.uint8]:
        """Pixels ``[height * width * 3]`` uint8 RGB."""

    def encoded(self, data: bytes) -> bytes | None:
        """The JPEG or PNG, None where it is neither."""


class McapFrames:
    """Frames of one topic, read one by one from where they are. Pickles as their places.

    The records of the chunk that was read last are kept: most frames are asked for in order.
    """

    def __init__(self, path: Path, topic: str) -> None:
        self.topic = topic
        self._path = path
        self._places: list[tuple[int, FilePosition]] = []  # and the frame's number, from 1
        self._decoder: ImageDecoder | None = None
        self._held: tuple[int, list[Any]] = (-1, [])  # a chunk's offset and its records

    def __len__(self) -> int:
        return len(self._places)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": (-1, [])}

    def add(self, number: int, position: FilePosition) -> None:
        self._places.append((number, position))

    def frames(self, size: tuple[int, int], decoder: ImageDecoder) -> RecordedFrames:
        """All that were added."""
        self._decoder = decoder
        return RecordedFrames(len(self), size, self._pixels, self._encoded, topic=self.topic)

    def unreadable(self, number: int, error: Exception) -> ConfigError:
        """Words the error for the frame of a number."""
        return unreadable(self._path, error, f"frame {number} of {self.topic}: ")

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        assert self._decoder is not None
        return self._read(index, self._decoder.pixels)

    def _encoded(self, index: int) -> bytes | None:
        assert self._decoder is not None
        return self._read(index, self._decoder.encoded)

    def _read(self, index: int, decode: Callable[[bytes], Found]) -> Found:
        number, position = self._places[index]
        try:
            if self._held[0] != position.offset:
                self._held = position.offset, self._records_at(position.offset)
            return decode(self._held[1][position.behind].data)
        except Exception as error:  # the file may have changed in any way
            raise self.unreadable(number, error) from error

    def _records_at(self, offset: int) -> list[Any]:
        from mcap.records import Chunk
        from mcap.stream_reader import StreamReader, breakup_chunk

        with self._path.open("rb") as file:
            file.seek(offset)
            found = StreamReader(file, skip_magic=offset > 0, emit_chunks=True).records
            record = next(iter(found))
        return breakup_chunk(record) if isinstance(record, Chunk) else [record]


class OwnCamera:
    """Frames of one camera, as ppstream recorded them.

    Args:
        path: of the file.
        topic: of the camera.
    """

    def __init__(self, path: Path, topic: str) -> None:
        self.topic = topic
        self.end = 0  # number behind the newest frame
        self.lost = 0  # what the recorder had to drop
        self._path = path
        self._schema = ""
        self._size: tuple[int, int] | None = None
        self._times: list[tuple[int, int]] = []  # stamp and arrival
        self._frames = McapFrames(path, topic)

    @property
    def count(self) -> int:
        return len(self._frames)

    def add(self, found: EncodedMessage) -> None:
        """Raises ConfigError when the message is no frame, or not as those before."""
        self._schema = found.kind
        if self._schema == FOXGLOVE[CompressedImage] and not self.count:
            need_jpeg(f"{self._path}: {self.topic}")
        number = self.count + 1
        try:
            facts = image_facts(self._schema, found.data)
            if self._size not in (None, facts.size):
                raise ValueError(f"got height and width {facts.size}, {self._size} before")
        except (ValueError, msgspec.MsgspecError) as error:
            raise self._frames.unreadable(number, error) from error
        self._size = facts.size
        self.lost += found.number - 1 - self.end
        self.end = found.number
        self._times.append((facts.stamp_ns, found.happened_ns))
        self._frames.add(number, found.position)

    def track(self) -> Track:
        """With arrivals on rank 0's clock."""
        assert self._size is not None, "a camera is made with its first frame"
        stamps, received = np.array(self._times, np.int64).T
        decoder = OwnImages(self._schema, self._size)
        return Track(stamps, self._frames.frames(self._size, decoder), received)


class OtherImages(NamedTuple):
    """Decodes the images of a topic that other software recorded."""

    kind: str  # of messages
    decode: MessageDecoder

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
    """

    def __init__(self, path: Path, stream: StreamConfig) -> None:
        assert stream.recorded is not None
        assert stream.image is not None
        self.name, self.topic = stream.name, stream.recorded.topic
        self._path, self._stamp = path, stream.recorded.stamp
        self._size = stream.image.height, stream.image.width
        self._frames = McapFrames(path, self.topic)
        self._decoder: OtherImages | None = None
        self._times: list[tuple[int, int]] = []  # stamp and arrival
        self._count = 0
        self._left: list[int] = []  # numbers of the frames that are left out
        self._reason = ""  # of the first

    def add(self, found: EncodedMessage, decode: MessageDecoder) -> None:
        """Raises ConfigError when no images of this kind or encoding are read."""
        if self._decoder is None:
            if found.kind.endswith(COMPRESSED):
                need_jpeg(f"{self._path}: {self.topic}")
            self._decoder = OtherImages(found.kind, decode)
        self._count += 1
        try:
            message = decode(found.data)
            image = found_image(found.kind, message)
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
        self._times.append((stamp_ns, found.at_ns))
        self._frames.add(self._count, found.position)

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
        stamps, logged = np.array(self._times, np.int64).T
        return Track(stamps, self._frames.frames(self._size, self._decoder), logged)

    @property
    def _about(self) -> str:
        return f"{self._path}: stream {self.name!r}: "
