"""A rank that was stopped before it served is found among the launcher's processes, and ended.

This process is the launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multirank.ranks import CONFIG as SMALL
from multirank.ranks import Ranks, free_port
from robot_rig import wait_until

from ppstream import stopped_sibling
from ppstream.ends import RankEnd
from ppstream.errors import ExitCode

RUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.fixture
def sibling(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1; this process stands for its launcher, and for rank 0."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, env=os.environ | {"RANK": "1"}) as child:
        yield child
        child.kill()


@pytest.mark.parametrize(
    ("rank", "other"),
    [(1, {}), (0, {}), (1, {"MASTER_PORT": "4712"}), (1, {"TORCHELASTIC_RESTART_COUNT": "1"})],
)
def test_a_rank_is_found_by_what_its_launcher_gave_it(
    sibling: subprocess.Popen[bytes], rank: int, other: dict[str, str]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = stopped_sibling.find(rank, os.getpid(), RUN | other)
    assert (found is not None and found.pid == sibling.pid) == (rank == 1 and not other)
    if found is not None:
        found.close()
    assert len(os.listdir("/proc/self/fd")) == before


class End(RankEnd):
    """Rank 0's, which does not end this process."""

    def __init__(self) -> None:
        super().__init__(0)
        self.left = threading.Event()
        self.reason = ""

    def leave(self, code: ExitCode, reason: str) -> Any:
        assert code is ExitCode.PEER_LOST
        self.reason = reason
        self.left.set()


def test_a_stopped_one_is_ended_and_the_reason_says_so(sibling: subprocess.Popen[bytes]) -> None:
    end = End()
    with stopped_sibling.watched(end, 200):
        assert not end.left.wait(0.6)  # it runs: however long it takes
        sibling.send_signal(signal.SIGSTOP)
        assert end.left.wait(5)
    assert sibling.wait(5) == -signal.SIGKILL
    assert end.reason == (
        f"rank 1 was stopped before it served; its process {sibling.pid} (state T) was ended"
    )


def test_short_stops_do_not_add_up(sibling: subprocess.Popen[bytes]) -> None:
    end = End()
    with stopped_sibling.watched(end, 1000):
        for _ in range(4):
            sibling.send_signal(signal.SIGSTOP)
            assert not end.left.wait(0.4)
            sibling.send_signal(signal.SIGCONT)
            assert not end.left.wait(0.3)
    assert sibling.poll() is None


def test_whoever_has_served_is_not_concerned(sibling: subprocess.Popen[bytes]) -> None:
    end = End()
    with stopped_sibling.watched(end, 200):
        pass
    sibling.send_signal(signal.SIGSTOP)
    assert not end.left.wait(0.6)
    assert sibling.poll() is None


def test_the_watch_lasts_until_the_run_is_warm(sibling: subprocess.Popen[bytes]) -> None:
    end = End()
    with stopped_sibling.watched(end, 200) as tell:
        tell("warming")
        tell("bring-up")
        tell("ready")
        sibling.send_signal(signal.SIGSTOP)
        assert not end.left.wait(0.6)
    with stopped_sibling.watched(end, 200) as tell:
        tell("warming")
        assert end.left.wait(5)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_stopped_while_warming_is_ended_by_the_other(tmp_path: Path, stopped: int) -> None:
    slow = ("policy.options.b_ms=400", f"log.root={tmp_path}", "liveness.frozen_ms=1000")
    settings = [part for setting in slow for part in ("--set", setting)]
    command = [sys.executable, "-m", "ppstream.serve", "--config", str(SMALL), *settings]
    port, size = str(free_port()), "2"
    errors = [tmp_path / f"stderr{rank}" for rank in range(2)]
    ranks = []
    for rank, error in enumerate(errors):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        mine |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        with error.open("w") as file:
            ranks.append(subprocess.Popen(command, env=os.environ | mine, stderr=file))
    try:
        log = Ranks.of_log(tmp_path, errors)
        wait_until(lambda: (tmp_path / "latest").exists(), seconds=40)
        log.wait_for_event("phase", phase="warming")
        ranks[stopped].send_signal(signal.SIGSTOP)
        assert ranks[1 - stopped].wait(10) == 20, log.output()
        assert ranks[stopped].wait(1) == -signal.SIGKILL
        assert f"rank {stopped} was stopped before it served" in log.output()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
