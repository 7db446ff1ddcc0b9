"""Faults of starting and restarting: ranks that never meet, that idle, and that start anew."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench_runs import RankPair, free_port
from drill_judging import Outcome, judge_ledger, judge_robot
from drill_logs import NOTHING_SENT, imbalances
from drill_processes import MARK
from drill_scene import CONFIG, READY_LIMIT_S, Failed, Scene, started
from drill_torchrun import expect_end, launched, no_orphans, rank_pids, until

from ppstream.clock import now_ns

IDLE_PERIODS: Final = 3  # of the watchdog
WATCHDOG_S: Final = 3.0  # of the drill's configuration
HANDSHAKE_S: Final = 4.0
STOP_S: Final = 5.0
KILLED_S: Final = 2.0
BRING_UP: Final = b'"phase":"bring-up"'


@dataclass(frozen=True)
class Launch:
    """``run`` gets a folder, and fills in what was seen and how long it took. Raises Failed."""

    name: str
    ids: str
    does: str
    expected: str
    run: Callable[[Path, Outcome], None]


def ranks_differ(folder: Path, outcome: Outcome) -> None:
    """Rank 1 resolves another depth than rank 0: here, by a hook that only it has."""
    with _pair(folder, only={1: {"PPSTREAM_TEST_DIFFERS": "1"}}) as (ranks, mark):
        until("rank 0 to wait", READY_LIMIT_S, lambda: "handshake" in ranks.output())
        began = time.monotonic()
        _expect(ranks, mark, outcome, (10, 10), 15.0)
        outcome.gone_s = time.monotonic() - began
        if "test_hooks: rank 0 has [" not in ranks.output():
            raise Failed(f"no difference was shown:\n{ranks.output()}")
    outcome.seen = "both ranks ended with 10 and the difference"


def policy_rank_absent(folder: Path, outcome: Outcome) -> None:
    """Only rank 0 is there."""
    with _pair(folder, f"liveness.handshake_s={HANDSHAKE_S}") as (ranks, mark):
        ranks.processes[1].kill()
        until("rank 0 to wait", READY_LIMIT_S, lambda: "handshake" in ranks.output())
        began = time.monotonic()
        _expect(ranks, mark, outcome, (20, -9), HANDSHAKE_S + 2.0)
        outcome.gone_s = time.monotonic() - began
    outcome.seen = "rank 0 ended with 20"


def killed_in_bring_up(folder: Path, outcome: Outcome) -> None:
    """The policy rank is killed while overlap is being proven: nobody was served yet."""
    with _pair(folder, "bringup.envelopes=2000") as (ranks, mark):
        log = folder / "latest" / "rank0.gen0.jsonl"
        until("bring-up", READY_LIMIT_S, lambda: log.exists() and BRING_UP in log.read_bytes())
        ranks.processes[1].kill()
        at = time.monotonic()
        until("the end", 5.0, lambda: all(p.poll() is not None for p in ranks.processes))
        outcome.gone_s = time.monotonic() - at
        outcome.codes = tuple(process.returncode for process in ranks.processes)
        if outcome.codes != (20, -9) or outcome.gone_s > KILLED_S:
            raise Failed(f"codes {outcome.codes}:\n{ranks.output()[-1500:]}")
        judge_ledger(outcome, imbalances(ranks.directory))
        outcome.orphans = no_orphans(mark)
    outcome.seen = "rank 0 ended with 20"


def idle(folder: Path, outcome: Outcome) -> None:
    """No robot for three times the watchdog's limit; then one comes and moves, and all drain."""
    with started(folder, robot=False) as scene:
        limit_s = IDLE_PERIODS * WATCHDOG_S
        time.sleep(limit_s)
        if any(code is not None for code in scene.codes()):
            raise Failed(f"ended while idle: {scene.codes()}")
        scene.robot = scene.start_robot()
        came = time.monotonic()
        scene.wait_moving(15.0)
        outcome.moves_s = time.monotonic() - came
        stopped_ns = now_ns()
        scene.stop()
        outcome.codes = tuple(scene.codes())
        if outcome.codes != (0, 0):
            raise Failed(f"codes {outcome.codes}:\n{scene.ranks.output()[-1500:]}")
        scene.wait("the robot holds", STOP_S, lambda: scene.has_held_since(stopped_ns))
        judge_robot(scene, outcome, stopped_ns, must_hold=True)
        judge_ledger(outcome, scene.imbalance())
        scene.wait("no orphan", STOP_S, lambda: not scene.orphans() or None)
        outcome.orphans = "none"
    outcome.seen = f"nobody left in {limit_s:g} s; then a robot came and moved"


def restart(folder: Path, outcome: Outcome) -> None:
    """The policy rank is killed under torchrun --max-restarts 1, and the robot waits."""
    port = free_port()
    scene = Scene(folder)
    scene.attach(port)
    settings = (f"log.root={folder}", f"service.endpoint=tcp://127.0.0.1:{port}")
    launcher = ("--nproc-per-node=2", "--max-restarts=1")
    output = folder / "torchrun.txt"
    with scene, launched(output, launcher, settings) as (torchrun, mark):
        scene.robot = scene.start_robot()
        scene.wait_moving(READY_LIMIT_S)
        killed_ns = now_ns()
        os.kill(rank_pids(mark)[1], signal.SIGKILL)
        at = time.monotonic()
        scene.wait("the robot holds", STOP_S, lambda: scene.has_held_since(killed_ns))
        held_ns = now_ns()
        scene.wait_moving(READY_LIMIT_S, held_ns)
        outcome.moves_s = time.monotonic() - at
        torchrun.send_signal(signal.SIGTERM)
        expect_end(torchrun)
        judge_robot(scene, outcome, killed_ns, must_hold=True)
        judge_ledger(outcome, imbalances(scene.ranks.directory))
        outcome.orphans = no_orphans(mark)
        logs = sorted(path.name for path in folder.glob("latest/rank*.jsonl"))
        if len(logs) != 4:
            raise Failed(f"logs: {logs}")
    outcome.seen = "a new generation; logs split"


@contextmanager
def _pair(
    folder: Path, *settings: str, only: dict[int, dict[str, str]] | None = None
) -> Iterator[tuple[RankPair, str]]:
    """Two ranks without a robot, and their mark; ``only``: more variables of single ranks."""
    mark = secrets.token_hex(8)
    environments = {rank: {MARK: mark} | (only or {}).get(rank, {}) for rank in (0, 1)}
    settings = ("service.endpoint=none", *settings)
    with RankPair(folder, CONFIG, settings, environments=environments) as ranks:
        yield ranks, mark


def _expect(
    ranks: RankPair, mark: str, outcome: Outcome, codes: tuple[int, int], limit_s: float
) -> None:
    """Both ranks end with these codes, nothing was sent, and no process of theirs is left."""
    until("the end", limit_s, lambda: all(p.poll() is not None for p in ranks.processes))
    outcome.codes = tuple(process.returncode for process in ranks.processes)
    if outcome.codes != codes:
        raise Failed(f"codes {outcome.codes}:\n{ranks.output()[-1500:]}")
    outcome.ledger = imbalances(ranks.directory)
    if outcome.ledger != NOTHING_SENT:
        raise Failed(f"ledger: {outcome.ledger or 'envelopes were sent'}")
    outcome.orphans = no_orphans(mark)


LAUNCHES: Final = (
    Launch("ranks-differ", "F01 BT05", "one rank has a test hook", "10 in 15 s", ranks_differ),
    Launch("policy-rank-absent", "BT43", "rank 1 is not there", "20 in 6 s", policy_rank_absent),
    Launch(
        "killed-in-bring-up", "F20 BT43", "SIGKILL to rank 1, not ready", "20", killed_in_bring_up
    ),
    Launch("idle", "F43 BT31", "no robot for 3x the watchdog", "nobody ends", idle),
    Launch("restart", "BT44", "SIGKILL under --max-restarts=1", "the robot moves again", restart),
)
