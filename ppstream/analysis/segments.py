"""Which part of a run is measured: segments of consecutive envelopes, after warm-up, in one window.

A segment never crosses a generation, lane, epoch, phase or a missing seq; no difference of two
stamps is ever taken across its ends. A window is the segments of one generation, summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from statistics import fmean, median, pstdev
from typing import Final

from ppstream.analysis.records import Envelope, RunLog, Topology
from ppstream.core.phases import BRING_UP

ALONE: Final = "alone"  # mode of envelopes that went one by one, to time a stage by itself
WARMUP_MIN: Final = 10  # envelopes
STEADY_RUN: Final = 20  # envelopes that must look alike before warm-up is over
STEADY_MEAN: Final = 10  # envelopes per rolling mean of the period
STEADY_CV: Final = 0.10  # largest spread of those means
IDLE_PERIODS: Final = 5  # a gap this long, spent waiting for input, closes the segment
IDLE_SHARE: Final = 0.8  # of the gap is input wait


@dataclass(frozen=True)
class Segment:
    """Envelopes of consecutive seq, drops included; the first and the last one are emitted."""

    envelopes: tuple[Envelope, ...]

    @property
    def first(self) -> Envelope:
        """The emit that opens the segment: it has no period."""
        return self.envelopes[0]

    @property
    def last(self) -> Envelope:
        return self.envelopes[-1]

    def at(self, seq: int) -> Envelope | None:
        """The envelope of that seq; None: it is not of this segment."""
        place = seq - self.first.seq
        return self.envelopes[place] if 0 <= place < len(self.envelopes) else None

    @cached_property
    def measured(self) -> tuple[Envelope, ...]:
        """All after the opening one: what the segment's time was spent on."""
        return self.envelopes[1:]

    @cached_property
    def emitted(self) -> list[Envelope]:
        return [envelope for envelope in self.envelopes if envelope.is_emitted]

    @cached_property
    def periods_ns(self) -> list[int]:
        return [_emit(b) - _emit(a) for a, b in pairwise(self.emitted)]

    @property
    def span_ns(self) -> int:
        return _emit(self.last) - _emit(self.first)


@dataclass(frozen=True)
class JudgedSpan:
    """The judged span: segments of one generation and one choice of phases."""

    topology: Topology
    phases: frozenset[str | None]
    generation: int
    segments: tuple[Segment, ...]
    skipped: int  # emitted envelopes left out as warm-up or refill
    steady: bool
    perturbed: int  # envelopes left out because a profiler or a fault hook was on

    @cached_property
    def measured(self) -> list[Envelope]:
        return [envelope for segment in self.segments for envelope in segment.measured]

    @cached_property
    def emitted(self) -> list[Envelope]:
        return [envelope for envelope in self.measured if envelope.is_emitted]

    @property
    def n(self) -> int:
        """Periods in the window."""
        return len(self.emitted)

    @cached_property
    def span_ns(self) -> int:
        """T: from the first emit to the last, summed over the segments."""
        return sum(segment.span_ns for segment in self.segments)


def select_window(run: RunLog, *wanted: str | None) -> JudgedSpan:
    """The newest generation's envelopes of the phases ``wanted``, after warm-up.

    Without any: bring-up when the run has it, else all but warming and draining.
    """
    phases = frozenset(wanted) - {None} or _usual_phases(run)
    chosen = [e for e in run.envelopes if e.phase in phases and e.mode != ALONE]
    generation = max((envelope.generation for envelope in chosen), default=0)
    chosen = [envelope for envelope in chosen if envelope.generation == generation]
    clean = [envelope for envelope in chosen if envelope.mode == "throughput"]
    segments, skipped, steady = _after_warmup(list(_segments(clean)), run.topology)
    return JudgedSpan(
        topology=run.topology,
        phases=phases,
        generation=generation,
        segments=tuple(segments),
        skipped=skipped,
        steady=steady,
        perturbed=len(chosen) - len(clean),
    )


def _usual_phases(run: RunLog) -> frozenset[str | None]:
    present = {envelope.phase for envelope in run.envelopes}
    if BRING_UP in present:
        return frozenset({BRING_UP})
    return frozenset(present - {"warming", "draining"})


def _segments(envelopes: Sequence[Envelope]) -> Iterator[Segment]:
    for _, same in groupby(envelopes, key=lambda e: (e.generation, e.lane, e.epoch, e.phase)):
        run: list[Envelope] = []
        for envelope in same:
            if run and envelope.seq != run[-1].seq + 1:
                yield from _trimmed(run)
                run = []
            run.append(envelope)
        yield from _trimmed(run)


def _trimmed(run: list[Envelope]) -> Iterator[Segment]:
    """Cut to emitted ends and at pauses of an idle robot; less than two emits have no period."""
    for part in _without_idle(run):
        emits = [i for i, envelope in enumerate(part) if envelope.is_emitted]
        if len(emits) >= 2:
            yield Segment(tuple(part[emits[0] : emits[-1] + 1]))


def _without_idle(run: list[Envelope]) -> Iterator[list[Envelope]]:
    """An idle robot is not a bubble. Only a wait for input counts as idle, never a stall."""
    emits = [i for i, envelope in enumerate(run) if envelope.is_emitted]
    gaps_ns = [_emit(run[j]) - _emit(run[i]) for i, j in pairwise(emits)]
    limit_ns = IDLE_PERIODS * median(gaps_ns) if gaps_ns else 0
    start = 0
    for i, gap_ns in zip(emits[1:], gaps_ns, strict=False):
        waits = [e.w_input_ns or 0 for e in run[i : i + 2]]  # one thread takes the next input first
        saturated = run[i].phase == BRING_UP or run[i].pacing == "saturated"
        if gap_ns > limit_ns and not saturated and max(waits) >= IDLE_SHARE * gap_ns:
            yield run[start:i]
            start = i
    yield run[start:]


def _after_warmup(segments: list[Segment], topology: Topology) -> tuple[list[Segment], int, bool]:
    """Skip the start of the run until it is steady, and the refill at every later start."""
    warmup = max(WARMUP_MIN, topology.in_system + 2)
    kept: list[Segment] = []
    skipped, steady, cold = 0, False, True
    for segment in segments:
        skip = warmup - skipped if cold else topology.d_in + 2
        if cold and len(segment.emitted) > skip:
            start = _steady_start(segment, skip, topology.replicas)
            steady = start is not None
            skip = skip if start is None else start
            cold = False
        rest = _without_first(segment, skip)
        skipped += len(segment.emitted) - (len(rest.emitted) if rest else 0)
        if rest:
            kept.append(rest)
    return kept, skipped, steady


def _without_first(segment: Segment, skip: int) -> Segment | None:
    """Drop ``skip`` emitted envelopes; the next one opens the rest."""
    emits = [i for i, envelope in enumerate(segment.envelopes) if envelope.is_emitted]
    return Segment(segment.envelopes[emits[skip] :]) if len(emits) >= skip + 2 else None


def _steady_start(segment: Segment, skip: int, replicas: int) -> int | None:
    """The first emit from ``skip`` on that opens a stretch of even period without a recompile.

    Even is judged on rolling means of the period: honest jitter of single periods is not warm-up,
    nor is what repeats with each turn of replicas.
    """
    emitted, periods_ns = segment.emitted, segment.periods_ns
    of = -(-STEADY_MEAN // replicas) * replicas  # periods of a mean
    means = [fmean(periods_ns[i : i + of]) for i in range(len(periods_ns) - of + 1)]
    for start in range(skip, len(emitted) - STEADY_RUN):
        nearby = means[start : start + STEADY_RUN]
        compiled = any(
            envelope.stage1 is not None and envelope.stage1.recompiles
            for envelope in emitted[start : start + STEADY_RUN]
        )
        if nearby and pstdev(nearby) < STEADY_CV * fmean(nearby) and not compiled:
            return start
    return None


def _emit(envelope: Envelope) -> int:
    assert envelope.tEmit is not None, f"seq {envelope.seq} is not emitted"
    return envelope.tEmit
