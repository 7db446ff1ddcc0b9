"""One judged run, and its form in JSON: what everything that shows a verdict is given. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple

from ppstream.analysis.age_advice import Model
from ppstream.analysis.audits import Audit
from ppstream.analysis.compiler_counts import CompiledPartSeen
from ppstream.analysis.contention import Alone
from ppstream.analysis.device_times import ClockSeen, StageOnDevice
from ppstream.analysis.lease import LeaseNeed
from ppstream.analysis.memory_use import MemoryUse
from ppstream.analysis.place_table import BetterCut, PlaceRow
from ppstream.analysis.records import Ledger, RobotRequests, RobotStateLine, RuleCounts
from ppstream.analysis.requests import Requests
from ppstream.analysis.run_statistics import ChunkGaps, FaultSeen
from ppstream.analysis.safety_counts import QueueMaxima
from ppstream.analysis.scores import Compat, Primary
from ppstream.analysis.segments import JudgedSpan
from ppstream.analysis.thread_time import StageCpu, Unnamed
from ppstream.analysis.verdict import Gate, Verdict, is_accepted
from ppstream.core.cpus import Machine
from ppstream.core.quantiles import Quantiles

DIGITS: Final = 12  # of a digest, that people compare
MS: Final = 1e-6  # per ns
_NO_TIMES: Final = dict.fromkeys(("p50", "p95", "p99", "max"))


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """The phases ready and degraded: there the input sets the period, so no score is asked of it.

    Its verdict is PASS unless it was not what bring-up was, or robots did not get their actions.
    """

    limited_by: str | None
    latency: Quantiles | None
    deadline: dict[str, object] | None
    utilisation: dict[str, float] | None
    drops: dict[str, object]
    verdict: Verdict = Verdict.PASS
    reasons: dict[str, str] = field(default_factory=dict)  # each with its sentence
    gaps: ChunkGaps | None = None  # without a new chunk
    lease: LeaseNeed | None = None  # what it had to cover
    robots: tuple[RobotStateLine, ...] = ()
    streams: tuple[Ledger, ...] = ()
    rule_counts: RuleCounts | None = None  # ``actions`` in JSON
    requests: Requests | None = None  # of robots that ask; None: samples come by themselves
    chunks_per_s: float | None = None  # mean rate of envelopes; None: fewer than two
    calls_by_rows: dict[int, int] | None = None  # of the policy; None: all whole


class Figure(NamedTuple):
    """One of the seven figures that a user reads first, in words."""

    name: str
    value: str  # with its unit; "unknown" where it was not measured
    note: str  # what it counts, with the published name in brackets
    is_bad: bool = False  # beyond its limit


class OldestAction(NamedTuple):
    """The oldest action that any robot executed, and how old one might be."""

    age_ns: int
    limit_ns: int | None

    @property
    def is_too_old(self) -> bool:
        return self.limit_ns is not None and self.age_ns > self.limit_ns

    def __str__(self) -> str:
        limit = "" if self.limit_ns is None else f" of {self.limit_ns * MS:g}"
        return f"oldest action executed: {self.age_ns * MS:.1f} ms{limit}"


class RobotChunks(NamedTuple):
    """Chunks by what robots did with them."""

    executed: int
    unexecuted: int
    late: Quantiles | None  # ages of the unexecuted that a robot received beyond ``limit_ns``
    limit_ns: int | None
    who: str = "robots"

    @property
    def late_share(self) -> float:
        return 0.0 if self.late is None else self.late.count / (self.executed + self.unexecuted)

    def __str__(self) -> str:
        text = f"{self.who} executed {self.executed} of {self.executed + self.unexecuted} chunks"
        if self.late is None:
            return text
        age_ms, limit_ms = self.late.p50_ns * MS, (self.limit_ns or 0) * MS
        late = f"{self.late.count} came too late, {age_ms:.1f} ms old (p50) of {limit_ms:g} allowed"
        return f"{text}; {late}"


class PolicySeen(NamedTuple):
    """The policy that a run was asked for, and the file of its weights."""

    target: str  # module:function
    weights: str | None = None  # path; None: no file was named
    sha256: str | None = None  # of the file as rank 0 read it

    def __str__(self) -> str:
        if self.weights is None:
            return f"{self.target} without a file of weights"
        digest = "" if self.sha256 is None else f" (sha256 {self.sha256[:DIGITS]})"
        return f"{self.target} with {self.weights.rpartition('/')[2]}{digest}"


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run's verdict with everything it rests on; ``as_dict`` is its form in JSON."""

    run_id: str
    verdict: Verdict
    reasons: list[str]
    limited_by: str | None  # ``class`` in JSON
    window: JudgedSpan
    compat: Compat | None
    primary: Primary | None
    alone: Alone | None
    gate: Gate
    audits: dict[str, Audit]
    latency: Quantiles | None
    pick_up: Quantiles | None  # of it, behind the end of C on a device
    age: Quantiles | None  # measured by the robots; None without them
    oldest: OldestAction | None
    chunks: RobotChunks | None  # None: no robot reported one
    model: Model | None
    queues: QueueMaxima
    critical_path: dict[str, dict[str, float]]
    drops: dict[str, object]
    service: ServiceReport | None
    statements: list[str]
    memory: list[MemoryUse] = field(default_factory=list)  # of ranks that logged it
    on_device: list[StageOnDevice] = field(default_factory=list)
    clocks: list[ClockSeen] = field(default_factory=list)
    unnamed: dict[str, Unnamed] = field(default_factory=dict)  # by thread
    cpu: dict[str, StageCpu] = field(default_factory=dict)  # by stage
    machine: Machine | None = None  # during bring-up
    faults: list[FaultSeen] = field(default_factory=list)  # of user code, the first of each kind
    input_source: str = ""  # of the judged phase: synthetic, recorded; empty: robots
    places: list[PlaceRow] = field(default_factory=list)  # ranks, rank 0 first
    better_cut: BetterCut | None = None
    requests: tuple[RobotRequests, ...] = ()  # of gateways' clients, by wire and robot
    compiled: list[CompiledPartSeen] = field(default_factory=list)  # parts that are compiled
    sentence: str = ""  # may it drive a robot, what limits it, what to do first
    figures: tuple[Figure, ...] = ()  # seven
    policy: PolicySeen | None = None  # None: the log does not name it
    simulated_ms: dict[str, float] = field(default_factory=dict)  # extra time by stage of rank 0
    judged_reasons: list[str] = field(default_factory=list)  # of the judged phase, without service
    lease: LeaseNeed | None = None  # what it must cover, by bring-up
    failed_end: str = ""  # the rank that failed first, and how; empty: none did
    unready: str = ""  # the phase in which it was stopped before it was ready; empty: it was not
    refused_alone: str = ""  # why one rank by itself was refused; empty: it was not

    @property
    def origin(self) -> list[str]:
        """The policy, and the time that [simulate] adds to rank 0's stages."""
        found = [] if self.policy is None else [str(self.policy)]
        added = ", ".join(f"{stage} {time_ms:g} ms" for stage, time_ms in self.simulated_ms.items())
        return [*found, f"simulated work in {added}"] if added else found

    @property
    def accepted(self) -> list[str]:
        """Reasons that the run's configuration accepts, when they are all there are."""
        accept = is_accepted(self.verdict, self.reasons, self.gate.accept)
        return list(self.reasons) if accept else []

    @property
    def exit_code(self) -> int:
        return 0 if self.accepted else int(self.verdict)

    @property
    def headline(self) -> str:
        """The verdict and its sentence, for the log of the gate and the first line of a report."""
        accepted = ", accepted" if self.accepted else ""
        return f"{self.verdict.name}{accepted}: {self.sentence}"

    def as_dict(self) -> dict[str, object]:
        """The run's entry under ``runs`` in ``ppstream.report/1``; times in ms."""
        topology = self.window.topology
        return {
            "run_id": self.run_id,
            "sentence": self.sentence,
            "figures": [figure._asdict() for figure in self.figures],
            "verdict": self.verdict.name,
            "reasons": self.reasons,
            "accepted": self.accepted,
            "limits": {"overlap_min": self.gate.overlap_min, "accept": list(self.gate.accept)},
            "n": self.window.n,
            "warmup_skipped": self.window.skipped,
            "class": self.limited_by,
            "compat": _compat_dict(self.compat),
            "primary": _primary_dict(self.primary, self.alone),
            "alone": _alone_dict(self.alone),
            "cpu": {stage: times._asdict() for stage, times in self.cpu.items()},
            "unnamed": {name: found._asdict() for name, found in self.unnamed.items()},
            "machine": None if self.machine is None else self.machine._asdict(),
            "input_source": self.input_source,
            "audits": {name: asdict(audit) for name, audit in self.audits.items()},
            "latency_ms": _ms_dict(self.latency),
            "pick_up_ms": _ms_dict(self.pick_up),
            "age_ms": _ms_dict(self.age),
            "oldest_action_ms": _oldest_dict(self.oldest),
            "lease": _lease_dict(self.lease),
            "model": _model_dict(self.model),
            "queues": {
                "d_in": topology.d_in,
                "d_out": topology.d_out,
                "outstanding_max": self.queues.outstanding,
                "q_decode_max": self.queues.q_decode,
            },
            "critical_path": self.critical_path,
            "drops": self.drops,
            "faults": [found._asdict() for found in self.faults],
            "service": _service_dict(self.service, self.age),
            "statements": self.statements,
            "memory": [asdict(use) for use in self.memory],
            "on_device": [_device_dict(stage) for stage in self.on_device],
            "clocks": [asdict(clock) for clock in self.clocks],
            "places": [asdict(place) for place in self.places],
            "better_cut": None if self.better_cut is None else asdict(self.better_cut),
            "requests": [_requests_dict(row) for row in self.requests],
            "compiled": [part._asdict() for part in self.compiled],
            "policy": None if self.policy is None else self.policy._asdict(),
            "simulated_ms": self.simulated_ms,
        }


def _compat_dict(score: Compat | None) -> dict[str, object] | None:
    if score is None:
        return None
    return {
        "period_ms": score.period_ns * MS,
        "stage0_ms": score.stage0_ns * MS,
        "stage1_ms": score.stage1_ns * MS,
        "hidden_ms": score.hidden_ns * MS,
        "overlap_score": score.score,
        "gate": score.gate,
    }


def _primary_dict(score: Primary | None, alone: Alone | None) -> dict[str, object] | None:
    if score is None:
        return None
    return {
        "P_ms": score.period_ns * MS,
        "S": score.s,
        "S_low": score.s_low,
        "S_high": score.s_high,
        "S_all": score.s_all,
        "E": score.efficiency,
        "G": score.gain,
        "G_star": score.ceiling,
        "S_alone": None if alone is None else alone.s,
        "strict": None if alone is None else alone.strict,
        "strict_in_run": 1 / score.efficiency if score.efficiency else None,
        "overhead": score.overhead,
        "bubble": {name: 1 - share for name, share in score.utilisation.items()},
    }


def _alone_dict(alone: Alone | None) -> dict[str, object] | None:
    if alone is None:
        return None
    return {
        "times_ms": {stage: ns * MS for stage, ns in alone.times.stages.items()},
        "in_turn_ms": alone.in_turn_ns * MS,
        "G_star": alone.ceiling,
        "stretch": alone.stretch,
        "moved": alone.moved,
    }


def _model_dict(model: Model | None) -> dict[str, object] | None:
    if model is None:
        return None
    return {
        "P_ms": model.period_ns * MS,
        "gap": model.gap,
        "W_star": model.w_star,
        "formula": model.formula,
    }


def _service_dict(service: ServiceReport | None, age: Quantiles | None) -> dict[str, object] | None:
    if service is None:
        return None
    return {
        "class": service.limited_by,
        "latency_ms": _ms_dict(service.latency),
        "age_ms": _ms_dict(age),
        "deadline": service.deadline,
        "utilisation": service.utilisation,
        "drops": service.drops,
        "verdict": service.verdict.name,
        "reasons": list(service.reasons),
        "lease": _lease_dict(service.lease),
        "longest_without_chunk_ms": None if service.gaps is None else service.gaps.longest_ns * MS,
        "robots": [robot._asdict() for robot in service.robots],
        "actions": None if service.rule_counts is None else service.rule_counts._asdict(),
        "streams": {ledger.stream: _stream_dict(ledger) for ledger in service.streams},
        "requests": None if service.requests is None else service.requests._asdict(),
        "chunks_per_s": service.chunks_per_s,
        "calls_by_rows": service.calls_by_rows,
    }


def _requests_dict(row: RobotRequests) -> dict[str, object]:
    times = {f"{name}_ms": value for name, value in (_ms_dict(row.latency) or _NO_TIMES).items()}
    counts = {name: getattr(row, name) for name in ("wire", "robot", "requests", "answered")}
    more = {"errors": row.errors, "unanswered": row.unanswered, "imbalance": row.imbalance}
    return counts | more | times


def _stream_dict(ledger: Ledger) -> dict[str, object]:
    longest_ns = ledger.longest_hole_ns
    return {
        "on_request": ledger.is_on_request,
        "holes": ledger.holes,
        "longest_hole_ms": None if longest_ns is None else longest_ns * MS,
        "invalid_share": ledger.invalid_share,
    }


def _oldest_dict(found: OldestAction | None) -> dict[str, object] | None:
    if found is None:
        return None
    limit = None if found.limit_ns is None else found.limit_ns * MS
    return {"age": found.age_ns * MS, "limit": limit}


def _lease_dict(need: LeaseNeed | None) -> dict[str, object] | None:
    if need is None:
        return None
    return {
        "age_ms": need.age_ns * MS,
        "gap_ms": need.gap_ns * MS,
        "lease_ms": need.lease_ns * MS,
        "need_ms": need.need_ns * MS,
        "longest_ms": need.longest_ns * MS,
        "holds": need.holds,
        "chunks": need.chunks,
        "held": need.held,
    }


def _device_dict(found: StageOnDevice) -> dict[str, object]:
    alone_ms = None if found.alone_ns is None else found.alone_ns * MS
    both = {"device_ms": _ms_dict(found.device), "host_ms": _ms_dict(found.host)}
    return {"stage": found.stage, **both, "apart": found.apart, "alone_ms": alone_ms}


def _ms_dict(found: Quantiles | None) -> dict[str, object] | None:
    if found is None:
        return None
    p99_ns = found.reported_p99_ns
    return {
        "p50": found.p50_ns * MS,
        "p95": found.p95_ns * MS,
        "p99": None if p99_ns is None else p99_ns * MS,
        "max": found.max_ns * MS,
    }
