"""The report audits its own figures, and the claims that lie beside a log. Pure.

What a run's report prints is written down as claims and redone by the rules that catch wrong
arithmetic in anybody's numbers; ``claims.json`` in a run's folder joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any, Final

from ppstream.analysis.claims import Finding, audit_claims
from ppstream.analysis.records import Envelope
from ppstream.analysis.run_report import RunReport
from ppstream.analysis.scores import between
from ppstream.analysis.segments import ALONE
from ppstream.report.series import latency_parts

CLAIMS_FILE: Final = "claims.json"
PERTURBED_MIN: Final = 20  # periods of a profiled mode before its disagreement means anything

Claim = dict[str, Any]


def audit_report(
    report: RunReport, envelopes: Iterable[Envelope], beside: Iterable[object] = ()
) -> list[Finding]:
    """Redo the report's figures.

    Args:
        report: a judged run.
        envelopes: all of that run, for what a profiled part of it says.
        beside: claims that were put beside the log.

    Raises:
        ClaimError: a claim of ``beside`` cannot be audited.
    """
    return audit_claims([*_claims(report), *_profiled(report, envelopes), *beside])


def _claims(report: RunReport) -> Iterator[Claim]:
    score, window = report.primary, report.window
    if score is None:
        return
    seconds = score.span_ns / 1e9
    rate = 1e9 / score.period_ns
    yield _claim("throughput", "envelopes a second", rate, items=score.n, seconds=seconds)
    efficiency = {"of": score.max_ns, "over": score.span_ns}
    yield _claim("ratio", "efficiency E", score.efficiency, **efficiency)
    if len(score.busy_ns) > 1:
        stages = [busy_ns / score.n for name, busy_ns in score.busy_ns.items() if name != "link"]
        yield _claim(
            "pipeline_gain",
            "gain G over running in turn",
            score.gain,
            before=[score.sigma_ns / score.n],
            after=[*stages, score.period_ns],
        )
    for stage, shares in report.critical_path.items():
        yield _claim("shares", f"starts of {stage}", 1.0, parts=list(shares.values()))
    parts = latency_parts(window)
    latency_ns = [between(e.tA0, e.picked) for e in window.emitted if e.tA0 is not None]
    if parts and fmean(latency_ns) > 0:
        shares_of = [part_ns / fmean(latency_ns) for part_ns in parts.values()]
        yield _claim("shares", "parts of the latency", 1.0, parts=shares_of)


def _profiled(report: RunReport, envelopes: Iterable[Envelope]) -> Iterator[Claim]:
    """A profiler that slows the run by more than a tenth measured another run."""
    periods: dict[str, list[int]] = {}
    before: Envelope | None = None
    for e in envelopes:
        if before is not None and e.mode not in ("throughput", ALONE) and _follows(before, e):
            periods.setdefault(e.mode, []).append(between(before.tEmit, e.tEmit))
        before = e
    for mode, found in periods.items():
        if report.primary is not None and len(found) >= PERTURBED_MIN:
            numbers = {"first": fmean(found), "second": report.primary.period_ns}
            yield _claim("agreement", f"period in {mode} mode and without", 0.10, **numbers)


def _follows(before: Envelope, e: Envelope) -> bool:
    same = (before.generation, before.lane, before.epoch, before.mode)
    consecutive = e.seq == before.seq + 1 and before.is_emitted and e.is_emitted
    return consecutive and same == (e.generation, e.lane, e.epoch, e.mode)


def _claim(kind: str, what: str, claimed: float, **numbers: Any) -> Claim:
    return {"kind": kind, "what": what, "numbers": numbers, "claimed": claimed}
