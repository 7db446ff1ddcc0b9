"""Faults of two hosts: an open network that nobody declared, a cut cable, a frozen or lost host.

Every form of a run spreads over both; a robot on the first host is served meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, Final, Literal, NamedTuple

from drill.ending import CHAIN_SETTINGS, MESH_SETTINGS
from drill.judging import FaultOutcome, judge_ledger, judge_robot
from drill.launches import LaunchDrill
from drill.live_logs import NOTHING_SENT, imbalances
from drill.processes import marked
from drill.replica_losses import SERVED as REPLICA_SETTINGS
from drill.scene import READY_LIMIT_S, Failed, Scene
from drill.torchrun import SERVE, expect_end, launched, no_orphans, rank_pids, until
from drill.two_host_network import cut_cable, is_possible, plug_cable_in, two_hosts
from real_runs import free_port

from ppstream.core.clock import NS_PER_S, now_ns

GONE_S: Final = 4.0  # until a silence of 1.5 s has ended or degraded a run
NOTICED_S: Final = 60.0  # what must happen happens within this, however busy the machine is
RESTARTS: Final = 3
LOST: Final = 20


class SpreadForm(NamedTuple):
    """A run on two hosts: its settings, and how many ranks each host has, rank 0 on the first."""

    settings: tuple[str, ...]
    ranks: tuple[int, int]


PIPELINE: Final = SpreadForm((), (1, 1))
CHAIN: Final = SpreadForm(CHAIN_SETTINGS, (2, 2))
#: The second replica is on the other host.
REPLICAS: Final = SpreadForm((*REPLICA_SETTINGS, "placement.replicas=2"), (2, 1))
SPARE_REPLICAS: Final = SpreadForm((*REPLICAS.settings, "placement.replicas_min=1"), REPLICAS.ranks)
#: The leader is on rank 0's host, the other member is not.
MESH: Final = SpreadForm(MESH_SETTINGS, (2, 1))


class Started(NamedTuple):
    """Torchrun on one host: its process, and the mark of all that it started."""

    torchrun: Popen[bytes]
    mark: str


class SpreadRun(NamedTuple):
    """A run that spreads over two hosts."""

    folder: Path
    outcome: FaultOutcome
    hosts: tuple[Started, Started]
    scene: Scene
    form: SpreadForm
    start: Callable[[int], Started]  # torchrun on a host, by its number

    def log(self, generation: int = 0) -> str:
        """Rank 0's log so far."""
        path = self.folder / "latest" / f"rank0.gen{generation}.jsonl"
        return path.read_text() if path.exists() else ""

    @property
    def generation(self) -> int:
        """The newest that has a log."""
        return len([*(self.folder / "latest").glob("rank0.gen*.jsonl")]) - 1

    def ends(self, generation: int) -> dict[int, Any]:
        """The ends that ranks of a generation have recorded so far."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "latest" / "exit.json").read_text())
        except (OSError, ValueError):
            return {}
        ends = {int(rank): end for rank, end in sorted(found.items())}
        return {rank: end for rank, end in ends.items() if end["generation"] == generation}

    def lost(self, ranks: Sequence[int]) -> None:
        """Wait until these ranks of the newest generation have ended, with 20."""
        at, generation = time.monotonic(), self.generation
        until("the ranks ended", NOTICED_S, lambda: set(ranks) <= self.ends(generation).keys())
        self.outcome.gone_s = time.monotonic() - at
        ends = self.ends(generation)
        codes = [ends[rank]["code"] for rank in ranks]
        if codes != [LOST] * len(codes):
            raise Failed(f"codes {codes} of ranks {list(ranks)}: {ends}")

    def degraded(self) -> None:
        """Wait until rank 0 goes on without the other host's replica."""
        at = time.monotonic()
        until("a lost replica", NOTICED_S, lambda: '"replica_lost"' in self.log())
        self.outcome.notice_s = time.monotonic() - at
        until("degraded", NOTICED_S, lambda: '"phase":"degraded"' in self.log())

    def safe(self, at_ns: int) -> None:
        """Wait until the robot holds."""
        self.scene.wait("the robot holds", NOTICED_S, lambda: self.scene.has_held_since(at_ns))

    def moves_again(self, since_ns: int) -> None:
        """Wait until it moves, from a moment on."""
        self.scene.wait_moving(READY_LIMIT_S, since_ns)
        self.outcome.moves_s = (now_ns() - since_ns) / NS_PER_S

    def stop(self, codes: dict[int, int], at_ns: int) -> None:
        """Have both launchers stop: ranks end so, and robot and ledgers are as they must be."""
        judge_robot(self.scene, self.outcome, at_ns, must_hold=True)
        for host in self.hosts:
            host.torchrun.terminate()
        for host in self.hosts:
            expect_end(host.torchrun)
        ends = self.ends(self.generation)
        found = {rank: end["code"] for rank, end in ends.items()}
        self.outcome.codes = tuple(found.values())
        if found != codes:
            raise Failed(f"codes {found}, want {codes}: {ends}")
        judge_ledger(self.outcome, imbalances(self.folder / "latest"))


Check = Callable[[SpreadRun], None]
#: Returns the run with other launchers, where it has started some.
Fault = Callable[[SpreadRun], SpreadRun | None]


def in_turn(*faults: Fault) -> Check:
    """Faults that a run survives by starting anew, one a generation; then it drains when asked."""

    def check(run: SpreadRun) -> None:
        at_ns = now_ns()
        for fault in faults:
            run = fault(run) or run
        run.stop(dict.fromkeys(range(sum(run.form.ranks)), 0), at_ns)

    return check


def refused(run: SpreadRun) -> None:
    """Without link.trusted_network nothing starts."""
    began = time.monotonic()
    for host in run.hosts:
        expect_end(host.torchrun)
    run.outcome.gone_s = time.monotonic() - began
    text = (run.folder / "torchrun0.txt").read_text()
    if "link.trusted_network: got false" not in text:
        raise Failed(text[-1500:])
    run.outcome.ledger = imbalances(run.folder / "latest")
    if run.outcome.ledger != NOTHING_SENT:
        raise Failed(f"ledger: {run.outcome.ledger or 'envelopes were sent'}")
    run.outcome.seen = "refused with 11 and the reason"


def cut(run: SpreadRun) -> None:
    """The cable is cut while the ranks serve: nobody is told, all end; plugged in, all serve."""
    ranks, generation = range(sum(run.form.ranks)), run.generation
    at_ns = now_ns()
    cut_cable()
    run.lost(ranks)
    run.safe(at_ns)
    plug_cable_in()
    run.outcome.seen = f"all {len(ranks)} ranks 20, and all serve once it is plugged in"
    _serves_again(run, generation)


def cut_for_good(run: SpreadRun) -> None:
    """The same under launchers without restarts, which end, too."""
    ranks = range(sum(run.form.ranks))
    at_ns = now_ns()
    cut_cable()
    run.lost(ranks)
    run.safe(at_ns)
    for host in run.hosts:
        expect_end(host.torchrun)
    run.outcome.seen = f"all {len(ranks)} ranks 20; torchrun's agents gone"
    run.stop(dict.fromkeys(ranks, LOST), at_ns)


def cut_from_spare(run: SpreadRun) -> None:
    """The cable to a replica that is not needed is cut: rank 0 goes on without it."""
    at_ns = now_ns()
    cut_cable()
    run.degraded()
    run.lost([2])
    run.safe(at_ns)
    run.moves_again(now_ns())
    plug_cable_in()  # the other host's launcher waits for the first one's
    run.outcome.seen = "rank 0 goes on without the replica, which ended with 20"
    run.stop({0: 0, 1: 0, 2: LOST}, at_ns)


def frozen(run: SpreadRun) -> None:
    """All of the other host stands still, as a machine that swaps: its sockets stay open."""
    generation, at_ns = run.generation, now_ns()
    with _still(run.hosts[1]):
        run.lost(range(run.form.ranks[0]))
        run.safe(at_ns)
    run.outcome.seen = "the first host's ranks 20, and both serve once the other goes on"
    _serves_again(run, generation)


def frozen_spare(run: SpreadRun) -> None:
    """The host of a replica that is not needed stands still: rank 0 goes on without it."""
    at_ns = now_ns()
    with _still(run.hosts[1]):
        run.degraded()
        run.safe(at_ns)
        run.moves_again(now_ns())
    run.lost([2])
    run.outcome.seen = "rank 0 goes on without the replica, which ends when its host goes on"
    run.stop({0: 0, 1: 0, 2: LOST}, at_ns)


def restarted(run: SpreadRun) -> None:
    """The other host's last rank is killed: both hosts' torchrun start anew, together."""
    victim = rank_pids(run.hosts[1].mark)[sum(run.form.ranks) - 1]
    generation, at_ns = run.generation, now_ns()
    os.kill(victim, signal.SIGKILL)
    run.safe(at_ns)
    run.outcome.seen = "both hosts serve again"
    _serves_again(run, generation)


def counted_apart(run: SpreadRun) -> None:
    """The other host's last rank is killed, and rank 0 has not noticed when its agent is told.

    So one agent counts a restart, and the other one none: to it this is a change of hosts.
    """
    about = json.loads((run.folder / "latest" / "run.json").read_text())
    rank0 = int(about["topology"]["ranks"][0]["pid"])
    victim = rank_pids(run.hosts[1].mark)[sum(run.form.ranks) - 1]
    generation, at_ns = run.generation, now_ns()
    os.kill(rank0, signal.SIGSTOP)
    try:
        os.kill(victim, signal.SIGKILL)
        until("rank 0's agent ends it", NOTICED_S, lambda: _has_pending(rank0, signal.SIGTERM))
    finally:
        os.kill(rank0, signal.SIGCONT)
    run.safe(at_ns)
    run.outcome.seen = "both hosts serve again"
    _serves_again(run, generation)


def replaced(run: SpreadRun) -> SpreadRun:
    """The other host is lost with all its processes, and another torchrun joins in its place."""
    generation, at_ns = run.generation, now_ns()
    for pid in marked(run.hosts[1].mark):
        os.kill(pid, signal.SIGKILL)
    run.lost([0])
    run.safe(at_ns)
    run.outcome.seen = "rank 0 20, and serves again with the new host, whose torchrun counts from 0"
    run = run._replace(hosts=(run.hosts[0], run.start(1)))
    _serves_again(run, generation)
    return run


def _has_pending(pid: int, number: int) -> bool:
    """True when a signal waits for a process that is stopped."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = next(line.split()[1] for line in lines if line.startswith("ShdPnd:"))
    return bool(int(found, 16) >> (number - 1) & 1)


@contextmanager
def _still(host: Started) -> Iterator[None]:
    """Inside: all processes of a host are stopped."""
    pids = [*marked(host.mark)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _serves_again(run: SpreadRun, generation: int) -> None:
    """The generation behind this one becomes ready and moves the robot."""
    again_ns = now_ns()
    until("ready again", READY_LIMIT_S, lambda: '"ready"' in run.log(generation + 1))
    run.moves_again(again_ns)


class HostFault(NamedTuple):
    """A fault of a form on two hosts; ``bound_s`` of the time until ranks end or go on without."""

    name: str
    ids: str
    does: str
    expected: str
    form: SpreadForm
    check: Check
    bound_s: float | None = GONE_S
    rendezvous: Literal["static", "c10d"] = "c10d"
    environment: tuple[tuple[str, str], ...] = ()

    def inject(self, folder: Path, outcome: FaultOutcome, module: str = SERVE) -> None:
        """Start a run whose ranks run ``module``, and inject the fault; times are not judged.

        Raises:
            Failed: what must happen did not.
        """
        folder.chmod(0o700)  # a socket for robots is in it
        scene = Scene(folder)
        scene.attach_to(f"unix://{folder}/robots")
        with scene, two_hosts() as hosts:
            port = free_port()
            commands = []
            for node, (host, ranks) in enumerate(zip(hosts, self.form.ranks, strict=True)):
                launcher = ["--nnodes=2", f"--nproc-per-node={ranks}"]
                if self.rendezvous == "static":
                    launcher += [f"--node-rank={node}", f"--master-addr={hosts[0].address}"]
                    launcher += [f"--master-port={port}"]
                else:  # the smallest address becomes rank 0
                    launcher += ["--rdzv-backend=c10d", "--rdzv-id=drill"]
                    launcher += [f"--rdzv-endpoint={hosts[0].address}:{port}"]
                    launcher += [f"--rdzv-conf=is_host={int(node == 0)}"]
                    launcher += [f"--local-addr={host.address}", f"--max-restarts={RESTARTS}"]
                commands.append((launcher, self._settings(folder), host.prefix))
            with ExitStack() as stack:
                started: list[Started] = []

                def start(node: int) -> Started:
                    output, more = folder / f"torchrun{len(started)}.txt", dict(self.environment)
                    launch = launched(output, *commands[node], module=module, environment=more)
                    started.append(Started(*stack.enter_context(launch)))
                    return started[-1]

                run = SpreadRun(folder, outcome, (start(0), start(1)), scene, self.form, start)
                if self.check is not refused:
                    scene.robot = scene.start_robot()
                    scene.wait_moving(READY_LIMIT_S)
                self.check(run)
                outcome.orphans = no_orphans(*(host.mark for host in started))

    def judged(self, folder: Path, outcome: FaultOutcome) -> None:
        """``inject``, within the bound; raises Failed, too, where it took longer."""
        if not is_possible():
            outcome.seen = "skipped: network namespaces need root and iproute2"
            return
        self.inject(folder, outcome)
        took_s = outcome.gone_s if outcome.notice_s is None else outcome.notice_s
        if self.bound_s is not None and took_s is not None and took_s > self.bound_s:
            raise Failed(f"noticed after {took_s:.1f} s, limit {self.bound_s:g} s")

    def _settings(self, folder: Path) -> list[str]:
        here = f"log.root={folder}", f"service.endpoint=unix://{folder}/robots"
        trusted = () if self.check is refused else ("link.trusted_network=true",)
        return [*here, *trusted, *self.form.settings]


#: Each start has a store of its own: torchrun 2.13 tells a later host no address of a shared one.
OWN_STORES: Final = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
ENDS: Final = f"20 in {GONE_S:g} s"
SERVE_AGAIN: Final = f"{ENDS}, then both hosts serve again"
GOES_ON: Final = f"degraded in {GONE_S:g} s, the robot moves again"
FAULTS: Final = (
    HostFault(
        "untrusted-network", "", "two hosts, not trusted", "11", PIPELINE, refused, None, "static"
    ),
    HostFault(
        "cable-between-hosts",
        "F21",
        "the cable of two hosts is cut",
        ENDS,
        PIPELINE,
        cut_for_good,
        rendezvous="static",
    ),
    HostFault(
        "cable-in-a-chain",
        "F21",
        "the cable of two hosts is cut, a chain of four ranks over both",
        ENDS,
        CHAIN,
        cut_for_good,
        rendezvous="static",
    ),
    HostFault(
        "cable-plugged-in",
        "F21",
        "the cable of two hosts is cut, and plugged in again; torchrun with c10d",
        SERVE_AGAIN,
        PIPELINE,
        in_turn(cut),
    ),
    HostFault(
        "host-frozen",
        "F21",
        "the policy's host stands still, sockets open; torchrun with c10d",
        SERVE_AGAIN,
        PIPELINE,
        in_turn(frozen),
    ),
    HostFault(
        "host-restart",
        "BT44",
        "the policy rank of two hosts is killed; torchrun with c10d and restarts",
        "both hosts serve again",
        PIPELINE,
        in_turn(restarted),
    ),
    HostFault(
        "host-restart-uncounted",
        "BT44",
        "the policy rank of two hosts is killed, and one host's torchrun counts no restart",
        "both hosts serve again",
        PIPELINE,
        in_turn(counted_apart),
    ),
    HostFault(
        "host-replaced",
        "F21",
        "the policy's host is lost, and another one joins in its place; torchrun with c10d",
        SERVE_AGAIN,
        PIPELINE,
        in_turn(replaced),
        environment=OWN_STORES,
    ),
    HostFault(
        "replica-cable-cut",
        "F21",
        "the cable to the host of one of two replicas is cut, one is enough",
        GOES_ON,
        SPARE_REPLICAS,
        cut_from_spare,
    ),
    HostFault(
        "replica-host-frozen",
        "F21",
        "the host of one of two replicas stands still, one is enough",
        GOES_ON,
        SPARE_REPLICAS,
        frozen_spare,
    ),
    HostFault(
        "replica-host-restart",
        "BT44",
        "the replica on the other host is killed, all are needed",
        "both hosts serve again",
        REPLICAS,
        in_turn(restarted),
    ),
    HostFault(
        "mesh-cable-cut",
        "F21",
        "the cable between the ranks of a mesh is cut, and plugged in again",
        SERVE_AGAIN,
        MESH,
        in_turn(cut),
    ),
    HostFault(
        "mesh-host-frozen",
        "F21",
        "the host of a mesh's other member stands still",
        SERVE_AGAIN,
        MESH,
        in_turn(frozen),
    ),
    HostFault(
        "mesh-host-restart",
        "BT44",
        "the member of a mesh on the other host is killed",
        "both hosts serve again",
        MESH,
        in_turn(restarted),
    ),
)
HOSTS: Final = tuple(
    LaunchDrill(fault.name, fault.ids, fault.does, fault.expected, fault.judged) for fault in FAULTS
)
