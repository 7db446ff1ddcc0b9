"""What only torchrun itself shows: its signals, its restarts, its store."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_process import ForkedProcess, run_forked
from ranks import BRIEF, CONFIG, SERIAL, UNGATED, Ranks, environment_without_ranks, free_port
from robot_rig import wait_until

LIMIT_S = 120  # of a launch on a machine that others use
pytestmark = [pytest.mark.multirank, pytest.mark.timeout(2 * LIMIT_S)]


def torchrun(
    log_root: Path, *settings: str, options: tuple[str, ...] = (), module: str = "ppstream.serve"
) -> list[str]:
    """The module that torchrun is, and its arguments; each rank runs ``module``."""
    launcher = ["forking_launcher", "torch.distributed.run"]
    launcher += ["--nproc-per-node=2", f"--master-port={free_port()}", *options]
    ranks = ["-m", module, "--config", str(CONFIG)]
    pairs = (f"log.root={log_root}", *settings)
    return [*launcher, *ranks, *(part for pair in pairs for part in ("--set", pair))]


@contextmanager
def launched(log_root: Path, command: list[str]) -> Iterator[tuple[Ranks, Callable[[], None]]]:
    """Torchrun's run, and what ends it as SIGTERM to the agent does."""
    process = ForkedProcess(command, environment_without_ranks(), log_root / "stderr")

    def stop() -> None:
        process.terminate()
        process.wait(15)

    try:
        yield Ranks.of_log(log_root, [log_root / "stderr"]), stop
    finally:
        process.kill()
        process.wait()


def test_a_chain_starts_anew_when_its_middle_rank_is_killed_and_drains(tmp_path, monkeypatch):
    settings = (
        "policy.options={parts_ms=[1, 1], horizon=4, action_dim=2}",
        "placement.parts=[1, 2]",
        "placement.policy=['cpu', 'cpu']",
        "link.kind=gloo",
        "service.duration_s=none",
        *BRIEF,
    )
    options = ("--nproc-per-node=3", "--max-restarts=1")
    found = (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1] / "support"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, found)))
    command = torchrun(tmp_path, *settings, options=options, module=UNGATED)
    with launched(tmp_path, command) as (run, stop):
        run.wait_for_event("phase", 80, phase="ready")
        about = json.loads((run.directory / "run.json").read_text())
        os.kill(about["policy_ranks"][0]["pid"], signal.SIGKILL)

        def is_ready_again() -> bool:
            return any(line.get("phase") == "ready" for line in run.lines(0, generation=1))

        wait_until(is_ready_again, seconds=80)
        began = time.monotonic()
        stop()
        assert time.monotonic() - began < 10
    assert {rank: end["code"] for rank, end in run.exits().items()} == dict.fromkeys("012", 0)
    for rank in range(3):
        assert run.lines(rank, generation=0)
        assert run.lines(rank, generation=1)


def test_refused_run_does_not_loop_under_max_restarts(tmp_path):
    command = torchrun(tmp_path, *SERIAL, options=("--max-restarts=1",))
    done = run_forked(command, LIMIT_S, environment=environment_without_ranks())
    assert done.returncode == 1  # torchrun's own: the ranks' codes stand in exit.json
    runs = [path for path in tmp_path.iterdir() if (path / "run.json").exists()]
    assert len({path.resolve() for path in runs}) == 1, done.stderr
    told = re.findall(r"exit 30 GATE_FAIL (.*)", done.stderr)
    assert sum("LOW_OVERLAP" in text for text in told) >= 1
    assert sum("earlier generation" in text for text in told) >= 1
    assert Ranks.of_log(tmp_path, []).exits()["0"]["code"] == 30
