"""Faults of starting, restarting and hosts: runs under torchrun, as it starts them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench_runs import POLL_S, SOURCES, RankPair, free_port
from drill_hosts import cut_cable, is_possible, two_hosts
from drill_scene import CONFIG, MARK, READY_LIMIT_S, Failed, Scene, started

IDLE_PERIODS: Final = 3  # of the watchdog
WATCHDOG_S: Final = 3.0  # of the drill's configuration
HANDSHAKE_S: Final = 4.0
LAUNCHER_END_S: Final = 60.0
FROZEN_S: Final = 2.0


@dataclass(frozen=True)
class Launch:
    """``run`` gets a folder; returns what was seen and how long it took. Raises Failed."""

    name: str
    ids: str
    does: str
    expected: str
    run: Callable[[Path], tuple[str, float]]


def ranks_differ(folder: Path) -> tuple[str, float]:
    """Rank 1 resolves another depth than rank 0: here, by a hook that only it has."""
    began = time.monotonic()
    with _pair(folder, only={1: {"PPSTREAM_TEST_DIFFERS": "1"}}) as ranks:
        _expect(ranks, (10, 10), 15.0)
        if "test_hooks: rank 0 has []" not in ranks.output():
            raise Failed(f"no difference was shown:\n{ranks.output()}")
    return "both ranks ended with 10 and the difference", time.monotonic() - began


def policy_rank_absent(folder: Path) -> tuple[str, float]:
    """Only rank 0 is there."""
    began = time.monotonic()
    with _pair(folder, f"liveness.handshake_s={HANDSHAKE_S}") as ranks:
        ranks.processes[1].kill()
        _expect(ranks, (20, -9), 20.0)
        took_s = time.monotonic() - began
    return "rank 0 ended with 20", took_s


def idle(folder: Path) -> tuple[str, float]:
    """No robot for three times the watchdog's limit; then one comes, and moves."""
    with started(folder, robot=False) as scene:
        limit_s = IDLE_PERIODS * WATCHDOG_S
        time.sleep(limit_s)
        if any(code is not None for code in scene.codes()):
            raise Failed(f"ended while idle: {scene.codes()}")
        scene.robot = scene.start_robot()
        scene.wait_moving(15.0)
    return f"nobody left in {limit_s:g} s; then a robot came and moved", limit_s


def restart(folder: Path) -> tuple[str, float]:
    """The policy rank is killed under torchrun --max-restarts 1, and the robot waits."""
    folder.mkdir(parents=True)
    port = free_port()
    scene = Scene(folder)
    scene.attach(port)
    settings = (f"log.root={folder}", f"service.endpoint=tcp://127.0.0.1:{port}")
    launcher = ("--nproc-per-node=2", "--max-restarts=1")
    with scene, launched(folder, launcher, settings) as (torchrun, mark):
        scene.robot = scene.start_robot()
        scene.wait_moving(READY_LIMIT_S)
        os.kill(_rank_pids(mark)[1], signal.SIGKILL)
        at = time.monotonic()
        time.sleep(1.0)  # the robot has held by now
        killed_ns = scene.ticks()[-1].at_ns
        scene.wait_moving(READY_LIMIT_S, killed_ns)
        took_s = time.monotonic() - at
        generations = sorted(path.name for path in folder.glob("latest/rank*.jsonl"))
        torchrun.send_signal(signal.SIGTERM)
        _ends(torchrun)
        if len(generations) != 4:
            raise Failed(f"logs: {generations}")
    return f"a new generation, {took_s:.1f} s until the robot moved again; logs split", took_s


def untrusted_network(folder: Path) -> tuple[str, float]:
    """Two hosts without link.trusted_network: refused before anything starts."""
    return _on_two_hosts(folder, (), _refused)


def cable_between_hosts(folder: Path) -> tuple[str, float]:
    """Two hosts, the cable between them is cut while they serve."""
    return _on_two_hosts(folder, ("link.trusted_network=true",), _cut)


def _refused(folder: Path, launchers: Sequence[subprocess.Popen[bytes]]) -> tuple[str, float]:
    began = time.monotonic()
    for launcher in launchers:
        _ends(launcher)
    if "link.trusted_network: got false" not in (folder / "torchrun0.txt").read_text():
        raise Failed((folder / "torchrun0.txt").read_text()[-1500:])
    return "refused with 11 and the reason", time.monotonic() - began


def _cut(folder: Path, launchers: Sequence[subprocess.Popen[bytes]]) -> tuple[str, float]:
    _wait("ready", READY_LIMIT_S, lambda: '"ready"' in _log(folder))
    time.sleep(1.0)
    cut_cable()
    at = time.monotonic()
    _wait("both ranks ended", 10.0, lambda: len(_ends_of(folder)) == 2)
    ranks_s = time.monotonic() - at
    codes = sorted((rank, end["code"]) for rank, end in _ends_of(folder).items())
    if codes != [("0", 20), ("1", 20)]:
        raise Failed(f"codes {codes}")
    if ranks_s > FROZEN_S + 2.0:
        raise Failed(f"the ranks ended after {ranks_s:.1f} s")
    agents = []
    for launcher in launchers:
        _ends(launcher)
        agents.append(f"{time.monotonic() - at:.1f} s")
    return f"both ranks 20 after {ranks_s:.1f} s; torchrun's agents after {agents}", ranks_s


def _on_two_hosts(
    folder: Path,
    settings: Sequence[str],
    check: Callable[[Path, Sequence[subprocess.Popen[bytes]]], tuple[str, float]],
) -> tuple[str, float]:
    if not is_possible():
        return "skipped: network namespaces need root and iproute2", 0.0
    folder.mkdir(parents=True)
    port = free_port()
    with two_hosts() as hosts:
        commands = []
        for node, host in enumerate(hosts):
            launcher = (
                *("--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}"),
                *(f"--master-addr={hosts[0].address}", f"--master-port={port}"),
            )
            local = (f"log.root={folder}", "service.endpoint=none", *settings)
            commands.append((host.prefix, launcher, local, folder / f"torchrun{node}.txt"))
        with _started(commands[0]) as first, _started(commands[1]) as second:
            return check(folder, (first[0], second[0]))


def _log(folder: Path) -> str:
    path = folder / "latest" / "rank0.gen0.jsonl"
    return path.read_text() if path.exists() else ""


def _ends_of(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "latest" / "exit.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


@contextmanager
def launched(
    folder: Path, launcher: Sequence[str], settings: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Torchrun, and the mark by which its ranks are found; none of them outlives the block."""
    with _started(((), launcher, settings, folder / "torchrun.txt")) as found:
        yield found


@contextmanager
def _started(
    what: tuple[Sequence[str], Sequence[str], Sequence[str], Path],
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    prefix, launcher, settings, output = what
    mark = secrets.token_hex(8)
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *launcher]
    command += ["-m", "ppstream.serve", "--config", CONFIG]
    for setting in settings:
        command += ["--set", setting]
    path = os.pathsep.join((*SOURCES, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    env = clean | {MARK: mark, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        yield process, mark
    finally:
        for pid in (*_rank_pids(mark).values(), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _rank_pids(mark: str) -> dict[int, int]:
    """Processes of the ranks, by rank: they have the mark and torchrun's RANK."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ranks = [item.partition(b"=")[2] for item in environ if item.startswith(b"RANK=")]
            if f"{MARK}={mark}".encode() in environ and ranks:
                found[int(ranks[0])] = int(entry.name)
    return found


@contextmanager
def _pair(
    folder: Path, *settings: str, only: dict[int, dict[str, str]] | None = None
) -> Iterator[RankPair]:
    folder.mkdir(parents=True)
    settings = ("service.endpoint=none", *settings)
    with RankPair(folder, CONFIG, settings, environments=only or {}) as ranks:
        yield ranks


def _expect(ranks: RankPair, codes: tuple[int, int], limit_s: float) -> None:
    _wait("the end", limit_s, lambda: all(p.poll() is not None for p in ranks.processes))
    found = tuple(process.returncode for process in ranks.processes)
    if found != codes:
        raise Failed(f"codes {found}:\n{ranks.output()[-1500:]}")


def _ends(launcher: subprocess.Popen[bytes]) -> None:
    try:
        launcher.wait(LAUNCHER_END_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"torchrun did not end within {LAUNCHER_END_S:g} s") from None


def _wait(what: str, limit_s: float, look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + limit_s
    while not look():
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {limit_s:g} s")
        time.sleep(POLL_S)


LAUNCHES: Final = (
    Launch("ranks-differ", "F01 BT05", "one rank has a test hook", "10 in 15 s", ranks_differ),
    Launch("policy-rank-absent", "BT43", "rank 1 is not there", "20 in 20 s", policy_rank_absent),
    Launch("idle", "F43 BT31", "no robot for 3x the watchdog", "nobody ends", idle),
    Launch("restart", "BT44", "SIGKILL under --max-restarts=1", "the robot moves again", restart),
    Launch("untrusted-network", "", "two hosts, not trusted", "11", untrusted_network),
    Launch(
        "cable-between-hosts",
        "F21",
        "the cable of two hosts is cut",
        "20 in 4 s",
        cable_between_hosts,
    ),
)
