"""Images of cameras' frames, as viewers know them: made for a recording or a view, and read back.

A recording has every frame, as JPEG or raw; a live view has a smaller one of some. Base64 of a raw
frame is made piece by piece: a loop of this process may be waiting for the interpreter.
"""

from __future__ import annotations

import binascii
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from ppstream.config.schema import CHANNELS
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError
from ppstream.recording.image_messages import check_encoded
from ppstream.recording.mcap_schema import FOXGLOVE, CompressedImage, Image, RawImage, Time
from ppstream.wire import jpeg

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.config.schema import StreamConfig
    from ppstream.core.interpreter import InterpreterPauses
    from ppstream.recording.items import FrameItem

Form = Literal["jpeg", "raw", "preview"]

JPEG: Final = "jpeg"
RGB: Final = "rgb8"
PNG_LEVEL: Final = 1  # of 9
PREVIEW_SIDE: Final = 320  # pixels of a live view's frame at most
PIECE_BYTES: Final = 3 << 14  # of pixels to base64 at once; 3 bytes are 4 characters
END_OF_DATA: Final = b'"}'  # of an encoded image, whose last field are its data

encode: Final = msgspec.json.Encoder().encode
DECODERS: Final[dict[str, msgspec.json.Decoder[Image]]] = {
    FOXGLOVE[RawImage]: msgspec.json.Decoder(RawImage),
    FOXGLOVE[CompressedImage]: msgspec.json.Decoder(CompressedImage),
}


class EncodedImage(NamedTuple):
    """An image as JSON; ``schema`` is the type of what is in it."""

    schema: type[Image]
    data: bytes


def encoded_image(
    item: FrameItem, stream: StreamConfig, form: Form, pauses: InterpreterPauses
) -> EncodedImage:
    """A frame in the form that is asked for; ``preview`` has every n-th pixel of it."""
    assert stream.image is not None, "a camera"
    frame = np.frombuffer(item.pixels, np.uint8)
    frame = frame.reshape(stream.image.height, stream.image.width, CHANNELS)
    about = Time(*divmod(item.stamp_ns, NS_PER_S)), item.stream
    if form == "jpeg":
        image = CompressedImage(*about, jpeg.encode(frame), JPEG)
        return EncodedImage(CompressedImage, encode(image))
    if form == "preview":
        step = -(-max(frame.shape) // PREVIEW_SIDE)
        frame = np.ascontiguousarray(frame[::step, ::step])
    height, width, _ = frame.shape
    head = encode(RawImage(*about, width, height, RGB, CHANNELS * width, b""))
    parts = [head.removesuffix(END_OF_DATA)]
    pixels = frame.reshape(-1).data
    for begin in range(0, len(pixels), PIECE_BYTES):
        parts.append(binascii.b2a_base64(pixels[begin : begin + PIECE_BYTES], newline=False))
        pauses.pause()
    return EncodedImage(RawImage, b"".join((*parts, END_OF_DATA)))


class ImageFacts(NamedTuple):
    """Facts of an image that are known without its pixels."""

    stamp_ns: int  # robot clock
    size: tuple[int, int]  # height and width


def image_facts(schema: str, data: bytes) -> ImageFacts:
    """Check an image that a recording holds; a JPEG's header and end, and not its pixels.

    Raises:
        ValueError: it is no image, or not one of these forms, or incomplete.
    """
    image = _decoded(schema, data)
    stamp_ns = image.timestamp.sec * NS_PER_S + image.timestamp.nsec
    if isinstance(image, CompressedImage):
        size = jpeg.size_of(image.data)
        if size is None:
            raise ValueError(f"{len(image.data)} bytes that are no complete JPEG")
        return ImageFacts(stamp_ns, size)
    height, width, bytes_of_row = image.height, image.width, CHANNELS * image.width
    found = image.encoding, image.step, len(image.data)
    if found != (RGB, bytes_of_row, height * bytes_of_row) or not image.data:
        raise ValueError(
            f"{len(image.data)} bytes of {image.encoding} in rows of {image.step}, want "
            f"{height * bytes_of_row} of {RGB}: {height} x {width} without padding"
        )
    return ImageFacts(stamp_ns, (height, width))


class OwnImages(NamedTuple):
    """Decodes the images of one camera; those of ``image_facts``'s forms."""

    schema: str
    size: tuple[int, int]  # height and width

    def pixels(self, data: bytes) -> NDArray[np.uint8]:
        """Pixels ``[height * width * 3]`` uint8 RGB. Raises ValueError: it is no such image."""
        image = _decoded(self.schema, data)
        if isinstance(image, RawImage):
            return np.frombuffer(image.data, np.uint8)
        pixels = jpeg.decode(image.data, *self.size)
        if pixels is None:
            height, width = self.size
            raise ValueError(f"{len(image.data)} bytes that are no JPEG of {height} x {width}")
        flat: NDArray[Any] = pixels[0]
        return flat

    def encoded(self, data: bytes) -> bytes | None:
        """Its JPEG; None of a raw one. Raises ValueError: it does not decode."""
        image = _decoded(self.schema, data)
        if isinstance(image, RawImage):
            return None
        check_encoded(image.data)
        return image.data


def png(frame: NDArray[np.uint8]) -> bytes:
    """A PNG of a frame ``[height, width, 3]`` uint8 RGB, quick to make rather than small."""
    from PIL import Image as PillowImage

    file = BytesIO()
    PillowImage.fromarray(frame).save(file, "PNG", compress_level=PNG_LEVEL)
    return file.getvalue()


def need_jpeg(why: str) -> None:
    """Raises ConfigError, which begins with ``why``, unless JPEG and PNG are read and written."""
    if not jpeg.is_installed():
        raise ConfigError([f"{why}: JPEG and PNG need Pillow: pip install 'ppstream[record]'"])


def _decoded(schema: str, data: bytes) -> Image:
    decoder = DECODERS.get(schema)
    if decoder is None:
        raise ValueError(f"a message of {schema!r}, want one of {', '.join(DECODERS)}")
    return decoder.decode(data)
