"""Intake: the rings of all robot rows and the cutter that reads them, built together.

A run has two: bring-up's, filled from a synthetic or recorded source, and service's, filled by
robots. So a robot may connect early, and nothing made up ever reaches a window of its.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ppstream.core.clock import NS_PER_MS
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput
from ppstream.ingest.sample_ledger import Balance, SampleLedger, total
from ppstream.ingest.window import WindowCutter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ppstream.config.schema import PipelineConfig


class Intake(NamedTuple):
    """Rings that one source fills and stage A reads; for the thread that owns the input."""

    rows: tuple[RowInput, ...]
    cutter: WindowCutter
    banks: Mapping[str, RingBank]  # the rings' memory, by stream


def build_intake(config: PipelineConfig) -> Intake:
    """Empty rings for every stream and row, and their cutter."""
    banks = {
        stream.name: RingBank(stream, config.batch.rows, config.ring_samples(stream))
        for stream in config.streams
    }
    stale_ns = round(config.reach_ms * NS_PER_MS)
    rows = tuple(
        RowInput(banks, row, config.reference.name, stale_ns) for row in range(config.batch.rows)
    )
    return Intake(rows, WindowCutter(config, rows, banks), banks)


def stream_lines(intake: Intake) -> dict[str, dict[str, object]]:
    """Each stream over all rows, as the log has it; for the rings' own thread.

    Its balance; ``holes`` wider than ``max_gap_ms`` between two samples, and ``longest_hole_ns``;
    ``targets`` of windows and how many were ``invalid``: not of cameras, nor where a device cuts.
    """
    cutter, lines = intake.cutter, {}
    for name, ledger in _ledgers(intake.rows).items():
        holes = {"holes": ledger.holes, "longest_hole_ns": ledger.longest_hole_ns}
        line: dict[str, object] = {**ledger.as_dict(), **holes}
        if cutter.targets and name in cutter.invalid:
            line |= {"targets": cutter.targets, "invalid": cutter.invalid[name]}
        lines[name] = line
    return lines


def balances(rows: Iterable[RowInput]) -> dict[str, Balance]:
    """The ledger of each stream over all rows, in the log's form; for the rings' own thread."""
    return {name: ledger.as_dict() for name, ledger in _ledgers(rows).items()}


def _ledgers(rows: Iterable[RowInput]) -> dict[str, SampleLedger]:
    ledgers: dict[str, list[SampleLedger]] = {}
    for row in rows:
        for name, ring in row.rings.items():
            ledgers.setdefault(name, []).append(ring.ledger)
    return {name: total(parts) for name, parts in ledgers.items()}
