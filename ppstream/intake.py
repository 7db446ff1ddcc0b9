"""Intake: the rings of all robot rows and the cutter that reads them, built together.

A run has two: bring-up's, filled from a synthetic or recorded source, and service's, filled by
robots. So a robot may connect early, and nothing made up ever reaches a window of its.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ppstream.ring import RowInput
from ppstream.ring_bank import RingBank
from ppstream.window import WindowCutter

if TYPE_CHECKING:
    from ppstream.config import PipelineConfig


class Intake(NamedTuple):
    """What one source fills and stage A reads; for the thread that owns the input."""

    rows: tuple[RowInput, ...]
    cutter: WindowCutter


def build_intake(config: PipelineConfig) -> Intake:
    """Empty rings for every stream and row, and their cutter."""
    banks = {
        stream.name: RingBank(stream, config.batch.rows, config.ring_samples(stream))
        for stream in config.streams
    }
    rows = tuple(RowInput(banks, row, config.reference.name) for row in range(config.batch.rows))
    return Intake(rows, WindowCutter(config, rows, banks))
