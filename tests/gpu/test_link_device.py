"""Links between two GPUs: real processes, real devices; every wait ends, every byte arrives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import environment_without_ranks, free_port

END = Path(__file__).with_name("link_end.py")
LIMIT_S = 60
KILLED = -9
KINDS = ("peer", "pinned", "nccl", "nccl-net")
#: GPUs that reach each other over sockets alone, as those of two hosts.
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytestmark = pytest.mark.gpu


def run_ends(scenario: str, kind: str) -> list[tuple[int, str]]:
    """Exit code and output of both ends."""
    port = str(free_port())
    root = Path(__file__).parents[2]
    processes = []
    for rank in (0, 1):
        environment = environment_without_ranks() | (APART if kind == "nccl-net" else {})
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels"), *sys.path]),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(END), scenario, kind],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    ends = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output = "hangs: " + process.communicate()[0]
        ends.append((process.returncode, output))
    return ends


@pytest.mark.parametrize("kind", [*KINDS, "peer-put", "peer-copy"])
def test_every_message_arrives_whole_and_in_order(kind: str) -> None:
    for code, output in run_ends("exchange", kind):
        assert code == 0, output
        assert "unbatched" not in output  # torch's warnings of how NCCL's groups are used
        print(kind, output)


@pytest.mark.parametrize("kind", ["peer-put", "peer-copy", "pinned"])
def test_counters_pass_half_of_their_cycle_and_its_end(kind: str) -> None:
    for code, output in run_ends("wrap", kind):
        assert code == 0, output


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_runs_ahead_closes_and_a_further_one_opens(kind: str) -> None:
    for code, output in run_ends("reopen", kind):
        assert code == 0, output
        print(kind, output)


def test_nccl_outlasts_a_time_out_of_its_group() -> None:
    for code, output in run_ends("idle", "nccl-short"):
        assert code == 0, output
        print(output)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_for_a_silent_peer_ends_with_close(kind: str) -> None:
    for code, output in run_ends("alone", kind):
        assert code == 0, output
        print(output)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_for_a_dead_peer_ends_with_close(kind: str) -> None:
    (front, said), (back, _) = run_ends("orphan", kind)
    assert front == 0, said
    assert back == KILLED
