"""Messages of openpi's clients: MessagePack in which a map of four stands for a NumPy array.

Bytes to plain data and back, without a socket. ``encode`` writes what ``openpi_client`` would, byte
for byte. ``decode`` trusts nobody, as ``foreign_msgpack.py`` does, and reads no array of objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from ppstream.core.errors import ProtocolError
from ppstream.wire.foreign_msgpack import Array, as_array, dtype_of, read, read_map

WIRE: Final = "openpi"
ARRAY: Final = b"__ndarray__"
SCALAR: Final = b"__npgeneric__"
ARRAY_KEYS: Final = {ARRAY, b"data", b"dtype", b"shape"}
SCALAR_KEYS: Final = {SCALAR, b"data", b"dtype"}
UNSENDABLE_KINDS: Final = "VOc"  # of a dtype, as openpi has it
TEXT_KINDS: Final = "SU"  # of a dtype


def decode(frame: bytes) -> dict[str, Any]:
    """The message of ``frame``: a map with text keys.

    Returns:
        Plain data, nested as sent; arrays are read-only views of bytes that belong to the result,
        in the dtype and shape that was sent.

    Raises:
        ProtocolError: it is no such message, or exceeds a bound; the text says which.
    """
    return read_map(frame, WIRE, _replaced)


def decode_reply(frame: bytes) -> Any:
    """The reply of ``frame``: as ``decode``, or one array alone, as vLLM-Omni answers."""
    return read(frame, WIRE, _replaced)


def encode(message: Mapping[str, Any] | Array) -> bytes:
    """The bytes of ``message``: plain data, NumPy arrays and NumPy numbers; or one array alone.

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


def _replaced(table: dict[Any, Any]) -> Any:
    if ARRAY in table:
        return _array(table)
    return _scalar(table) if SCALAR in table else table


def _array(table: dict[Any, Any]) -> Array:
    if table.keys() != ARRAY_KEYS:
        raise ValueError(f"an array has the keys {_shown(table)}, want {_shown(ARRAY_KEYS)}")
    return as_array(table[b"data"], dtype_of(table[b"dtype"]), table[b"shape"])


def _scalar(table: dict[Any, Any]) -> np.generic:
    if table.keys() != SCALAR_KEYS:
        raise ValueError(f"a number has the keys {_shown(table)}, want {_shown(SCALAR_KEYS)}")
    dtype, data = dtype_of(table[b"dtype"]), table[b"data"]
    if not isinstance(data, bool | int | float | str | bytes):
        raise ValueError(f"a number's data are {type(data).__name__}")
    if dtype.kind in TEXT_KINDS and not isinstance(data, str | bytes):
        raise ValueError(f"a text's data are {type(data).__name__}")  # bytes(10**9) takes memory
    found: np.generic = dtype.type(data)
    return found


def _shown(keys: Any) -> str:
    return ", ".join(sorted(repr(key)[:20] for key in keys)[:6])
