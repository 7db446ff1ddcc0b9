"""PASS, FAIL or INCONCLUSIVE, why, and the class of a run. Pure.

Order of judgement: a safety count that is not zero fails; then anything that keeps the score from
being known is inconclusive; only then the score and the release limits decide. All reasons are
listed, the first decides. What service was like is judged by itself (``Served``), and the worse of
both is the run's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from ppstream.analysis.audits import Audit
from ppstream.analysis.contention import Alone
from ppstream.analysis.json_values import mapping_of
from ppstream.analysis.lease import LeaseNeed
from ppstream.analysis.period_model import period
from ppstream.analysis.places import is_elsewhere, lost_places
from ppstream.analysis.records import LogEvent, RunLog
from ppstream.analysis.replicas import replica_shares
from ppstream.analysis.requests import has_streaming_robots
from ppstream.analysis.run_ends import failed_end, last_before_ready
from ppstream.analysis.run_statistics import Spoilt, wait_share
from ppstream.analysis.scores import CEILING_MIN, Primary, form_of, missing_stages
from ppstream.analysis.segments import JudgedSpan
from ppstream.analysis.thread_time import Unnamed
from ppstream.core.cpus import Machine
from ppstream.core.phases import BRING_UP
from ppstream.core.quantiles import Quantiles

N_MIN: Final = 100
WAIT_MAX: Final = 0.05  # share of the window
UNNAMED_MAX: Final = 0.15  # of a thread's time, waits for a CPU taken out
UNNAMED_STAGE_NS: Final = 1_000_000  # where no stage is that long, what lies around them is as long
OVERLAP_MIN: Final = 0.30
EFFICIENCY_MIN: Final = 0.85
MODEL_MAX: Final = 1.05  # period over the model's
BUSY_MIN: Final = 0.90  # a resource this busy limits the run
STRETCHED: Final = 1.10  # a stage in the run over its time alone: something holds it up
SCORE_APART: Final = 0.02  # between the score in the log's verdict and the one from its lines

#: The user's to judge: speed. Nothing else can be accepted by ``bringup.accept``.
ACCEPTABLE: Final = ("NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED")
#: Exit codes of a gate that refused: 30 and 31 of ``errors.ExitCode``, which is not needed here.
REFUSED: Final = {30: "FAIL", 31: "INCONCLUSIVE"}


class Verdict(IntEnum):
    """The value is the exit code of the report; 3 is bad input."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2


#: From harmless to decisive.
SEVERITY: Final = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL)


@dataclass(frozen=True, slots=True)
class Gate:
    """Requirements of a run. The bring-up profile asks for safety and overlap only."""

    profile: str = "bringup"  # bringup | release
    overlap_min: float = OVERLAP_MIN  # of S and of S alone
    period_budget_ns: int | None = None
    latency_budget_ns: int | None = None
    accept: tuple[str, ...] = ()  # reasons that the run's configuration accepts

    @property
    def overlap_asked(self) -> float:
        """S below which a run is refused; minus infinity: it is served all the same."""
        return -math.inf if set(ACCEPTABLE) <= set(self.accept) else self.overlap_min


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known about one run when it is judged."""

    run: RunLog
    window: JudgedSpan
    primary: Primary | None
    alone: Alone | None
    audits: Mapping[str, Audit]
    safety: Mapping[str, int]
    latency: Quantiles | None
    spoilt: Spoilt | None
    unnamed: Mapping[str, Unnamed]
    machine: Machine | None  # during bring-up
    lease: LeaseNeed | None  # of bring-up; None: not known


class Decision(NamedTuple):
    """The verdict and all reasons, the deciding one first."""

    verdict: Verdict
    reasons: list[str]
    contradictions: list[str]  # sentences: where the folder says otherwise than its lines


def decide(evidence: Evidence, gate: Gate) -> Decision:
    """PASS only where nothing speaks against it."""
    safety = list(evidence.safety)
    unknown = inconclusive_reasons(evidence)
    unjudged = {"INLINE", "NOTHING_TO_HIDE"} & set(unknown)  # there a low score says nothing
    weak = [] if unjudged and gate.profile == "bringup" else score_reasons(evidence, gate)
    if evidence.lease is not None and evidence.lease.is_short and "EXPIRED" not in unknown:
        weak = [*(["SHORT_LEASE"] if has_streaming_robots(evidence.run.config) else []), *weak]
    verdict = _verdict(safety, unknown, weak)
    found = _contradictions(evidence, verdict, [*safety, *unknown, *weak])
    if found:
        unknown = ["CONTRADICTED", *unknown]
        verdict = _verdict(safety, unknown, weak)
    return Decision(verdict, [*safety, *unknown, *weak], found)


def _verdict(safety: list[str], unknown: list[str], weak: list[str]) -> Verdict:
    if safety:
        return Verdict.FAIL
    if unknown:
        return Verdict.INCONCLUSIVE
    return Verdict.FAIL if weak else Verdict.PASS


def worse(one: Verdict, other: Verdict) -> Verdict:
    return max(one, other, key=SEVERITY.index)


def is_accepted(verdict: Verdict, reasons: Iterable[str], accept: Iterable[str]) -> bool:
    """A run that did not pass may serve all the same: each of its reasons is accepted."""
    return verdict is not Verdict.PASS and set(reasons) <= set(accept)


def inconclusive_reasons(evidence: Evidence) -> list[str]:
    """Yields the reasons why the score cannot be known, most fundamental first."""
    run, window, primary = evidence.run, evidence.window, evidence.primary
    if run.topology.world_size == 1:
        return ["INLINE"]
    audits, spoilt, alone = evidence.audits.values(), evidence.spoilt, evidence.alone
    nothing = not window.n and not window.perturbed and spoilt is None
    has_failed = failed_end(run) and all(e.phase != BRING_UP for e in run.events)
    nothing = nothing and not (has_failed or last_before_ready(run))  # else it had not come to it
    lacking = bool(missing_stages(window)) or nothing or any(a.missing for a in audits)
    lacking = lacking or bool(places_lost(evidence))
    hidden = [score.ceiling for score in (primary, alone) if score is not None]
    found = {
        "MISSING_LOGS": 0 in run.missing_ranks or lacking,
        "EXPIRED": spoilt is not None and spoilt.reason == "expired",
        "DROPPED": spoilt is not None and spoilt.reason != "expired",
        "BAD_INSTRUMENT": any(audit.ok is False for audit in audits),
        "NOT_AUDITED": primary is not None and bool(unaudited(evidence)),
        "PERTURBED": faults_inside(evidence) > 0 or (window.perturbed > 0 and window.n == 0),
        "TOO_FEW": window.n < N_MIN and spoilt is None,
        "NOT_WARM": window.n >= N_MIN and not window.steady,
        "INPUT_LIMITED": wait_share(window, "w_input_ns") > WAIT_MAX,
        "OUTPUT_LIMITED": wait_share(window, "w_emit_ns") > WAIT_MAX,
        "UNNAMED_TIME": any(True for _ in too_much_unnamed(evidence)),
        "NOTHING_TO_HIDE": bool(hidden) and min(hidden) < CEILING_MIN,
    }
    return [reason for reason, holds in found.items() if holds]


def faults_inside(evidence: Evidence) -> int:
    """Counts the faults in the time that is judged."""
    faults = [event for event in evidence.run.events if event.name == "fault"]
    return sum(_inside(evidence.window, fault.t) for fault in faults)


def places_lost(evidence: Evidence) -> list[int]:
    """Places of a chain whose times nobody logged; those of other hosts have logs there."""
    run, window = evidence.run, evidence.window
    found = lost_places(window.measured, run.topology) if window.measured else []
    whole = len(found) == run.topology.places and is_elsewhere(run.manifest)
    return [] if whole else found


def unaudited(evidence: Evidence) -> dict[str, str]:
    """Audits that had to run and did not, and why; the times alone count as one."""
    found = {
        name: audit.note
        for name, audit in evidence.audits.items()
        if audit.ok is None and not audit.may_lack and not audit.missing
    }
    if evidence.alone is None:
        found["alone"] = "run.json has no isolated stage times"
    return found


def too_much_unnamed(evidence: Evidence) -> Iterator[str]:
    """Threads that spend more time outside stages and named waits than a score can bear."""
    if evidence.primary is None:
        return
    times = evidence.primary.times
    if max(times.stages.values()) >= UNNAMED_STAGE_NS:
        for thread, found in evidence.unnamed.items():
            if found.rest is not None and found.rest > UNNAMED_MAX:
                yield thread


def score_reasons(evidence: Evidence, gate: Gate) -> list[str]:
    """Which limits the run misses; empty where nothing could be computed."""
    primary, alone, latency = evidence.primary, evidence.alone, evidence.latency
    if primary is None:
        return []
    s_low, s_alone = primary.s_low, None if alone is None else alone.s
    if primary.is_beyond_s:
        s_low, s_alone = primary.saved, None if alone is None else alone.saved(primary.period_ns)
    found = {"LOW_OVERLAP": s_low is not None and s_low < gate.overlap_min}
    if alone is not None and s_alone is not None and s_alone < gate.overlap_min:
        # where stages run in turn and take their own time, nothing is contended
        found["CONTENDED"] = (
            not found["LOW_OVERLAP"] or max(alone.stretch.values(), default=0.0) > STRETCHED
        )
    if gate.profile == "release":
        model_ns = period(primary.times, form_of(evidence.run.topology))
        tail_ns = None if latency is None else latency.reported_p99_ns or latency.max_ns
        found |= {
            "LOW_EFFICIENCY": primary.efficiency < EFFICIENCY_MIN,
            "OVER_MODEL": primary.period_ns > MODEL_MAX * model_ns,
            "PERIOD_BUDGET": _over(primary.period_ns, gate.period_budget_ns),
            "LATENCY_BUDGET": _over(tail_ns, gate.latency_budget_ns),
        }
    return [reason for reason, holds in found.items() if holds]


def _contradictions(evidence: Evidence, verdict: Verdict, reasons: Iterable[str]) -> list[str]:
    """Sentences on what the folder says otherwise than its lines.

    Lines of another run; a verdict of the run itself, or an exit code, that is worse than what the
    lines now say; a score that is not theirs.
    """
    run, window, primary = evidence.run, evidence.window, evidence.primary
    texts = [f"{file} has lines of another run" for file in run.strangers]
    texts += _disagreements(run)
    event = logged_verdict(run, window)
    if event is not None:
        name, overlap = event.fields.get("verdict"), event.fields.get("overlap")
        logged = event.fields.get("reasons")
        theirs = [str(r) for r in logged] if isinstance(logged, list) else []
        is_known = isinstance(name, str) and name in Verdict.__members__
        is_worse = is_known and worse(Verdict[str(name)], verdict) is not verdict
        if is_worse or not set(theirs) <= set(reasons):
            texts.append(f"the run's own verdict was {' '.join([str(name), *theirs])}")
        score = None if primary is None else primary.s
        if isinstance(overlap, int | float) and (
            score is None or not abs(score - overlap) <= SCORE_APART
        ):
            now = "none" if score is None else f"{score:.2f}"
            texts.append(f"the run's own verdict had overlap {overlap:.2f}, its lines have {now}")
    end = run.exits.get("0") if window.phases == {BRING_UP} else None
    if isinstance(end, Mapping) and end.get("generation", window.generation) == window.generation:
        code = end.get("code")
        refused = REFUSED.get(code) if isinstance(code, int) else None
        if refused is not None and worse(Verdict[refused], verdict) is not verdict:
            texts.append(f"exit.json has code {code}: the gate refused this run")
    return texts


def _disagreements(run: RunLog) -> Iterator[str]:
    """Yields where the topology, by which lines are read, is not what its run was asked to be."""
    topology, cut = run.topology, mapping_of(run.manifest.get("cut"))
    if topology.world_size == 1:
        return
    asked, devices = (mapping_of(run.config.get(name)) for name in ("pipeline", "placement"))
    for name, depth in (("d_in", topology.d_in), ("d_out", topology.d_out)):
        if isinstance(asked.get(name), int) and asked[name] != depth:
            yield f"run.json has topology.{name} {depth} and pipeline.{name} {asked[name]}"
    policy, where = devices.get("policy"), devices.get("parts")
    ranks = topology.world_size
    if isinstance(policy, list):
        if policy != ["cpu"] * len(policy):  # which is a whole mesh's; a GPU is one rank's
            ranks += len(topology.members)
        if len(policy) != ranks - 1:
            yield f"run.json has {ranks} ranks and {len(policy)} devices for policy ranks"
    parts_of = topology.parts[: 1 + topology.places]  # replicas have the same ones
    names = [name for parts in parts_of for name in parts]
    if names and cut.get("parts") not in (None, names):
        yield "run.json has other parts in topology than in cut"
    here = [rank for rank, parts in enumerate(parts_of) for _ in parts]
    for name, there in (("placement.parts", where), ("cut", cut.get("chosen"))):
        if names and isinstance(there, list) and there and here != there:
            yield f"run.json has parts at places {here} in topology and {there} in {name}"


def logged_verdict(run: RunLog, window: JudgedSpan) -> LogEvent | None:
    """The verdict that the run itself came to, of the judged bring-up."""
    if window.phases != {BRING_UP}:
        return None
    found = [e for e in run.events if e.name == "verdict" and e.generation == window.generation]
    return found[-1] if found else None


def classify(window: JudgedSpan, primary: Primary | None) -> str | None:
    """Returns the first class that holds: what limits the run."""
    if primary is None or window.topology.world_size == 1:
        return None
    shares = [*primary.places.values(), *replica_shares(window).values()]
    rank0, mesh = max(primary.rank0.values()), max(shares, default=0.0)
    found = {
        "output-limited": wait_share(window, "w_emit_ns") > WAIT_MAX,
        "input-limited": wait_share(window, "w_input_ns") > WAIT_MAX,
        "stage0-limited": rank0 >= max(BUSY_MIN, mesh),
        "stage1-limited": mesh >= BUSY_MIN,
        "window-limited": wait_share(window, "w_credit_ns") > WAIT_MAX,
        "serialized": primary.s is not None and primary.s < OVERLAP_MIN,
    }
    return next((name for name, holds in found.items() if holds), "overhead-limited")


def _inside(window: JudgedSpan, t: int | None) -> bool:
    return t is not None and any(
        (s.first.tEmit or 0) <= t <= (s.last.tEmit or 0) for s in window.segments
    )


def _over(value: float | None, budget: int | None) -> bool:
    return value is not None and budget is not None and value > budget
