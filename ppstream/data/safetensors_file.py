"""Safetensors files through memory maps: written part by part, read without loading.

The library writes whole tensors from memory; an episode's windows may be larger than the memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ppstream.recording.recording import RecordedFrames

DTYPES: Final = {
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
    "BOOL": np.bool_,
    "U8": np.uint8,
}
NAMES: Final = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
ALIGNMENT: Final = 8  # of the first tensor
HEADER_MAX: Final = 100 << 20  # bytes, as the library allows
LENGTH: Final = struct.Struct("<Q")


def create(
    path: Path,
    tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> dict[str, NDArray[Any]]:
    """Makes a file of zeros; returns its tensors, to be written in place.

    Args:
        path: of the file.
        tensors: dtype and shape by name.
        metadata: texts of the file.

    Raises:
        OSError: there is no room for it: a full disk would end the process that writes in place.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    widest_first = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    for name, (dtype, shape) in widest_first:  # so that each is aligned
        end = at + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(LENGTH.pack(len(text)) + text)
        file.flush()
        _reserve(file.fileno(), file.tell() + at)
    return _mapped(path, header, LENGTH.size + len(text), "r+")


def copy_frames(frames: RecordedFrames, numbers: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copies the frames of these numbers ``[n]`` into ``out`` ``[n, height, width, 3]``."""
    for row, number in enumerate(numbers):
        out[row] = frames.pixels(int(number))


def open_mapped(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors of a file, read when they are used, and its metadata.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            if length > HEADER_MAX:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        return _mapped(path, header, LENGTH.size + length, "r"), header.get("__metadata__", {})
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigError([f"{path}: cannot be read as safetensors: {error}"]) from error


def _reserve(file: int, size: int) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(file, size)  # a file system that reserves nothing


def _mapped(path: Path, header: dict[str, Any], begin: int, mode: Any) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = np.dtype(DTYPES[about["dtype"]]), tuple(about["shape"])
        if math.prod(shape) == 0:
            found[name] = np.zeros(shape, dtype)  # nothing can be mapped
            continue
        offset = begin + about["data_offsets"][0]
        found[name] = np.memmap(path, dtype, mode, offset, shape)
    return found
