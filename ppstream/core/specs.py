"""TensorSpec: a named tensor's shape and dtype, and how a set of them lies in one slot.

A slot is one contiguous block of bytes: a header row of int64 first, then the tensors, each on a
64-byte boundary. Nothing here imports torch; ``SlotLayout.views`` is given the buffer to view.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from ppstream.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
ALIGNMENT_BYTES = 64


class TensorSpec(msgspec.Struct, frozen=True):
    """A named tensor of fixed shape.

    Args:
        name: unique within its envelope, e.g. ``"proprio.values"``.
        shape: sizes **per robot row**; the runtime adds the leading batch dimension.
        dtype: a key of ``DTYPE_BYTES``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
            )
        if any(size < 1 for size in self.shape):
            raise SpecError(f"tensor {self.name!r}: shape {self.shape} has a size below 1")

    def bytes_for(self, rows: int) -> int:
        """Bytes of ``[rows, *shape]``."""
        return rows * math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class SlotLayout:
    """Where the header and each tensor lie in a slot of ``slot_bytes`` bytes.

    Args:
        header: names of the int64 header fields, in order.
        tensors: the envelope's tensors, in order.
        rows: the batch dimension B that is put before each spec's shape.
    """

    def __init__(self, header: tuple[str, ...], tensors: tuple[TensorSpec, ...], rows: int) -> None:
        names = [spec.name for spec in tensors]
        if len(set(names)) != len(names):
            raise SpecError(f"tensor names of an envelope must be unique, got {names}")
        self.header = header
        self.tensors = tensors
        self.rows = rows
        self.offsets: dict[str, int] = {}
        position = _aligned(len(header) * 8)
        for spec in tensors:
            self.offsets[spec.name] = position
            position = _aligned(position + spec.bytes_for(rows))
        self.slot_bytes = position

    def views(self, slot: Tensor) -> Mapping[str, Tensor]:
        """Named tensors ``[rows, *shape]`` that share memory with ``slot``, a uint8 tensor.

        Read-only: a name cannot be bound to other memory.
        """
        import torch

        views: dict[str, Tensor] = {}
        for spec in self.tensors:
            start = self.offsets[spec.name]
            flat = slot[start : start + spec.bytes_for(self.rows)].view(getattr(torch, spec.dtype))
            views[spec.name] = flat.view(self.rows, *spec.shape)
        return MappingProxyType(views)

    def header_view(self, slot: Tensor) -> Tensor:
        """The header as an int64 tensor ``[len(header)]`` that shares memory with ``slot``."""
        import torch

        return slot[: len(self.header) * 8].view(torch.int64)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
