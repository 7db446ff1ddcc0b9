"""PASS, FAIL or INCONCLUSIVE, why, and the class of a run. Pure.

Order of judgement: a safety count that is not zero fails; then anything that keeps the score from
being known is inconclusive; only then the score and the release limits decide. All reasons are
listed, the first decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ppstream.audits import Audit
from ppstream.model import period
from ppstream.records import RunLog
from ppstream.scores import Primary, form_of, missing_stages
from ppstream.segments import Window
from ppstream.standing import Quantiles, wait_share

N_MIN: Final = 100
CEILING_MIN: Final = 1.10
WAIT_MAX: Final = 0.05  # share of the window
OVERLAP_MIN: Final = 0.30
EFFICIENCY_MIN: Final = 0.85
MODEL_MAX: Final = 1.05  # period over the model's
BUSY_MIN: Final = 0.90  # a resource this busy limits the run


class Verdict(IntEnum):
    """The value is the exit code of the report; 3 is bad input."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2


@dataclass(frozen=True, slots=True)
class Gate:
    """What is asked of a run. The bring-up profile asks for safety and overlap only."""

    profile: str = "bringup"  # bringup | release
    overlap_min: float = OVERLAP_MIN
    period_budget_ns: int | None = None
    latency_budget_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known about one run when it is judged."""

    run: RunLog
    window: Window
    primary: Primary | None
    audits: Mapping[str, Audit]
    safety: Mapping[str, int]
    latency: Quantiles | None


def decide(evidence: Evidence, gate: Gate) -> tuple[Verdict, list[str]]:
    """The verdict and all reasons, the deciding one first."""
    safety = list(evidence.safety)
    unknown = inconclusive_reasons(evidence)
    weak = [] if "INLINE" in unknown else score_reasons(evidence, gate)
    if safety:
        verdict = Verdict.FAIL
    elif unknown:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.FAIL if weak else Verdict.PASS
    return verdict, safety + unknown + weak


def inconclusive_reasons(evidence: Evidence) -> list[str]:
    """Why the score cannot be known, most fundamental first."""
    run, window, primary = evidence.run, evidence.window, evidence.primary
    if run.topology.world_size == 1:
        return ["INLINE"]
    audits = evidence.audits.values()
    lacking = bool(missing_stages(window)) or (not window.n and not window.perturbed)
    faulted = any(_inside(window, event.t) for event in run.events if event.name == "fault")
    found = {
        "MISSING_LOGS": 0 in run.missing_ranks or lacking or any(a.missing for a in audits),
        "BAD_INSTRUMENT": any(audit.ok is False for audit in audits),
        "PERTURBED": faulted or (window.perturbed > 0 and window.n == 0),
        "TOO_FEW": window.n < N_MIN,
        "NOT_WARM": window.n >= N_MIN and not window.steady,
        "INPUT_LIMITED": wait_share(window, "w_input_ns") > WAIT_MAX,
        "OUTPUT_LIMITED": wait_share(window, "w_emit_ns") > WAIT_MAX,
        "NOTHING_TO_HIDE": primary is not None and primary.ceiling < CEILING_MIN,
    }
    return [reason for reason, holds in found.items() if holds]


def score_reasons(evidence: Evidence, gate: Gate) -> list[str]:
    """Which limits the run misses; empty where nothing could be computed."""
    primary, latency = evidence.primary, evidence.latency
    if primary is None:
        return []
    found = {"LOW_OVERLAP": primary.s_low is not None and primary.s_low < gate.overlap_min}
    if gate.profile == "release":
        model_ns = period(primary.times, form_of(evidence.run.topology))
        tail_ns = None if latency is None else latency.p99 or latency.max
        found |= {
            "LOW_EFFICIENCY": primary.efficiency < EFFICIENCY_MIN,
            "OVER_MODEL": primary.period_ns > MODEL_MAX * model_ns,
            "PERIOD_BUDGET": _over(primary.period_ns, gate.period_budget_ns),
            "LATENCY_BUDGET": _over(tail_ns, gate.latency_budget_ns),
        }
    return [reason for reason, holds in found.items() if holds]


def classify(window: Window, primary: Primary | None) -> str | None:
    """What limits the run: the first that holds."""
    if primary is None or window.topology.world_size == 1:
        return None
    busy = primary.utilisation
    rank0 = max(share for name, share in busy.items() if name not in ("mesh", "link"))
    mesh = busy.get("mesh", 0.0)
    found = {
        "output-limited": wait_share(window, "w_emit_ns") > WAIT_MAX,
        "input-limited": wait_share(window, "w_input_ns") > WAIT_MAX,
        "stage0-limited": rank0 >= max(BUSY_MIN, mesh),
        "stage1-limited": mesh >= BUSY_MIN,
        "window-limited": wait_share(window, "w_credit_ns") > WAIT_MAX,
        "serialized": primary.s is not None and primary.s < OVERLAP_MIN,
    }
    return next((name for name, holds in found.items() if holds), "overhead-limited")


def _inside(window: Window, t: int | None) -> bool:
    return t is not None and any(
        (s.first.tEmit or 0) <= t <= (s.last.tEmit or 0) for s in window.segments
    )


def _over(value: float | None, budget: int | None) -> bool:
    return value is not None and budget is not None and value > budget
