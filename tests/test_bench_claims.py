"""Benchmarks claim their own numbers: the form is auditable, and a wrong number is said aloud."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import bench_claims
import bench_latency
import bench_link
import bench_pipeline_cpu
import bench_resample
import claims_audit
import d_sweep
import pytest
from bench_runs import Spread, Target, write_json
from d_sweep_cells import Cell, Stages
from d_sweep_cells import Row as DepthRow

from ppstream.claims import audit_claims

TOOLS = Path(__file__).resolve().parent.parent / "tools"
#: Whatever prints numbers that people quote belongs here.
SCRIPTS = (
    "bench_control_loop.py",
    "bench_ingest.py",
    "bench_latency.py",
    "bench_link.py",
    "bench_log.py",
    "bench_pipeline_cpu.py",
    "bench_resample.py",
    "d_sweep.py",
)
HALF = Spread(10, 2.0, 2.0, 3.0, 4.0)
WHOLE = Spread(10, 4.0, 4.0, 6.0, 8.0)


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
        periods_ms=HALF,
        **times,
        **bare,
    )


def depth_row() -> DepthRow:
    cell = Cell(Stages(3, 10, 4), "serial", 2)
    return DepthRow(cell, 10.4, 10.0, "B", 0.9, 0.96, WHOLE, WHOLE, 1000, ("PASS",))


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
        bench_claims.median_rate("x", [bench_claims.Timed(100, 1.0), bench_claims.Timed(98, 1.0)]),
    ]


def test_claims_of_the_benchmarks_follow_from_their_numbers() -> None:
    findings = audit_claims(every_claim())
    assert len(findings) >= 14
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
