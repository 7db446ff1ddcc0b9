"""The cells of ``bench/pipeline_gpu.py``, and what is held against its rows."""

from __future__ import annotations

from typing import Any

import pytest
from bench.pipeline_gpu import beside_nccl, grid, targets_of
from bench.pipeline_gpu_cells import envelopes_of


def row(size_us: float, link: str, period_us: float, depth: int = 2) -> dict[str, Any]:
    cell = {"name": "balanced", "a_us": size_us, "b_us": size_us, "rows": 1, "depth": depth}
    cell |= {"link": link, "credit": "before_window"}
    found = {"cell": cell, "period_us": period_us, "alone_us": [size_us, size_us, 5.0]}
    found |= {"strict": period_us / size_us, "overhead_us": period_us - size_us, "compat": 0.9}
    found |= {
        "latency_us": 2 * period_us,
        "age_us": 2 * period_us,
        "p50_us": 1.0,
        "p99_us": 1.0,
        "cpu_us": [20.0, 20.0],
    }
    return found


def test_every_cell_of_a_further_link_has_its_twin_on_the_first() -> None:
    cells = list(grid(["peer", "nccl"], (30, 200, 700)))
    others = [cell for cell in cells if cell.link == "nccl"]
    assert len(others) == 18
    for cell in others:
        assert cell.depth == 2
        assert cells[cells.index(cell) - 1] == cell._replace(link="peer")
    assert len([cell for cell in cells if cell.link == "peer"]) == 33


@pytest.mark.parametrize(("size_us", "least"), [(30, 2500), (200, 2500), (700, 714)])
def test_a_cell_lasts_half_a_second(size_us: float, least: int) -> None:
    cells = [cell for cell in grid(["peer"], (size_us,)) if cell.name == "balanced"]
    assert {envelopes_of(cell, 320) for cell in cells} == {least}
    assert envelopes_of(cells[0], 5000) == 5000


def test_a_cell_is_held_against_the_same_cell_on_nccl_alone() -> None:
    rows = [row(30, "peer", 40), row(30, "nccl", 100), row(200, "peer", 210)]
    rows += [row(200, "nccl", 230, depth=1)]
    assert [(one["period_us"], other["period_us"]) for one, other in beside_nccl(rows)] == [
        (40, 100)
    ]


@pytest.mark.parametrize(("size_us", "limit"), [(30, 0.5), (200, 0.97), (700, 0.97)])
def test_the_limit_against_nccl_follows_the_stages(size_us: float, limit: float) -> None:
    targets = targets_of([row(size_us, "peer", 96), row(size_us, "nccl", 100)])
    (found,) = [target for target in targets if "NCCL" in target.what]
    assert (found.limit, found.reached) == (limit, 0.96)


def test_serial_latency_is_what_one_envelope_takes_beyond_its_stages() -> None:
    targets = targets_of([row(200, "peer", 210, depth=1)])
    (found,) = [target for target in targets if "serial" in target.what]
    assert (found.limit, found.reached) == (12, 2 * 210 - 405)
