"""TensorSpec: a named tensor's shape and dtype, without torch; and the ends of window names."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from ppstream.core.errors import SpecError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "bool": 1,
}
#: Ends of names in a window, as in ``"proprio.valid"``: a group's samples, or a camera's, and what
#: tells that some are missing.
VALUES: Final = ".values"
FRAMES: Final = ".frames"
VALID: Final = ".valid"
AGE_S: Final = ".age_s"


class TensorSpec(msgspec.Struct, frozen=True):
    """A named tensor of fixed shape.

    Args:
        name: unique within its envelope, e.g. ``"proprio.values"``.
        shape: sizes **per robot row**; the runtime adds the leading batch dimension.
        dtype: a key of ``DTYPE_BYTES``, or torch's dtype of that name.

    Raises:
        SpecError: there is no such dtype, or the shape has a size below 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if (dtype := str(self.dtype).removeprefix("torch.")) != self.dtype:
            msgspec.structs.force_setattr(self, "dtype", dtype)
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
            )
        if any(size < 1 for size in self.shape):
            raise SpecError(f"tensor {self.name!r}: shape {self.shape} has a size below 1")

    def bytes_for(self, rows: int) -> int:
        """Bytes of ``[rows, *shape]``."""
        return rows * math.prod(self.shape) * DTYPE_BYTES[self.dtype]
