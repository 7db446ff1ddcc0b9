"""NCCL between GPUs that share no peer memory: two processes stand in for two hosts.

``NCCL_P2P_DISABLE`` and ``NCCL_SHM_DISABLE`` leave NCCL its sockets, on loopback. A launcher that
started one rank here (``LOCAL_WORLD_SIZE``) has the ranks take each other for two hosts: the
control socket is TCP, no rank sees the other's process, and ``link.kind = "auto"`` chooses.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from ranks import JUDGED_AGAIN, Ranks
from robot_rig import wait_until

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run

CONFIG = Path(__file__).parents[2] / "stages" / "ppstream_stages" / "bench_gpus.toml"
SETTINGS = ("service.endpoint=none", "service.duration_s=none", "bringup.envelopes=200")
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
TWO_HOSTS = APART | {"LOCAL_WORLD_SIZE": "1"}
ASKED, CHOSEN = ("link.kind=nccl",), ("link.trusted_network=true",)
#: Sockets on loopback may take as long as a stage of 1 ms.
LONG_STAGES = ("policy.options.b_ms=5", "simulate.a_ms=3")
LIMIT_S = 120
GONE_S = 2.5
FROZEN_S = 2.0  # silence has a limit of its own
SPARE_S = 3.0  # of a process with CUDA, to be gone once it was told to

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
]


@pytest.mark.parametrize(
    ("link", "env", "why"),
    [
        (ASKED, APART, "asked for by link.kind, though both GPUs are in one host"),
        (CHOSEN, TWO_HOSTS, "the GPUs are in two hosts, over a network declared as trusted"),
    ],
    ids=["asked for", "two hosts"],
)
@JUDGED_AGAIN
def test_a_run_over_sockets_earns_ready_and_drains(
    link: tuple[str, ...], env: dict[str, str], why: str, tmp_path: Path
) -> None:
    logged = env | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%p"}
    settings = (*SETTINGS, *LONG_STAGES, *link)
    with Ranks(tmp_path, *settings, config=CONFIG, env=logged, judged=True) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        run.processes[0].terminate()
        assert run.wait(20) == [0, 0], run.output()
        report = judge(read_run(run.directory))
        assert report.verdict.name == "PASS", (report.reasons, run.output())
        assert all(audit.ok or audit.may_lack for audit in report.audits.values()), report.audits
        (opened,) = [line for line in run.lines(0) if line.get("name") == "link"]
        assert (opened["link"], opened["why"]) == ("nccl", why)
    told = "\n".join(path.read_text() for path in tmp_path.glob("nccl.*"))
    assert "via NET/Socket" in told, told[-3000:]
    assert "via P2P" not in told
    assert "via SHM" not in told


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("link", "env"), [(CHOSEN, TWO_HOSTS), (ASKED, APART)], ids=["two hosts", "asked for"]
)
def test_no_rank_outlives_the_other(
    link: tuple[str, ...], env: dict[str, str], rank: int, how: int, tmp_path: Path
) -> None:
    with Ranks(tmp_path, *SETTINGS, *link, config=CONFIG, env=env) as run:
        run.wait_for_event("phase", LIMIT_S, phase="ready")
        other = run.processes[1 - rank]
        os.kill(run.processes[rank].pid, how)
        limit_s = GONE_S + SPARE_S + (0 if how == signal.SIGKILL else FROZEN_S)
        wait_until(lambda: other.poll() is not None, seconds=limit_s)
        assert other.poll() == 20, run.output()


def test_two_hosts_whose_network_nobody_trusts_are_refused(tmp_path: Path) -> None:
    with Ranks(tmp_path, *SETTINGS, config=CONFIG, env=TWO_HOSTS) as run:
        assert run.wait(LIMIT_S) == [11, 11], run.output()
        assert "link.trusted_network: got false" in run.output()
