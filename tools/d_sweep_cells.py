"""A D sweep's cells and what follows from them: order, means, the model's gap, the recommended D.

Pure: nothing here starts a process, draws or prints. ``d_sweep.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

from real_runs import Spread, Target, spread

GOOD_ENOUGH: Final = 1.02  # of the best period: deeper queues only cost latency
OF_IDEAL: Final = 1.053  # 95 % of the ideal rate, with any number of replicas
OF_IDEAL_GPU: Final = 1.03  # of the period that stages of measured length allow
GAP_MAX: Final = 0.03  # of the model's period,
GAP_MAX_MS: Final = 0.3  # or this, whichever is more
GAP_STAGE_MIN_MS: Final = 5.0  # asked of cells whose longest stage takes this long


class Stages(NamedTuple):
    """Times of one envelope, simulated or measured.

    ``behind_ms``: stage B of the policy ranks behind rank 1. With ``replicas`` policy ranks take
    envelopes in turn.
    """

    a_ms: float
    b_ms: float
    c_ms: float
    behind_ms: tuple[float, ...] = ()
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """Rank 0 and all policy ranks."""
        return 1 + self.replicas * len(self.places_ms)

    def ideal_ms(self, threads: str) -> float:
        """The shortest period: that of the busiest rank, or of replicas in turn."""
        rank0_ms = (self.a_ms, self.c_ms) if threads == "split" else (self.a_ms + self.c_ms,)
        return max(*rank0_ms, *(b_ms / self.replicas for b_ms in self.places_ms))

    @property
    def places_ms(self) -> tuple[float, ...]:
        """Stage B of every policy rank."""
        return (self.b_ms, *self.behind_ms)

    @property
    def longest_ms(self) -> float:
        return max(self.a_ms, *self.places_ms, self.c_ms)

    def __str__(self) -> str:
        places = "+".join(f"{b_ms:g}" for b_ms in self.places_ms)
        places += f" x {self.replicas}" if self.replicas > 1 else ""
        return f"A {self.a_ms:g}  B {places}  C {self.c_ms:g} ms"


class SweepCell(NamedTuple):
    """One point of the sweep: D_in = D_out = ``depth``."""

    stages: Stages
    threads: str
    depth: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of a cell. ``overlap`` is None where nothing can overlap."""

    alone: Stages  # as this run measured them, one stage at a time
    period_ms: float
    model_ms: float  # from the stage times that this run measured
    formula: str  # what sets the period, says the model
    overlap: float | None
    efficiency: float
    latencies_ms: tuple[float, ...]  # tA0 to tEmit
    ages_ms: tuple[float, ...]  # newest sample used: its arrival on rank 0 to emit
    verdict: str


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A cell's passes together. ``slot_bytes``: both directions' slots, shared by the ranks."""

    cell: SweepCell
    alone: Stages
    period_ms: float
    model_ms: float
    formula: str
    overlap: float | None
    efficiency: float
    latency_ms: Spread
    age_ms: Spread
    slot_bytes: int
    verdicts: tuple[str, ...]

    @property
    def gap(self) -> float:
        """Share of the model's period by which the measured one is longer."""
        return self.period_ms / self.model_ms - 1


class Price(NamedTuple):
    """Difference of one cell from another of the same stages and threads, with smaller D."""

    over_depth: int
    saved_ms: float  # of the period
    age_ms: float  # p50
    slot_bytes: int


class Advice(NamedTuple):
    """The smallest D whose period is good enough; ``price``: over the next smaller D, if any."""

    row: SweepRow
    price: Price | None


def parse_stages(text: str) -> Stages:
    """``A:B:C`` or, of a chain, ``A:B1:B2:C`` in ms. Raises ValueError for anything else."""
    times = tuple(float(part) for part in text.split(":"))
    if len(times) < 3 or min(times) < 0:
        raise ValueError(f"{text!r} is not A:B:C or A:B1:B2:C in ms")
    a_ms, b_ms, *behind_ms, c_ms = times
    return Stages(a_ms, b_ms, c_ms, tuple(behind_ms))


def cells(
    stages: Iterable[Stages], threads: Sequence[str], depths: Sequence[int]
) -> list[SweepCell]:
    return [
        SweepCell(s, t, depth) for s in stages for t in threads for depth in sorted(set(depths))
    ]


def replica_cells(
    stages: Iterable[Stages], threads: Sequence[str], replicas: Sequence[int]
) -> list[SweepCell]:
    """Each number of replicas with as many envelopes in flight as there are ranks."""
    counts = sorted(set(replicas))
    return [
        SweepCell(s._replace(replicas=r), t, r + 1) for s in stages for t in threads for r in counts
    ]


def replica_targets(rows: Iterable[SweepRow], kind: str) -> list[Target]:
    """Returns each cell's period over the shortest that its replicas allow.

    Stages of ``kind`` gpu take what the GPU makes of the time that was asked for: there the ideal
    comes from the stages alone.
    """
    targets = []
    for row in rows:
        stages, limit = row.cell.stages, OF_IDEAL
        if kind == "gpu":
            stages, limit = row.alone, OF_IDEAL_GPU
        ideal_ms = stages.ideal_ms(row.cell.threads)
        what = f"{row.cell.stages} {row.cell.threads}: period / ideal {ideal_ms:.3f} ms"
        targets.append(Target(what, limit, row.period_ms / ideal_ms))
    return targets


def abba(forwards: Sequence[SweepCell]) -> list[SweepCell]:
    """Every cell twice, the second time in reverse: a steady drift adds the same to each."""
    return [*forwards, *reversed(forwards)]


def combine(cell: SweepCell, passes: Sequence[Pass], slot_bytes: int) -> SweepRow:
    """Means of the passes' means; latencies and ages of all of them pooled."""
    overlaps = [found.overlap for found in passes if found.overlap is not None]
    return SweepRow(
        cell=cell,
        alone=_mean([found.alone for found in passes], cell.stages.replicas),
        period_ms=fmean(found.period_ms for found in passes),
        model_ms=fmean(found.model_ms for found in passes),
        formula=passes[0].formula,
        overlap=fmean(overlaps) if overlaps else None,
        efficiency=fmean(found.efficiency for found in passes),
        latency_ms=spread([value for found in passes for value in found.latencies_ms]),
        age_ms=spread([value for found in passes for value in found.ages_ms]),
        slot_bytes=slot_bytes,
        verdicts=tuple(found.verdict for found in passes),
    )


def recommend(rows: Sequence[SweepRow]) -> list[Advice]:
    """One advice for each stage times and thread mode, in the order of the rows."""
    groups: dict[tuple[Stages, str], list[SweepRow]] = {}
    for row in rows:
        groups.setdefault((row.cell.stages, row.cell.threads), []).append(row)
    return [_advice(sorted(group, key=lambda row: row.cell.depth)) for group in groups.values()]


def gap_targets(rows: Iterable[SweepRow]) -> list[Target]:
    """Returns what the model must explain, as gap in ms over the limit in ms (at most 1)."""
    targets = []
    for row in rows:
        if row.cell.stages.longest_ms < GAP_STAGE_MIN_MS:
            continue
        limit_ms = max(GAP_MAX * row.model_ms, GAP_MAX_MS)
        gap_ms = abs(row.period_ms - row.model_ms)
        what = f"{row.cell.stages} {row.cell.threads} D={row.cell.depth}: |period - model|, ms"
        targets.append(Target(what, round(limit_ms, 3), gap_ms))
    return targets


def _mean(measured: Sequence[Stages], replicas: int) -> Stages:
    times = [(one.a_ms, one.c_ms, *one.places_ms) for one in measured]
    a_ms, c_ms, b_ms, *behind_ms = map(fmean, zip(*times, strict=True))
    return Stages(a_ms, b_ms, c_ms, tuple(behind_ms), replicas)


def _advice(group: list[SweepRow]) -> Advice:
    best_ms = min(row.period_ms for row in group)
    index = next(i for i, row in enumerate(group) if row.period_ms <= GOOD_ENOUGH * best_ms)
    row = group[index]
    if index == 0:
        return Advice(row, None)
    before = group[index - 1]
    price = Price(
        before.cell.depth,
        before.period_ms - row.period_ms,
        row.age_ms.p50 - before.age_ms.p50,
        row.slot_bytes - before.slot_bytes,
    )
    return Advice(row, price)
