from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import d_sweep
import pytest
from d_sweep_cells import (
    Cell,
    Pass,
    Row,
    Stages,
    abba,
    cells,
    combine,
    gap_targets,
    parse_stages,
    recommend,
)
from golden_runs import MS, simulate
from judging import judged

from ppstream.analysis.period_model import StageTimes

TOOLS = Path(__file__).resolve().parents[2] / "tools"

STAGES = Stages(3, 10, 4)


def passed(period_ms: float, model_ms: float = 10.0, latency_ms: float = 20.0) -> Pass:
    return Pass(period_ms, model_ms, "B", 0.9, 0.95, (latency_ms,) * 3, (latency_ms,) * 3, "PASS")


def row(depth: int, period_ms: float, *, age_ms: float = 20.0, threads: str = "serial") -> Row:
    cell = Cell(STAGES, threads, depth)
    return combine(cell, [passed(period_ms, latency_ms=age_ms)] * 2, depth * 1000)


def test_stage_times_are_three_numbers_that_are_not_negative() -> None:
    assert parse_stages("3:10:4.5") == Stages(3, 10, 4.5)
    for text in ("3:10", "3:10:4:5", "3:ten:4", "3:-1:4"):
        with pytest.raises(ValueError, match=r"A:B:C|could not convert"):
            parse_stages(text)


def test_each_cell_runs_twice_at_places_that_average_out_a_steady_drift() -> None:
    order = abba(cells([STAGES], ("serial", "split"), (4, 1, 2)))
    assert [cell.depth for cell in order[:3]] == [1, 2, 4]
    centre = (len(order) - 1) / 2
    for cell in set(order):
        places = [place for place, other in enumerate(order) if other == cell]
        assert len(places) == 2
        assert sum(places) / 2 == centre


def test_passes_of_a_cell_are_averaged_and_their_latencies_pooled() -> None:
    combined = combine(
        Cell(STAGES, "serial", 2), [passed(10.0, 9.0, 20.0), passed(12.0, 11.0, 40.0)], 7
    )
    assert combined.period_ms == 11.0
    assert combined.model_ms == 10.0
    assert combined.gap == pytest.approx(0.1)
    assert combined.latency_ms.n == 6
    assert combined.latency_ms.max == 40.0


def test_smallest_depth_within_two_percent_of_the_best_is_recommended() -> None:
    found = recommend([row(4, 10.0), row(1, 15.0), row(3, 10.05), row(2, 10.15)])
    assert [item.row.cell.depth for item in found] == [2]
    found = recommend([row(4, 10.0), row(1, 15.0), row(3, 10.05), row(2, 10.25)])
    assert [item.row.cell.depth for item in found] == [3]


def test_price_is_over_the_next_smaller_depth() -> None:
    measured = [row(1, 25.0), row(2, 15.0, age_ms=23.0), row(4, 10.0, age_ms=28.0)]
    [item] = recommend(measured)
    assert item.price is not None
    assert item.price.over_depth == 2
    assert item.price.saved_ms == pytest.approx(5.0)
    assert item.price.age_ms == pytest.approx(5.0)
    assert item.price.slot_bytes == 2000


def test_thread_modes_are_advised_apart_and_depth_one_has_no_price() -> None:
    rows = [row(1, 10.0), row(2, 10.0), row(1, 15.0, threads="split"), row(2, 9.0, threads="split")]
    found = recommend(rows)
    assert [(item.row.cell.threads, item.row.cell.depth) for item in found] == [
        ("serial", 1),
        ("split", 2),
    ]
    assert found[0].price is None


def test_gap_may_be_three_percent_or_a_third_of_a_millisecond() -> None:
    [target] = gap_targets([row(2, 10.29)])
    assert target.met
    [target] = gap_targets([row(2, 10.31)])
    assert not target.met
    [target] = gap_targets([row(2, 9.69)])  # faster than the model is as wrong
    assert not target.met
    slow = combine(Cell(STAGES, "serial", 2), [passed(20.55, 20.0)], 0)
    assert [target.met for target in gap_targets([slow])] == [True]


def test_gap_is_not_asked_of_short_stages() -> None:
    short = combine(Cell(Stages(1, 4.9, 1), "serial", 2), [passed(9.0, 5.0)], 0)
    assert gap_targets([short]) == []


def test_more_depth_takes_more_slots() -> None:
    taken = [d_sweep.slot_bytes(Cell(STAGES, "serial", depth)) for depth in (1, 2, 3)]
    steps = [after - before for before, after in pairwise(taken)]
    assert steps[0] == steps[1] > 0


def test_pass_is_read_from_the_judged_run() -> None:
    found = d_sweep.read_pass(
        judged(simulate(StageTimes(3 * MS, 10 * MS, 4 * MS, MS // 4, MS // 4)))
    )
    assert found.period_ms == pytest.approx(10.0, rel=0.01)
    assert found.model_ms == pytest.approx(10.0, rel=0.01)
    assert len(found.latencies_ms) >= 300


@pytest.mark.multirank
def test_sweep_goes_on_behind_a_cell_that_the_gate_refuses(tmp_path: Path) -> None:
    """Without overlap bring-up ends with 30; both its runs and the plot must be there."""
    target, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    options = "--quick --stages 2:2:0 --depths 1"
    command = [sys.executable, str(TOOLS / "d_sweep.py"), *options.split()]
    command += ["--json", str(target), "--plot", str(picture)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [found] = json.loads(target.read_text())["rows"]
    assert len(found["verdicts"]) == 2
    assert not any(verdict == "PASS" for verdict in found["verdicts"])
    assert found["period_ms"] > 4
    assert found["latency_ms"]["n"] >= 150
    assert "<svg" in picture.read_text()
