"""Benchmarks claim their own numbers: the form is auditable, and a wrong number is said aloud."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import bench_claims
import bench_device_window
import bench_latency
import bench_link
import bench_link_gpu
import bench_metrics
import bench_pipeline
import bench_pipeline_cpu
import bench_record
import bench_resample
import bench_robots
import bench_sessions
import bench_workload
import claims_audit
import d_sweep
import pytest
from bare_pipeline import BareRun
from bench_runs import Spread, Target, write_json
from d_sweep_cells import Cell, Stages
from d_sweep_cells import Row as DepthRow

from ppstream.claims import audit_claims
from ppstream.control_loop import LoopStatistics
from ppstream.durations import Bin, Quantiles

TOOLS = Path(__file__).resolve().parent.parent / "tools"
#: Whatever prints numbers that people quote belongs here.
SCRIPTS = (
    "bench_control_loop.py",
    "bench_device_window.py",
    "bench_ingest.py",
    "bench_latency.py",
    "bench_link.py",
    "bench_link_gpu.py",
    "bench_log.py",
    "bench_metrics.py",
    "bench_pipeline.py",
    "bench_pipeline_cpu.py",
    "bench_record.py",
    "bench_resample.py",
    "bench_robots.py",
    "bench_sessions.py",
    "bench_workload.py",
    "d_sweep.py",
)
HALF = Spread(10, 2.0, 2.0, 3.0, 4.0)
WHOLE = Spread(10, 4.0, 4.0, 6.0, 8.0)
#: Rounds that differ by more than any tolerance.
TIMED = [bench_claims.Timed(items, 1.0) for items in (300, 50, 90)]


LATE = Quantiles(10, 100, 900, 1000)
TICKS = LoopStatistics(
    10,
    0,
    10,
    0,
    0,
    LATE,
    (Bin(500, 7), Bin(None, 3)),
    "",
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


def device_claims(*, share: float = 0.1) -> list[bench_claims.Claim]:
    """Of the scripts that need a GPU."""
    window = {"windows": 500, "elapsed_s": 5.0, "windows_per_s": 100.0, "frames": 1500}
    step = {"a_us": 5.0, "copy_in_us": 15.0, "policy_us": 30.0, "step_p50_us": 100.0}
    step |= {"share": share, "share_of_step": 0.05, "preprocessing_share": 0.4}
    step |= {"gpu_us": 45.0, "busy": 0.45}
    cell = {"name": "balanced", "a_us": 200.0, "b_us": 200.0, "rows": 1, "depth": 2}
    cell |= {"link": "peer", "credit": "before_window"}
    ran = {"period_us": 206.0, "alone_us": (203.0, 200.0, 4.0), "overhead_us": 3.0}
    link = {"link": "peer", "size": "16 MB", "p50_us": 50.0}
    link |= bench_link_gpu.costs_of(1 << 24, 50.0, 0.0018, 900)
    return [
        *bench_device_window.claims_of({"3 cameras, B = 1, saturated": window}),
        *bench_workload.claims_of(
            {"mlp": step, "kernel": {"a_us": 2.0, "policy_us": 30.0, "share": 2 / 32}}
        ),
        *bench_pipeline.claims_of([{"cell": cell, "strict": 206 / 203, **ran}]),
        *bench_link_gpu.claims_of([link]),
    ]


def watching_claims(added_us: float) -> list[bench_claims.Claim]:
    """Of four pairs of blocks that differ by 1, 2, 4 and 9 us."""
    blocks = {"CPU, on": [11.0, 12.0, 14.0, 19.0], "CPU, off": [10.0] * 4}
    return bench_metrics.claims_of(blocks, {"CPU": added_us}, 500)


def every_claim() -> list[bench_claims.Claim]:
    us = {"plan": {"p50": 5.0}, "formula": {"p50": 20.0}}
    kernel = {"dtype": "float32", "shape": "1x2", "bytes": 2_000_000, "gb_s": 200.0}
    kernel |= {"us": {"ours": 10.0, "naive": 15.0}, "share_of_copy": 0.1, "vs_naive": 1.5}
    limits = [Target(way, limit, 0.5) for way, _, limit in bench_latency.LIMITS]
    spreads = {"ppstream": HALF, "REQ/REP": WHOLE, "chain": WHOLE}
    links = [
        {"kind": kind, "size": "1 KB", "p50_us": p50}
        for kind, p50 in (("host", 30.0), ("socket", 20.0))
    ]
    return [
        *bench_latency.claims_of(
            spreads, {"A": Spread(9, 0.5, 0, 0, 0), "B": Spread(9, 1.5, 0, 0, 0)}, limits
        ),
        *bench_pipeline_cpu.claims_of([pipeline_row(ratio=10 / 9.5)]),
        *bench_link.claims_of(links),
        *bench_resample._claims([{"case": "x", "us": us, "ratio": {"plan": 0.25}}]),
        *bench_resample.gpu_claims({"copy_gb_s": 2000.0, "shapes": [kernel]}),
        *d_sweep.claims_of([depth_row()]),
        *bench_record.claims_of(
            {"on": bench_record.Cost(0.02, 3.0, 5.0, 1e4, 0, 0.6, 10.0, 0.2, 100_000, 6_000_000)}
        ),
        bench_robots.histogram_claim(TICKS),
        *bench_robots.latency_claims({8: bench_robots.Latency(HALF, 95, 100)}),
        bench_sessions.answered("8 robots", bench_sessions.Served(HALF, 9.0, 2, 12)),
        *watching_claims(added_us=3.0),
        *device_claims(),
        bench_claims.median_rate("x", TIMED, 90.0),
    ]


def test_claims_of_the_benchmarks_follow_from_their_numbers() -> None:
    findings = audit_claims(every_claim())
    assert len(findings) >= 33
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


@pytest.mark.parametrize(
    "claims",
    [
        device_claims(share=0.3),
        watching_claims(added_us=2.0),
        [bench_claims.median_rate("x", TIMED, 146.7)],
        [bench_sessions.answered("8 robots", bench_sessions.Served(HALF, 9.0, 2, 20))],
    ],
    ids=("share", "watching", "rate", "answers"),
)
def test_wrong_arithmetic_breaks_a_claim(claims: list[bench_claims.Claim]) -> None:
    assert not all(finding.holds for finding in audit_claims(claims))


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
