"""``ppstream.start``: a run that a Python program owns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_process import FORKING
from ranks import BRIEF
from robot_rig import wait_until

import ppstream
from ppstream.control.peer_process import HeldProcess, ranks_started_by
from ppstream.core.errors import ConfigError, PpstreamError
from ppstream_stages import simulated

pytestmark = pytest.mark.multirank

SMALL = Path(__file__).parents[1] / "support" / "small.toml"


def settings(folder: Path) -> list[str]:
    """A lease that no envelope outlives, and more of them: a busy machine leaves the gate few."""
    return [
        f"log.root={folder}",
        "service.duration_s=none",
        f"service.endpoint=unix://{folder}/r",
        "actions.lease_ms=5000",
        *BRIEF,
        "bringup.envelopes=150",
    ]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is a fork of a process that has imported torch, and so are its ranks."""
    monkeypatch.setattr("ppstream.launch.start.subprocess", FORKING)


@pytest.mark.usefixtures("forked")
def test_a_run_is_started_seen_and_stopped(tmp_path: Path) -> None:
    with ppstream.start(SMALL, policy=simulated.build, settings=settings(tmp_path)) as run:
        assert run.phase == "ready"
        assert run.verdict in ("PASS", "FAIL", "INCONCLUSIVE")
        assert run.config.policy.target == "ppstream_stages.simulated:build"
        assert run.endpoint == f"unix://{tmp_path}/r"
        assert run.report().run_id == (tmp_path / "latest").resolve().name
        with ppstream.RobotClient(
            run.endpoint,
            robot="arm",
            streams=[(stream.name, stream.dim) for stream in run.config.streams],
            actions=run.config.actions.names,
        ) as client:
            client.connect(30)
            assert client.wait_ready(30)
        assert run.stop() == 0
        assert run.phase == "stopped"
        assert "ppstream: exit 0 DRAINED SIGTERM" in run.output


@pytest.mark.usefixtures("forked")
def test_a_run_that_cannot_serve_says_why(tmp_path: Path) -> None:
    broken = "policy.options.b_ms=-1"
    with pytest.raises(PpstreamError, match=r"(?s)ended with 11 before it served:.*b_ms"):
        ppstream.start(SMALL, settings=[*settings(tmp_path), broken])


def test_a_configuration_with_problems_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pipeline.d_in: got 0"):
        ppstream.start(SMALL, settings=["pipeline.d_in=0"])
    assert list(tmp_path.iterdir()) == []


ORPHANS = """
import os, sys
import ppstream
run = ppstream.start(sys.argv[1], settings=sys.argv[2:])
print(run.directory, flush=True)
os._exit(3)
"""


def test_when_its_owner_dies_the_run_drains(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHANS, str(SMALL), *settings(tmp_path)]
    owner = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100)
    assert owner.returncode == 3
    launcher = json.loads((Path(owner.stdout.strip()) / "run.json").read_text())["launcher_pid"]
    ranks = [held for pid in ranks_started_by(launcher).values() if (held := HeldProcess.of(pid))]
    wait_until(lambda: not os.path.exists(f"/proc/{launcher}"), seconds=40)
    assert all(rank.wait_gone(10) for rank in ranks)
    for rank in ranks:
        rank.close()
    ends = (tmp_path / "latest" / "exit.json").read_text()
    assert ends.count('"code": 0') == 2, ends
