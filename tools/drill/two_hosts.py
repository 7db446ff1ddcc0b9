"""Faults of two hosts: an open network that nobody declared, a cut cable, a frozen or lost host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from drill.ending import CHAIN_SETTINGS
from drill.judging import FaultOutcome, judge_ledger
from drill.launches import LaunchDrill
from drill.live_logs import NOTHING_SENT, imbalances
from drill.processes import marked
from drill.scene import READY_LIMIT_S, Failed
from drill.torchrun import expect_end, launched, no_orphans, rank_pids, until
from drill.two_host_network import cut_cable, is_possible, two_hosts
from real_runs import free_port

FROZEN_S: Final = 1.5
SPARE_S: Final = 2.0
RESTARTS: Final = 3
TRUSTED: Final = ("link.trusted_network=true",)


class Started(NamedTuple):
    """Torchrun on one host: its process, and the mark of all that it started."""

    torchrun: subprocess.Popen[bytes]
    mark: str


Check = Callable[[Path, FaultOutcome, Sequence[Started]], None]


def refused(folder: Path, outcome: FaultOutcome, hosts: Sequence[Started]) -> None:
    """Without link.trusted_network nothing starts."""
    began = time.monotonic()
    for host in hosts:
        expect_end(host.torchrun)
    outcome.gone_s = time.monotonic() - began
    if "link.trusted_network: got false" not in (folder / "torchrun0.txt").read_text():
        raise Failed((folder / "torchrun0.txt").read_text()[-1500:])
    outcome.ledger = imbalances(folder / "latest")
    if outcome.ledger != NOTHING_SENT:
        raise Failed(f"ledger: {outcome.ledger or 'envelopes were sent'}")
    outcome.seen = "refused with 11 and the reason"


def cut(folder: Path, outcome: FaultOutcome, hosts: Sequence[Started]) -> None:
    """The cable is cut while the ranks serve: nobody is told, all end."""
    _serves(folder)
    cut_cable()
    at = time.monotonic()
    ranks = len(json.loads((folder / "latest" / "run.json").read_text())["topology"]["ranks"])
    until("all ranks ended", 10.0, lambda: len(_ends_of(folder)) == ranks)
    outcome.gone_s = time.monotonic() - at
    outcome.codes = tuple(end["code"] for _, end in sorted(_ends_of(folder).items()))
    if outcome.codes != (20,) * ranks:
        raise Failed(f"codes {outcome.codes}")
    if outcome.gone_s > FROZEN_S + SPARE_S:
        raise Failed(f"the ranks ended after {outcome.gone_s:.1f} s")
    agents = []
    for host in hosts:
        expect_end(host.torchrun)
        agents.append(f"{time.monotonic() - at:.1f} s")
    judge_ledger(outcome, imbalances(folder / "latest"))
    outcome.seen = f"all {ranks} ranks 20; torchrun's agents gone after {agents}"


def frozen(folder: Path, outcome: FaultOutcome, hosts: Sequence[Started]) -> None:
    """All of the policy's host stands still, as a machine that swaps: its sockets stay open."""
    _serves(folder)
    still = [*marked(hosts[1].mark)]
    for pid in still:
        os.kill(pid, signal.SIGSTOP)
    at = time.monotonic()
    try:
        until("rank 0 ended", 10.0, lambda: "0" in _ends_of(folder))
        outcome.gone_s = time.monotonic() - at
    finally:
        for pid in still:
            os.kill(pid, signal.SIGCONT)
    code = _ends_of(folder)["0"]["code"]
    if code != 20:
        raise Failed(f"rank 0 ended with {code}")
    if outcome.gone_s > FROZEN_S + SPARE_S:
        raise Failed(f"rank 0 ended after {outcome.gone_s:.1f} s")
    _serves_again(folder, outcome, hosts)
    outcome.seen = f"rank 0 ended with 20; {outcome.seen} the other host goes on"


def restarted(folder: Path, outcome: FaultOutcome, hosts: Sequence[Started]) -> None:
    """The policy rank is killed: both hosts' torchrun start anew, together."""
    _serves(folder)
    (victim,) = rank_pids(hosts[1].mark).values()
    os.kill(victim, signal.SIGKILL)
    at = time.monotonic()
    _serves_again(folder, outcome, hosts)
    outcome.gone_s = time.monotonic() - at
    outcome.seen += " the kill"


def _serves_again(folder: Path, outcome: FaultOutcome, hosts: Sequence[Started]) -> None:
    """Generation 1 becomes ready, and drains when both torchruns are asked to stop."""
    at = time.monotonic()
    until("ready again", READY_LIMIT_S, lambda: '"ready"' in _log(folder, generation=1))
    outcome.seen = f"generation 1 serves {time.monotonic() - at:.1f} s after"
    for host in hosts:
        host.torchrun.terminate()
    for host in hosts:
        expect_end(host.torchrun)
    outcome.codes = tuple(end["code"] for _, end in sorted(_ends_of(folder).items()))
    if any(outcome.codes):
        raise Failed(f"codes {outcome.codes}")
    judge_ledger(outcome, imbalances(folder / "latest"))


def _serves(folder: Path) -> None:
    until("ready", READY_LIMIT_S, lambda: '"ready"' in _log(folder))
    time.sleep(1.0)


def _on_two_hosts(
    folder: Path,
    outcome: FaultOutcome,
    settings: Sequence[str],
    check: Check,
    ranks_each: int = 1,
    rendezvous: Literal["static", "c10d"] = "c10d",
) -> None:
    if not is_possible():
        outcome.seen = "skipped: network namespaces need root and iproute2"
        return
    port = free_port()
    with two_hosts() as hosts:
        commands = []
        for node, host in enumerate(hosts):
            launcher = ["--nnodes=2", f"--nproc-per-node={ranks_each}"]
            if rendezvous == "static":
                launcher += [f"--node-rank={node}", f"--master-addr={hosts[0].address}"]
                launcher += [f"--master-port={port}"]
            else:  # the smallest address becomes rank 0
                launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:{port}"]
                launcher += [f"--rdzv-conf=is_host={int(node == 0)}", "--rdzv-id=drill"]
                launcher += [f"--local-addr={host.address}", f"--max-restarts={RESTARTS}"]
            local = (f"log.root={folder}", "service.endpoint=none", *settings)
            commands.append((folder / f"torchrun{node}.txt", launcher, local, host.prefix))
        with launched(*commands[0]) as first, launched(*commands[1]) as second:
            check(folder, outcome, (Started(*first), Started(*second)))
            outcome.orphans = no_orphans(first[1], second[1])


def _log(folder: Path, generation: int = 0) -> str:
    path = folder / "latest" / f"rank0.gen{generation}.jsonl"
    return path.read_text() if path.exists() else ""


def _ends_of(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "latest" / "exit.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


HOSTS: Final = (
    LaunchDrill(
        "untrusted-network",
        "",
        "two hosts, not trusted",
        "11",
        partial(_on_two_hosts, settings=(), check=refused, rendezvous="static"),
    ),
    LaunchDrill(
        "cable-between-hosts",
        "F21",
        "the cable of two hosts is cut",
        "20 in 4 s",
        partial(_on_two_hosts, settings=TRUSTED, check=cut, rendezvous="static"),
    ),
    LaunchDrill(
        "host-frozen",
        "F21",
        "the policy's host stands still, sockets open; torchrun with c10d",
        "20 in 4 s, then both hosts serve again",
        partial(_on_two_hosts, settings=TRUSTED, check=frozen),
    ),
    LaunchDrill(
        "host-restart",
        "BT44",
        "the policy rank of two hosts is killed; torchrun with c10d and restarts",
        "both hosts serve again",
        partial(_on_two_hosts, settings=TRUSTED, check=restarted),
    ),
    LaunchDrill(
        "cable-in-a-chain",
        "F21",
        "the cable of two hosts is cut, a chain of four ranks over both",
        "20 in 4 s",
        partial(
            _on_two_hosts,
            settings=(*TRUSTED, *CHAIN_SETTINGS),
            check=cut,
            ranks_each=2,
            rendezvous="static",
        ),
    ),
)
