"""Input of resampling: a stream's samples, their interpolation, and how far they are trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

#: ``linear`` straight lines; ``previous`` the newest sample at or before the target; ``nearest``
#: the closer sample, the older one on a tie; ``slerp`` quaternions (xyzw, D == 4), normalised,
#: along the shorter arc; ``angle`` each dimension in radians, turned the shorter way and wrapped to
#: (-pi, pi]; ``cubic`` monotone cubics, whose slopes ``resampling.py`` states.
Mode = Literal["linear", "previous", "nearest", "slerp", "angle", "cubic"]
MODES: Final[tuple[Mode, ...]] = ("linear", "previous", "nearest", "slerp", "angle", "cubic")

VALUE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALED_DTYPES: Final = (torch.int8, torch.float8_e4m3fn)  # of outputs with a scale
NO_LIMIT: Final = 2**63 - 1  # of the ops, whose lists of int hold no None


@dataclass(frozen=True, slots=True)
class StreamSource:
    """One stream of every row: samples in order of time, as a plain history or as a ring.

    With ``count`` and ``head`` a row is a ring: ``count[b]`` samples, the oldest at slot
    ``head[b]``, wrapping at N. Slots outside never reach a result. Without ``count`` all N slots
    hold samples; without ``head`` the oldest is at slot 0. The tensors are read only and may be
    views of a ring that is filled between two calls: build the source once, use it every time,
    and only its numbers change.

    Raises:
        ValueError: what is no tensor; a shape, dtype, device, mode or limit is not as below.
    """

    values: Tensor  # [B, N, D] float32, float64, bfloat16 or float16; finite
    stamps_ns: Tensor  # [B, N] int64, never decreasing from the oldest to the newest
    count: Tensor | None = None  # [B] int64, 0..N
    head: Tensor | None = None  # [B] int64, 0..N-1
    mode: Mode = "linear"
    max_gap_ns: int | None = None  # longest bridge: between two samples, or to the one picked
    max_age_ns: int | None = None  # longest hold of a sample

    def __post_init__(self) -> None:
        _check_values(self)
        _check_stamps(self)
        for name, numbers in (("count", self.count), ("head", self.head)):
            if numbers is not None:
                _check_row_numbers(self, name, numbers)
        for name, limit_ns in (("max_gap_ns", self.max_gap_ns), ("max_age_ns", self.max_age_ns)):
            if limit_ns is not None and limit_ns < 0:
                raise ValueError(f"{name} is {limit_ns}, needs >= 0, or None for no limit")


class Columns(NamedTuple):
    """Several sources as the ops take them: one list per field, one entry per stream."""

    values: list[Tensor]
    stamps_ns: list[Tensor]
    counts: list[Tensor | None]
    heads: list[Tensor | None]
    modes: list[str]
    max_gap_ns: list[int]  # or NO_LIMIT
    max_age_ns: list[int]  # or NO_LIMIT


def to_columns(sources: Sequence[StreamSource]) -> Columns:
    """The sources transposed; no tensor is touched."""
    return Columns(
        [source.values for source in sources],
        [source.stamps_ns for source in sources],
        [source.count for source in sources],
        [source.head for source in sources],
        [source.mode for source in sources],
        [ops_limit_ns(source.max_gap_ns) for source in sources],
        [ops_limit_ns(source.max_age_ns) for source in sources],
    )


def ops_limit_ns(limit_ns: int | None) -> int:
    """The limit as an op takes it."""
    return NO_LIMIT if limit_ns is None else limit_ns


def seen(tensor: Tensor) -> str:
    """Words a tensor for an error message."""
    return f"{list(tensor.shape)} {dtype_name(tensor.dtype)} on {tensor.device}"


def check_tensor(name: str, one: object) -> None:
    """Raises ValueError unless ``one`` is a tensor."""
    if not isinstance(one, Tensor):
        kind = type(one)
        raise ValueError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, needs a torch.Tensor; "
            "torch.from_numpy() makes one of an array without a copy"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _check_values(source: StreamSource) -> None:
    values, mode = source.values, source.mode
    check_tensor("values", values)
    if values.dim() != 3 or values.shape[1] < 1 or values.dtype not in VALUE_DTYPES:
        allowed = ", ".join(dtype_name(dtype) for dtype in VALUE_DTYPES)
        raise ValueError(f"values is {seen(values)}, needs [B, N, D], N >= 1, of {allowed}")
    if values.requires_grad:
        raise ValueError("values requires grad, but resampling has no gradient: detach() it")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, needs one of {', '.join(MODES)}")
    if mode == "slerp" and values.shape[2] != 4:
        raise ValueError(f"mode slerp needs D = 4 (quaternion xyzw), values is {seen(values)}")


def _check_stamps(source: StreamSource) -> None:
    values, stamps_ns = source.values, source.stamps_ns
    check_tensor("stamps_ns", stamps_ns)
    fits = stamps_ns.shape == values.shape[:2] and stamps_ns.dtype is torch.int64
    if not fits or stamps_ns.device != values.device:
        raise ValueError(
            f"stamps_ns is {seen(stamps_ns)}, needs {list(values.shape[:2])} int64 "
            f"on {values.device} to match values"
        )


def _check_row_numbers(source: StreamSource, name: str, numbers: Tensor) -> None:
    values = source.values
    check_tensor(name, numbers)
    fits = numbers.shape == values.shape[:1] and numbers.dtype is torch.int64
    if not fits or numbers.device != values.device:
        raise ValueError(
            f"{name} is {seen(numbers)}, needs [{values.shape[0]}] int64 "
            f"on {values.device} to match values"
        )
