"""MessagePack of strangers as plain data, for wires on which maps stand for NumPy arrays.

Bytes to data, without a socket. Nobody is trusted: no extension type, and bounds on items and depth
before anything is made of them, so that a message cannot take many times its own size. Which map
stands for what, the file of each wire says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from ppstream.core.errors import ProtocolError
from ppstream.wire.fields import DECODE_ERRORS

Array: TypeAlias = np.ndarray[Any, Any]
#: Given a map, what it stands for; the map itself if for nothing. Raises ValueError: it cannot.
Replace: TypeAlias = Callable[[dict[Any, Any]], Any]

ITEMS_MAX: Final = 16384  # of one message, nested ones included: an array of openpi counts nine
DEPTH_MAX: Final = 16
DIMENSIONS_MAX: Final = 8
#: Numbers, truth values and texts; no objects, records, complex numbers or dates.
DTYPE: Final = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[US][1-9]\d{0,5})")

# MessagePack's first bytes: how many bytes follow, or how wide a length is.
_FIXED: Final = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    **dict.fromkeys((0xCC, 0xD0), 1),
    **dict.fromkeys((0xCD, 0xD1), 2),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 4),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 8),
}
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_MANY: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # width, items an entry

_decoder: Final = msgspec.msgpack.Decoder()


def read(frame: bytes, of: str, replace: Replace) -> Any:
    """The message of ``frame``: plain data, nested as sent, and what ``replace`` makes of maps.

    Raises:
        ProtocolError: it is no message of ``of``, or exceeds a bound; the text says which.
    """
    try:
        _check_items(frame)
        return _plain(_decoder.decode(frame), replace)
    except (*DECODE_ERRORS, ValueError, OverflowError, TypeError) as error:
        raise ProtocolError(f"not a message of {of}: {error}") from error


def read_map(frame: bytes, of: str, replace: Replace) -> dict[str, Any]:
    """As ``read``: a map with text keys, or a ProtocolError."""
    found = read(frame, of, replace)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        name = "a map with other keys" if isinstance(found, dict) else type(found).__name__
        raise ProtocolError(f"not a message of {of}: got {name}, want a map with text keys")
    return found


def as_array(data: Any, dtype: np.dtype[Any], shape: Any, order: Any = "C") -> Array:
    """A read-only view of ``data``, which must be exactly the array's bytes.

    Raises:
        ValueError: they are not, or a size exceeds a bound.
    """
    if not isinstance(data, bytes | memoryview) or not isinstance(shape, list | tuple):
        raise ValueError("an array needs bytes as data, and a list as shape")
    if len(shape) > DIMENSIONS_MAX or not all(type(one) is int and one >= 0 for one in shape):
        raise ValueError(f"an array has the shape {list(shape[: DIMENSIONS_MAX + 1])}")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != len(data):
        raise ValueError(f"an array {dtype} {list(shape)} has {len(data)} bytes, want {wanted}")
    return np.ndarray(tuple(shape), dtype, data, order=order)


def dtype_of(text: Any) -> np.dtype[Any]:
    """Raises ValueError: no dtype of ``DTYPE``."""
    if not isinstance(text, str) or DTYPE.fullmatch(text) is None:
        raise ValueError(f"dtype {text!r:.40} is not taken")
    return np.dtype(text)


def _check_items(frame: bytes) -> None:
    """Count items by their first bytes alone, before anything is made of them."""
    at, due, items = 0, 1, 0
    while due:
        if at >= len(frame):
            raise ValueError("it ends too early")
        due, items, kind, at = due - 1, items + 1, frame[at], at + 1
        if kind <= 0x7F or kind >= 0xE0:
            continue
        if kind <= 0x8F:
            due += 2 * (kind & 0x0F)
        elif kind <= 0x9F:
            due += kind & 0x0F
        elif kind <= 0xBF:
            at += kind & 0x1F
        elif kind in _FIXED:
            at += _FIXED[kind]
        elif kind in _SIZED:
            width = _SIZED[kind]
            at += width + int.from_bytes(frame[at : at + width], "big")
        elif kind in _MANY:
            width, each = _MANY[kind]
            due += each * int.from_bytes(frame[at : at + width], "big")
            at += width
        else:
            raise ValueError(f"first byte {kind:#04x}: extension types are not taken")
        if items + due > ITEMS_MAX:
            raise ValueError(f"more than {ITEMS_MAX} items; send numbers as NumPy arrays")


def _plain(value: Any, replace: Replace, depth: int = 0) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX}")
    if isinstance(value, dict):
        found = replace(value)
        if found is not value:
            return found
        return {key: _plain(one, replace, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, replace, depth + 1) for one in value]
    return value
