"""What tests ask of a judged run, in one word each."""

from __future__ import annotations

from typing import Any

from golden_runs import MS, GoldenRun

from ppstream.analysis.judge import judge
from ppstream.analysis.run_report import RunReport


def judged(golden: GoldenRun, **options: Any) -> RunReport:
    return judge(golden.parse(), **options)


def published(report: RunReport) -> float:
    assert report.compat is not None
    assert report.compat.score is not None
    return report.compat.score


def overlap(report: RunReport) -> float:
    assert report.primary is not None
    assert report.primary.s is not None
    return report.primary.s


def period_ms(report: RunReport) -> float:
    assert report.primary is not None
    return report.primary.period_ns / MS


def broken(report: RunReport) -> set[str]:
    return {name for name, audit in report.audits.items() if audit.ok is False}


def all_audits_pass(report: RunReport) -> bool:
    return all(audit.ok for audit in report.audits.values())


def sentence(report: RunReport, begin: str) -> str:
    found = [s for s in report.statements if s.startswith(begin)]
    assert found, f"no sentence begins with {begin!r}: {report.statements}"
    return found[0]
