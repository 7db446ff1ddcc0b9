from __future__ import annotations

import json
from pathlib import Path

import d_sweep
import pytest
import real_runs
from d_sweep_cells import (
    Pass,
    Stages,
    SweepCell,
    SweepRow,
    combine,
    parse_stages,
    recommend,
    replica_cells,
    replica_targets,
)
from forked_process import FORKING


def row(depth: int, period_ms: float, *, age_ms: float = 20.0, threads: str = "serial") -> SweepRow:
    ages = (age_ms,) * 3
    one = Pass(Stages(3, 10, 4), period_ms, 10.0, "B", 0.9, 0.95, ages, ages, "PASS")
    return combine(SweepCell(Stages(3, 10, 4), threads, depth), [one] * 2, depth * 1000)


def test_smallest_depth_within_two_percent_of_the_best_is_recommended() -> None:
    found = recommend([row(4, 10.0), row(1, 15.0), row(3, 10.05), row(2, 10.15)])
    assert [item.row.cell.depth for item in found] == [2]
    found = recommend([row(4, 10.0), row(1, 15.0), row(3, 10.05), row(2, 10.25)])
    assert [item.row.cell.depth for item in found] == [3]


def test_price_is_over_the_next_smaller_depth_of_the_same_threads() -> None:
    measured = [row(1, 25.0), row(2, 15.0, age_ms=23.0), row(4, 10.0, age_ms=28.0)]
    [item, alone] = recommend([*measured, row(1, 10.0, threads="split")])
    assert item.price is not None
    assert item.price.over_depth == 2
    assert item.price.saved_ms == pytest.approx(5.0)
    assert item.price.age_ms == pytest.approx(5.0)
    assert item.price.slot_bytes == 2000
    assert alone.price is None


def test_a_chain_s_stages_are_read_and_named() -> None:
    assert parse_stages("3:10:4") == Stages(3, 10, 4)
    chain = parse_stages("9:10:8:1")
    assert (chain.a_ms, chain.places_ms, chain.c_ms) == (9, (10, 8), 1)
    assert chain.longest_ms == 10
    assert str(chain) == "A 9  B 10+8  C 1 ms"
    with pytest.raises(ValueError, match="A:B1:B2:C"):
        parse_stages("3:10")


def test_replicas_are_measured_with_an_envelope_for_each_rank() -> None:
    cells = replica_cells([Stages(5, 20, 0)], ["split"], [3, 1, 2])
    assert [(cell.stages.replicas, cell.stages.ranks, cell.depth) for cell in cells] == [
        (1, 2, 2),
        (2, 3, 3),
        (3, 4, 4),
    ]
    assert str(cells[2].stages) == "A 5  B 20 x 3  C 0 ms"
    assert [cell.stages.ideal_ms("split") for cell in cells] == [20, 10, 20 / 3]
    ages = (20.0,) * 3
    measured = [
        Pass(Stages(5, b_ms, 0), 10.4, 10.0, "B / 2", 0.9, 0.95, ages, ages, "PASS")
        for b_ms in (20.3, 20.5)
    ]
    row = combine(cells[1], measured, 1000)
    [target] = replica_targets([row], "sleep")
    assert (target.reached, target.limit) == (pytest.approx(10.4 / 10), 1.053)
    [target] = replica_targets([row], "gpu")  # whose B takes what the GPU makes of 20 ms
    assert (target.reached, target.limit) == (pytest.approx(10.4 / (20.4 / 2)), 1.03)


@pytest.mark.multirank
def test_sweep_goes_on_behind_a_cell_that_the_gate_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without overlap bring-up ends with 30; both its runs and the plot must be there."""
    monkeypatch.setattr(real_runs, "subprocess", FORKING)
    target, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    options = "--stages 2:2:0 --depths 1 --threads serial --envelopes 100"
    command = [*options.split(), "--json", str(target), "--plot", str(picture)]
    assert d_sweep.main(command) == 0, capfd.readouterr()
    [found] = json.loads(target.read_text())["rows"]
    assert len(found["verdicts"]) == 2
    assert not any(verdict == "PASS" for verdict in found["verdicts"])
    assert found["period_ms"] > 4
    assert all(found["alone"][stage] >= 2 for stage in ("a_ms", "b_ms"))  # C takes what it takes
    assert found["latency_ms"]["n"] >= 150
    assert "<svg" in picture.read_text()
