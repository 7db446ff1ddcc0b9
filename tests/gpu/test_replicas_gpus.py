"""Rank 0 and its replicas on GPUs: the twin's actions in turn; losses degrade or end the run.

All ranks share the GPUs that there are, one if need be: what is tested is their order and their
ends, not their speed.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks
from recorded_runs import played
from recording_files import made_recording
from robot_rig import wait_until
from served_replicas import ends_balanced, serves_degraded, serving

from ppstream.links.device_link import AHEAD

GPUS = torch.cuda.device_count()
ECHO = (
    "policy.target=ppstream_stages.echo:build",
    "policy.options={steps=8, dim=5, horizon=4, action_dim=2}",
    "simulate.a_ms=0",
    "simulate.c_ms=0",
)
#: A stage B that takes its time, so that envelopes are under way whenever a replica is lost.
SLOW = (
    "policy.options={b_ms=5, kind='gpu', horizon=4, action_dim=2}",
    "simulate.a_ms=0",
    "simulate.c_ms=0",
)
LIMIT_S = 120
GONE_S = 8.0  # silence has a limit of 1.5 s, and a process with CUDA takes its time to be gone
TOLERANCE = 1e-5  # windows are resampled on a GPU

if GPUS < 1:
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]


def placed(replicas: int, link: str, wait: str = "driver") -> tuple[str, ...]:
    """Ranks on the GPUs in turn; those that share one wait by the driver unless asked."""
    names = [f"cuda:{rank % max(1, GPUS)}" for rank in range(replicas + 1)]
    policy = ", ".join(f'"{name}"' for name in names[1:])
    return (
        f"placement.rank0={names[0]}",
        f"placement.policy=[{policy}]",
        f"placement.replicas={replicas}",
        f"link.kind={link}",
        f"link.wait={wait}",
    )


def actions_of(root: Path, recording: Path, *settings: str, ranks: int):
    asked = (*ECHO, "service.duration_s=none", "pipeline.windows=scheduled", *settings)
    return played(root, recording, *asked, ranks=ranks, limit_s=LIMIT_S, module="ungated")


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    recording = made_recording(folder / "recording.npz")
    inline = ("placement.rank0=cpu", "placement.policy=cuda:0")
    return recording, actions_of(folder / "inline", recording, *inline, ranks=1)


@pytest.mark.parametrize(
    ("replicas", "link", "wait"),
    [(2, "peer", "driver"), (3, "pinned", "driver"), (2, "peer", "kernel")],
    ids=str,
)
def test_replicas_give_the_twin_s_actions(replicas, link, wait, twin, tmp_path):
    recording, (expected, drops) = twin
    settings = placed(replicas, link, wait)
    actions, found = actions_of(tmp_path, recording, *settings, ranks=replicas + 1)
    assert found == drops
    assert actions.keys() == expected.keys()
    for name, array in actions.items():
        np.testing.assert_allclose(array, expected[name], atol=TOLERANCE, err_msg=name)
    assert len(actions["actions"]) > 20


def test_one_rank_that_cuts_its_windows_on_the_gpu_gives_the_twin_s_actions(twin, tmp_path):
    recording, (expected, drops) = twin
    inline = ("placement.rank0=cuda:0", "placement.policy=cuda:0")
    actions, found = actions_of(tmp_path, recording, *inline, ranks=1)
    assert found == drops
    assert actions.keys() == expected.keys()
    for name, array in actions.items():
        np.testing.assert_allclose(array, expected[name], atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("link", ["peer", "pinned"])
def test_envelopes_go_to_the_replicas_in_turn_and_all_drain(link, tmp_path):
    patient = "service.duration_s=none", "actions.lease_ms=2000"  # as served runs have it
    settings = (*SLOW, *placed(3, link), *patient, "bringup.envelopes=300")
    with Ranks(tmp_path, *settings, world_size=4) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        run.processes[0].terminate()
        assert run.wait(20) == [0] * 4, run.output()
        lines = [line for line in run.lines(0) if line["kind"] == "envelope"]
        assert len(lines) > 100  # of bring-up
        assert not Counter(line["drop"] for line in lines if line.get("drop"))
        assert lines[0]["replica"] == 1
        assert all(b["replica"] == a["replica"] % 3 + 1 for a, b in pairwise(lines))
        for rank in (1, 2, 3):
            own = [line for line in run.lines(rank) if line["kind"] == "stage1"]
            mine = [line for line in lines if line["replica"] == rank]
            assert [(b["epoch"], b["seq"]) for b in own] == [(e["epoch"], e["seq"]) for e in mine]


@pytest.mark.parametrize(
    ("number", "link", "wait"),
    [
        (signal.SIGKILL, "peer", "driver"),
        (signal.SIGKILL, "peer", "kernel"),
        (signal.SIGKILL, "pinned", "driver"),
        (signal.SIGSTOP, "peer", "driver"),
        (signal.SIGSTOP, "pinned", "driver"),
    ],
    ids=str,
)
def test_the_run_goes_on_without_a_replica(number, link, wait, tmp_path):
    settings = (*SLOW, *placed(3, link, wait), "placement.replicas_min=2")
    with serving(tmp_path, *settings, replicas=3, limit_s=LIMIT_S, guarded=True) as (run, came):
        os.kill(run.pid_of(2), number)
        serves_degraded(run, came, 2, left=2)
        run.processes[0].terminate()
        assert run.wait(20) == [0] * 4, run.output()
        ends_balanced(run, 2, most=4 + AHEAD)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_lost_replica_ends_the_run_where_all_are_needed(number, tmp_path):
    with serving(tmp_path, *SLOW, *placed(2, "peer"), replicas=2, limit_s=LIMIT_S) as (run, _):
        os.kill(run.pid_of(1), number)
        ends = run.processes[0], run.processes[2]
        wait_until(lambda: all(end.poll() is not None for end in ends), seconds=GONE_S)
        codes = {end.poll() for end in ends}
        assert codes <= {20, -signal.SIGKILL}, (codes, run.output())
        assert run.processes[0].poll() == 20, run.output()
        assert not [line for line in run.lines(0) if line.get("phase") == "degraded"]
