"""The product on two GPUs: real ranks earn *ready*, drain when told, and end when one dies."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from multirank.ranks import Ranks

from ppstream.overlap import judge
from ppstream.runlog import read_run

CONFIG = Path(__file__).parents[2] / "stages" / "ppstream_stages" / "bench_gpus.toml"
SETTINGS = ("service.endpoint=none", "service.duration_s=30", "bringup.envelopes=200")
DEATH_LIMIT_S = 4.0
PEER_LOST = 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]


def test_a_run_on_two_gpus_earns_ready_and_drains_when_told(tmp_path: Path) -> None:
    with Ranks(tmp_path, *SETTINGS, config=CONFIG) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        for process in ranks.processes:  # as torchrun signals: all at once
            process.send_signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()
        report = judge(read_run(ranks.directory))
        assert report.verdict.name == "PASS", (report.reasons, ranks.output())
        assert all(audit.ok for audit in report.audits.values()), report.audits
        assert report.window.topology.device_stamped
        surprises = [
            abs(line["surprise_ns"]) for line in ranks.lines(0) if line.get("name") == "clock"
        ]
        assert max(surprises, default=0) < 50_000  # how far the mapping was off after a second


def test_a_dead_policy_rank_ends_rank_0_whose_streams_wait_for_it(tmp_path: Path) -> None:
    with Ranks(tmp_path, *SETTINGS, config=CONFIG) as ranks:
        ranks.wait_for_event("phase", phase="bring-up")
        time.sleep(0.05)
        ranks.processes[1].kill()
        killed = time.monotonic()
        code = ranks.processes[0].wait(20)
        took_s = time.monotonic() - killed
        assert code == PEER_LOST, ranks.output()
        assert took_s < DEATH_LIMIT_S


@pytest.mark.parametrize("link", ["pinned", "nccl"])
def test_the_other_links_earn_ready_too(tmp_path: Path, link: str) -> None:
    with Ranks(tmp_path, *SETTINGS, f"link.kind={link}", config=CONFIG) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()
