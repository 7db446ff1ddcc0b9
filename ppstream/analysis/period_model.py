"""The pipeline as a timed event graph: closed forms for period and latency, and the recurrence.

Pure and free of units: every time in, period or latency out, is in the caller's unit. The forms are
exact for constant times (maximum over circuits of delay / tokens); the recurrence takes drawn or
recorded times and is the oracle behind the forms. ``decode_first`` exists here and in tests only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

#: Relative slack when a ratio that should be a whole number of credits is rounded up.
_ROUNDING: Final = 1e-9
#: Envelopes until queues have filled, and as many to take a mean of.
_SETTLED: Final = 200


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Constant times of one envelope: stages A, B, C, the two transfers, the input's period."""

    a: float
    b: float
    c: float
    x_in: float = 0
    x_out: float = 0
    t_in: float = 0

    @property
    def loop(self) -> float:
        """From commit to receipt: what one credit is gone for."""
        return self.x_in + self.b + self.x_out

    @property
    def through(self) -> float:
        """One envelope alone in the pipeline."""
        return self.a + self.loop + self.c


@dataclass(frozen=True, slots=True)
class PipelineForm:
    """Shape fixed at start: threads, order of one thread, credit rule and both bounds."""

    threads: str = "serial"  # serial | split
    order: str = "send_first"  # send_first | decode_first (serial only)
    credit: str = "before_window"  # before_window: A starts on the credit; after_window: prebuilt
    d_in: int = 2
    d_out: int = 2

    @property
    def is_unpipelined(self) -> bool:
        """One token: the next A waits for this C, whatever the bounds are."""
        return self.threads == "serial" and self.order == "decode_first"


def period_terms(times: StageTimes, form: PipelineForm) -> dict[str, float]:
    """Every circuit's delay / tokens by its formula; the steady period is the largest value."""
    if form.is_unpipelined:
        return {"A + x_in + B + x_out + C": times.through, "T_in": times.t_in}
    on_credit = form.credit == "before_window"
    loop = times.loop + (times.a if on_credit else 0.0)
    terms = {"A + C": times.a + times.c} if form.threads == "serial" else {}
    if form.threads == "split":
        terms |= {"A": times.a, "C": times.c}
    terms |= {
        "B": times.b,
        "x_in": times.x_in,
        "x_out": times.x_out,
        f"({'A + ' if on_credit else ''}x_in + B + x_out) / D_in": loop / form.d_in,
        "x_out / D_out": times.x_out / form.d_out,
        "T_in": times.t_in,
    }
    if form.threads == "serial":  # one thread with one envelope of lead holds only two tokens
        terms["(A + x_in + B + x_out + C) / 2"] = times.through / 2
    return terms


def period(times: StageTimes, form: PipelineForm) -> float:
    """Steady period of constant times."""
    return max(period_terms(times, form).values())


def limiting_term(times: StageTimes, form: PipelineForm) -> str:
    """The formula of the circuit that sets the period."""
    terms = period_terms(times, form)
    return max(terms, key=lambda formula: terms[formula])


def window_star(times: StageTimes, form: PipelineForm) -> int:
    """W*: the smallest D_in whose period no larger D_in improves; more depth buys only latency."""
    if form.is_unpipelined:
        return 1
    loop = times.loop + (times.a if form.credit == "before_window" else 0.0)
    floor = max(v for f, v in period_terms(times, form).items() if not f.endswith("/ D_in"))
    return max(1, math.ceil(loop / floor - _ROUNDING)) if floor > 0 else 1


def latency(times: StageTimes, form: PipelineForm) -> float | None:
    """Age of an emit (tEmit - tA0) of a saturated steady run; None where no closed form is known.

    Known: unpipelined, one thread with a prebuilt envelope, and split threads. Where credits bind
    more than one envelope at a time the value is the mean over a cycle.
    """
    p = period(times, form)
    if form.is_unpipelined:
        return times.through
    if form.threads == "serial":
        return 2 * p if form.credit == "after_window" else None
    if max(times.a, times.t_in) >= p:  # A sets the pace: nothing queues behind it
        return times.through
    ahead = form.d_in + (1 if form.credit == "after_window" else 0)
    if times.c >= p:
        return (ahead + form.d_out) * p - times.x_out + times.c
    return ahead * p + times.c


@dataclass(frozen=True, slots=True)
class Deeper:
    """Effect that a larger D_in would have."""

    d_in: int
    gain: float  # of the period
    older: float  # mean age of what is emitted; below zero: it is younger
    is_worth: bool  # the gain is one that the model can tell


def deeper(times: StageTimes, form: PipelineForm, error: float) -> Deeper | None:
    """The smallest D_in that W* betters by no more than ``error``; None: W* is reached.

    Where that is the D_in there is, nothing is worth its price, and W* itself is shown.
    """
    star = window_star(times, form)
    if form.d_in >= star:
        return None
    forms = [replace(form, d_in=depth) for depth in range(form.d_in, star + 1)]
    periods = [period(times, deep) for deep in forms]
    enough = next(n for n, found in enumerate(periods) if found - periods[-1] <= error)
    to = enough or -1
    older = _settled_latency(times, forms[to]) - _settled_latency(times, form)
    return Deeper(forms[to].d_in, periods[0] - periods[to], older, is_worth=enough > 0)


def _settled_latency(times: StageTimes, form: PipelineForm) -> float:
    """Mean tEmit - tA0 of a saturated run, also where no closed form is known."""
    run = recurrence([times] * (2 * _SETTLED + 1), form)
    counted = slice(_SETTLED, -1)  # no A follows the last one
    return fmean(c1 - a0 for a0, c1 in zip(run.a0[counted], run.c1[counted], strict=True))


@dataclass(frozen=True, slots=True)
class ModelledRun:
    """Instants per envelope, by the letters of the recurrence (same unit as the times)."""

    a0: list[float]
    a1: list[float]
    s0: list[float]  # commit: tSend
    i1: list[float]  # envelope complete on the policy rank
    b0: list[float]
    b1: list[float]
    o0: list[float]  # result committed to the link
    o1: list[float]  # tRecv
    c0: list[float]  # tDecode
    c1: list[float]  # tEmit


def recurrence(
    times: Sequence[StageTimes], form: PipelineForm, arrivals: Sequence[float] | None = None
) -> ModelledRun:
    """When everything happens, envelope by envelope; starts at 0 with all credits free.

    Args:
        times: one entry per envelope; integers stay integers.
        form: the pipeline's form.
        arrivals: earliest start of each A; default ``k * times[k].t_in``.
    """
    z = ModelledRun([], [], [], [], [], [], [], [], [], [])
    arrive = [k * t.t_in for k, t in enumerate(times)] if arrivals is None else arrivals
    lead = form.threads == "serial" and not form.is_unpipelined
    for k, t in enumerate(times):
        _stage_a(z, k, t, form, arrive[k])
        if lead and k > 0:
            _stage_c(z, k - 1, times[k - 1], thread_free=z.a1[k])
        _stage_b(z, k, t, form)
        if not lead:
            _stage_c(z, k, t, thread_free=z.a1[k] if form.is_unpipelined else 0)
    if lead and times:
        _stage_c(z, len(times) - 1, times[-1], thread_free=z.a1[-1])
    return z


def _stage_a(z: ModelledRun, k: int, t: StageTimes, form: PipelineForm, arrive: float) -> None:
    on_credit = form.credit == "before_window"
    same_thread: float = 0  # the decode this A stands behind: send first leaves one in between
    if form.threads == "serial":
        same_thread = _at(z.c1, k - 1 if form.is_unpipelined else k - 2)
    a0 = max(
        arrive,
        _at(z.a1, k - 1),
        _at(z.o1, k - form.d_in) if on_credit else _at(z.s0, k - 1),
        same_thread,
    )
    z.a0.append(a0)
    z.a1.append(a0 + t.a)
    z.s0.append(max(z.a1[k], _at(z.o1, k - form.d_in), _at(z.i1, k - 1)))
    z.i1.append(z.s0[k] + t.x_in)


def _stage_b(z: ModelledRun, k: int, t: StageTimes, form: PipelineForm) -> None:
    z.b0.append(max(z.i1[k], _at(z.b1, k - 1)))
    z.b1.append(z.b0[k] + t.b)
    z.o0.append(max(z.b1[k], _at(z.o1, k - 1), _at(z.c0, k - form.d_out)))
    z.o1.append(z.o0[k] + t.x_out)


def _stage_c(z: ModelledRun, k: int, t: StageTimes, *, thread_free: float) -> None:
    z.c0.append(max(z.o1[k], _at(z.c1, k - 1), thread_free))
    z.c1.append(z.c0[k] + t.c)


def _at(instants: list[float], k: int) -> float:
    return instants[k] if k >= 0 else 0
