"""Starts the ranks of a run directly, with the environment that torchrun would set (it is slow)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest
from forked_process import ForkedProcess
from real_runs import free_port as free_port
from robot_rig import wait_until

from ppstream.observe.run_folder import EventLog

CONFIG = Path(__file__).with_name("small.toml")
END_LIMIT_S = 100
#: Whoever does not ask for a verdict is served whatever it is: a busy machine may have no overlap,
#: take for ever to be warm, and stop a rank for longer than the audits bear.
SERVE, UNGATED = "ppstream.serve", "ungated"
SERVED: Final = "bringup.accept=['NOTHING_TO_HIDE', 'LOW_OVERLAP', 'CONTENDED']"
#: Nor are its times measured: as few envelopes as there may be.
BRIEF: Final = ("bringup.envelopes=100", "bringup.standalone=3", "bringup.warmup_max=20")
#: One credit and no stage C: nothing overlaps, however busy the machine is.
SERIAL: Final = ("pipeline.d_in=1", "simulate.a_ms=5", "simulate.c_ms=0", "policy.options.b_ms=6")
#: Whoever does may be refused on a busy machine, rightly: so again.
JUDGED_AGAIN = pytest.mark.flaky(reruns=2, reruns_delay=10, only_rerun=["LOW_OVERLAP", "CONTENDED"])
#: What a loss is noticed by, whenever a busy machine has a rank look: all else takes longer than a
#: test waits.
NOTICED_BY = {
    signal.SIGKILL: ("liveness.frozen_ms=150000", "liveness.watchdog_s=200"),  # its end
    signal.SIGSTOP: ("liveness.watchdog_s=200",),  # its silence
}
RANK_KEYS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_without_ranks() -> dict[str, str]:
    """This process's environment, for a launcher that sets the ranks' part itself."""
    return {key: value for key, value in os.environ.items() if key not in RANK_KEYS}


def placed(*where: int) -> tuple[str, ...]:
    """Settings that run each part on the rank given for it, all on the CPU."""
    devices = ", ".join(['"cpu"'] * max(where))
    return f"placement.policy=[{devices}]", f"placement.parts={list(where)}"


class Ranks:
    """``world_size`` ranks of one run; use as a context manager: none outlives it.

    ``overrides`` is ``--set`` for every rank; ``only`` maps a rank to overrides of its own. With
    ``judged`` the gate refuses what does not overlap, as it does by default elsewhere; without it
    lets everything pass. Each rank runs ``module``, if that is given.
    """

    def __init__(
        self,
        log_root: Path,
        *overrides: str,
        world_size: int = 2,
        only: dict[int, tuple[str, ...]] | None = None,
        env: dict[str, str] | None = None,
        config: Path = CONFIG,
        judged: bool = False,
        module: str | None = None,
    ) -> None:
        log_root.mkdir(parents=True, exist_ok=True)
        self.log_root = log_root
        self.errors = [log_root / f"stderr{rank}" for rank in range(world_size)]
        port = str(free_port())
        self.processes = []
        for rank in range(world_size):
            mine = (*overrides, *(only or {}).get(rank, ()))
            program = module or (SERVE if judged else UNGATED)
            lenient = () if judged else (SERVED, *(() if program == SERVE else BRIEF))
            settings = [f"log.root={log_root}", *lenient, *mine]
            command = [program, "--config", str(config)]
            command += [part for setting in settings for part in ("--set", setting)]
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            self.errors[rank].touch()
            self.processes.append(ForkedProcess(command, environment, self.errors[rank]))

    @classmethod
    def of_log(cls, log_root: Path, errors: list[Path]) -> Ranks:
        """Reads the run of ranks that somebody else started."""
        ranks = cls.__new__(cls)
        ranks.log_root, ranks.errors, ranks.processes = log_root, errors, []
        return ranks

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def wait(self, limit_s: float = END_LIMIT_S) -> list[int]:
        """Exit codes of all ranks; fails the test with their output when one does not end."""
        deadline = time.monotonic() + limit_s
        try:
            return [
                process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes
            ]
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"a rank did not end within {limit_s} s:\n{self.output()}"
            ) from None

    def gateway_address(self, wire: str) -> str:
        """Where the gateway of ``wire`` listens, once the run is ready."""
        listens = re.compile(rf"clients of {wire} connect to (\S+)")
        self.wait_for_event("phase", phase="ready")
        wait_until(lambda: listens.search(self.output()), seconds=END_LIMIT_S)
        found = listens.search(self.output())
        assert found is not None
        return found[1]

    def wait_for_event(self, name: str, limit_s: float = END_LIMIT_S, **fields: object) -> dict:
        """The first event of that name (and fields) in rank 0's log, as soon as it is there."""
        deadline = time.monotonic() + limit_s
        logs: dict[Path, EventLog] = {}
        while time.monotonic() < deadline:
            has_ended = bool(self.processes) and self.processes[0].poll() is not None
            if (path := self.directory / "rank0.gen0.jsonl").exists():
                for event in logs.setdefault(path, EventLog(path)).read():
                    if event["name"] == name and fields.items() <= event.items():
                        return event
            if has_ended:  # before its whole log was looked through
                break
            time.sleep(0.05)
        raise AssertionError(f"no event {name} {fields} came:\n{self.output()}")

    @property
    def directory(self) -> Path:
        return (self.log_root / "latest").resolve()

    def lines(self, rank: int, generation: int = 0) -> list[dict]:
        """Complete lines of one rank's log so far."""
        path = self.directory / f"rank{rank}.gen{generation}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]

    def envelopes(self, phase: str) -> list[dict]:
        return [
            line for line in self.lines(0) if line["kind"] == "envelope" and line["phase"] == phase
        ]

    def pid_of(self, policy_rank: int) -> int:
        """The process that runs it: of a replica that may be lost not the one that was started."""
        told = json.loads((self.directory / "run.json").read_text())
        return int(told["policy_ranks"][policy_rank - 1]["pid"])

    def exits(self) -> dict[str, dict]:
        return json.loads((self.directory / "exit.json").read_text())

    def output(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self.errors)


def assert_no_rank_outlives(ranks: Ranks, rank: int, how: int, seconds: float = 60.0) -> None:
    """Signal ``rank`` with ``how``: it is lost, and within ``seconds`` all others have ended so."""
    ends = [other for other in ranks.processes if other is not ranks.processes[rank]]
    os.kill(ranks.processes[rank].pid, how)
    wait_until(
        lambda: all(other.poll() is not None for other in ends),
        seconds=seconds,
        found=lambda: f"{[process.poll() for process in ranks.processes]}\n{ranks.output()}",
    )
    codes = {process.poll() for process in ends}
    assert codes <= {20, -signal.SIGKILL}, (codes, ranks.output())
    assert 20 in codes


def assert_standing_member_is_named(ranks: Ranks, trigger: Path, limit_s: float) -> None:
    """Rank 2 of a mesh of ``mesh_policy`` stands from ``trigger`` on: its own watchdog says so."""
    ranks.wait_for_event("phase", limit_s, phase="bring-up")
    trigger.touch()
    codes = ranks.wait(60)
    assert codes[2] == 21, (codes, ranks.output())
    assert set(codes[:2]) <= {20, 21, -signal.SIGKILL}
    reason = ranks.exits()["2"]["reason"]
    assert reason.startswith("stage B on rank 2 made no progress")
    assert "mesh_policy.py" in reason
