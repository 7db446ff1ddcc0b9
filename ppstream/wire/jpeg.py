"""JPEG of a camera's frame, by Pillow, which lets other threads run while it encodes or decodes."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from typing import Any, Final

import numpy as np

QUALITY: Final = 90  # of what is encoded here
END: Final = b"\xff\xd9"
SCAN: Final = b"\xff\xda"  # begins one; pixels never hold this pair
SCANS_MAX: Final = 64  # each costs a turn through all pixels; usual progressive files have 10


def is_installed() -> bool:
    """True when frames can be encoded and decoded here."""
    return find_spec("PIL") is not None


def encode(frame: np.ndarray[Any, Any]) -> bytes:
    """A JPEG of a frame ``[height, width, 3]`` uint8 RGB, of ``QUALITY``, colours at half size."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def size_of(jpeg: bytes) -> tuple[int, int] | None:
    """Height and width, read from the header; None when it is no JPEG, or has no end."""
    from PIL import Image

    try:
        with Image.open(BytesIO(jpeg), formats=("JPEG",)) as opened:
            width, height = opened.size
    except Exception:  # noqa: BLE001 - a parser on a stranger's bytes: whatever it raises, no frame
        return None
    return (height, width) if jpeg.endswith(END) else None


def decode(jpeg: bytes, height: int, width: int) -> np.ndarray[Any, Any] | None:
    """Pixels ``[1, height * width * 3]`` uint8 RGB; None when it is no JPEG of exactly that size.

    The size is read from the header before memory is taken for the pixels, and a file of more than
    ``SCANS_MAX`` scans is none: a small one could keep a thread for seconds.
    """
    from PIL import Image

    if jpeg.count(SCAN) > SCANS_MAX:
        return None
    try:
        with Image.open(BytesIO(jpeg), formats=("JPEG",)) as opened:
            if opened.size != (width, height):
                return None
            pixels = np.asarray(opened.convert("RGB"))
    except Exception:  # noqa: BLE001 - a parser on a stranger's bytes: whatever it raises, no frame
        return None
    return pixels.reshape(1, -1)
