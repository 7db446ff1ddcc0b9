"""Judge one run: does the pipeline overlap, and can its log be believed?

Pure and standard library only: ``serve`` gates bring-up with the same function that the report
prints. The parts stand in their own files: ``segments`` (what is measured), ``scores`` (how much),
``audits`` (is it true), ``safety``, ``verdict`` and ``statements`` (what it means).
"""

from __future__ import annotations

from typing import Final

from ppstream.audits import audit_all
from ppstream.device_times import clocks_seen, stages_on_device
from ppstream.memory_use import memory_use
from ppstream.model import deeper, limiting_term, period, window_star
from ppstream.records import RunLog
from ppstream.run_report import OldestAction, RunReport, Service
from ppstream.safety import queue_maxima, safety_counts
from ppstream.scores import Primary, compat, form_of, primary
from ppstream.segments import Window, select_window
from ppstream.standing import (
    critical_path,
    deadlines,
    drops,
    latencies_ns,
    quantiles,
)
from ppstream.statements import Findings, Model, statements
from ppstream.verdict import OVERLAP_MIN, Evidence, Gate, classify, decide

MODEL_ERROR: Final = 0.03  # of the period: the closed form is good for that on healthy runs
MODEL_ERROR_NS: Final = 20_000  # where stages are short


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
        phase: judge the envelopes of this phase; default: bring-up when there is any, else all
            but warming and draining.
        period_budget_ns: largest mean period of a release.
        latency_budget_ns: largest p99 of tEmit - tA0 of a release (maximum below 1000 envelopes).
    """
    window = select_window(run, phase)
    score = primary(window)
    latency = quantiles(latencies_ns(window))
    audits = audit_all(run, window)
    evidence = Evidence(run, window, score, audits, safety_counts(run), latency)
    gate = Gate(profile, _overlap_min(run), period_budget_ns, latency_budget_ns)
    verdict, reasons = decide(evidence, gate)
    judged = (e for e in run.envelopes if e.phase in window.phases)
    queues = queue_maxima(judged)
    inline = run.topology.world_size == 1
    published = None if inline else compat(window, queues.outstanding, queues.q_decode)
    model = None if inline else _model(score, window)
    path = critical_path(window)
    limited_by = classify(window, score)
    findings = Findings(evidence, gate, verdict, reasons, limited_by, published, model, path)
    return RunReport(
        run_id=run.run_id,
        verdict=verdict,
        reasons=reasons,
        limited_by=limited_by,
        window=window,
        compat=published,
        primary=score,
        strict=_strict(run, score),
        audits=audits,
        latency=latency,
        age=quantiles(run.ages_ns),
        oldest=_oldest(run),
        model=model,
        queues=queues,
        critical_path=path,
        drops=drops(run, run.envelopes),
        service=_service(run),
        statements=statements(findings),
        memory=memory_use(run),
        on_device=stages_on_device(run, window),
        clocks=clocks_seen(run),
    )


def _oldest(run: RunLog) -> OldestAction | None:
    if run.oldest_ns is None:
        return None
    actions = run.config.get("actions")
    table = actions if isinstance(actions, dict) else {}
    limit_ms = table.get("max_age_ms") or table.get("lease_ms")
    limit_ns = round(limit_ms * 1e6) if isinstance(limit_ms, int | float) else None
    return OldestAction(run.oldest_ns, limit_ns)


def _overlap_min(run: RunLog) -> float:
    """The limit the run itself was started with."""
    table = run.config.get("bringup")
    value = table.get("overlap_min") if isinstance(table, dict) else None
    return float(value) if isinstance(value, int | float) else OVERLAP_MIN


def _model(score: Primary | None, window: Window) -> Model | None:
    if score is None:
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
    )


def _service(run: RunLog) -> Service | None:
    ready = [e for e in run.envelopes if e.phase == "ready"]
    if not ready:
        return None
    window = select_window(run, "ready")
    score = primary(window, resampled=False)
    return Service(
        limited_by=classify(window, score),
        latency=quantiles(latencies_ns(window)),
        deadline=deadlines(ready),
        utilisation=score.utilisation if score else None,
        drops=drops(run, ready),
    )


def _strict(run: RunLog, score: Primary | None) -> float | None:
    """Period over the slowest stage timed alone: brackets cannot absorb overhead into it."""
    if score is None or score.s is None or run.standalone is None:
        return None
    return score.period_ns / run.standalone.slowest_ns(run.topology.threads)
