"""Stages A and C alone on the host, on slots with real contents that nothing uses now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppstream.clock import now_ns
from ppstream.flight import Flight
from ppstream.timestamps import EnvelopeRecord

if TYPE_CHECKING:
    from ppstream.rank0 import Rank0
    from ppstream.slots import Slot


def time_on_host(
    rank0: Rank0, envelope: Slot, result: Slot, repeats: int
) -> tuple[list[int], list[int]]:
    """Durations of A into ``envelope`` and of C from ``result``, in ns; for rank 0's thread."""
    durations_a, durations_c = [], []
    newest = (None,) * len(rank0.intake.rows)
    for _ in range(repeats):
        rank0.take_in()
        flight = Flight(0, rank0.epoch, 0, EnvelopeRecord())
        began = now_ns()
        rank0.stage_a.build(flight, envelope.tensors, newest)
        built = now_ns()
        rank0.decode_and_emit(flight, result)
        durations_a.append(built - began)
        durations_c.append(now_ns() - built)
    return durations_a, durations_c
