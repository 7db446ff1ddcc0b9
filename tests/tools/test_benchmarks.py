"""Benchmarks start, and those that need seconds run once with tiny numbers that prove nothing.

Each prints its claims and whether they follow from its numbers; whoever runs one sees it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import claims_audit
import numpy as np
import pytest
import real_runs
from bench import policy_cut
from bench.pipeline_gpu_cells import LoopCpu
from claimed_numbers import ratio, write_audited
from forked_process import forked_popen, run_forked

from ppstream.config import load
from ppstream.launch.placement import place

TOOLS: Final = Path(__file__).resolve().parents[2] / "tools"
LIMIT_S: Final = 100
#: Options of a run that takes a moment. The others need real ranks, GPUs or more seconds.
TINY: Final = {
    "dataset.py": ("--rounds", "1", "--parts", "device", "pinned", "safetensors", "mcap", "loop"),
    "log_cost.py": ("--batches", "3", "--blocks", "2", "--block", "20"),
    "metrics_cost.py": ("--blocks", "2", "--block", "20"),
    "record_cost.py": ("--seconds", "0.1"),
    "resample.py": ("--calls", "30"),
}
#: The policy of two_gpus, small, in place of GPUs.
SMALL_ON_CPUS: Final = (
    "placement.rank0=cpu",
    "placement.policy=cpu",
    'simulate={a_ms=0, c_ms=0, kind="sleep"}',
    "policy.options={steps=64, dim=270, streams=2, horizon=16, action_dim=7, width=128, "
    'encoder_blocks=1, decoder_blocks=1, dtype="float32"}',
    "bringup.envelopes=100",
    "bringup.warmup_max=20",
    "bringup.standalone=3",
    "actions.lease_ms=5000",
)
pytestmark = pytest.mark.multirank
COMMANDS: Final = sorted(
    path.name for path in (TOOLS / "bench").glob("*.py") if '"--json"' in path.read_text()
)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_starts(name: str) -> None:
    done = run_forked([str(TOOLS / "bench" / name), "--help"], LIMIT_S)
    assert (done.returncode, "--json" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_s_claims_follow_from_its_numbers(name: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [str(TOOLS / "bench" / name), *TINY[name], "--json", str(file)]
    done = run_forked(command, LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert claims_audit.main([str(file), "--quiet"]) == 0


@pytest.mark.parametrize("size", policy_cut.MESH_SIZES)
@pytest.mark.parametrize("name", policy_cut.MESHED)
def test_a_policy_whole_and_its_meshes_differ_in_the_ranks_of_the_mesh_alone(
    name: str, size: int
) -> None:
    settings = (*policy_cut.MESHED[name], *policy_cut.on_gpus(size), f"placement.mesh={size}")
    config = load.read(name, settings)
    assert (config.placement.ranks, config.placement.leaders) == (1 + size, 1)
    assert len(set(config.placement.policy)) == size
    placed = place(config, 1 + size, 1 + size)
    assert (placed.link, placed.ranks[0].device) == ("host", "cpu")


def test_a_mesh_is_measured_on_two_gpus_at_least() -> None:
    done = run_forked([str(TOOLS / "bench/policy_cut.py"), "--mesh", "--gpus", "1"], LIMIT_S)
    assert done.returncode == 1
    assert done.stdout in ("needs two GPUs, got 0\n", "needs two GPUs, got 1\n"), done.stderr


def test_a_mesh_is_brought_up_and_serves_a_robot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def served(command: Sequence[str], **options: Any) -> Any:
        """Whatever the verdict is."""
        words = ["ungated" if word == "ppstream.serve" else word for word in command]
        return forked_popen(words, **options)

    starts = SimpleNamespace(Popen=served, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(real_runs, "subprocess", starts)
    monkeypatch.setattr(policy_cut, "SETTLE_S", 0.2)
    found = policy_cut.measure_mesh("two_gpus", SMALL_ON_CPUS, 2, 0.0)  # until a chunk has come
    assert found.ranks == 2
    assert found.b_ms > found.rank0_ms > 0
    assert min(found.period_ms, found.age_ms) > found.rank0_ms
    assert found.hz > 1 / policy_cut.CHUNK_S
    assert found.memory_gib == []  # no GPU
    policy_cut.print_mesh(found, found._replace(ranks=1, b_ms=2 * found.b_ms))
    assert "two_gpus, mesh of 2" in (said := capsys.readouterr().out)
    assert "2.00 x as fast as whole" in said
    long = found._replace(rank0_ms=8.0, b_ms=10.0, period_ms=11.0)
    assert [target.reached for target in policy_cut.mesh_targets([long])] == [pytest.approx(1.1)]


def test_a_robot_that_gets_no_chunk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SETTLE_S", "CHUNK_S"):
        monkeypatch.setattr(policy_cut, name, 0.0)
    robot = policy_cut.CameraRobot(f"unix://{tmp_path}/nobody", "two_gpus")
    with (
        robot.client,
        pytest.raises(SystemExit, match=r"no chunk came within 0\.. s, want at least"),
    ):
        robot.measure(0.0)


def test_cubics_predict_a_smooth_recording_better_than_lines(tmp_path: Path) -> None:
    table = np.zeros((3000, 42))
    table[:, 0] = 1_700_000_000_000_000_000 + np.arange(3000) * 1_000_000
    table[:, 1:] = np.sin(table[:, :1] / 2e8 + np.arange(41)) + np.arange(3000)[:, None] * 1e-3
    np.save(tmp_path / "arm.npy", table)
    found = tmp_path / "found.json"
    command = [str(TOOLS / "bench/resample_recording.py"), str(tmp_path / "arm.npy")]
    done = run_forked([*command, "--rounds", "1", "--json", str(found)], LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert claims_audit.main([str(found), "--quiet"]) == 0
    rows = json.loads(found.read_text())["rows"]
    assert len(rows) == 9
    assert all(row["rms_over_linear"] < 0.5 for row in rows)


def test_a_claim_that_does_not_follow_is_said_aloud_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    claims = [ratio("right", 6.0, 3.0, 2.0), ratio("wrong", 6.0, 3.0, 1.5)]
    write_audited(file, {"rows": [1]}, claims)
    said = capsys.readouterr().out
    assert "claims: 1 of 2 follow" in said
    assert "BROKEN" in said
    assert json.loads(file.read_text())["rows"] == [1]
    assert claims_audit.main([str(file), "--quiet"]) == 1


def test_calls_of_a_cell_s_loop_are_timed_and_answer_as_before() -> None:
    executor = SimpleNamespace(begin=lambda flight: None, wait=lambda *, worked: worked)
    loop_cpu = LoopCpu(executor, is_parted=True)
    assert [executor.wait(worked=worked) for worked in (True, False)] == [True, False]
    executor.begin(1)
    found = loop_cpu.stop(2, 10**9)
    assert found["waits"] == 1.0
    assert found["launch"] > 0
