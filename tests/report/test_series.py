"""Series for pictures: bounded, complete, and equal to what the log says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import pytest
from golden_gpus import on_gpus
from golden_runs import GoldenRun, jittered, ms, simulate, stages

from ppstream.analysis.claims import audit_claims
from ppstream.analysis.judge import judge
from ppstream.analysis.period_model import PipelineForm, StageTimes
from ppstream.analysis.run_report import RunReport
from ppstream.analysis.run_statistics import latencies_ns
from ppstream.analysis.segments import JudgedSpan, select_window
from ppstream.report.formatting import why_scores_differ
from ppstream.report.series import (
    POINTS,
    bins_of,
    depth_curve,
    emit_times_s,
    latency_parts,
    over_time,
    periods_ns,
    queue_levels,
    stretch_of,
)

SPLIT = PipelineForm("split")


def window(n: int = 330) -> JudgedSpan:
    return select_window(simulate(jittered(stages(), n, 3), SPLIT).parse())


@pytest.mark.parametrize("times", [stages(), stages(c=20), stages(a=20)])
def test_parts_of_the_latency_make_up_the_latency(times: StageTimes) -> None:
    found = select_window(simulate(jittered(times, 330, 3), SPLIT).parse())
    whole = fmean((e.tEmit or 0) - (e.tA0 or 0) for e in found.emitted)
    assert sum(latency_parts(found).values()) == pytest.approx(whole)
    assert latency_parts(found)["both links"] == pytest.approx(ms(1))


def test_stretch_is_the_one_whose_periods_are_most_usual() -> None:
    golden = simulate()
    for line in golden.lines[:200]:  # the first ones are late by turns
        line["tEmit"] += ms(1) * (line["seq"] % 3)
    found = stretch_of(select_window(golden.parse()))
    assert found is not None
    assert found.start_ns >= golden.lines[195]["tEmit"]
    assert found.end_ns - found.start_ns == ms(80)
    assert stretch_of(select_window(simulate(n=3).parse())) is None


def test_bins_hold_every_value_once() -> None:
    values = [10 + (k * 7919 % 1000) / 100 for k in range(1000)] + [500.0]
    found = bins_of(values)
    assert found is not None
    assert sum(found.counts) + found.beyond == found.n == 1001
    assert found.beyond >= 1
    assert found.high < 30
    assert bins_of([]) is None
    same = bins_of([7.0] * 20)
    assert same is not None
    assert sum(same.counts) == 20


@pytest.mark.parametrize("n", [1, 159, 160, 161, 5000])
def test_a_series_over_time_is_bounded_and_keeps_its_largest(n: int) -> None:
    values = [float(k * 31 % 97) for k in range(n)]
    points = over_time(list(range(n)), values)
    assert len(points) <= POINTS
    assert max(point.top for point in points) == max(values)
    assert all(p.low <= p.middle <= p.high <= p.top for p in points)


def test_times_and_periods_belong_together() -> None:
    found = window()
    assert len(emit_times_s(found)) == len(periods_ns(found)) == found.n
    assert emit_times_s(found)[-1] == pytest.approx(found.span_ns / 1e9)


def test_queue_means_are_those_of_the_counters() -> None:
    found = window()
    at, means, maxima = queue_levels(found, "outstanding")
    assert len(at) <= POINTS + 1
    assert max(maxima) == 2
    sojourn = sum((e.tRecv or 0) - (e.tSend or 0) for e in found.measured) / found.span_ns
    assert fmean(means) == pytest.approx(sojourn, rel=0.05)


@pytest.mark.parametrize("form", [PipelineForm(), SPLIT])
def test_depth_curve_holds_what_was_measured_at_its_own_depth(form: PipelineForm) -> None:
    run = simulate(form=form).parse()
    report = judge(run)
    curve = depth_curve(report.primary, report.window)
    here = next(depth for depth in curve if depth.d_in == 2)
    assert here.period_ns == pytest.approx(ms(10), rel=1e-3)
    assert report.latency is not None
    assert here.latency_ns == pytest.approx(report.latency.p50_ns, rel=1e-3)
    assert curve[-1].latency_ns >= here.latency_ns


def claims_of_report(report: RunReport) -> Iterator[dict[str, Any]]:
    """A report's figures with the numbers that they follow from."""
    score = report.primary
    assert score is not None
    rate = {"items": score.n, "seconds": score.span_ns / 1e9}
    yield claim("throughput", "envelopes a second", 1e9 / score.period_ns, **rate)
    busy = {"of": score.max_ns, "over": score.span_ns}
    yield claim("ratio", "efficiency E", score.efficiency, **busy)
    if len(score.busy_ns) > 1:
        stages = [busy_ns / score.n for name, busy_ns in score.busy_ns.items() if name != "link"]
        gain = {"before": [score.sigma_ns / score.n], "after": [*stages, score.period_ns]}
        yield claim("pipeline_gain", "gain G over running in turn", score.gain, **gain)
    for stage, shares in report.critical_path.items():
        yield claim("shares", f"starts of {stage}", 1.0, parts=list(shares.values()))
    parts, latency_ns = latency_parts(report.window), fmean(latencies_ns(report.window))
    yield claim("shares", "latency", 1.0, parts=[ns / latency_ns for ns in parts.values()])


def claim(kind: str, what: str, claimed: float, **numbers: Any) -> dict[str, Any]:
    return {"kind": kind, "what": what, "numbers": numbers, "claimed": claimed}


@pytest.mark.parametrize(
    ("make", "figures"),
    [
        (simulate, 7),
        (lambda: simulate(stages(t_in=40)), 7),
        (lambda: simulate(stages(c=20), PipelineForm("split", d_in=4, d_out=4)), 7),
        (lambda: simulate(form=PipelineForm("serial", "decode_first")), 7),
        (lambda: on_gpus(simulate()), 7),
    ],
)
def test_figures_of_a_report_follow_from_each_other(
    make: Callable[[], GoldenRun], figures: int
) -> None:
    report = judge(make().parse())
    findings = audit_claims(claims_of_report(report))
    assert len(findings) == figures
    assert [finding.text for finding in findings if not finding.holds] == []
    report.critical_path["B"]["lost"] = 0.5
    broken = [
        finding.what for finding in audit_claims(claims_of_report(report)) if not finding.holds
    ]
    assert broken == ["starts of B"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (simulate, ""),
        (lambda: simulate(stages(c=20), SPLIT), "results waited 39.5 ms for their decode"),
        (lambda: simulate(stages(t_in=40)), "waits for input"),
        (lambda: simulate(form=PipelineForm(d_in=1)), "is not the primary 0.44"),
    ],
)
def test_scores_apart_have_a_reason(make: Callable[[], GoldenRun], said: str) -> None:
    why = why_scores_differ(judge(make().parse()))
    assert said in why
    assert bool(why) == bool(said)
