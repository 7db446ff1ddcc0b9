"""Messages of openpi's clients: MessagePack in which a map of four stands for a NumPy array.

Bytes to plain data and back, without a socket. ``encode`` writes what ``openpi_client`` would, byte
for byte. ``decode`` trusts nobody: no array of objects, no extension type, and bounds on items,
dimensions and depth, so that a message cannot take many times its own size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from ppstream.core.errors import ProtocolError
from ppstream.wire.fields import DECODE_ERRORS

Array: TypeAlias = np.ndarray[Any, Any]

ITEMS_MAX: Final = 16384  # of one message, nested ones included: an array counts nine
DEPTH_MAX: Final = 16
DIMENSIONS_MAX: Final = 8

ARRAY: Final = b"__ndarray__"
SCALAR: Final = b"__npgeneric__"
ARRAY_KEYS: Final = {ARRAY, b"data", b"dtype", b"shape"}
SCALAR_KEYS: Final = {SCALAR, b"data", b"dtype"}
#: Numbers, truth values and texts; no objects, records, complex numbers or dates.
DTYPE: Final = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[US][1-9]\d{0,5})")
UNSENDABLE_KINDS: Final = "VOc"  # of a dtype, as openpi has it

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


def decode(frame: bytes) -> dict[str, Any]:
    """The message of ``frame``: a map with text keys.

    Returns:
        Plain data, nested as sent; arrays are read-only views of bytes that belong to the result,
        in the dtype and shape that was sent.

    Raises:
        ProtocolError: it is no such message, or exceeds a bound; the text says which.
    """
    try:
        _check_items(frame)
        found = _plain(_decoder.decode(frame))
    except (*DECODE_ERRORS, ValueError, OverflowError, TypeError) as error:
        raise ProtocolError(f"not a message of openpi: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ProtocolError(
            f"not a message of openpi: got {_name(found)}, want a map with text keys"
        )
    return found


def encode(message: Mapping[str, Any]) -> bytes:
    """The bytes of ``message``: plain data, NumPy arrays and NumPy numbers.

    Raises:
        ProtocolError: it holds what openpi's clients cannot read.
    """
    try:
        return _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"cannot be sent to a client of openpi: {error}") from error


def _as_map(value: Any) -> Any:
    """Replaces what MessagePack lacks, key by key in the order of openpi's own."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in UNSENDABLE_KINDS:
        raise TypeError(f"dtype {value.dtype}")
    if isinstance(value, float):  # np.float64 is Python's own, too
        return float(value)
    if isinstance(value, np.str_ | np.bytes_):
        return value.item()
    if isinstance(value, np.ndarray):
        return {
            ARRAY: True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {SCALAR: True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(type(value).__name__)


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_as_map)


def _check_items(frame: bytes) -> None:
    """Count items by their first bytes alone, before anything is made of them."""
    at, due, items = 0, 1, 0
    while due:
        if at >= len(frame):
            raise ValueError("it ends in the middle")
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


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX}")
    if isinstance(value, dict):
        if ARRAY in value:
            return _array(value)
        if SCALAR in value:
            return _scalar(value)
        return {key: _plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, depth + 1) for one in value]
    return value


def _array(table: dict[Any, Any]) -> Array:
    if table.keys() != ARRAY_KEYS:
        raise ValueError(f"an array has the keys {_shown(table)}, want {_shown(ARRAY_KEYS)}")
    data, shape = table[b"data"], table[b"shape"]
    dtype = _dtype(table[b"dtype"])
    if not isinstance(data, bytes) or not isinstance(shape, list):
        raise ValueError("an array's data are no bytes, or its shape is no list")
    if len(shape) > DIMENSIONS_MAX or not all(type(one) is int and one >= 0 for one in shape):
        raise ValueError(f"an array has the shape {shape[: DIMENSIONS_MAX + 1]}")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != len(data):
        raise ValueError(f"an array {dtype} {shape} has {len(data)} bytes, want {wanted}")
    return np.ndarray(tuple(shape), dtype, data)


def _scalar(table: dict[Any, Any]) -> np.generic:
    if table.keys() != SCALAR_KEYS:
        raise ValueError(f"a number has the keys {_shown(table)}, want {_shown(SCALAR_KEYS)}")
    dtype, data = _dtype(table[b"dtype"]), table[b"data"]
    if not isinstance(data, bool | int | float | str | bytes):
        raise ValueError(f"a number's data are {_name(data)}")
    found: np.generic = dtype.type(data)
    return found


def _dtype(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or DTYPE.fullmatch(text) is None:
        raise ValueError(f"dtype {text!r} is not taken")
    return np.dtype(text)


def _shown(keys: Any) -> str:
    return ", ".join(sorted(repr(key)[:20] for key in keys)[:6])


def _name(value: Any) -> str:
    return "a map with other keys" if isinstance(value, dict) else type(value).__name__
