"""Messages of GR00T's clients and servers: MessagePack in which a map stands for an ``.npy`` file.

Bytes to plain data and back, without a socket. ``decode`` trusts nobody, as ``foreign_msgpack.py``
does; it reads the head of an ``.npy`` by its form, and neither unpickles nor evaluates it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ppstream.core.errors import ProtocolError
from ppstream.wire.foreign_msgpack import Array, as_array, dtype_of, read, read_map

WIRE: Final = "GR00T"
ARRAY: Final = "__ndarray_class__"
NPY: Final = "as_npy"
CONFIG: Final = "__ModalityConfig_class__"
JSON: Final = "as_json"
#: First bytes of what the first GR00T and others sent: pickle's protocols, and torch.save's zip.
PICKLED: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")

MAGIC: Final = b"\x93NUMPY"
HEAD_WIDTHS: Final = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}  # by version: of its length
HEAD_MAX: Final = 1024
#: As NumPy has written it ever since, padded with blanks.
HEAD: Final = re.compile(
    r"\{'descr': '([^'\\]{2,16})', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,15}(?:, \d{1,15})*)?,?)\), \} *\n"
)


def decode(frame: bytes) -> dict[str, Any]:
    """The request of ``frame``: a map with text keys.

    Returns:
        Plain data, nested as sent; arrays are read-only views of bytes that belong to the result.

    Raises:
        ProtocolError: it is no such message, or exceeds a bound; the text says which.
    """
    if frame.startswith(PICKLED):
        raise ProtocolError("not a message of GR00T: it is pickled, and nothing is unpickled here")
    return read_map(frame, WIRE, _replaced)


def decode_reply(frame: bytes) -> Any:
    """The reply of ``frame``: as ``decode``, or a list, as newer servers answer ``get_action``."""
    return read(frame, WIRE, _replaced)


def encode(message: Any) -> bytes:
    """The bytes of ``message``: plain data and NumPy arrays.

    Raises:
        ProtocolError: it holds what GR00T's clients cannot read.
    """
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"cannot be sent to a client of GR00T: {error}") from error


def modality_config(indices: Sequence[int], keys: Sequence[str], *, as_text: bool) -> Any:
    """The map that stands for a ``ModalityConfig``: as JSON in a text until N1.5, later plain."""
    fields: dict[str, Any] = {"delta_indices": list(indices), "modality_keys": list(keys)}
    return {CONFIG: True, JSON: json.dumps(fields) if as_text else fields}


def _as_map(value: Any) -> Any:
    if isinstance(value, float):  # np.float64 is Python's own, too
        return float(value)
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(type(value).__name__)
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return {ARRAY: True, NPY: file.getvalue()}


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_as_map)


def _replaced(table: dict[Any, Any]) -> Any:
    if ARRAY not in table:
        return table
    file = table.get(NPY)
    if len(table) != 2 or not isinstance(file, bytes):
        raise ValueError(f"an array needs the keys {ARRAY} and {NPY}, and bytes")
    return _array(file)


def _array(file: bytes) -> Array:
    """The array of an ``.npy`` file."""
    width = HEAD_WIDTHS.get(file[6:8])
    if not file.startswith(MAGIC) or width is None:
        raise ValueError("an array is not an .npy file of version 1 to 3")
    start = 8 + width
    length = int.from_bytes(file[8:start], "little")
    head = HEAD.fullmatch(file[start : start + min(length, HEAD_MAX)].decode("latin-1"))
    if length > HEAD_MAX or head is None:
        raise ValueError("an array has a head that NumPy does not write for numbers and texts")
    dtype, order, shape = head.groups()
    sizes = [int(size) for size in shape.split(",") if size]
    data = memoryview(file)[start + length :]
    return as_array(data, dtype_of(dtype), sizes, "F" if order == "True" else "C")
