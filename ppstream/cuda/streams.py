"""The CUDA streams of a rank, by name, made together and before any other.

The driver spreads streams over at most 32 connections, and one that waits for the other rank can
hold up who shares its connection. torch makes 32 streams at the first use of any, so with those
some must share. Ours, which wait, or must move while others do, are made before, once, and kept. A
policy that uses streams of its own while it runs shares a connection with somebody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch

from ppstream.cuda.driver import CudaStream

if TYPE_CHECKING:
    from collections.abc import Mapping

Role = Literal[
    "receiving", "sending", "a", "b", "c", "ingest", "clock", "release", "release by copy"
]
URGENT: Final = ("c", "clock")  # short, and others wait for them

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods
_made: Final[dict[int, Mapping[str, CudaStream]]] = {}  # by device; for the life of the process


def stream(role: Role) -> CudaStream:
    """The current device's stream for ``role``; the first call makes all of them."""
    index: int = torch.cuda.current_device()
    if index not in _made:
        _made[index] = {name: CudaStream(urgent=name in URGENT) for name in get_args(Role)}
    return _made[index][role]


def torch_stream(role: Role) -> torch.cuda.Stream:
    """The same stream as torch takes it."""
    index: int = torch.cuda.current_device()
    found: torch.cuda.Stream = _cuda.ExternalStream(int(stream(role).handle), f"cuda:{index}")
    return found
