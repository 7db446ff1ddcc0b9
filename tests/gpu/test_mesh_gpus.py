"""A policy that two GPUs compute together: the actions of one, and no rank outlives another.

Rank 0 is on the CPU; ranks 1 and 2 are the mesh. ``APART`` has NCCL reach its peers over sockets
alone, as between hosts.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import (
    JUDGED_AGAIN,
    Ranks,
    assert_no_rank_outlives,
    assert_standing_member_is_named,
)
from recorded_runs import played
from recording_files import made_recording
from robot_rig import wait_until
from safetensors.torch import load_file
from served_replicas import robot
from sharded_rank import sharded

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run

GPUS = torch.cuda.device_count()
VLA_TINY = Path(__file__).parents[2] / "stages" / "ppstream_stages" / "vla_tiny.toml"
ON_GPUS = ('placement.policy=["cuda:0", "cuda:1"]', "placement.mesh=2")
SHAPE = "steps=8, dim=5, horizon=4, action_dim=2"
#: Of the size of ACT without cameras, in its type.
ACT = (
    "policy.target=ppstream_stages.act:build",
    f'policy.options={{{SHAPE}, streams=2, dtype="bfloat16"}}',
)
#: Of one block each: ranks that share GPUs with other tests meet in few collectives.
SMALL_ACT = (ACT[0], ACT[1].replace('bfloat16"', 'float32", encoder_blocks=1, decoder_blocks=1'))
#: Counts its calls since a row's reset: eager, as its state is no memory that a graph keeps.
MESHED = ("policy.target=mesh_policy:build", f"policy.options={{{SHAPE}}}", "policy.graph=false")
CALM = (
    "bringup.warmup_max=20",
    "bringup.standalone=5",
    "actions.lease_ms=5000",
    "log.keep=1",
)
SERVED = "service.duration_s=none"
LONG = "bringup.envelopes=100000"  # there are envelopes until the fault comes
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
TOGETHER: dict[str, str] = {}
LIMIT_S, COMPILE_LIMIT_S = 120, 200
GONE_S = 2.5
FROZEN_S = 2.0  # silence has a limit of its own
SPARE_S = 3.0  # of a process with CUDA, to be gone once it was told to
BFLOAT16, FLOAT32 = 2e-2, 1e-4  # TF32 would be off by some 1e-3
TOLERANCE = {"bfloat16": BFLOAT16, "float32": FLOAT32}

if GPUS < 2:
    pytest.skip("needs two GPUs: NCCL takes one rank for each", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]

WHOLE_ACT = {
    "module": "ppstream_stages.act",
    "steps": 64,
    "dim": 14,
    "streams": 2,
    "horizon": 50,
    "action_dim": 7,
}
#: The vla's own form and widths, with few layers.
WHOLE_VLA = {
    "module": "ppstream_stages.vla",
    "steps": 8,
    "dim": 14,
    "streams": 1,
    "horizon": 50,
    "action_dim": 7,
    "cameras": ["left", "wrist"],
    "layers": 4,
    "denoising_steps": 2,
    "image": {"layers": 2},
    "language_layers_per_part": 2,
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [WHOLE_ACT, WHOLE_VLA], ids=["act", "vla"])
def test_a_sharded_policy_equals_the_whole_one_called_and_replayed(
    options: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    sharded({**options, "dtype": dtype}, 2, tmp_path, "cuda")
    whole = load_file(tmp_path / "whole0.safetensors")
    for file in ("sharded0", "sharded1", "sharded0.graph", "sharded1.graph", "whole0.graph"):
        found = load_file(tmp_path / f"{file}.safetensors")
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            most = float(tensor.abs().max())
            apart = float((found[name].float() - tensor.float()).abs().max())
            print(f"{file:15} {name:12} of {most:8.4f} at most: {apart:.2e} apart")
            assert most > 1e-3, name  # a policy of zeros would always be equal
            assert apart <= TOLERANCE[dtype] * max(1.0, most), (file, name)
    weights = [int((tmp_path / f"{name}0.json").read_text()) for name in ("whole", "sharded")]
    assert weights[1] < 0.8 * weights[0]


@pytest.mark.parametrize(
    ("policy", "env", "tolerance"),
    [
        (ACT, TOGETHER, BFLOAT16),
        (MESHED, TOGETHER, 1e-5),
        (SMALL_ACT, APART, FLOAT32),
        ((*SMALL_ACT, "policy.graph=false"), TOGETHER, FLOAT32),
    ],
    ids=["graph", "eager with state", "graph over sockets", "eager"],
)
def test_a_mesh_gives_the_actions_of_one_gpu(
    policy: tuple[str, ...], env: dict[str, str], tolerance: float, tmp_path: Path
) -> None:
    recording = made_recording(tmp_path / "recording.npz", 0.2)
    settings = (*policy, *CALM, SERVED, "pipeline.windows=scheduled")
    one, drops = played(
        *(tmp_path / "one", recording, *settings, "placement.policy=cuda:0"),
        ranks=1,
        limit_s=LIMIT_S,
    )
    two, other_drops = played(
        *(tmp_path / "two", recording, *settings, *ON_GPUS), ranks=3, limit_s=LIMIT_S, env=env
    )
    assert (other_drops, two.keys()) == (drops, one.keys())
    assert len(one["actions"]) > 20
    assert one["actions"].std() > 1e-3
    assert np.abs(two["actions"] - one["actions"]).max() < tolerance


@pytest.mark.parametrize("env", [TOGETHER, APART], ids=["peer memory", "sockets"])
@JUDGED_AGAIN
def test_a_run_earns_ready_serves_and_drains(env: dict[str, str], tmp_path: Path) -> None:
    logged = env | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%p"}
    simulated = ("simulate.a_ms=1", "simulate.c_ms=0.5", "actions.lease_ms=2000")
    settings = (*ACT, *ON_GPUS, *simulated, SERVED, f"service.endpoint=unix://{tmp_path}/robots")
    with Ranks(tmp_path, *settings, world_size=3, judged=True, env=logged) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        with robot(tmp_path) as came:
            wait_until(lambda: len(came) > 20)
            run.processes[0].terminate()
            assert run.wait(20) == [0] * 3, run.output()
        report = judge(read_run(run.directory))
        assert report.verdict.name == "PASS", (report.reasons, run.output())
        assert all(audit.ok or audit.may_lack for audit in report.audits.values()), report.audits
        lines = [len([x for x in run.lines(k) if x["kind"] == "stage1"]) for k in (1, 2)]
        assert lines[0] == lines[1] > 100
    places: Any = report.as_dict()["places"]
    assert [member["rank"] for member in places[1]["members"]] == [2]
    told = "\n".join(path.read_text() for path in tmp_path.glob("nccl.*"))
    assert ("via NET/Socket" in told) == (env is APART), told[-3000:]


def test_the_vla_is_served_by_a_mesh_behind_a_part_on_rank_0_s_gpu(tmp_path: Path) -> None:
    front = ("placement.rank0=cuda:0", "placement.parts=[0, 1, 1, 1, 1]", "service.endpoint=none")
    with Ranks(tmp_path, *ON_GPUS, *front, SERVED, config=VLA_TINY, world_size=3) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        run.processes[0].terminate()
        assert run.wait(20) == [0] * 3, run.output()
        lines = [len([x for x in run.lines(k) if x["kind"] == "stage1"]) for k in (1, 2)]
        assert lines[0] == lines[1] > 100
        assert not {line.get("drop") for line in run.envelopes("bring-up")} - {None}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize(
    ("rank", "env", "graph"),
    [
        (2, TOGETHER, "true"),
        (1, TOGETHER, "true"),
        (2, APART, "true"),
        (2, TOGETHER, "false"),
        (0, TOGETHER, "true"),
    ],
    ids=["2", "1", "2 over sockets", "2 eager", "0"],
)
def test_no_rank_outlives_another_of_the_mesh(
    rank: int, env: dict[str, str], graph: str, how: int, tmp_path: Path
) -> None:
    settings = (*SMALL_ACT, *ON_GPUS, *CALM, SERVED, f"policy.graph={graph}")
    with Ranks(tmp_path, *settings, world_size=3, env=env) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        limit_s = GONE_S + SPARE_S + (0 if how == signal.SIGKILL else FROZEN_S)
        assert_no_rank_outlives(run, rank, how, limit_s)
        if rank == 2:
            assert "rank 2" in run.output().partition("--- stderr1")[0]


def faulty(fault: str, trigger: Path | str = "") -> tuple[str, ...]:
    """Settings of a mesh whose rank 2 has a fault."""
    options = f'policy.options={{{SHAPE}, fault="{fault}", trigger="{trigger}"}}'
    return MESHED[0], options, MESHED[2], *ON_GPUS, SERVED, *CALM


def test_a_member_that_stands_is_named_by_its_own_watchdog(tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    settings = (*faulty("slow", trigger), "liveness.watchdog_s=2", LONG)
    with Ranks(tmp_path / "logs", *settings, world_size=3) as run:
        assert_standing_member_is_named(run, trigger, LIMIT_S)


def test_a_rank_that_raises_alone_ends_the_run(tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    with Ranks(tmp_path / "logs", *faulty("raises", trigger), LONG, world_size=3) as run:
        run.wait_for_event("phase", LIMIT_S, phase="bring-up")
        trigger.touch()
        codes = run.wait(60)
        assert codes[0] == 22, (codes, run.output())
        assert all(code in (20, 22, -signal.SIGKILL) for code in codes[1:])
        reason = run.exits()["0"]["reason"]
        assert "rank 2 raised ValueError" in reason
        assert "but rank 1 did not within 1 s" in reason


def test_a_member_with_other_weights_is_refused_before_ready(tmp_path: Path) -> None:
    with Ranks(tmp_path, *faulty("weights"), world_size=3) as run:
        codes = run.wait(LIMIT_S)
        assert codes[0] == 10, (codes, run.output())
        assert set(codes) <= {10, 20, -signal.SIGKILL}
        reason = run.exits()["0"]["reason"]
        assert re.match(r"weights\.meshed\.shift: rank 1 has '\[1\] float32 .*, rank 2 has", reason)
        assert not [line for line in run.lines(0) if line.get("name") == "phase"]


def test_a_compiled_mesh_gives_the_same_actions(tmp_path: Path) -> None:
    recording = made_recording(tmp_path / "recording.npz", 0.2)
    policy = (MESHED[0], f"policy.options={{{SHAPE}, stateless=true}}")
    settings = (*policy, *CALM, SERVED, "pipeline.windows=scheduled")
    alone = (*settings, "placement.policy=cuda:0")
    one, _ = played(tmp_path / "one", recording, *alone, ranks=1, limit_s=LIMIT_S)
    compiled = (*settings, *ON_GPUS, "policy.compile=true")
    two, _ = played(tmp_path / "two", recording, *compiled, ranks=3, limit_s=COMPILE_LIMIT_S)
    assert np.abs(two["actions"] - one["actions"]).max() < FLOAT32
