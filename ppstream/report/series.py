"""Series that pictures of a run are drawn from: stretches, bins, parts and curves. Pure.

Every series is bounded whatever the length of the run, so a page of an hour is no heavier than one
of a minute. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median
from typing import Final, NamedTuple

from ppstream.analysis.period_model import (
    PipelineForm,
    StageTimes,
    latency,
    limiting_term,
    period,
    recurrence,
)
from ppstream.analysis.records import Envelope
from ppstream.analysis.scores import Primary, between, form_of
from ppstream.analysis.segments import JudgedSpan, Segment

STRETCH: Final = 8  # envelopes of the representative stretch
BINS: Final = 48
BIN_TAIL: Final = 0.995  # what lies beyond this quantile is counted in one bin of its own
POINTS: Final = 160  # of a series over time
DEPTHS: Final = (1, 2, 3, 4, 5, 6)
SIMULATED: Final = 60  # envelopes: constant times are steady long before


class Bins(NamedTuple):
    """A histogram: counts of equal bins from ``low`` on, and how many lay beyond the last."""

    low: float
    width: float
    counts: list[int]
    beyond: int
    n: int

    @property
    def high(self) -> float:
        return self.low + self.width * len(self.counts)


class Point(NamedTuple):
    """One bucket of a series over time: its middle, and quantiles of the values in it."""

    at: float
    low: float  # 10 %
    middle: float
    high: float  # 90 %
    top: float  # the largest


class ExpectedDepth(NamedTuple):
    """Expectation of the model for one D_in, the other times being as measured; in ns."""

    d_in: int
    period_ns: float
    latency_ns: float
    limit: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive envelopes whose periods are most like those of the whole window."""

    shown: list[Envelope]  # to be drawn: neighbours on both sides included
    start_ns: int
    end_ns: int


def stretch_of(window: JudgedSpan) -> Stretch | None:
    """The ``STRETCH`` periods nearest the median period; None without any."""
    best: tuple[float, Segment, int] | None = None
    periods = [p for segment in window.segments for p in segment.periods_ns]
    if not periods:
        return None
    usual = median(periods)
    for segment in window.segments:
        own = segment.periods_ns
        length = min(STRETCH, len(own))
        off = list(accumulate((abs(p - usual) for p in own), initial=0.0))
        for start in range(len(own) - length + 1):
            score = (off[start + length] - off[start]) / length
            if best is None or score < best[0]:
                best = (score, segment, start)
    assert best is not None, f"{len(periods)} periods and no stretch"
    _, segment, start = best
    emitted = segment.emitted
    length = min(STRETCH, len(emitted) - 1)
    first, last = emitted[start], emitted[start + length]
    margin = window.topology.in_system
    shown = [e for e in segment.envelopes if first.seq - margin <= e.seq <= last.seq + margin]
    return Stretch(shown, first.tEmit or 0, last.tEmit or 0)


def periods_ns(window: JudgedSpan) -> list[int]:
    return [p for segment in window.segments for p in segment.periods_ns]


def bins_of(values: Sequence[float], count: int = BINS) -> Bins | None:
    """A histogram over the bulk of ``values``; None without any."""
    if not values:
        return None
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(BIN_TAIL * len(ordered)))]
    width = (high - low) / count or max(abs(high), 1.0) * 1e-3
    counts, beyond = [0] * count, 0
    for value in ordered:
        place = int((value - low) / width)
        if place < count:
            counts[place] += 1
        elif value <= high:
            counts[-1] += 1
        else:
            beyond += 1
    return Bins(low, width, counts, beyond, len(ordered))


def over_time(at: Sequence[float], values: Sequence[float], points: int = POINTS) -> list[Point]:
    """Quantiles of ``values`` in equal stretches of their order; ``at`` ascends."""
    step = max(1, -(-len(values) // points))
    found = []
    for start in range(0, len(values), step):
        part = sorted(values[start : start + step])
        last = len(part) - 1
        low, middle, high = (part[round(q * last)] for q in (0.1, 0.5, 0.9))
        found.append(Point(fmean(at[start : start + step]), low, middle, high, part[-1]))
    return found


def emit_times_s(window: JudgedSpan) -> list[float]:
    """Of every period in the window: its end, from the first emit on."""
    if not window.segments:
        return []
    first = window.segments[0].first.tEmit or 0
    return [((e.tEmit or 0) - first) / 1e9 for s in window.segments for e in s.emitted[1:]]


def latency_parts(window: JudgedSpan) -> dict[str, float]:
    """Mean ns of every part of the latency, in order; together they are its mean.

    All links are one part: with unsynchronised clocks only their sum is known.
    """
    whole = [e for e in window.emitted if _is_complete(e)]
    if not whole:
        return {}
    places = len(whole[0].places)
    single = places < 2
    parts = {
        "A": [between(e.tA0, e.tA1) for e in whole],
        "to commit": [between(e.tA1, e.tSend) for e in whole],
        "both links" if single else "all hops": [
            between(e.tSend, e.tRecv) - (e.residence_ns or 0) for e in whole
        ],
    }
    for place, b in enumerate(
        ["B"] if single else [f"B{k + 1}" for k in range(len(whole[0].places))]
    ):
        lines = whole if single else [e.places[place] for e in whole]
        stays = [line for line in lines if line is not None]
        waits = [(s.residence_ns or 0) - (s.B_ns or 0) - (s.wait_output_ns or 0) for s in stays]
        parts[f"wait for {b}"] = waits
        parts[b] = [s.B_ns or 0 for s in stays]
        slot = "a result slot" if single else f"a slot behind {b}"
        parts[f"wait for {slot}"] = [s.wait_output_ns or 0 for s in stays]
    parts |= {
        "wait for C": [between(e.tRecv, e.tDecode) for e in whole],
        "C": [between(e.tDecode, e.tEmit) for e in whole],
    }
    if any(e.tPick is not None for e in whole):
        parts["pick-up"] = [between(e.tEmit, e.picked) for e in whole]
    return {name: fmean(values) for name, values in parts.items()}


def _is_complete(e: Envelope) -> bool:
    stamps = (e.tA0, e.tA1, e.tSend, e.tRecv, e.tDecode, e.tEmit, e.B_ns, e.residence_ns)
    return None not in stamps and (len(e.places) < 2 or None not in e.places)


def input_ages_ns(envelopes: Sequence[Envelope]) -> dict[str, list[int]]:
    """Age of the newest sample used, by stream, at the end of its window."""
    found: dict[str, list[int]] = {}
    for e in envelopes:
        for stream, age_ns in (e.input_age_ns or {}).items():
            found.setdefault(stream, []).append(age_ns)
    return found


def queue_levels(window: JudgedSpan, queue: str) -> tuple[list[float], list[float], list[float]]:
    """Seconds, time-weighted mean and maximum of a queue, bucketed; from its own counters.

    Args:
        window: what is judged.
        queue: ``outstanding`` or ``q_decode``.
    """
    total, most = f"{queue}_ns_total", f"{queue}_max"
    at, means, maxima = [], [], []
    first = window.segments[0].first.tEmit or 0 if window.segments else 0
    for segment in window.segments:
        emitted = [e for e in segment.emitted if getattr(e, total) is not None]
        step = max(1, -(-window.n // POINTS))
        for start in range(0, len(emitted) - 1, step):
            part = emitted[start : start + step + 1]
            span = between(part[0].tEmit, part[-1].tEmit)
            if span > 0:
                at.append(((part[-1].tEmit or 0) - first) / 1e9)
                means.append((getattr(part[-1], total) - getattr(part[0], total)) / span)
                maxima.append(max(getattr(e, most) or 0 for e in part[1:]))
    return at, means, maxima


def depth_curve(score: Primary | None, window: JudgedSpan) -> list[ExpectedDepth]:
    """Period and latency by D_in, from the window's own stage means."""
    if score is None or window.topology.world_size == 1:
        return []
    form = form_of(window.topology)
    depths = sorted({*DEPTHS, form.d_in})
    forms = [replace(form, d_in=d_in) for d_in in depths]
    return [
        ExpectedDepth(
            f.d_in, period(score.times, f), _latency(score.times, f), limiting_term(score.times, f)
        )
        for f in forms
    ]


def _latency(times: StageTimes, form: PipelineForm) -> float:
    """The closed form where one is known, else the recurrence's mean over its second half."""
    known = latency(times, form)
    if known is not None:
        return known
    run = recurrence([times] * SIMULATED, form)
    ages = [c1 - a0 for a0, c1 in zip(run.a0, run.c1, strict=True)]
    return fmean(ages[SIMULATED // 2 :])
