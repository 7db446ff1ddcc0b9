"""The compiled core: the calls of every envelope in C, each beside its Python twin.

Not here: the twins, which are the reference (``ingest``, ``pipeline/action_limits.py``,
``links/doorbell.py``, ``core/waiter.py``). They do everything without a compiler at installation or
with ``PPSTREAM_NATIVE=0``; ``run.json`` tells. Start reading at ``core.pyi``, ``core.c`` and
``wait.c``.
"""

from ppstream.native.loader import (
    Bell,
    Clock,
    Ledger,
    Ring,
    Waiter,
    are_inside,
    is_used,
    receive,
    why_not,
)

__all__ = [
    "Bell",
    "Clock",
    "Ledger",
    "Ring",
    "Waiter",
    "are_inside",
    "is_used",
    "receive",
    "why_not",
]
