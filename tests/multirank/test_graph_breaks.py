"""The gate in front of ready that refuses a compiled policy whose graph breaks, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from breaking_policy import line_of
from ranks import Ranks

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run

pytestmark = pytest.mark.multirank


def broken(breaks: str, limit: int) -> tuple[str, ...]:
    """Settings of a compiled policy, and how many graph breaks it may have."""
    options = f'steps=8, dim=5, horizon=4, action_dim=2, breaks="{breaks}"'
    return (
        "policy.target=breaking_policy:build",
        f"policy.options={{{options}}}",
        "policy.compile=true",
        f"policy.graph_breaks_max={limit}",
        "actions.lease_ms=5000",
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_policy_whose_graph_breaks_is_never_ready(world_size: int, tmp_path: Path) -> None:
    settings, module = broken("branch", 0), "graphs_alone"
    with Ranks(tmp_path, *settings, world_size=world_size, module=module) as run:
        assert run.wait() == [11] * world_size, run.output()
        for end in run.exits().values():
            assert "broke 1 graph of the policy, limit 0" in end["reason"]
            assert f"{line_of('BRANCH')}: part 'summing': Data-dependent" in end["reason"]
        phases = [line["phase"] for line in run.lines(0) if line.get("name") == "phase"]
        assert "ready" not in phases


def test_a_policy_within_its_limit_serves_and_its_counts_are_reported(tmp_path: Path) -> None:
    with Ranks(tmp_path, *broken("branch", 1)) as run:
        assert run.wait() == [0, 0], run.output()
        (seen,) = judge(read_run(run.directory)).compiled
    assert (seen.rank, seen.part, seen.breaks) == (1, "summing", 1)
    assert seen.graphs >= 2
    assert seen.kernels >= 1
