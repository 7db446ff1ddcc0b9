"""Columns of images in LeRobot's tables: frames as JPEG or PNG inside the parquet file.

A frame that was recorded as JPEG or PNG stays the bytes that it was; a raw one becomes a PNG, which
loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.config.schema import CHANNELS
from ppstream.data.statistics import PixelStatistics
from ppstream.recording.camera_images import png

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig
    from ppstream.data.outputs import DataPart, PreparedEpisode

SAMPLED: Final = 16  # of so many frames one counts in statistics,
SIDE: Final = 150  # and of it about so many rows and columns
NAMES: Final = ("height", "width", "channels")


def image_key(camera: str) -> str:
    """LeRobot's name of a camera."""
    return f"observation.images.{camera}"


class ImageColumn:
    """Images of one camera, for the windows of an input in turn."""

    def __init__(self, camera: StreamConfig) -> None:
        assert camera.image is not None
        self._name, self._size = camera.name, (camera.image.height, camera.image.width)
        self._statistics = PixelStatistics()
        self._step = max(1, min(self._size) // SIDE)
        self._newest: tuple[int, int] = -1, -1  # episode and frame
        self._image = self._black = png(np.zeros((*self._size, CHANNELS), np.uint8))
        self.count = 0  # frames, each once

    def images(
        self, episode: int, each: PreparedEpisode, chunk: Mapping[str, NDArray[Any]]
    ) -> list[bytes]:
        """The newest frame of each window; a black one where there is none."""
        numbers = chunk[f"{self._name}.frame_index"][:, -1].tolist()
        return [self._image_of(episode, each, number) for number in numbers]

    def about(self) -> dict[str, Any]:
        """For JSON, and for ``image_features`` and ``image_statistics``."""
        return {"shape": [*self._size, CHANNELS], "statistics": self._statistics.as_dict()}

    def _image_of(self, episode: int, each: PreparedEpisode, number: int) -> bytes:
        if number < 0:
            return self._black
        if (episode, number) != self._newest:
            frames = each.episode.frames[self._name]
            pixels = None
            if self.count % SAMPLED == 0:
                pixels = frames.pixels(number)
                self._statistics.add(pixels[:: self._step, :: self._step])
            encoded = frames.encoded(number)
            if encoded is None:
                encoded = png(frames.pixels(number) if pixels is None else pixels)
            self._newest, self._image = (episode, number), encoded
            self.count += 1
        return self._image


def image_array(images: Sequence[bytes]) -> Any:
    """A column as the reader of Hugging Face's data sets stores it."""
    import pyarrow as pa

    parts = [pa.array(images, pa.binary()), pa.nulls(len(images), pa.string())]
    return pa.StructArray.from_arrays(parts, ["bytes", "path"])


def image_features(parts: Sequence[DataPart]) -> dict[str, Any]:
    """Descriptions by column."""
    return {
        image_key(camera): {"dtype": "image", "shape": about["shape"], "names": list(NAMES)}
        for camera, about in parts[0].summary.get("images", {}).items()
    }


def image_statistics(parts: Sequence[DataPart]) -> dict[str, Any]:
    """Statistics by column."""
    whole: dict[str, PixelStatistics] = {}
    for part in parts:
        for camera, about in part.summary.get("images", {}).items():
            whole.setdefault(image_key(camera), PixelStatistics()).merge(about["statistics"])
    return {key: one.result() for key, one in whole.items()}
