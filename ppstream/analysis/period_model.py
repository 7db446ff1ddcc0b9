"""The pipeline as a timed event graph: closed forms for period and latency, and the recurrence.

Pure and free of units: every time in, period or latency out, is in the caller's unit. The forms are
exact for constant times (maximum over circuits of delay / tokens); the recurrence takes drawn or
recorded times and is the oracle behind the forms. ``decode_first`` exists here and in tests only.

Place 0 is rank 0 (A and C), places 1 to n are the policy ranks of a chain. A hop is a serial
resource of its own: a place works on the next envelope while the last one travels. Replicas of the
only policy rank take envelopes in turn, each with hops of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, NamedTuple

#: Relative slack when a ratio that should be a whole number of credits is rounded up.
_ROUNDING: Final = 1e-9
#: Envelopes until queues have filled, and as many to take a mean of.
_SETTLED: Final = 200
#: Of the period or of the age: less is not worth as much of the other.
LITTLE: Final = 0.10


class Behind(NamedTuple):
    """A place behind the first policy rank: the hop to it, and its share of stage B."""

    x: float
    b: float


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Constant times of one envelope: stages A, B, C, the two transfers, the input's period.

    In a chain ``b`` is place 1's time, ``x_in`` the hop to it, ``behind`` has the places behind it
    and ``x_out`` is the hop from the last one back to rank 0.
    """

    a: float
    b: float
    c: float
    x_in: float = 0
    x_out: float = 0
    t_in: float = 0
    behind: tuple[Behind, ...] = ()

    @classmethod
    def of_chain(
        cls,
        a: float,
        places: Sequence[float],
        c: float,
        hops: Sequence[float] | None = None,
        t_in: float = 0,
    ) -> StageTimes:
        """Of ``n`` policy ranks and the ``n + 1`` hops around them (default: free ones)."""
        x_in, *between, x_out = hops or [0] * (len(places) + 1)
        behind = tuple(Behind(x, b) for x, b in zip(between, places[1:], strict=True))
        return cls(a, places[0], c, x_in, x_out, t_in, behind)

    @property
    def places(self) -> tuple[float, ...]:
        """Stage B's time on each policy rank, in order."""
        return (self.b, *(place.b for place in self.behind))

    @property
    def hops(self) -> tuple[float, ...]:
        """To each policy rank in order, and back to rank 0."""
        return (self.x_in, *(place.x for place in self.behind), self.x_out)

    @property
    def stages(self) -> dict[str, float]:
        """The stages by name: A, B and C, in a chain A, B1 to Bn and C."""
        names = [f"B{k}" for k in range(1, len(self.places) + 1)] if self.behind else ["B"]
        return {"A": self.a, **dict(zip(names, self.places, strict=True)), "C": self.c}

    @property
    def loop(self) -> float:
        """From commit to receipt: what one credit is gone for."""
        return self.x_in + self.b + sum(x + b for x, b in self.behind) + self.x_out

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
    replicas: int = 1  # of the only policy rank

    @property
    def is_unpipelined(self) -> bool:
        """One token: the next A waits for this C, whatever the bounds are."""
        return self.threads == "serial" and self.order == "decode_first"

    def tokens(self, times: StageTimes) -> int:
        """Most envelopes in the system that one thread on rank 0 can use: one for each rank.

        Its A leads the decode of the oldest of them; credits may let it lead by less.
        """
        return min(len(times.places) * self.replicas, self.d_in) + 1


def period_terms(times: StageTimes, form: PipelineForm) -> dict[str, float]:
    """Every circuit's delay / tokens by its formula; the steady period is the largest value."""
    if form.is_unpipelined:
        return {"A + x_in + B + x_out + C": times.through, "T_in": times.t_in}
    on_credit = form.credit == "before_window"
    loop = times.loop + (times.a if on_credit else 0.0)
    terms = {"A + C": times.a + times.c} if form.threads == "serial" else {}
    if form.threads == "split":
        terms |= {"A": times.a, "C": times.c}
    stages, hops = times.stages, _hop_names(times)
    sigma = "x_in + B + x_out" if not times.behind else f"x + B1 .. B{len(times.places)}"
    r = form.replicas
    each = {name: b for name, b in stages.items() if name not in "AC"}
    each |= dict(zip(hops, times.hops, strict=True))
    terms |= {f"{name} / {r}" if r > 1 else name: took / r for name, took in each.items()}
    terms |= {
        f"({'A + ' if on_credit else ''}{sigma}) / D_in": loop / form.d_in,
        "x_out / D_out": times.x_out / form.d_out,
        "T_in": times.t_in,
    }
    if form.threads == "serial":  # one thread has one envelope of lead for each policy rank
        tokens = form.tokens(times)
        terms[f"(A + {sigma} + C) / {tokens}"] = times.through / tokens
        if (
            times.behind or r > 1
        ):  # an A stands in front of the decode that gives the result its place
            ahead = form.d_in + (not on_credit)
            terms["(A + x_out) / (D_out + D_in - lead)"] = (times.a + times.x_out) / (
                form.d_out + ahead - (tokens - 1)
            )
    return terms


def _hop_names(times: StageTimes) -> list[str]:
    between = [f"x_{k}" for k in range(1, len(times.places))]
    return ["x_in", *between, "x_out"]


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
    ranks = len(times.places) * form.replicas
    endless = replace(form, d_in=max(form.d_in, ranks + form.d_out + 1))
    floor = max(v for f, v in period_terms(times, endless).items() if not f.endswith("/ D_in"))
    star = max(1, math.ceil(loop / floor - _ROUNDING)) if floor > 0 else 1
    while ranks > 1 and period(times, replace(form, d_in=star)) > floor * (1 + _ROUNDING):
        star += 1  # one thread leads by no more than its credits: at most n + 1 times
    return star


def latency(times: StageTimes, form: PipelineForm) -> float | None:
    """Age of an emit (tEmit - tA0) of a saturated steady run; None where no closed form is known.

    Known without replicas: unpipelined, one thread with a prebuilt envelope, and split threads.
    Where credits bind more than one envelope at a time the value is the mean over a cycle.
    """
    p = period(times, form)
    if form.is_unpipelined:
        return times.through
    if form.replicas > 1:
        return None
    if form.threads == "serial":
        return 2 * p if form.credit == "after_window" and not times.behind else None
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
    is_seen: bool  # the gain is one that the model can tell
    is_worth: bool  # and more than a little, or for actions that are little older


@dataclass(frozen=True, slots=True)
class Shallower:
    """A smaller D_in, and its effect."""

    d_in: int
    cost: float  # added to the period
    younger: float  # mean age of what is emitted
    overlap: float  # S that it can reach


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
    gain, before = periods[0] - periods[to], settled_latency(times, form)
    older = settled_latency(times, forms[to]) - before
    is_dear = gain < LITTLE * periods[0] and older > LITTLE * before
    return Deeper(forms[to].d_in, gain, older, enough > 0, enough > 0 and not is_dear)


def shallower(times: StageTimes, form: PipelineForm, most: float = LITTLE) -> Shallower | None:
    """The smallest D_in that costs ``most`` of the period; None: it makes nothing much younger."""
    now = period(times, form)
    depths = range(1, min(form.d_in, window_star(times, form)))
    costs = {depth: period(times, replace(form, d_in=depth)) - now for depth in depths}
    to = next((depth for depth, cost in costs.items() if cost <= most * now), None)
    if to is None or form.is_unpipelined:
        return None
    before = settled_latency(times, form)
    younger = before - settled_latency(times, replace(form, d_in=to))
    if younger < LITTLE * before:
        return None
    on_one, in_turn = form.threads == "serial", sum(times.stages.values())
    slowest = max(times.a + times.c if on_one else 0, *times.stages.values())
    overlap = (in_turn - now - costs[to]) / (in_turn - slowest) if in_turn > slowest else 0.0
    return Shallower(to, costs[to], younger, overlap)


def settled_latency(times: StageTimes, form: PipelineForm) -> float:
    """Mean tEmit - tA0 of a saturated run, also where no closed form is known."""
    run = recurrence([times] * (2 * _SETTLED + 1), form)
    counted = slice(_SETTLED, -1)  # no A follows the last one
    return fmean(c1 - a0 for a0, c1 in zip(run.a0[counted], run.c1[counted], strict=True))


@dataclass(frozen=True, slots=True)
class PlaceRun:
    """Instants per envelope on one policy rank."""

    i1: list[float]  # envelope complete there
    b0: list[float]
    b1: list[float]
    o0: list[float]  # output committed to the next hop


@dataclass(frozen=True, slots=True)
class ModelledRun:
    """Instants per envelope, by the letters of the recurrence (same unit as the times)."""

    a0: list[float]
    a1: list[float]
    s0: list[float]  # commit: tSend
    places: list[PlaceRun]
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
    n = len(times[0].places) if times else 1
    places = [PlaceRun([], [], [], []) for _ in range(n)]
    z = ModelledRun([], [], [], places, [], [], [])
    arrive = [k * t.t_in for k, t in enumerate(times)] if arrivals is None else arrivals
    leads = form.threads == "serial" and not form.is_unpipelined and bool(times)
    lead = form.tokens(times[0]) - 1 if leads else 0  # so many A stand in front of a decode
    for k, t in enumerate(times):
        for j in range(len(z.a0), min(len(times), k + 1 + max(0, lead - form.d_out))):
            _stage_a(z, j, times[j], form, arrive[j])
            if leads and j >= lead:
                _stage_c(z, j - lead, times[j - lead], thread_free=z.a1[j])
        _stage_b(z, k, t, form)
        if not leads:
            _stage_c(z, k, t, thread_free=z.a1[k] if form.is_unpipelined else 0)
        elif len(z.a0) == len(times):  # no A follows that a decode would stand behind
            for j in range(len(z.c0), k + 1):
                _stage_c(z, j, times[j], thread_free=z.a1[-1])
    return z


def _stage_a(z: ModelledRun, k: int, t: StageTimes, form: PipelineForm, arrive: float) -> None:
    on_credit = form.credit == "before_window"
    same_thread: float = 0  # the decode this A stands behind: send first leaves one in between
    if form.threads == "serial":
        same_thread = _at(z.c1, k - (1 if form.is_unpipelined else form.tokens(t)))
    a0 = max(
        arrive,
        _at(z.a1, k - 1),
        _at(z.o1, k - form.d_in) if on_credit else _at(z.s0, k - 1),
        same_thread,
    )
    z.a0.append(a0)
    z.a1.append(a0 + t.a)
    before = k - form.replicas  # on the same hop
    z.s0.append(max(z.a1[k], _at(z.o1, k - form.d_in), _at(z.places[0].i1, before)))
    z.places[0].i1.append(z.s0[k] + t.x_in)


def _stage_b(z: ModelledRun, k: int, t: StageTimes, form: PipelineForm) -> None:
    before = k - form.replicas  # on the same rank
    for at, (place, b) in enumerate(zip(z.places, t.places, strict=True), start=1):
        place.b0.append(max(place.i1[k], _at(place.b1, before)))
        place.b1.append(place.b0[k] + b)
        if at < len(z.places):  # every hop has a slot for each credit: only the link is waited for
            beyond = z.places[at]
            place.o0.append(max(place.b1[k], _at(beyond.i1, k - 1)))
            beyond.i1.append(place.o0[k] + t.hops[at])
        else:
            place.o0.append(max(place.b1[k], _at(z.o1, before), _at(z.c0, k - form.d_out)))
            z.o1.append(max(place.o0[k] + t.x_out, _at(z.o1, k - 1)))  # received in order


def _stage_c(z: ModelledRun, k: int, t: StageTimes, *, thread_free: float) -> None:
    z.c0.append(max(z.o1[k], _at(z.c1, k - 1), thread_free))
    z.c1.append(z.c0[k] + t.c)


def _at(instants: list[float], k: int) -> float:
    return instants[k] if k >= 0 else 0
