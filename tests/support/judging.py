"""What tests ask of a judged run, in one word each, and the rows of the golden tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from golden_runs import MS, GoldenRun

from ppstream.analysis.judge import judge
from ppstream.analysis.run_report import RunReport

#: A log, the verdict with all its reasons and the audits that fail, further places of the JSON.
Case = tuple[Callable[[], GoldenRun], str] | tuple[Callable[[], GoldenRun], str, dict[str, Any]]


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


def check(case: Case) -> None:
    """Judge the case's run, and compare with what stands beside it.

    ``"says"`` are texts that the report's statements have, ``"with"`` the options of the judgement.
    """
    make, verdict, *more = case
    places: dict[str, Any] = dict(more[0]) if more else {}
    found = judged(make(), **places.pop("with", {})).as_dict()
    report: Any = json.loads(json.dumps(found))
    says = places.pop("says", [])
    for text in [says] if isinstance(says, str) else says:
        assert text in " | ".join(report["statements"])
    expected, _, fails = verdict.partition(" | ")
    assert [report["verdict"], *report["reasons"]] == expected.split()
    broken = {k: audit["note"] for k, audit in report["audits"].items() if audit["ok"] is False}
    notes = dict(one.rstrip(")").partition("(")[::2] for one in fails.split("; ") if one)
    assert broken.keys() == notes.keys()
    assert all(note in broken[audit] for audit, note in notes.items())
    for path, value in places.items():
        at = report
        for key in path.split("."):
            at = at[int(key)] if isinstance(at, list) else at[key]
        assert at == (pytest.approx(value, abs=6e-3) if is_number(value) else value), path


def is_number(value: object) -> bool:
    values = value.values() if isinstance(value, dict) else [value]
    return all(isinstance(one, int | float) for one in values)
