"""The compiled core: the calls of every envelope in C, each beside its Python twin.

Not here: the twins, which are the reference (``ingest``, ``pipeline/action_limits.py``). They do
everything without a compiler at installation or with ``PPSTREAM_NATIVE=0``; ``run.json`` tells.
Start reading at ``core.pyi`` and ``core.c``.
"""

from ppstream.native.loader import Clock, Ledger, Ring, are_inside, is_used, why_not

__all__ = ["Clock", "Ledger", "Ring", "are_inside", "is_used", "why_not"]
