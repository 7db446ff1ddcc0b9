"""Replicas of a policy rank over real ranks: the twin's actions, in turn; losses end or degrade."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from ranks import NOTICED_BY, Ranks
from recorded_runs import played
from recording_files import made_recording
from robot_rig import wait_until
from served_replicas import ends_balanced, serves_degraded, serving

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]  # five ranks on a busy machine

ECHO = (
    "policy.target=ppstream_stages.echo:build",
    "policy.options={steps=8, dim=5, horizon=4, action_dim=2}",
    "pipeline.windows=scheduled",
    "service.duration_s=none",
)


def actions_of(root: Path, recording: Path, *settings: str, ranks: int) -> dict[str, np.ndarray]:
    return played(root, recording, *ECHO, *settings, ranks=ranks)[0]


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    recording = made_recording(folder / "recording.npz")
    return recording, actions_of(folder / "inline", recording, ranks=1)


@pytest.mark.parametrize(
    ("replicas", "settings"),
    [
        (2, ("link.kind=host",)),
        (3, ("link.kind=host", "pipeline.threads=split")),
        (2, ("link.kind=gloo", "pipeline.threads=split")),
        (3, ("link.kind=gloo",)),
    ],
    ids=str,
)
def test_replicas_give_the_twin_s_actions_bit_for_bit(replicas, settings, twin, tmp_path):
    recording, expected = twin
    count = f"placement.replicas={replicas}"
    found = actions_of(tmp_path / "ranks", recording, count, *settings, ranks=replicas + 1)
    assert len(expected["actions"]) > 200
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.tobytes() == expected[name].tobytes(), name


def test_envelopes_go_to_the_replicas_in_turn(tmp_path):
    with Ranks(tmp_path, "placement.replicas=3", world_size=4) as run:
        assert run.wait() == [0] * 4, run.output()
        lines = [line for line in run.lines(0) if line["kind"] == "envelope"]
        assert lines[0]["replica"] == 1
        assert all(b["replica"] == a["replica"] % 3 + 1 for a, b in pairwise(lines))
        for rank in (1, 2, 3):
            own = [line for line in run.lines(rank) if line["kind"] == "stage1"]
            mine = [line for line in lines if line["replica"] == rank]
            assert [(b["epoch"], b["seq"]) for b in own] == [(e["epoch"], e["seq"]) for e in mine]


def test_a_policy_with_a_memory_is_refused_with_replicas(tmp_path):
    policy = "policy.target=policy_in_parts:build"
    options = "policy.options={steps=8, dim=5, horizon=4, action_dim=2}"
    settings = (policy, options, "placement.replicas=2", "placement.parts=[0, 1, 1]")
    with Ranks(tmp_path, *settings, world_size=3) as run:
        assert run.wait(30) == [11] * 3, run.output()
        reason = run.exits()["0"]["reason"]
    assert "part 'middle' of policy_in_parts:build, which does not say" in reason
    assert "set stateless = True" in reason


def test_replicas_whose_weights_differ_are_refused_before_ready(tmp_path):
    fault = 'policy.options.fault="weights"'  # of rank 2
    settings = OF_TWO_RANKS[0], OF_TWO_RANKS[1], fault, "placement.replicas=2"
    with Ranks(tmp_path, *settings, world_size=3) as run:
        assert run.wait(60) == [10] * 3, run.output()
        reason = run.exits()["0"]["reason"]
        assert "weights.meshed.shift: rank 1 has '[1] float32 " in reason
        assert "load them from one file, or draw them from one seed" in reason
        assert [line for line in run.lines(0) if line.get("name") == "phase"] == []


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "threads", "link"),
    [
        (signal.SIGKILL, "serial", "host"),
        (signal.SIGKILL, "split", "gloo"),
        (signal.SIGSTOP, "serial", "gloo"),
        (signal.SIGSTOP, "split", "host"),
    ],
    ids=str,
)
def test_the_run_goes_on_without_a_replica(number, threads, link, tmp_path):
    settings = "placement.replicas_min=2", f"link.kind={link}", f"pipeline.threads={threads}"
    with serving(tmp_path, *settings, replicas=3) as (run, came):
        os.kill(run.pid_of(2), number)
        serves_degraded(run, came, 2, left=2)
        run.processes[0].terminate()
        lost = -signal.SIGKILL  # what was stopped is ended, too
        assert run.wait() == [0, 0, lost, 0], run.output()
        ends_balanced(run, 2, most=4)  # D_in


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_lost_replica_ends_the_run_where_all_are_needed(number, tmp_path):
    with serving(tmp_path, replicas=2) as (run, _):
        os.kill(run.pid_of(1), number)
        ends = run.processes[0], run.processes[2]
        wait_until(lambda: all(end.poll() is not None for end in ends))
        assert run.processes[0].poll() == 20, run.output()
        assert not [line for line in run.lines(0) if line.get("phase") == "degraded"]


#: Ranks 1 and 3 are a replica, and 2 and 4.
OF_TWO_RANKS = (
    "policy.target=mesh_policy:build",
    "policy.options={steps=8, dim=5, horizon=4, action_dim=2, stateless=true}",
    "placement.mesh=2",
)


@pytest.mark.parametrize(
    ("rank", "number"),
    [(1, signal.SIGSTOP), (3, signal.SIGSTOP), (4, signal.SIGKILL)],
    ids=["leader frozen", "member frozen", "member killed"],
)
def test_a_lost_rank_of_a_replica_takes_its_mesh_out(rank, number, tmp_path):
    settings = *OF_TWO_RANKS, *NOTICED_BY[number], "placement.replicas_min=1"
    with serving(tmp_path, *settings, replicas=2, mesh=2) as (run, came):
        os.kill(run.pid_of(rank), number)
        lost = (rank - 1) % 2 + 1
        serves_degraded(run, came, lost, left=1)
        ranks = run.processes[lost], run.processes[lost + 2]
        wait_until(lambda: all(process.poll() is not None for process in ranks))
        run.processes[0].terminate()
        codes = run.wait()
        assert all(codes[rank] for rank in (lost, lost + 2)), run.output()
        assert [codes[rank] for rank in (0, 3 - lost, 5 - lost)] == [0] * 3, run.output()
        ends_balanced(run, lost)


def test_a_rank_of_a_replica_that_raises_alone_takes_its_mesh_out(tmp_path):
    trigger = tmp_path / "now"  # of the faults of rank 2
    fault = 'policy.options.fault="raises"', f'policy.options.trigger="{trigger}"'
    settings = *OF_TWO_RANKS, *fault, "placement.replicas_min=1"
    with serving(tmp_path, *settings, replicas=2, mesh=2) as (run, came):
        trigger.touch()
        serves_degraded(run, came, 2, left=1)
        reason = run.wait_for_event("replica_lost", rank=2)["reason"]
        assert "rank 2 raised ValueError" in reason
        assert "but rank 4 did not within 1 s" in reason


def test_a_lost_member_of_a_replica_ends_the_run_where_all_are_needed(tmp_path):
    with serving(tmp_path, *OF_TWO_RANKS, replicas=2, mesh=2) as (run, _):
        os.kill(run.pid_of(4), signal.SIGKILL)
        ends = [run.processes[rank] for rank in range(4)]
        wait_until(lambda: all(end.poll() is not None for end in ends))
        assert run.processes[0].poll() == 20, run.output()


def test_the_last_replica_that_is_needed_ends_the_run(tmp_path):
    with serving(tmp_path, "placement.replicas_min=1", replicas=2) as (run, came):
        os.kill(run.pid_of(1), signal.SIGKILL)
        serves_degraded(run, came, 1, left=1)
        os.kill(run.pid_of(2), signal.SIGKILL)
        wait_until(lambda: all(process.poll() is not None for process in run.processes))
        assert run.processes[0].poll() == 20, run.output()
