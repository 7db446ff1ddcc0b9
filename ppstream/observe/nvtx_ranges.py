"""NVTX ranges of the loops, for a profiler that is attached: one per stage step of each envelope.

The domain is ``ppstream``; a range is named ``A``, ``send``, ``B``, ``recv`` or ``C``, and its
payload is ``epoch << 32 | seq``. ``on`` says whether anybody listens: a loop asks that one flag and
calls nothing otherwise. While torch.profiler records (``profiler.py``), the steps go there
instead. What happened when without a profiler stands in the time-stamp log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

SEQ_BITS: Final = 32  # of the payload; the epoch stands above

COLOURS: Final = {  # 0xAARRGGBB: one per step, told apart by people who cannot tell red from green
    "A": 0xFF0072B2,
    "send": 0xFF56B4E9,
    "B": 0xFFE69F00,
    "recv": 0xFFCC79A7,
    "C": 0xFF009E73,
}


class RangeCall(Protocol):
    """One NVTX range, which a loop opens and closes around a step while ``on``."""

    def push(self, epoch: int, seq: int) -> None: ...

    def pop(self) -> None: ...


class NvtxRange:
    """One named range; ``push`` and ``pop`` in pairs, on one thread, only while ``on``."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Any, name: str) -> None:
        self._domain = domain
        self._attributes = domain.get_event_attributes(message=name, color=COLOURS[name])

    @property
    def is_seen(self) -> bool:
        """A tool is attached to this process, and was before torch or CUDA started."""
        return self._attributes is not None

    def push(self, epoch: int, seq: int) -> None:
        self._attributes.payload = epoch << SEQ_BITS | seq
        self._domain.push_range(self._attributes)

    def pop(self) -> None:
        self._domain.pop_range()


class _NoDomain:
    """Stands in for the domain where the nvtx package is not installed."""

    def get_event_attributes(self, *, message: str, color: int) -> None: ...


def _domain() -> Any:
    try:
        import nvtx
    except ImportError:
        return _NoDomain()
    return nvtx.get_domain("ppstream")


_steps: Final = tuple(NvtxRange(_domain(), name) for name in COLOURS)
A: RangeCall
SEND: RangeCall
B: RangeCall
RECV: RangeCall
C: RangeCall
A, SEND, B, RECV, C = _steps
on: bool = _steps[0].is_seen


def annotate(make: Callable[[str], RangeCall] | None) -> None:
    """Give the steps to ``make(name)``, or with None back to NVTX; between two envelopes."""
    global A, SEND, B, RECV, C, on
    steps = _steps if make is None else tuple(make(name) for name in COLOURS)
    A, SEND, B, RECV, C = steps
    on = make is not None or _steps[0].is_seen
