"""Faults of two hosts: an open network that nobody declared, and a cable that is cut."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from drill.ending import CHAIN_SETTINGS
from drill.judging import FaultOutcome, judge_ledger
from drill.launches import LaunchDrill
from drill.live_logs import NOTHING_SENT, imbalances
from drill.scene import READY_LIMIT_S, Failed
from drill.torchrun import expect_end, launched, no_orphans, until
from drill.two_host_network import cut_cable, is_possible, two_hosts
from real_runs import free_port

FROZEN_S: Final = 1.5
SPARE_S: Final = 2.0
Check = Callable[[Path, FaultOutcome, Sequence[subprocess.Popen[bytes]]], None]


def refused(
    folder: Path, outcome: FaultOutcome, launchers: Sequence[subprocess.Popen[bytes]]
) -> None:
    """Without link.trusted_network nothing starts."""
    began = time.monotonic()
    for launcher in launchers:
        expect_end(launcher)
    outcome.gone_s = time.monotonic() - began
    if "link.trusted_network: got false" not in (folder / "torchrun0.txt").read_text():
        raise Failed((folder / "torchrun0.txt").read_text()[-1500:])
    outcome.ledger = imbalances(folder / "latest")
    if outcome.ledger != NOTHING_SENT:
        raise Failed(f"ledger: {outcome.ledger or 'envelopes were sent'}")
    outcome.seen = "refused with 11 and the reason"


def cut(folder: Path, outcome: FaultOutcome, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    """The cable is cut while the ranks serve: nobody is told, all end."""
    until("ready", READY_LIMIT_S, lambda: '"ready"' in _log(folder))
    time.sleep(1.0)
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
    for launcher in launchers:
        expect_end(launcher)
        agents.append(f"{time.monotonic() - at:.1f} s")
    judge_ledger(outcome, imbalances(folder / "latest"))
    outcome.seen = f"all {ranks} ranks 20; torchrun's agents gone after {agents}"


def _on_two_hosts(
    folder: Path, outcome: FaultOutcome, settings: Sequence[str], check: Check, ranks_each: int = 1
) -> None:
    if not is_possible():
        outcome.seen = "skipped: network namespaces need root and iproute2"
        return
    port = free_port()
    with two_hosts() as hosts:
        commands = []
        for node, host in enumerate(hosts):
            launcher = (
                *("--nnodes=2", f"--nproc-per-node={ranks_each}", f"--node-rank={node}"),
                *(f"--master-addr={hosts[0].address}", f"--master-port={port}"),
            )
            local = (f"log.root={folder}", "service.endpoint=none", *settings)
            commands.append((folder / f"torchrun{node}.txt", launcher, local, host.prefix))
        with launched(*commands[0]) as (first, mark), launched(*commands[1]) as (second, other):
            check(folder, outcome, (first, second))
            outcome.orphans = no_orphans(mark, other)


def _log(folder: Path) -> str:
    path = folder / "latest" / "rank0.gen0.jsonl"
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
        partial(_on_two_hosts, settings=(), check=refused),
    ),
    LaunchDrill(
        "cable-between-hosts",
        "F21",
        "the cable of two hosts is cut",
        "20 in 4 s",
        partial(_on_two_hosts, settings=("link.trusted_network=true",), check=cut),
    ),
    LaunchDrill(
        "cable-in-a-chain",
        "F21",
        "the cable of two hosts is cut, a chain of four ranks over both",
        "20 in 4 s",
        partial(
            _on_two_hosts,
            settings=("link.trusted_network=true", *CHAIN_SETTINGS),
            check=cut,
            ranks_each=2,
        ),
    ),
)
