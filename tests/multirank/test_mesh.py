"""A policy that several ranks compute together: the actions of one, and none outlives another."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import (
    END_LIMIT_S,
    NOTICED_BY,
    Ranks,
    assert_no_rank_outlives,
    assert_standing_member_is_named,
)
from recorded_runs import played
from recording_files import made_recording

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.report.text import render

pytestmark = pytest.mark.multirank

COMPILE_LIMIT_S = 300  # of three ranks on two processors that others use
SHAPE = "steps=8, dim=5, horizon=4, action_dim=2"
ACT = (
    "policy.target=ppstream_stages.act:build",
    f"policy.options={{{SHAPE}, streams=2, width=128, encoder_blocks=1, decoder_blocks=1, "
    'dtype="float32"}',
)
MESHED = ("policy.target=mesh_policy:build", f"policy.options={{{SHAPE}}}")
STATELESS = (MESHED[0], f"policy.options={{{SHAPE}, stateless=true}}")
REPLICAS = (*STATELESS, "placement.replicas=2")
RAISING = (MESHED[0], f'policy.options={{{SHAPE}, fault="all raise"}}')
#: What a busy machine may not be refused for.
LONG = "bringup.envelopes=100000"  # there are envelopes until the fault comes
CALM = ("actions.lease_ms=5000", "log.keep=1")


def faulty(fault: str, trigger: Path | str = "") -> tuple[str, ...]:
    """Settings of a mesh of two ranks, 1 and 2, whose rank 2 has a fault."""
    options = f'policy.options={{{SHAPE}, fault="{fault}", trigger="{trigger}"}}'
    return MESHED[0], options, "placement.mesh=2", "service.duration_s=none", *CALM


@pytest.mark.parametrize(
    ("policy", "mesh", "link"),
    [(ACT, 2, "host"), (MESHED, 3, "gloo"), (RAISING, 2, "host"), (REPLICAS, 2, "host")],
    ids=["act-2", "meshed-3", "every rank raises now and then", "two replicas of two ranks"],
)
def test_a_mesh_gives_the_actions_of_one_rank(
    policy: tuple[str, ...], mesh: int, link: str, tmp_path: Path
) -> None:
    seconds = 0.1 if policy is ACT else 0.2  # a call of it takes ten times as long
    recording = made_recording(tmp_path / "recording.npz", seconds)
    settings = (*policy, *CALM, "pipeline.windows=scheduled", "service.duration_s=none")
    one, drops = played(tmp_path / "one", recording, *settings, ranks=1)
    settings += (f"placement.mesh={mesh}", f"link.kind={link}")
    ranks = 1 + mesh * (2 if policy is REPLICAS else 1)
    several, other_drops = played(tmp_path / "mesh", recording, *settings, ranks=ranks)
    assert (other_drops, several.keys()) == (drops, one.keys())
    assert ("policy_error" in drops) == (policy is RAISING)
    assert len(one["actions"]) > 20
    assert one["actions"].std() > 1e-3
    assert np.abs(several["actions"] - one["actions"]).max() < 1e-5


def test_members_are_named_in_the_log_and_the_report(tmp_path: Path) -> None:
    settings = (*MESHED, "placement.mesh=3", *CALM, "bringup.envelopes=150")
    with Ranks(tmp_path, *settings, world_size=4) as run:
        assert run.wait() == [0] * 4, run.output()
        topology = json.loads((run.directory / "run.json").read_text())["topology"]
        assert [found["rank"] for found in topology["members"]] == [2, 3]
        lines = [[x for x in run.lines(k) if x["kind"] == "stage1"] for k in (1, 2, 3)]
        assert len(lines[0]) == len(lines[1]) == len(lines[2]) > 100
        report = judge(read_run(run.directory))
    told = " ".join(render(report).split())
    assert re.search(
        r"mesh rank 1 leads, B [\d.]+ ms rank 2, B [\d.]+ ms rank 3, B [\d.]+ ms", told
    )
    places: Any = report.as_dict()["places"]
    assert [[member["rank"] for member in place["members"]] for place in places] == [[], [2, 3]]
    assert all(member["busy_ns"] > 0 for member in places[1]["members"])
    assert places[1]["busy_ns"] > 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("rank", range(3))
def test_no_rank_outlives_another_of_the_mesh(rank: int, how: int, tmp_path: Path) -> None:
    with Ranks(tmp_path, *faulty(""), *NOTICED_BY[how], world_size=3) as run:
        run.wait_for_event("phase", phase="ready")
        assert_no_rank_outlives(run, rank, how)
        if rank == 2:
            assert "rank 2" in run.output().partition("--- stderr1")[0]


def test_a_member_that_stands_is_named_by_its_own_watchdog(tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    settings = (*faulty("slow", trigger), "liveness.watchdog_s=2", LONG)
    with Ranks(tmp_path / "logs", *settings, world_size=3) as run:
        assert_standing_member_is_named(run, trigger, END_LIMIT_S)


def test_a_rank_that_raises_alone_ends_the_run(tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    with Ranks(tmp_path / "logs", *faulty("raises", trigger), LONG, world_size=3) as run:
        run.wait_for_event("phase", phase="bring-up")
        trigger.touch()
        codes = run.wait(60)
        assert codes[0] == 22, (codes, run.output())
        assert all(code in (20, -signal.SIGKILL) for code in codes[1:])
        reason = run.exits()["0"]["reason"]
        assert "rank 2 raised ValueError" in reason
        assert "but rank 1 did not within 1 s" in reason


@pytest.mark.parametrize(
    ("fault", "key"),
    [("weights", "weights.meshed.shift: rank 1 has '[1] float32 "), ("versions", "torch: rank 1")],
)
def test_a_member_that_differs_is_refused_before_ready(
    fault: str, key: str, tmp_path: Path
) -> None:
    module = "other_versions" if fault == "versions" else None
    with Ranks(tmp_path, *faulty(fault), world_size=3, module=module) as run:
        codes = run.wait(60)
        assert codes[0] == 10, (codes, run.output())
        assert set(codes) <= {10, 20, -signal.SIGKILL}
        reason = run.exits()["0"]["reason"]
        assert key in reason
        assert ", rank 2 has '" in reason
        phases = [line["phase"] for line in run.lines(0) if line.get("name") == "phase"]
        assert phases == []


def test_a_member_that_compiles_other_graphs_is_refused_before_ready(tmp_path: Path) -> None:
    settings = *faulty("breaks"), "policy.compile=true", "policy.graph_breaks_max=9"
    with Ranks(tmp_path, *settings, world_size=3, module="graphs_alone") as run:
        codes = run.wait(COMPILE_LIMIT_S)
        assert codes[0] == 10, (codes, run.output())
        assert set(codes) <= {10, 20, -signal.SIGKILL}
        reason = run.exits()["0"]["reason"]
        assert "compiled.meshed.breaks: rank 1 has " in reason
        assert "compiled.meshed.graphs: rank 1 has " in reason
        phases = [line["phase"] for line in run.lines(0) if line.get("name") == "phase"]
        assert phases == ["warming"]


def test_a_policy_that_takes_no_mesh_is_one_clear_error(tmp_path: Path) -> None:
    policy = ("policy.target=mesh_policy:build_alone", MESHED[1], "placement.mesh=2")
    with Ranks(tmp_path, *policy, *CALM, world_size=3) as run:
        assert run.wait(60) == [11] * 3, run.output()
        assert "mesh_policy:build_alone takes no mesh" in run.exits()["0"]["reason"]


def test_one_gpu_for_two_ranks_of_a_mesh_is_refused_by_all(tmp_path: Path) -> None:
    gpus = 'placement.policy=["cuda:0", "cuda:0"]', "placement.mesh=2"
    with Ranks(tmp_path, *MESHED, *gpus, world_size=3) as run:
        assert run.wait(60) == [11] * 3, run.output()
        assert "want another GPU for each of its ranks" in run.output()
