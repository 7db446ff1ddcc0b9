"""Benchmarks claim their own numbers: the form is auditable, and a wrong number is said aloud."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import claimed_numbers as bench_claims
import claims_audit
import d_sweep
import pytest
from bench import control_loop as bench_control_loop
from bench import device_window as bench_device_window
from bench import latency as bench_latency
from bench import link as bench_link
from bench import link_gpu as bench_link_gpu
from bench import metrics_cost as bench_metrics
from bench import pipeline_cpu as bench_pipeline_cpu
from bench import pipeline_gpu as bench_pipeline
from bench import record_cost as bench_record
from bench import resample as bench_resample
from bench import robots as bench_robots
from bench import sessions as bench_sessions
from bench import workload as bench_workload
from bench.bare_pipeline import BareRun
from d_sweep_cells import Cell, Stages
from d_sweep_cells import Row as DepthRow
from real_runs import Spread, Target, write_json

from ppstream.analysis.claims import audit_claims
from ppstream.core.durations import Bin
from ppstream.core.quantiles import Quantiles
from ppstream.robot.control_loop import LoopStatistics

TOOLS = Path(__file__).resolve().parents[3] / "tools"
#: Whatever prints numbers that people quote belongs here.
SCRIPTS = (
    "bench/control_loop.py",
    "bench/device_window.py",
    "bench/ingest.py",
    "bench/latency.py",
    "bench/link.py",
    "bench/link_gpu.py",
    "bench/log_cost.py",
    "bench/metrics_cost.py",
    "bench/pipeline_gpu.py",
    "bench/pipeline_cpu.py",
    "bench/record_cost.py",
    "bench/resample.py",
    "bench/robots.py",
    "bench/sessions.py",
    "bench/workload.py",
    "d_sweep.py",
)
HALF = Spread(10, 2.0, 2.0, 3.0, 4.0)
WHOLE = Spread(10, 4.0, 4.0, 6.0, 8.0)
#: Rounds that differ by more than any tolerance.
TIMED = [bench_claims.Timed(items, 1.0) for items in (300, 50, 90)]


LATE = Quantiles(10, 100, 800, 900, 1000)
TICKS = LoopStatistics(
    10,
    0,
    10,
    0,
    0,
    LATE,
    (Bin(500, 7), Bin(None, 3)),
    oldest_ns=0,
    max_age_ns=0,
    collections=0,
    longest_collection_ns=0,
    refused=(),
)


def pipeline_row(*, ratio: float) -> bench_pipeline_cpu.Row:
    case = bench_pipeline_cpu.CASES[0]
    times = {"period_ms": 10.0, "stage0_ms": 9.0, "stage1_ms": 9.5, "link_ms": 0.1}
    bare = {"bare_period_ms": 9.8, "bare_ratio": 1.01, "bare_sleep_ratio": 1.01}
    return bench_pipeline_cpu.Row(
        case=case,
        threads="split",
        rounds=3,
        ratio=ratio,
        sleep_ratio=1.0,
        over_bare=10 / 9.8,
        gain=1.85,
        periods_ms=HALF,
        ratio_ms=(10.0, 9.0, 9.5),
        over_bare_ms=(10.0, 9.8),
        **times,
        **bare,
    )


def depth_row() -> DepthRow:
    cell = Cell(Stages(3, 10, 4), "serial", 2)
    return DepthRow(cell, 10.4, 10.0, "B", 0.9, 0.96, WHOLE, WHOLE, 1000, ("PASS",))


class Case(NamedTuple):
    """What a script says of these figures: a list of claims, or one."""

    claims_of: Callable[..., Any]
    figures: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})

    def claims(self) -> list[bench_claims.Claim]:
        found = self.claims_of(*self.figures, **self.options)
        return found if isinstance(found, list) else [found]


WINDOWS = {"windows": 500, "elapsed_s": 5.0, "windows_per_s": 100.0, "frames": 1500}
STEP = {"a_us": 5.0, "copy_in_us": 15.0, "policy_us": 30.0, "step_p50_us": 100.0, "share": 0.1}
STEP |= {"share_of_step": 0.05, "preprocessing_share": 0.4, "gpu_us": 45.0, "busy": 0.45}
STEP |= {"forward_us": 60.0, "share_as_run": 5 / 80}
GPU_CELL = {"name": "balanced", "a_us": 200.0, "b_us": 200.0, "rows": 1, "depth": 2}
GPU_CELL |= {"link": "peer", "credit": "before_window"}
GPU_RAN = {"cell": GPU_CELL, "period_us": 206.0, "alone_us": (203.0, 200.0, 4.0)}
GPU_RAN |= {"overhead_us": 3.0, "strict": 206 / 203}
GPU_LINK = {"way": "put", "mode": "graph", "size": "16 MB", "p50_us": 50.0}
GPU_LINK |= bench_link_gpu.costs_of(1 << 24, 50.0, 0.0018, 900)
KERNEL = {"dtype": "float32", "shape": "1x2", "bytes": 2_000_000, "gb_s": 200.0}
KERNEL |= {"us": {"ours": 10.0, "naive": 15.0}, "share_of_copy": 0.1, "vs_naive": 1.5}
#: Of four pairs of blocks that differ by 1, 2, 4 and 9 us.
BLOCKS = {"CPU, scraped": [11.0, 12.0, 14.0, 19.0], "CPU, off": [10.0] * 4}
PLAN = {
    "case": "x",
    "us": {"plan": {"p50": 5.0}, "formula": {"p50": 20.0}},
    "ratio": {"plan": 0.25},
}
LINKS = [
    {"kind": kind, "size": "1 KB", "p50_us": p50, "vs_socket": p50 / 20}
    for kind, p50 in (("host", 30.0), ("socket", 20.0))
]
LATENCIES = {"ppstream": HALF, "REQ/REP": WHOLE, "chain": WHOLE}
PARTS = {"A": Spread(9, 0.5, 0, 0, 0), "B": Spread(9, 1.5, 0, 0, 0)}
LIMITS = [Target(way, limit, 0.5) for way, _, limit in bench_latency.LIMITS]
COST = bench_record.Cost(0.02, 3.0, 5.0, 1e4, 0, 0.6, 10.0, 0.2, 100_000, 6_000_000)
LATENESS = {
    "control loop": bench_control_loop.Lateness(0.1, 0.5, 2.0, 10),
    "bare loop in turn": bench_control_loop.Lateness(0.1, 0.4, 2.0, 10),
}

CASES: dict[str, Case] = {
    "device window": Case(bench_device_window.claims_of, ({"3 cameras, saturated": WINDOWS},)),
    "workload": Case(
        bench_workload.claims_of,
        ({"mlp": STEP, "kernel": {"a_us": 2.0, "policy_us": 30.0, "share": 2 / 32}},),
    ),
    "pipeline": Case(bench_pipeline.claims_of, ([GPU_RAN],)),
    "link of GPUs": Case(bench_link_gpu.claims_of, ([GPU_LINK],)),
    "watching": Case(bench_metrics.claims_of, (BLOCKS, {"CPU, scraped": 3.0}, 500)),
    "latency": Case(bench_latency.claims_of, (LATENCIES, PARTS, LIMITS)),
    "pipeline of CPUs": Case(bench_pipeline_cpu.claims_of, ([pipeline_row(ratio=10 / 9.5)],)),
    "link": Case(bench_link.claims_of, (LINKS,)),
    "resample": Case(bench_resample._claims, ([PLAN],)),
    "resample on a GPU": Case(
        bench_resample.gpu_claims, ({"copy_gb_s": 2000.0, "shapes": [KERNEL]},)
    ),
    "depths": Case(d_sweep.claims_of, ([depth_row()],)),
    "record": Case(bench_record.claims_of, ({"on": COST},)),
    "histogram": Case(bench_robots.histogram_claim, (TICKS,)),
    "robots": Case(bench_robots.latency_claims, ({8: bench_robots.Latency(HALF, 95, 100)},)),
    "control loop": Case(
        bench_control_loop.claims_of,
        (LATENESS, [Target("p99 above a bare loop", 0.1, 0.1)], TICKS),
        {"asked": 10},
    ),
    "sessions": Case(
        bench_sessions.answered, ("8 robots", bench_sessions.Served(HALF, 9.0, 2, 12))
    ),
    "ingest": Case(bench_claims.median_rate, ("x", TIMED, 90.0)),
    "log": Case(bench_claims.throughput, ("sustained records a second", 900, 3.0, 300.0)),
}


def test_claims_of_the_benchmarks_follow_from_their_numbers() -> None:
    findings = audit_claims([claim for case in CASES.values() for claim in case.claims()])
    assert len(findings) >= 37
    assert [finding.text for finding in findings if not finding.holds] == []
    assert all(finding.what for finding in findings)


def test_wrong_ratio_is_said_aloud_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = bench_pipeline_cpu.claims_of([pipeline_row(ratio=1.2)])
    path = tmp_path / "out.json"
    write_json(path, "mode", [], claims=claims, rows=[1])
    said = capsys.readouterr().out
    assert "claims: 2 of 3 follow" in said
    assert "BROKEN" in said
    assert json.loads(path.read_text())["rows"] == [1]
    assert claims_audit.main([str(path), "--quiet"]) == 1


def test_rounds_that_differ_break_no_claim_of_their_median() -> None:
    bare = [BareRun(10.0, 9.0, 9.0), BareRun(20.0, 9.0, 9.0), BareRun(30.0, 9.0, 9.0)]
    times_ms = [(10.0, 9.0, 9.5), (30.0, 10.0, 15.0), (18.0, 17.0, 12.0)]
    runs = [
        bench_pipeline_cpu.Run(period, stage0, stage1, 0.1, (period,))
        for period, stage0, stage1 in times_ms
    ]
    row = bench_pipeline_cpu.summary(bench_pipeline_cpu.CASES[1], "split", runs, bare, 0.1)
    assert (row.ratio, row.over_bare) == (18 / 17, 1.0)
    findings = audit_claims(bench_pipeline_cpu.claims_of([row]))
    assert [finding.text for finding in findings if not finding.holds] == []


def wrong_figures(case: Case) -> Iterator[Case]:
    """The case with one number half again as large, for every number that it rests on."""
    for path in paths_of(case.figures):
        yield case._replace(figures=changed(case.figures, path))
    for name, number in case.options.items():
        yield case._replace(options={**case.options, name: number * 1.5})


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to the numbers in dicts, sequences and records."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from paths_of(part, (*path, key))
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from paths_of(part, (*path, place))
    elif is_dataclass(value):
        for field in fields(value):
            yield from paths_of(getattr(value, field.name), (*path, field.name))


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """``value`` with the number at ``path`` times 1.5."""
    if not path:
        return value * 1.5
    step, *rest = path
    if isinstance(value, dict):
        return {**value, step: changed(value[step], tuple(rest))}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{step: changed(getattr(value, step), tuple(rest))})
    parts = [changed(part, tuple(rest)) if n == step else part for n, part in enumerate(value)]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


#: Figures that a record works out itself: what breaks is the arithmetic there.
WORKED_OUT = {
    "robots": (bench_robots.Latency, "answered_share"),
    "depths": (DepthRow, "gap"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_claim_breaks_when_one_of_its_numbers_is_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that no wrong number breaks says nothing."""
    case = CASES[name]
    broken = set()
    for wrong in wrong_figures(case):
        broken |= {n for n, found in enumerate(audit_claims(wrong.claims())) if not found.holds}
    if name in WORKED_OUT:
        record, figure = WORKED_OUT[name]
        right = getattr(record, figure).fget
        monkeypatch.setattr(record, figure, property(lambda self: 1.5 * right(self) + 0.5))
        broken |= {n for n, found in enumerate(audit_claims(case.claims())) if not found.holds}
    never = [claim["what"] for n, claim in enumerate(case.claims()) if n not in broken]
    assert never == []


def test_every_benchmark_is_looked_at() -> None:
    """A new script that offers ``--json`` belongs to SCRIPTS."""
    offering = [path.name for path in TOOLS.glob("bench_*.py") if '"--json"' in path.read_text()]
    assert set(offering) <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_writes_its_claims(script: str) -> None:
    """Whatever writes JSON does it through the audit."""
    tree = ast.parse((TOOLS / script).read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "write_json"
    ]
    given = [any(k.arg == "claims" for k in call.keywords) for call in calls]
    assert ("write_audited" in names) or (given and all(given))
