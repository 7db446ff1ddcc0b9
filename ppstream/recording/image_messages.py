"""Images in messages of other software: ROS's and Foxglove's, raw, JPEG or PNG, all to RGB.

A message is an object with the fields of its type or a mapping (JSON). ppstream's own images
are ``camera_images.py``'s.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ppstream.config.schema import CHANNELS
from ppstream.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PixelOrder(NamedTuple):
    """Bytes of a pixel, and which of them are red, green and blue; one is all three."""

    bytes: int
    rgb: slice  # so that rgb8 without padding is a view


ORDERS: Final = {
    "rgb8": PixelOrder(3, slice(0, 3)),
    "bgr8": PixelOrder(3, slice(2, None, -1)),
    "rgba8": PixelOrder(4, slice(0, 3)),
    "bgra8": PixelOrder(4, slice(2, None, -1)),
    "mono8": PixelOrder(1, slice(0, 1)),
}
RAW: Final = ("Image", "RawImage")  # how the names of types end
COMPRESSED: Final = "CompressedImage"
FORMATS: Final = ("JPEG", "PNG")
FORMAT_NAMES: Final = ("jpeg", "jpg", "png")  # in a message's ``format``: "bgr8; jpeg compressed"
DEPTH: Final = "compresseddepth"
EIGHT_BITS: Final = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
ORIENTATION: Final = 0x0112  # EXIF's tag; 1 is as it is


class FoundImage(NamedTuple):
    """An image of a message; of a raw one the number of bytes is right."""

    size: tuple[int, int]  # height and width
    data: NDArray[np.uint8]
    order: PixelOrder | None  # None: JPEG or PNG
    step: int  # bytes of a row
    opened: Any = None  # Pillow's, of a JPEG or PNG

    def check(self) -> None:
        """Raises ValueError where a JPEG or PNG does not decode."""
        if self.order is None:
            _check(self.opened)

    def pixels(self) -> NDArray[np.uint8]:
        """Pixels ``[height * width * 3]`` uint8 RGB, perhaps a view. Raises ValueError."""
        if self.order is None:
            opened = self._whole()
            _load(opened)
            rgb = opened if opened.mode == "RGB" else opened.convert("RGB")
            decoded: NDArray[np.uint8] = np.asarray(rgb)
            return decoded.reshape(-1)
        height, width = self.size
        rows = self.data.reshape(height, self.step)[:, : width * self.order.bytes]
        pixels = rows.reshape(height, width, self.order.bytes)[..., self.order.rgb]
        return np.broadcast_to(pixels, (height, width, CHANNELS)).reshape(-1)

    def encoded(self) -> bytes | None:
        """The JPEG or PNG, where any reader sees the same RGB in it; else None."""
        if self.order is not None:
            return None
        is_plain = self.opened.mode == "RGB" and self.opened.getexif().get(ORIENTATION, 1) == 1
        return self.data.tobytes() if is_plain else None

    def _whole(self) -> Any:
        """Opened anew if ``check`` has made it smaller."""
        is_whole = self.opened.size == self.size[::-1]
        return self.opened if is_whole else _opened(self.data)


def check_encoded(data: bytes | NDArray[np.uint8]) -> None:
    """Raises ValueError where a JPEG or PNG does not decode; cheaper than its pixels."""
    _check(_opened(data))


def _check(opened: Any) -> None:
    opened.draft("RGB", (1, 1))  # of a JPEG every bit is read, and few pixels are made
    _load(opened)


def found_image(kind: str, message: object) -> FoundImage:
    """The image of a message.

    Args:
        kind: name of the message's type: ``sensor_msgs/msg/Image``, ``foxglove.CompressedImage``.
        message: decoded.

    Raises:
        ConfigError: no image of this kind or encoding is read.
        ValueError: the message is damaged.
    """
    name = kind.rpartition("/")[2].rpartition(".")[2]
    if name == COMPRESSED:
        return _compressed(message)
    if name in RAW:
        return _raw(message)
    raise ConfigError(
        [f"messages of {kind!r} are not read as frames; want Image, RawImage or CompressedImage"]
    )


def _raw(message: object) -> FoundImage:
    encoding = str(_field(message, "encoding"))
    order = ORDERS.get(encoding)
    if order is None:
        raise ConfigError(
            [f"frames are encoded as {encoding!r}, want {', '.join(ORDERS)}, or JPEG or PNG"]
        )
    height, width, step = (int(_field(message, name)) for name in ("height", "width", "step"))
    data = _bytes(_field(message, "data"))
    if min(height, width) < 1 or step < width * order.bytes or len(data) != height * step:
        raise ValueError(
            f"{len(data)} bytes of {encoding} in rows of {step}, want {height} rows of "
            f"{width * order.bytes} at least"
        )
    return FoundImage((height, width), data, order, step)


def _compressed(message: object) -> FoundImage:
    form = str(_field(message, "format")).lower()
    if form and (DEPTH in form or not any(name in form for name in FORMAT_NAMES)):
        raise ConfigError([f"frames are compressed as {form!r}, want jpeg or png"])
    data = _bytes(_field(message, "data"))
    opened = _opened(data)
    if opened.mode not in EIGHT_BITS:
        raise ConfigError([f"frames are {opened.format} of {opened.mode}, want 8 bits a channel"])
    return FoundImage((opened.height, opened.width), data, None, 0, opened)


def _opened(data: bytes | NDArray[np.uint8]) -> Any:
    from PIL import Image

    try:
        file = BytesIO(data if isinstance(data, bytes) else data.tobytes())
        return Image.open(file, formats=FORMATS)
    except Exception as error:  # a parser on a stranger's bytes
        raise ValueError(f"{len(data)} bytes that are no JPEG or PNG") from error


def _load(opened: Any) -> None:
    try:
        opened.load()
    except Exception as error:  # a parser on a stranger's bytes
        raise ValueError(f"a {opened.format} that does not decode: {error}") from error


def _bytes(data: Any) -> NDArray[np.uint8]:
    if isinstance(data, str):  # base64 of JSON
        return np.frombuffer(binascii.a2b_base64(data), np.uint8)
    if isinstance(data, bytes | memoryview):
        return np.frombuffer(data, np.uint8)
    return np.ascontiguousarray(data, np.uint8)


def _field(message: object, name: str) -> Any:
    try:
        return message[name] if isinstance(message, Mapping) else getattr(message, name)
    except (LookupError, AttributeError) as error:
        raise ValueError(f"no field {name!r}") from error
