"""A policy cut over GPUs: the twin's actions over every link, and no rank outlives another.

Ranks of longer chains share the GPUs that there are: their order is tested, not their speed, and no
gate judges their time slices. NCCL takes one rank for each GPU.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks, assert_no_rank_outlives
from recorded_runs import played
from recording_files import made_recording, write_late_recording

from ppstream.recording.repeated_actions import compare_actions

GPUS = torch.cuda.device_count()
SHAPE = "steps=8, dim=5, horizon=4, action_dim=2"
PARTS = (
    "policy.target=policy_in_parts:build",
    "link.wait=driver",
    "simulate.a_ms=0",
    "simulate.c_ms=0",
)
SERVED = "service.duration_s=none"
LONG = "bringup.envelopes=300"
LIMIT_S = 120
GONE_S = 2.5
FROZEN_S = 2.0  # silence has a limit of its own
SPARE_S = 3.0  # of a process with CUDA, to be gone once it was told to
TOLERANCE = 1e-5  # windows are resampled on a GPU, sums have another order

if GPUS < 1:
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]
NCCL = "NCCL takes one rank for each GPU"


def placed(devices: str, *where: int) -> tuple[str, ...]:
    """``devices`` of all ranks: a digit is a GPU, c the CPU; their numbers wrap."""
    names = ["cpu" if one == "c" else f"cuda:{int(one) % max(1, GPUS)}" for one in devices]
    policy = ", ".join(f'"{name}"' for name in names[1:])
    return (
        f"placement.rank0={names[0]}",
        f"placement.policy=[{policy}]",
        f"placement.parts={list(where)}",
    )


def actions_of(
    root: Path, recording: Path, *settings: str, ranks: int
) -> tuple[dict[str, np.ndarray], list[str | None]]:
    """Actions by name, and why each envelope of the recording gave none."""
    options = f"policy.options={{{SHAPE}}}"
    asked = (*PARTS, SERVED, options, "pipeline.windows=scheduled", *settings)
    return played(root, recording, *asked, ranks=ranks, limit_s=LIMIT_S, module="ungated")


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    recording = made_recording(folder / "recording.npz")
    return recording, actions_of(folder / "inline", recording, *placed("c0", 1, 1, 1), ranks=1)


CUTS = [
    ("01", (0, 1, 1), "peer"),
    ("01", (0, 0, 1), "pinned"),
    pytest.param(
        *("01", (0, 1, 1), "nccl"), marks=pytest.mark.skipif(GPUS < 2, reason=f"two GPUs: {NCCL}")
    ),
    ("012", (0, 1, 2), "peer"),
    ("012", (1, 1, 2), "peer"),
    ("012", (0, 1, 2), "pinned"),
    ("0123", (1, 2, 3), "peer"),
    ("0123", (1, 2, 3), "pinned"),
    ("c01", (0, 1, 2), "host"),
    ("0c1", (0, 1, 2), "host"),
]


@pytest.mark.parametrize(("devices", "where", "link"), CUTS, ids=str)
def test_parts_give_the_twin_s_actions_wherever_they_run(devices, where, link, twin, tmp_path):
    recording, (expected, drops) = twin
    actions, found = actions_of(
        tmp_path, recording, *placed(devices, *where), f"link.kind={link}", ranks=len(devices)
    )
    assert found == drops
    assert actions.keys() == expected.keys()
    for name, array in actions.items():
        np.testing.assert_allclose(array, expected[name], atol=TOLERANCE, err_msg=name)
    assert len(actions["actions"]) > 20


BY_KERNELS = ("link.kind=peer", "link.wait=kernel")


@pytest.mark.parametrize("stamps", ["auto", "events"])
@pytest.mark.parametrize("where", [(1, 1, 1), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_kernels_that_wait_and_stamp_give_the_twin_s_actions(stamps, where, depth, twin, tmp_path):
    recording, (expected, drops) = twin
    settings = (*placed("01", *where), *BY_KERNELS, f"link.stamps={stamps}")
    settings = (*settings, f"pipeline.d_in={depth}", f"pipeline.d_out={depth}")
    actions, found = actions_of(tmp_path, recording, *settings, ranks=2)
    assert found == drops
    np.testing.assert_allclose(actions["actions"], expected["actions"], atol=TOLERANCE)
    files = tmp_path.rglob("rank*.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    told = [line["stamps"] for line in lines if line.get("name") == "link"]
    assert told == ["device" if stamps == "auto" else "events"] * 2


ALL_DIMS = (  # actions of every value that a window has
    "actions.names=['a', 'b', 'c', 'd', 'e']",
    f"actions.low={[-1.0] * 5}",
    f"actions.high={[1.0] * 5}",
    f"policy.options={{{SHAPE.replace('action_dim=2', 'action_dim=5')}}}",
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_recorded_on_gpus_gives_its_actions_again_bit_for_bit(ranks, tmp_path):
    """Its policy adds up what it reads: one window more, fewer or of other samples would show.

    One stream comes late: samples that a window would use come while its envelope is under way.
    """
    pytest.importorskip("mcap")
    made, run, same = (
        tmp_path / "made.mcap",
        tmp_path / "run.mcap",
        (*placed("01", 1, 1, 1), *ALL_DIMS),
    )
    write_late_recording(made)
    live = ("pipeline.windows=live", "simulate.c_ms=6", f"record.file={run}")
    _, drops = actions_of(tmp_path / "live", made, *live, *same, ranks=ranks)
    actions_of(tmp_path / "again", run, *same, ranks=1)
    found = compare_actions(run, tmp_path / "again" / "actions.npz")
    assert found.is_whole, found.text
    assert found.chunks == len([drop for drop in drops if drop is None]) > 100


@pytest.mark.skipif(GPUS < 3, reason=f"three GPUs: {NCCL}")
def test_nccl_carries_every_hop_of_a_chain(twin, tmp_path):
    recording, (expected, _) = twin
    settings = (*placed("012", 0, 1, 2), "link.kind=nccl")
    actions, _ = actions_of(tmp_path, recording, *settings, ranks=3)
    np.testing.assert_allclose(actions["actions"], expected["actions"], atol=TOLERANCE)


CHAIN = placed("012", 0, 1, 2)
STAMPED = (*placed("01", 1, 1, 1), *BY_KERNELS)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize(
    ("placement", "rank"),
    [*((CHAIN, rank) for rank in range(3)), *((STAMPED, rank) for rank in range(2))],
    ids=["chain-0", "chain-1", "chain-2", "stamped-0", "stamped-1"],
)
def test_no_rank_outlives_another(placement, rank, how, tmp_path):
    options = f"policy.options={{{SHAPE}}}"
    settings = (*PARTS, SERVED, options, *placement, "log.keep=1")
    with Ranks(tmp_path, *settings, world_size=3 if placement is CHAIN else 2) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        limit_s = GONE_S + SPARE_S + (0 if how == signal.SIGKILL else FROZEN_S)
        assert_no_rank_outlives(run, rank, how, limit_s)


def test_ranks_by_stamps_drain_when_they_are_asked_to(tmp_path):
    options = f"policy.options={{{SHAPE}}}"
    with Ranks(tmp_path, *PARTS, SERVED, options, *STAMPED, LONG) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        run.processes[0].terminate()
        assert run.wait(20) == [0] * 2, run.output()
        sent = [line for line in run.lines(0) if line["kind"] == "envelope"]
        answered = [line for line in run.lines(1) if line["kind"] == "stage1"]
        assert len(answered) >= len(sent) > 100


def test_a_chain_drains_when_it_is_asked_to(tmp_path):
    options = f"policy.options={{{SHAPE}}}"
    settings = (*PARTS, SERVED, options, *CHAIN, LONG)
    with Ranks(tmp_path, *settings, world_size=3) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        run.processes[0].terminate()
        assert run.wait(20) == [0] * 3, run.output()
        lines = [len([x for x in run.lines(k) if x["kind"] == "stage1"]) for k in (1, 2)]
        assert lines[0] == lines[1] > 100
