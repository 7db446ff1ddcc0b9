"""Advice on the age of actions: what a lease must cover, and what a queue's depth costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from ppstream.analysis.period_model import Deeper, Shallower
from ppstream.analysis.places import stage_b_ns
from ppstream.analysis.records import Envelope, Topology
from ppstream.analysis.run_statistics import usual_stages_ns
from ppstream.analysis.scores import form_of, stage_a_ns, stage_c_ns
from ppstream.core.quantiles import quantiles

SAME: Final = 0.005  # a relative difference that rounds to nothing
SPARE: Final = 0.10  # of what a lease must cover: no two runs are alike


@dataclass(frozen=True, slots=True)
class Model:
    """Expectations of the closed form from the window's own stage means."""

    period_ns: float
    gap: float  # measured / expected - 1
    w_star: int
    formula: str
    deeper: Deeper | None  # what a D_in up to W* would give
    shallower: Shallower | None  # what one below it would, for little of the rate
    youngest: Shallower | None  # the same for up to half of the rate


class LeaseNeed(NamedTuple):
    """The time for which a robot moves on with one chunk, and for which it may."""

    age_ns: float  # p95 of chunks that were made; where sensors set the pace as if one were alone
    period_ns: float  # p50, to the next one; or more; or what the sensors' rate makes of it
    limits_ns: Mapping[str, int]  # by setting, of an action's age; one at least
    is_uneven: bool = False  # more: what p95 of the time from a start to the next chunk leaves
    is_paced: bool = False  # the sensors set the pace: no envelope waits for another

    @property
    def need_ns(self) -> float:
        return self.age_ns + self.period_ns

    @property
    def is_short(self) -> bool:
        """True where robots hold between two chunks, now and then at least."""
        return self.need_ns > min(self.limits_ns.values())

    @property
    def text(self) -> str:
        """For people."""
        setting = min(self.limits_ns, key=self.limits_ns.__getitem__)
        when = "with the next sample, " if self.is_paced else "up to " if self.is_uneven else ""
        later = "later" if self.is_paced or self.is_uneven else "later (p50)"
        return (
            f"actions are {in_ms(self.age_ns)} ms old when they are made (p95), and the next "
            f"ones come {when}{in_ms(self.period_ns)} ms {later}: robots need "
            f"{in_ms(self.need_ns)} ms, and {setting} is {self.limits_ns[setting] / 1e6:g}"
        )

    def remedy(self, model: Model | None, overlap_min: float) -> str:
        """Returns what to set, as an order.

        Args:
            model: names a shallower queue where robots would need less with it.
            overlap_min: S that the gate asks for, of it as well.
        """
        short = [setting for setting, ns in self.limits_ns.items() if ns < self.need_ns]
        spared_ms = math.ceil(round((1 + SPARE) * self.need_ns / 1e6, 3))
        text = f"set {' and '.join(short)} to {spared_ms}, a tenth to spare"
        less = None if model is None or self.is_paced else model.youngest
        is_sure = less is not None and less.cost < less.younger < self.age_ns  # the model fits
        if less is not None and is_sure and less.overlap >= overlap_min:
            fewer = less.cost / (self.period_ns + less.cost)
            text += f", or pipeline.d_in to {less.d_in}, for actions {in_ms(less.younger)} ms"
            text += f" younger and {fewer:.0%} fewer of them"
        return text


def lease_need(
    envelopes: Iterable[Envelope],
    limits_ns: Mapping[str, int],
    *,
    ages_ns: Iterable[int] = (),
    c_ns: int = 0,
) -> LeaseNeed | None:
    """Returns what the chunks of ``envelopes`` ask of a lease; None without two of them.

    Chunks past their lease count as made: a longer one would have let them go.

    Args:
        envelopes: of one phase.
        limits_ns: by setting, of an action's age.
        ages_ns: of chunks as robots measured them; default: from A's start to the actions.
        c_ns: of stage C, where no chunk came through it in time.
    """
    lines = [e for e in envelopes if e.is_emitted or (e.drop == "expired" and e.tDecode)]
    c_ns = round(usual_stages_ns(lines).get("C", c_ns))
    made = sorted((e.picked or (e.tDecode or 0) + c_ns, e.tA0 or 0) for e in lines)
    own = quantiles([ready - start for ready, start in made])
    gap = quantiles([later - ready for (ready, _), (later, _) in pairwise(made)])
    lasts = quantiles([later - start for (_, start), (later, _) in pairwise(made)])
    if own is None or gap is None or lasts is None or not limits_ns:
        return None
    age = quantiles([*ages_ns]) or own
    uneven_ns = lasts.p95_ns - own.p95_ns  # a young chunk may be the one that waits long
    period_ns = max(gap.p50_ns, uneven_ns)
    return LeaseNeed(age.p95_ns, period_ns, limits_ns, is_uneven=uneven_ns > gap.p50_ns)


def lease_need_in_turn(
    stages_ns: Mapping[str, Sequence[int]], limits_ns: Mapping[str, int], paced_ns: float
) -> LeaseNeed | None:
    """Returns what a lease must cover where one process runs all stages in turn.

    Args:
        stages_ns: durations of each stage, of the same envelopes.
        limits_ns: by setting, of an action's age.
        paced_ns: the period of the sensors.
    """
    each = quantiles([sum(stages) for stages in zip(*stages_ns.values(), strict=False)])
    if each is None or not limits_ns:
        return None
    is_paced = paced_ns > each.p50_ns
    return LeaseNeed(each.p95_ns, max(paced_ns, each.p50_ns), limits_ns, is_paced=is_paced)


def age_alone_ns(envelopes: Iterable[Envelope], through_ns: float) -> float:
    """Returns p95 of the time from A's start to the actions, of one that waits for no other.

    Args:
        envelopes: of one phase.
        through_ns: the mean, links and all.
    """
    each = [stage_a_ns(e) + stage_b_ns(e) + stage_c_ns(e) for e in envelopes if e.is_emitted]
    found = quantiles(each)
    return through_ns + (max(0, found.p95_ns - sum(each) / len(each)) if found else 0)


def depth_advice(model: Model, topology: Topology, overlap_min: float) -> str:
    """Returns what another D_in would do for the rate and for the age of actions.

    Args:
        model: of the judged window.
        topology: of the run.
        overlap_min: S that the gate asks for.
    """
    form = form_of(topology)
    if form.is_unpipelined:
        return "depth does not help a loop that decodes before it sends"
    if deep := model.deeper:
        gain, price = f"{deep.gain / model.period_ns:.0%}", "actions of the same age"
        if abs(deep.older) >= SAME * model.period_ns:
            age = "older" if deep.older > 0 else "younger"
            price = f"actions {in_ms(abs(deep.older))} ms {age}"
        if deep.is_worth:
            return (
                f"raise D_in from {form.d_in} to {deep.d_in}: the model expects {gain} less period "
                f"with more envelopes in flight, for {price}"
            )
        unseen = "" if deep.is_seen else ", less than the model can resolve"
        return (
            f"D_in {form.d_in} is deep enough: {deep.d_in} would gain {gain}{unseen}, for {price}"
        )
    if less := model.shallower:
        fewer = less.cost / (model.period_ns + less.cost)
        advice = (
            f"D_in {form.d_in} lets envelopes wait for the policy: pipeline.d_in = {less.d_in} "
            f"would make actions {in_ms(less.younger)} ms younger, for {fewer:.0%} fewer of them"
        )
        if less.overlap < overlap_min and topology.world_size == 2:
            advice += "; if the gate refuses that, one rank (--nproc 1) gives as young ones"
        return advice
    if form.d_in > model.w_star:
        excess = form.d_in - model.w_star
        return (
            f"D_in {form.d_in} is {excess} too deep: {model.w_star} would give the same period "
            "with fresher actions, jitter aside"
        )
    return f"D_in {form.d_in} is just deep enough"


def in_ms(value_ns: float) -> str:
    """Three significant digits, never fewer than the milliseconds themselves."""
    ms = value_ns / 1e6
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
