"""FileFrames: frames of one topic that stay in their file until they are asked for."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.recording.recording import RecordedFrames, unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

Found = TypeVar("Found")
MessageReader = Callable[[Any], bytes]  # the message at a place, which is the file's own matter


class ImageDecoder(Protocol):
    """Decodes the messages of one topic."""

    def pixels(self, data: bytes) -> NDArray[np.uint8]:
        """Pixels ``[height * width * 3]`` uint8 RGB."""

    def encoded(self, data: bytes) -> bytes | None:
        """The JPEG or PNG, None where it is neither."""


class FileFrames:
    """Frames of one topic, read one by one from where they are. Pickles as their places.

    Args:
        path: of the file.
        topic: that has them.
        read: gives the message at a place; pickles.
    """

    def __init__(self, path: Path, topic: str, read: MessageReader) -> None:
        self.topic = topic
        self._path, self._read = path, read
        self._numbers = array("q")  # of the frames, from 1
        self._places: list[Any] = []
        self._decoder: ImageDecoder | None = None

    def __len__(self) -> int:
        return len(self._places)

    def add(self, number: int, place: Any) -> None:
        self._numbers.append(number)
        self._places.append(place)

    def frames(self, size: tuple[int, int], decoder: ImageDecoder) -> RecordedFrames:
        """All that were added."""
        self._decoder = decoder
        return RecordedFrames(len(self), size, self._pixels, self._encoded, topic=self.topic)

    def unreadable(self, number: int, error: Exception) -> ConfigError:
        """Words the error for the frame of a number."""
        return unreadable(self._path, error, f"frame {number} of {self.topic}: ")

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        assert self._decoder is not None
        return self._decoded(index, self._decoder.pixels)

    def _encoded(self, index: int) -> bytes | None:
        assert self._decoder is not None
        return self._decoded(index, self._decoder.encoded)

    def _decoded(self, index: int, decode: Callable[[bytes], Found]) -> Found:
        try:
            return decode(self._read(self._places[index]))
        except Exception as error:  # the file may have changed in any way
            raise self.unreadable(self._numbers[index], error) from error
