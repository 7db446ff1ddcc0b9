"""Faults of starting and restarting: ranks that never meet, that idle, and that start anew.

And of what they stand on: the launcher, the run's folder, the time that a start takes.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drill.judging import FaultOutcome, judge_ledger, judge_robot
from drill.live_logs import NOTHING_SENT, imbalances
from drill.processes import MARK, marked
from drill.scene import CONFIG, READY_LIMIT_S, Failed, Scene, started
from drill.torchrun import expect_end, launched, no_orphans, rank_pids, until
from real_runs import RankPair, free_port

from ppstream.control.peer_process import ranks_started_by
from ppstream.core.clock import now_ns
from ppstream.launch.lookout import LAUNCHER_LOST
from ppstream.observe.run_folder import Run

IDLE_PERIODS: Final = 3  # of the watchdog
WATCHDOG_S: Final = 3.0  # of the drill's configuration
HANDSHAKE_S: Final = 4.0
STOP_S: Final = 5.0
KILLED_S: Final = 2.0
BEREFT_S: Final = 2.5  # ranks whose launcher was killed
LEASE_S: Final = 0.3  # of the drill's configuration
FULL_BYTES: Final = 40_000  # of a log: more than run.json, which can still be written
STANDS_S: Final = 90.0  # longer than all heartbeats that a socket holds take
LAUNCHER: Final = ("--nproc-per-node=2",)
STANDING: Final = (
    "policy.target=drill.standing_policy:build",
    "policy.options.inner=drill.policy:build",
)
WARMING, BRING_UP, READY = (
    f'"phase":"{phase}"'.encode() for phase in ("warming", "bring-up", "ready")
)


@dataclass(frozen=True)
class LaunchDrill:
    """``run`` gets a folder, and fills in what was seen and how long it took. Raises Failed."""

    name: str
    ids: str
    does: str
    expected: str
    run: Callable[[Path, FaultOutcome], None]


def ranks_differ(folder: Path, outcome: FaultOutcome) -> None:
    """Rank 1 resolves another depth than rank 0: here, by a hook that only it has."""
    with _pair(folder, only={1: {"PPSTREAM_TEST_DIFFERS": "1"}}) as (ranks, mark):
        until("rank 0 to wait", READY_LIMIT_S, lambda: "handshake" in ranks.output())
        began = time.monotonic()
        _expect(ranks, mark, outcome, (10, 10), 15.0)
        outcome.gone_s = time.monotonic() - began
        if "test_hooks: rank 0 has [" not in ranks.output():
            raise Failed(f"no difference was shown:\n{ranks.output()}")
    outcome.seen = "both ranks ended with 10 and the difference"


def policy_rank_absent(folder: Path, outcome: FaultOutcome) -> None:
    """Only rank 0 is there."""
    with _pair(folder, f"liveness.handshake_s={HANDSHAKE_S}") as (ranks, mark):
        ranks.processes[1].kill()
        until("rank 0 to wait", READY_LIMIT_S, lambda: "handshake" in ranks.output())
        began = time.monotonic()
        _expect(ranks, mark, outcome, (20, -9), HANDSHAKE_S + 2.0)
        outcome.gone_s = time.monotonic() - began
    outcome.seen = "rank 0 ended with 20"


def killed_in_bring_up(folder: Path, outcome: FaultOutcome) -> None:
    """The policy rank is killed while overlap is being proven: nobody was served yet."""
    with _pair(folder, "bringup.envelopes=2000") as (ranks, mark):
        log = folder / "latest" / "rank0.gen0.jsonl"
        until("bring-up", READY_LIMIT_S, lambda: log.exists() and BRING_UP in log.read_bytes())
        ranks.processes[1].kill()
        at = time.monotonic()
        until("the end", 5.0, lambda: _are_gone(ranks))
        outcome.gone_s = time.monotonic() - at
        outcome.codes = tuple(process.returncode for process in ranks.processes)
        if outcome.codes != (20, -9) or outcome.gone_s > KILLED_S:
            raise Failed(f"codes {outcome.codes}:\n{ranks.output()[-1500:]}")
        judge_ledger(outcome, imbalances(ranks.directory))
        outcome.orphans = no_orphans(mark)
    outcome.seen = "rank 0 ended with 20"


def disk_full_in_bring_up(folder: Path, outcome: FaultOutcome) -> None:
    """The log of one rank, then of the other, takes no byte more while overlap is being proven."""
    for rank in (0, 1):
        (own := folder / str(rank)).mkdir()
        log = own / "latest" / f"rank{rank}.gen0.jsonl"
        with _pair(own, "bringup.envelopes=1000") as (ranks, mark):
            until("bring-up", READY_LIMIT_S, lambda log=log: _is_long(log))
            limits = log.stat().st_size, resource.RLIM_INFINITY
            resource.prlimit(ranks.processes[rank].pid, resource.RLIMIT_FSIZE, limits)
            until("the end", READY_LIMIT_S, lambda ranks=ranks: _are_gone(ranks))
            outcome.codes = tuple(process.returncode for process in ranks.processes)
            says = f"log.root: cannot write to {log.resolve()}: File too large"
            if outcome.codes != (11, 11) or says not in ranks.output():
                raise Failed(f"codes {outcome.codes}:\n{ranks.output()[-1500:]}")
            outcome.orphans = no_orphans(mark)
    outcome.seen = "11 at the gate, file and reason named, of each rank's log"


def _are_gone(ranks: RankPair) -> bool:
    return all(process.poll() is not None for process in ranks.processes)


def _is_long(log: Path) -> bool:
    return log.exists() and log.stat().st_size > FULL_BYTES and BRING_UP in log.read_bytes()


def policy_never_wrote(folder: Path, outcome: FaultOutcome) -> None:
    """No call of the policy writes its actions: found while warming, and said what to do."""
    orders = folder / "orders"
    orders.write_text("nothing 1000000")
    with _pair(folder, f"policy.options.orders={orders}") as (ranks, mark):
        until("the end", READY_LIMIT_S, lambda: _are_gone(ranks))
        outcome.codes = tuple(process.returncode for process in ranks.processes)
        output = ranks.output()
        if outcome.codes != (26, 20) or "write out['actions'].copy_(x)" not in output:
            raise Failed(f"codes {outcome.codes}:\n{output[-1500:]}")
        if BRING_UP in (ranks.directory / "rank0.gen0.jsonl").read_bytes():
            raise Failed("it was warm, though it never wrote")
        judge_ledger(outcome, imbalances(ranks.directory))
        outcome.orphans = no_orphans(mark)
    outcome.seen = "26 while warming, and how to write"


def idle(folder: Path, outcome: FaultOutcome) -> None:
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


def restart(folder: Path, outcome: FaultOutcome) -> None:
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


def launcher_killed(folder: Path, outcome: FaultOutcome) -> None:
    """SIGKILL to torchrun while a robot moves: nobody is left who could stop this run."""
    port = free_port()
    scene = Scene(folder)
    scene.attach(port)
    settings = (f"log.root={folder}", f"service.endpoint=tcp://127.0.0.1:{port}")
    with scene, launched(folder / "torchrun.txt", LAUNCHER, settings) as (torchrun, mark):
        scene.robot = scene.start_robot()
        scene.wait_moving(READY_LIMIT_S)
        killed_ns = now_ns()
        _expect_bereft(folder, torchrun, mark, outcome)
        scene.wait("the robot holds", STOP_S, lambda: scene.has_held_since(killed_ns))
        judge_robot(scene, outcome, killed_ns, must_hold=True)
        moved = [tick.at_ns for tick in scene.ticks(killed_ns) if tick.moved]
        if moved and moved[-1] - killed_ns > (BEREFT_S + LEASE_S) * 1e9:
            raise Failed(f"the robot moved {(moved[-1] - killed_ns) / 1e9:.1f} s later")
        judge_ledger(outcome, imbalances(folder / "latest"))
        outcome.orphans = no_orphans(mark)


def launcher_killed_while_warming(folder: Path, outcome: FaultOutcome) -> None:
    """The same before the run is ready: it never becomes so."""
    settings = (f"log.root={folder}", "service.endpoint=none", "policy.options.b_ms=50")
    warm = (*settings, "bringup.warmup_max=2000")
    with launched(folder / "torchrun.txt", LAUNCHER, warm) as (torchrun, mark):
        log = folder / "latest" / "rank0.gen0.jsonl"
        until("warming", READY_LIMIT_S, lambda: log.exists() and WARMING in log.read_bytes())
        _expect_bereft(folder, torchrun, mark, outcome)
        if READY in log.read_bytes():
            raise Failed("it became ready")
        outcome.orphans = no_orphans(mark)
        judge_ledger(outcome, imbalances(folder / "latest"))


def _expect_bereft(folder: Path, torchrun: Any, mark: str, outcome: FaultOutcome) -> None:
    """Kill the launcher: both ranks leave in time, with 20, and say why."""
    torchrun.kill()
    at = time.monotonic()
    until("the ranks left", STOP_S, lambda: not rank_pids(mark))
    outcome.gone_s = time.monotonic() - at
    ends = json.loads((folder / "latest" / "exit.json").read_text())
    outcome.codes = tuple(ends[rank]["code"] for rank in ("0", "1"))
    outcome.seen = ends["0"]["reason"]
    if outcome.codes != (20, 20):
        raise Failed(f"codes {outcome.codes}")
    if not all(end["reason"].startswith(LAUNCHER_LOST) for end in ends.values()):
        raise Failed(f"said {ends}")
    if outcome.gone_s > BEREFT_S:
        raise Failed(f"gone after {outcome.gone_s:.1f} s, limit {BEREFT_S:g} s")


def folder_deleted_and_decoder_stuck(folder: Path, outcome: FaultOutcome) -> None:
    """The run's folder is deleted, then stage C never ends: the way out has nowhere to write."""
    orders = folder / "decode"
    decoder = ("decode.target=drill.policy:build_decoder", f"decode.options.orders={orders}")
    with started(folder, decoder) as scene:
        shutil.rmtree(scene.ranks.directory)
        at, at_ns = time.monotonic(), now_ns()
        orders.touch()
        scene.wait("the end", 2 * STOP_S, lambda: None not in scene.codes() or None)
        outcome.gone_s = time.monotonic() - at
        outcome.codes = tuple(scene.codes())
        output = scene.ranks.output()
        wanted = ("rank 0: the end is not recorded", "ppstream: exit 21 WATCHDOG rank 0's loop")
        if outcome.codes != (21, 20) or any(text not in output for text in wanted):
            raise Failed(f"codes {outcome.codes}:\n{output[-1500:]}")
        if "Traceback" in output:
            raise Failed(output[-1500:])
        scene.wait("the robot holds", STOP_S, lambda: scene.has_held_since(at_ns))
        judge_robot(scene, outcome, at_ns, must_hold=True)
        scene.wait("no orphan", STOP_S, lambda: not scene.orphans() or None)
        outcome.orphans = "none"
    outcome.seen, outcome.ledger = "21 and its reason, and what could not be written", "deleted"


def slow_start(folder: Path, outcome: FaultOutcome) -> None:
    """A build of 90 s, and a first call of 90 s: no rank takes the other one for dead."""
    slow = (f"policy.options.build_s={STANDS_S}", f"policy.options.first_s={STANDS_S}")
    with _pair(folder, *STANDING, *slow) as (ranks, mark):
        log = folder / "latest" / "rank0.gen0.jsonl"

        def is_ready() -> bool:
            if any(process.poll() is not None for process in ranks.processes):
                raise Failed(ranks.output()[-1500:])
            return log.exists() and READY in log.read_bytes()

        began = time.monotonic()
        until("ready", 2 * STANDS_S + READY_LIMIT_S, is_ready)
        outcome.seen = f"ready after {time.monotonic() - began:.0f} s"
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        until("the end", 2 * STOP_S, lambda: all(p.poll() is not None for p in ranks.processes))
        outcome.codes = tuple(process.returncode for process in ranks.processes)
        if outcome.codes != (0, 0):
            raise Failed(f"codes {outcome.codes}:\n{ranks.output()[-1500:]}")
        judge_ledger(outcome, imbalances(ranks.directory))
        outcome.orphans = no_orphans(mark)


def build_never_ends(folder: Path, outcome: FaultOutcome) -> None:
    """A build above its limit: 21, and both ranks name thread, call and place."""
    slow = ("policy.options.build_s=3600", "liveness.start_s=5")
    with _pair(folder, *STANDING, *slow) as (ranks, mark):
        until("the build", READY_LIMIT_S, lambda: "the build takes" in ranks.output())
        at = time.monotonic()
        _expect(ranks, mark, outcome, (20, 21), 5.0 + STOP_S)
        outcome.gone_s = time.monotonic() - at
        for rank in (0, 1):
            found = json.loads((ranks.directory / "exit.json").read_text())[str(rank)]["reason"]
            wanted = (
                "the build of drill.standing_policy:build",
                "MainThread is in",
                "standing_policy.py",
            )
            if any(text not in found for text in wanted):
                raise Failed(f"rank {rank} said {found}")
    outcome.seen = found


def killed_in_handshake(folder: Path, outcome: FaultOutcome) -> None:
    """SIGKILL to rank 1 before ranks have met; torchrun then asks rank 0 to stop."""
    settings = (f"log.root={folder}", "service.endpoint=none")
    with launched(folder / "torchrun.txt", LAUNCHER, settings) as (torchrun, mark):
        until("the ranks", READY_LIMIT_S, lambda: len(rank_pids(mark)) == 2)
        until("rank 0 began", READY_LIMIT_S, (folder / "latest" / "run.json").exists)
        os.kill(rank_pids(mark)[1], signal.SIGKILL)
        at = time.monotonic()
        expect_end(torchrun)
        outcome.gone_s = time.monotonic() - at
        end = json.loads((folder / "latest" / "exit.json").read_text())["0"]
        outcome.codes, outcome.seen = (end["code"], -9), end["reason"]
        if end["code"] != 20:
            raise Failed(f"rank 0 recorded {end}")
        outcome.ledger = imbalances(folder / "latest")
        outcome.orphans = no_orphans(mark)


def log_kept_while_it_runs(folder: Path, outcome: FaultOutcome) -> None:
    """Other runs with the same log.root begin and end; each keeps one run."""
    with started(folder, ("log.keep=1",), robot=False) as scene:
        root = scene.ranks.directory.parent
        for _ in range(3):
            other = Run.create(root, 1)
            other.begin(config={}, config_sha256="0", versions={})
            time.sleep(1.1)  # runs are kept by the second they began in
        own = [path for path in root.iterdir() if (path / "rank0.gen0.jsonl").exists()]
        if not own or not (own[0] / "run.json").exists():
            raise Failed("its folder was deleted while it ran")
        (root / "latest").unlink()
        (root / "latest").symlink_to(own[0].name)
        scene.stop()
        outcome.codes = tuple(scene.codes())
        judge_ledger(outcome, imbalances(own[0]))
        outcome.orphans = "none"
        if outcome.codes != (0, 0) or not (own[0] / "exit.json").exists():
            raise Failed(f"codes {outcome.codes}:\n{scene.ranks.output()[-1500:]}")
    outcome.seen = "its folder stayed, and its end stands in it"


def launcher_number_again(folder: Path, outcome: FaultOutcome) -> None:
    """Two days of a container: torchrun has the same number, and a new run is none of the old."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        outcome.seen = "skipped: PID namespaces need root and util-linux"
        return
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    local = (f"log.root={folder}", "service.endpoint=none")
    output = folder / "torchrun.txt"
    refused = (*local, "bringup.accept=[]", "simulate.a_ms=0", "simulate.c_ms=0")
    with launched(output, LAUNCHER, refused, prefix) as (torchrun, _):
        expect_end(torchrun)
    if "exit 31 GATE_INCONCLUSIVE" not in output.read_text():
        raise Failed(f"day 1 was not refused:\n{output.read_text()[-1500:]}")
    once = (*LAUNCHER, "--max-restarts=1")
    with launched(output, once, (*local, "service.duration_s=1"), prefix) as (torchrun, mark):
        until("rank 0", READY_LIMIT_S, lambda: 0 in rank_pids(mark))
        os.kill(rank_pids(mark)[0], signal.SIGKILL)  # before it has begun a run
        expect_end(torchrun)
        outcome.orphans = no_orphans(mark)
    if "an earlier generation ended so" in output.read_text():
        raise Failed(f"day 2 ended as day 1:\n{output.read_text()[-1500:]}")
    runs = sorted(path.parent for path in folder.glob("*/run.json") if not path.parent.is_symlink())
    ends = json.loads((runs[-1] / "exit.json").read_text())
    outcome.codes = tuple(ends[rank]["code"] for rank in ("0", "1"))
    judge_ledger(outcome, imbalances(runs[-1]))
    if len(runs) != 2 or outcome.codes != (0, 0):
        raise Failed(f"runs {runs}, codes {outcome.codes}")
    outcome.seen = "a run of its own, drained"


def demo_rank_killed(folder: Path, outcome: FaultOutcome) -> None:
    """SIGKILL to rank 0 of the demo: its robot ends with it."""
    settings = (f"log.root={folder}", f"service.endpoint=tcp://127.0.0.1:{free_port()}")
    output = folder / "torchrun.txt"
    with launched(output, ("--nproc-per-node=1",), settings, config="demo") as (torchrun, mark):
        log = folder / "latest" / "rank0.gen0.jsonl"
        until("ready", READY_LIMIT_S, lambda: log.exists() and READY in log.read_bytes())
        os.kill(ranks_started_by(torchrun.pid)[0], signal.SIGKILL)
        at = time.monotonic()
        until("the robot left", STOP_S, lambda: set(marked(mark)) <= {torchrun.pid})
        outcome.gone_s = time.monotonic() - at
        expect_end(torchrun)
        outcome.orphans = no_orphans(mark)
    outcome.codes, outcome.seen, outcome.ledger = (-9,), "the robot left, too", "one rank"


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
    ranks: RankPair, mark: str, outcome: FaultOutcome, codes: tuple[int, int], limit_s: float
) -> None:
    """Both ranks end with these codes, nothing was sent, and no process of theirs is left."""
    until("the end", limit_s, lambda: _are_gone(ranks))
    outcome.codes = tuple(process.returncode for process in ranks.processes)
    if outcome.codes != codes:
        raise Failed(f"codes {outcome.codes}:\n{ranks.output()[-1500:]}")
    outcome.ledger = imbalances(ranks.directory)
    if outcome.ledger != NOTHING_SENT:
        raise Failed(f"ledger: {outcome.ledger or 'envelopes were sent'}")
    outcome.orphans = no_orphans(mark)


LAUNCHES: Final = (
    LaunchDrill("ranks-differ", "F01 BT05", "one rank has a test hook", "10 in 15 s", ranks_differ),
    LaunchDrill(
        "policy-rank-absent", "BT43", "rank 1 is not there", "20 in 6 s", policy_rank_absent
    ),
    LaunchDrill(
        "killed-in-bring-up", "F20 BT43", "SIGKILL to rank 1, not ready", "20", killed_in_bring_up
    ),
    LaunchDrill(
        "policy-never-wrote", "F31", "no call writes actions", "26, not ready", policy_never_wrote
    ),
    LaunchDrill("disk-full-in-bring-up", "F44", "no byte more", "11, named", disk_full_in_bring_up),
    LaunchDrill(
        "killed-in-handshake", "F20", "SIGKILL to rank 1, not met", "20", killed_in_handshake
    ),
    LaunchDrill(
        "launcher-killed", "", "SIGKILL to torchrun, ready", "20 in 2.5 s", launcher_killed
    ),
    LaunchDrill(
        "launcher-killed-while-warming",
        "",
        "SIGKILL to torchrun, warming",
        "20 in 2.5 s, never ready",
        launcher_killed_while_warming,
    ),
    LaunchDrill(
        "demo-rank-killed", "", "SIGKILL to the demo's rank 0", "no robot", demo_rank_killed
    ),
    LaunchDrill(
        "folder-deleted-decoder-stuck",
        "F22 F42",
        "the run's folder is deleted, then stage C never ends",
        "21 and its reason",
        folder_deleted_and_decoder_stuck,
    ),
    LaunchDrill("slow-start", "F21", "build and first call of 90 s each", "ready", slow_start),
    LaunchDrill(
        "build-never-ends", "F21", "the build stands", "21 named by both", build_never_ends
    ),
    LaunchDrill(
        "log-kept-while-it-runs",
        "",
        "three runs with log.keep = 1 beside it",
        "its folder stays",
        log_kept_while_it_runs,
    ),
    LaunchDrill(
        "launcher-number-again",
        "",
        "torchrun has the number of one whose run was refused",
        "a new run",
        launcher_number_again,
    ),
    LaunchDrill("idle", "F43 BT31", "no robot for 3x the watchdog", "nobody ends", idle),
    LaunchDrill(
        "restart", "BT44", "SIGKILL under --max-restarts=1", "the robot moves again", restart
    ),
)
