"""Judge one run: does the pipeline overlap, and can its log be believed?

Pure and standard library only: ``serve`` gates bring-up with the same function that the report
prints. The parts stand in their own files: ``segments`` (what is measured), ``scores`` (how much),
``audits`` (is it true), ``safety``, ``verdict`` and ``statements`` (what it means).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, pairwise
from typing import Final

from ppstream.analysis.age_advice import Model, in_ms
from ppstream.analysis.audits import audit_all
from ppstream.analysis.compiler_counts import compiled_parts_seen
from ppstream.analysis.contention import alone
from ppstream.analysis.device_times import clocks_seen, stages_on_device
from ppstream.analysis.json_values import mapping_of
from ppstream.analysis.lease import (
    LeaseNeed,
    actions_ns,
    lease_of_bring_up,
    lease_of_service,
    steps_of,
)
from ppstream.analysis.memory_use import memory_use, shared_gpus
from ppstream.analysis.period_model import (
    deeper,
    limiting_term,
    period,
    shallower,
    window_star,
)
from ppstream.analysis.place_table import better_cut, place_rows
from ppstream.analysis.records import Envelope, Json, RunLog
from ppstream.analysis.requests import requests_of, streams_on_request
from ppstream.analysis.robot_states import longest_held, with_waits
from ppstream.analysis.run_ends import (
    failed_end,
    last_before_ready,
    lost_end,
    lost_lines,
    refused_alone,
)
from ppstream.analysis.run_report import (
    OldestAction,
    PolicySeen,
    RobotChunks,
    RunReport,
    ServiceReport,
)
from ppstream.analysis.run_statistics import (
    HARMLESS,
    chunk_gaps,
    critical_path,
    deadlines,
    drops,
    first_faults,
    latencies_ns,
    pick_ups_ns,
    spoilt,
    usual_stages_ns,
)
from ppstream.analysis.safety_counts import QueueMaxima, queue_maxima, safety_counts
from ppstream.analysis.scores import Primary, compat, form_of, primary, resource_names
from ppstream.analysis.segments import IDLE_PERIODS, JudgedSpan, select_window
from ppstream.analysis.statements import Diagnosis, statements
from ppstream.analysis.summary import figures, sentence
from ppstream.analysis.thread_time import stage_cpu, unnamed
from ppstream.analysis.unserved import late_chunks, unmoved
from ppstream.analysis.verdict import (
    ACCEPTABLE,
    N_MIN,
    OVERLAP_MIN,
    Evidence,
    Gate,
    Verdict,
    classify,
    decide,
    worse,
)
from ppstream.core.cpus import Machine
from ppstream.core.errors import LogError, counted
from ppstream.core.phases import BRING_UP, SERVING
from ppstream.core.quantiles import quantiles

MODEL_ERROR: Final = 0.03  # of the period: the closed form is good for that on healthy runs
MODEL_ERROR_NS: Final = 20_000  # where stages are short
SLOWER: Final = 2.0  # a stage's time in service over bring-up's
SLOWER_NS: Final = 1_000_000  # and at least so much more
COMPARED_MIN: Final = 5  # envelopes of each: a slow service has few
HELD_MAX: Final = 0.10  # of the service, by one robot in all its sessions
DROPPED_MAX: Final = 0.10  # of its envelopes


def judge(
    run: RunLog,
    *,
    profile: str = "bringup",
    phase: str | None = None,
    period_budget_ns: int | None = None,
    latency_budget_ns: int | None = None,
) -> RunReport:
    """Judge a run, finished or going on.

    Args:
        run: its records.
        profile: ``bringup`` asks for safety and overlap, ``release`` for every limit.
        phase: to be judged; default: bring-up if there is any, else all but warming and draining.
        period_budget_ns: largest mean period of a release.
        latency_budget_ns: largest p99 of its latency (maximum below 1000 envelopes).

    Raises:
        LogError: the limits in its configuration are none.
    """
    evidence = _evidence(run, window := select_window(run, phase))
    gate = _gate(run, profile, (period_budget_ns, latency_budget_ns))
    queues = queue_maxima(e for e in run.envelopes if e.phase in window.phases)
    service = _service(run)
    report = _report(_findings(evidence, gate, queues, service), queues, service)
    return replace(report, sentence=sentence(report), figures=figures(report))


def _report(findings: Diagnosis, queues: QueueMaxima, service: ServiceReport | None) -> RunReport:
    evidence = findings.evidence
    run, window = evidence.run, evidence.window
    return RunReport(
        run_id=run.run_id,
        verdict=findings.verdict if service is None else worse(findings.verdict, service.verdict),
        reasons=list(dict.fromkeys([*findings.reasons, *findings.service])),
        limited_by=findings.limited_by,
        window=window,
        compat=findings.compat,
        primary=evidence.primary,
        alone=evidence.alone,
        gate=findings.gate,
        audits=dict(evidence.audits),
        latency=evidence.latency,
        pick_up=quantiles(pick_ups_ns(window)),
        age=quantiles(run.ages_ns),
        oldest=_oldest(run),
        chunks=_chunks(run),
        model=findings.model,
        queues=queues,
        critical_path=findings.critical_path,
        drops=drops(run, run.envelopes),
        service=service,
        lease=evidence.lease,
        statements=statements(findings),
        memory=memory_use(run),
        on_device=stages_on_device(run, window),
        compiled=compiled_parts_seen(run),
        clocks=clocks_seen(run),
        unnamed=dict(evidence.unnamed),
        cpu=stage_cpu(window),
        machine=evidence.machine,
        faults=first_faults(run),
        input_source=_input_source(run, window),
        places=findings.places,
        better_cut=findings.better_cut,
        requests=run.requests,
        policy=_policy(run),
        simulated_ms=_simulated_ms(run),
        judged_reasons=findings.reasons,
        failed_end=failed_end(run),
        unready=last_before_ready(run),
        refused_alone=refused_alone(run),
    )


def _evidence(run: RunLog, window: JudgedSpan) -> Evidence:
    score, lost = primary(window), spoilt(run, window, N_MIN)
    machine = _machine(run, window)
    return Evidence(
        run=run,
        window=window,
        primary=score,
        alone=None if score is None else alone(run, window, score, machine),
        audits=audit_all(run, window),
        safety=safety_counts(run),
        latency=quantiles(latencies_ns(window)),
        spoilt=lost,
        unnamed=unnamed(window),
        machine=machine,
        lease=lease_of_bring_up(run, window, score, lost, N_MIN),
    )


def _findings(
    evidence: Evidence, gate: Gate, queues: QueueMaxima, service: ServiceReport | None
) -> Diagnosis:
    run, window, score = evidence.run, evidence.window, evidence.primary
    verdict, reasons, contradictions = decide(evidence, gate)
    inline = run.topology.world_size == 1
    return Diagnosis(
        evidence=evidence,
        gate=gate,
        verdict=verdict,
        reasons=reasons,
        limited_by=classify(window, score),
        compat=None if inline else compat(window, queues.outstanding, queues.q_decode),
        model=None if inline else _model(score, window),
        critical_path=critical_path(window),
        service={} if service is None else service.reasons,
        requests=None if service is None else service.requests,
        contradictions=contradictions,
        places=place_rows(run, window, score, evidence.alone),
        better_cut=better_cut(run, score),
    )


def _oldest(run: RunLog) -> OldestAction | None:
    return None if run.oldest_ns is None else OldestAction(run.oldest_ns, _age_limit_ns(run))


def _chunks(run: RunLog) -> RobotChunks | None:
    unexecuted_ns = [*chain.from_iterable(run.unexecuted_ages_ns.values())]
    if not run.ages_ns and not unexecuted_ns:
        return None
    steps = steps_of(run.config)
    last_ns = None if steps is None else steps.last_ns
    limits_ns = [ns for ns in (_age_limit_ns(run), last_ns) if ns is not None]
    limit_ns = min(limits_ns, default=None)
    late_ns = [ns for ns in unexecuted_ns if limit_ns is not None and ns > limit_ns]
    counts = len(run.ages_ns), len(unexecuted_ns)
    return RobotChunks(*counts, quantiles(late_ns), limit_ns)


def _age_limit_ns(run: RunLog) -> int | None:
    """No robot executes an older action; None: nobody says."""
    return actions_ns(run.config, "max_age_ms") or actions_ns(run.config, "lease_ms")


def _gate(run: RunLog, profile: str, budgets_ns: tuple[int | None, int | None]) -> Gate:
    bringup = mapping_of(run.config.get("bringup"))
    return Gate(profile, _overlap_min(bringup), *budgets_ns, _accept(bringup))


def _overlap_min(bringup: Json) -> float:
    """The limit the run itself was started with."""
    value = bringup.get("overlap_min", OVERLAP_MIN)
    if isinstance(value, int | float) and 0 <= value <= 1:
        return float(value)
    raise LogError(f"run.json: config.bringup.overlap_min is {value!r:.40}, expected 0 to 1")


def _policy(run: RunLog) -> PolicySeen | None:
    table, digest = mapping_of(run.config.get("policy")), run.manifest.get("weights_sha256")
    found = table.get("target"), table.get("weights"), digest
    target, weights, sha256 = (text if isinstance(text, str) else None for text in found)
    return None if target is None else PolicySeen(target, weights, sha256)


def _simulated_ms(run: RunLog) -> dict[str, float]:
    """Mean time that the configuration adds to stages of rank 0."""
    added = mapping_of(run.config.get("simulate"))
    found = {stage: added.get(f"{stage.lower()}_ms") for stage in "AC"}
    return {k: float(v) for k, v in found.items() if isinstance(v, int | float) and v}


def _accept(bringup: Json) -> tuple[str, ...]:
    value = bringup.get("accept")
    listed = value if isinstance(value, list) else []
    return tuple(reason for reason in ACCEPTABLE if reason in listed)


def _input_source(run: RunLog, window: JudgedSpan) -> str:
    if window.phases != {BRING_UP}:
        return ""
    bringup = mapping_of(run.config.get("bringup"))
    return "recorded" if bringup.get("source") == "recording" else "synthetic"


def _machine(run: RunLog, window: JudgedSpan) -> Machine | None:
    """Rank 0's newest event on its host, of the judged generation."""
    for event in reversed(run.events):
        if event.name == "machine" and event.generation == window.generation:
            cpus, threads, load, steal, others = (
                value if isinstance(value := event.fields.get(name), int | float) else None
                for name in Machine._fields[:-1]
            )
            if cpus is not None and threads is not None and load is not None:
                replicas = [f"replica{rank}" for rank in window.topology.replica_ranks]
                names = (*resource_names(window.topology), *replicas)
                listed = _thread_cpus(event.fields, names)
                return Machine(cpus, threads, load, steal, others, listed)
    return None


def _thread_cpus(fields: Json, threads: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Of the threads that work at the same time; what is no list of CPUs is not known."""
    listed = mapping_of(fields.get("thread_cpus"))
    found = {name: value for name in threads if isinstance(value := listed.get(name), list)}
    return {
        name: tuple(cpus)
        for name, cpus in found.items()
        if cpus and all(isinstance(cpu, int) for cpu in cpus)
    }


def _model(score: Primary | None, window: JudgedSpan) -> Model | None:
    if score is None or len(score.times.places) != window.topology.places:
        return None
    form = form_of(window.topology)
    period_ns = period(score.times, form)
    if period_ns <= 0:
        return None
    gap = score.period_ns / period_ns - 1
    error_ns = max(MODEL_ERROR_NS, max(MODEL_ERROR, abs(gap)) * period_ns)
    return Model(
        period_ns=period_ns,
        gap=gap,
        w_star=window_star(score.times, form),
        formula=limiting_term(score.times, form),
        deeper=deeper(score.times, form, error_ns),
        shallower=shallower(score.times, form),
        youngest=shallower(score.times, form, most=1.0),
    )


def _service(run: RunLog) -> ServiceReport | None:
    ready = [e for e in run.envelopes if e.phase in SERVING]
    if not ready:
        return _unserved(run)
    window = select_window(run, *SERVING)
    score = primary(window, resampled=False)
    lease = lease_of_service(run, window)
    reasons = _service_reasons(run, ready, lease) | _lost_lines(run)
    lease_ns, latency = _lease_ns(run), quantiles(latencies_ns(window))
    age = quantiles(run.ages_ns) or latency
    on_request = streams_on_request(run.config)
    found = [
        ledger._replace(is_on_request=ledger.stream in on_request) for ledger in run.stream_ledgers
    ]
    proof = len(reasons.keys() - {"MISSING_LOGS"})
    verdict = Verdict.FAIL if proof > 1 else Verdict.INCONCLUSIVE
    return ServiceReport(
        limited_by=classify(window, score),
        latency=latency,
        deadline=deadlines(ready),
        utilisation=score.utilisation if score else None,
        drops=drops(run, ready),
        verdict=verdict if reasons else Verdict.PASS,
        reasons=reasons,
        lease=lease,
        gaps=chunk_gaps(run, ready, lease_ns, 0 if age is None else age.p50_ns),
        robots=with_waits(run),
        rule_counts=run.rule_counts,
        streams=tuple(ledger for ledger in found if ledger.holes is not None),
        requests=requests_of(run.config, ready),
        chunks_per_s=_chunks_per_s(ready, lease_ns),
        calls_by_rows=_calls_by_rows(run, ready),
    )


def _unserved(run: RunLog) -> ServiceReport | None:
    """Of a run that had robots in service and began no window of theirs."""
    reasons = unmoved(run, _lease_ns(run)) | _lost_lines(run)
    if not reasons:
        return None
    return ServiceReport(
        limited_by=None,
        latency=None,
        deadline=None,
        utilisation=None,
        drops=drops(run, ()),
        verdict=Verdict.INCONCLUSIVE,
        reasons=reasons,
        robots=with_waits(run),
        streams=tuple(ledger for ledger in run.stream_ledgers if ledger.holes is not None),
    )


def _lost_lines(run: RunLog) -> dict[str, str]:
    """A log that holds a part of the service alone, which nobody can judge by it."""
    found = lost_end(run) or lost_lines(run)
    return {"MISSING_LOGS": found} if found else {}


def _calls_by_rows(run: RunLog, ready: Iterable[Envelope]) -> dict[int, int] | None:
    """Calls of the policy with so many rows; None: all had the whole batch, or nobody says."""
    lines = (e.stage1 for e in ready)
    rows = [line.rows for line in lines if line is not None and line.rows is not None]
    counts, whole = Counter(rows), mapping_of(run.config.get("batch")).get("rows")
    return {n: counts[n] for n in sorted(counts)} if any(n != whole for n in counts) else None


def _chunks_per_s(ready: Iterable[Envelope], lease_ns: int) -> float | None:
    """The mean rate: times in which no robot was there count for nothing.

    Those are gaps above a lease and far above the mean one. Chunks that come in bursts have long
    gaps, too, but often.
    """
    emits = sorted(e.tEmit for e in ready if e.is_emitted and e.tEmit is not None)
    gaps_ns = sorted(later - sooner for sooner, later in pairwise(emits))
    lasted_ns = sum(gaps_ns)
    while gaps_ns and gaps_ns[-1] > max(lease_ns, IDLE_PERIODS * lasted_ns / len(gaps_ns)):
        lasted_ns -= gaps_ns.pop()
    return len(gaps_ns) * 1e9 / lasted_ns if lasted_ns > 0 else None


def _service_reasons(run: RunLog, ready: list[Envelope], lease: LeaseNeed | None) -> dict[str, str]:
    """Reasons against service, each with its sentence: one is a doubt, two are proof."""
    found: dict[str, str] = {}
    if failed := failed_end(run):
        found["SERVICE_ENDED"] = failed
    before, served = (
        [e for e in run.envelopes if e.phase in phases and e.mode == "throughput"]
        for phases in ((BRING_UP,), SERVING)
    )
    was, now = usual_stages_ns(before), usual_stages_ns(served)
    if min(len(before), len(served)) >= COMPARED_MIN:
        slower = {
            stage: f"{stage} took {ns / was[stage]:.1f} x bring-up's {in_ms(was[stage])} ms "
            f"({in_ms(ns)} ms)"
            for stage, ns in now.items()
            if was.get(stage, 0) > 0 and ns > SLOWER * was[stage] and ns - was[stage] > SLOWER_NS
        }
        if slower:
            texts = [*slower.values(), *shared_gpus(run, slower)]
            found["SERVICE_SLOWER"] = ", ".join(texts)
    began = min((e.tA0 for e in ready if e.tA0 is not None), default=None)
    ended = max((e.tEmit for e in ready if e.tEmit is not None), default=None)
    lasted_ns = ended - began if began is not None and ended is not None else 0
    late_ns = max((e.tDecode or 0) - (ended or 0) for e in ready)  # chunks that nobody executes
    worked_ns = lasted_ns and lasted_ns + max(0, late_ns)
    worst = longest_held(run.robot_states)
    held_ns = 0 if worst is None else worst.held_ns or 0
    if worst is not None and 0 < HELD_MAX * worked_ns < held_ns:
        share, newest = min(1.0, held_ns / worked_ns), f", the newest: {worst.fault}"
        faults = counted(worst.faults or 0, "fault") + (newest if worst.fault else "")
        found["SERVICE_HELD"] = f"robot {worst.name} held {share:.0%} of the time, {faults}"
        if lease is not None and lease.is_short:
            found["SERVICE_HELD"] += f"; {lease.text}"
    lost = [e.drop for e in ready if e.drop is not None and e.drop not in HARMLESS]
    if len(lost) > DROPPED_MAX * len(ready):
        reasons = ", ".join(f"{lost.count(drop)} {drop}" for drop in dict.fromkeys(lost))
        found["SERVICE_DROPPED"] = f"{len(lost)} of {len(ready)} envelopes dropped: {reasons}"
    oldest, chunks, lease_ns = _oldest(run), _chunks(run), _lease_ns(run)
    if chunks is not None and (late := late_chunks(run, chunks, lease_ns, lasted_ns)):
        found["SERVICE_LATE"] = late
    limit_ns = None if chunks is None else chunks.limit_ns
    found |= unmoved(run, lease_ns, lasted_ns, limit_ns)
    if oldest is not None and oldest.is_too_old:
        age, limit = in_ms(oldest.age_ns), in_ms(oldest.limit_ns or 0)
        found["SERVICE_TOO_OLD"] = f"a robot executed an action {age} ms old, of {limit} ms allowed"
    return found


def _lease_ns(run: RunLog) -> int:
    """So long a robot moves on without a new chunk; where nobody says, a second."""
    lease_ns = actions_ns(run.config, "lease_ms")
    return 1_000_000_000 if lease_ns is None else lease_ns
