"""Advice on the age of actions: what a queue's depth costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ppstream.analysis.period_model import Deeper, Shallower
from ppstream.analysis.records import Topology
from ppstream.analysis.scores import form_of

SAME: Final = 0.005  # a relative difference that rounds to nothing


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
