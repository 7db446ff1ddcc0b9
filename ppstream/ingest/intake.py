"""Intake: the rings of all robot rows and the cutter that reads them, built together.

A run has two: bring-up's, filled from a synthetic or recorded source, and service's, filled by
robots. So a robot may connect early, and nothing made up ever reaches a window of its.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ppstream.core.clock import NS_PER_MS
from ppstream.ingest.camera_frames import camera_names
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput
from ppstream.ingest.sample_ledger import Balance, SampleLedger, total
from ppstream.ingest.window import WindowCutter, group_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ppstream.config.schema import PipelineConfig


class Intake(NamedTuple):
    """Rings that one source fills and stage A reads; for the thread that owns the input."""

    rows: tuple[RowInput, ...]
    cutter: WindowCutter
    banks: Mapping[str, RingBank]  # the rings' memory, by stream


def build_intake(config: PipelineConfig, reads: Collection[str] = ()) -> Intake:
    """Empty rings for every stream and row, and their cutter.

    Args:
        config: of the run.
        reads: names of inputs of the policy. A robot has no window while a stream is missing or
            older than its ``max_age_ms`` that the policy reads without ``valid`` and ``age_s``.
    """
    banks = {
        stream.name: RingBank(stream, config.batch.rows, config.ring_samples(stream))
        for stream in config.streams
    }
    stale_ns = round(config.reach_ms * NS_PER_MS)
    needed_ns, reference = _needed_ns(config, reads), config.reference.name
    rows = tuple(
        RowInput(banks, row, reference, stale_ns, needed_ns) for row in range(config.batch.rows)
    )
    return Intake(rows, WindowCutter(config, rows, banks), banks)


def _needed_ns(config: PipelineConfig, reads: Collection[str]) -> dict[str, int]:
    """By stream that the policy reads blindly, how old its newest sample may be."""
    blind = [camera for camera in config.cameras if _is_blind(camera_names(camera), reads)]
    for group, streams in config.groups.items():
        blind += streams if _is_blind(group_names(group), reads) else ()
    return {
        stream.name: round(stream.max_age_ms * NS_PER_MS)
        for stream in blind
        if stream.name != config.reference.name
    }


def _is_blind(names: tuple[str, str, str], reads: Collection[str]) -> bool:
    """True when samples are read, and neither whether they are valid nor how old they are."""
    samples, *known_by = names
    return samples in reads and not any(name in reads for name in known_by)


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
