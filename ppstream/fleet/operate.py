"""``ppstream fleet up|drain|down``: changes a fleet, from a node of its Ray cluster."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError
from ppstream.core.phases import SERVING
from ppstream.fleet import fleet_config, status
from ppstream.fleet.directory_server import DirectoryStatus
from ppstream.fleet.fleet_config import FleetPlan
from ppstream.fleet.pipeline_process import ENDED

LOOK_S: Final = 0.5
NOT_ALL: Final = 1


def up(argv: Sequence[str] | None = None) -> int:
    """Starts what does not run, and waits until all pipelines serve; 1: they do not."""
    parser = _parser("up", "Start a fleet's directory and pipelines; what runs is left alone.")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="until all serve (600)")
    args = parser.parse_args(argv)
    plan = _joined(args)
    from ppstream.fleet import cluster

    url = cluster.up(plan)
    print(f"directory: {url}")
    if surplus := cluster.surplus(plan):
        print(
            f"{', '.join(surplus)}: beyond pipelines = {plan.fleet.pipelines}, left as they are; "
            "ppstream fleet down stops them, too"
        )
    until_ns = now_ns() + round(args.timeout_s * NS_PER_S)
    while True:
        found = status.ask(url, plan.token)
        has_ended = any(row.phase == ENDED for row in found.pipelines)
        if _all_serve(plan, found) or has_ended or now_ns() > until_ns:
            break
        time.sleep(LOOK_S)
    Console().print(status.table(found))
    return 0 if _all_serve(plan, found) else NOT_ALL


def drain(argv: Sequence[str] | None = None) -> int:
    """Takes one pipeline out: no robot gets it, those it has go elsewhere."""
    parser = _parser("drain", "Stop one pipeline; its robots hold and go to others.")
    parser.add_argument("pipeline", help="its name, as status has it")
    args = parser.parse_args(argv)
    plan = _joined(args)
    from ppstream.fleet import cluster

    if args.pipeline not in plan.fleet.pipeline_names():
        names = ", ".join(plan.fleet.pipeline_names())
        raise ConfigError([f"pipeline: got {args.pipeline!r}, want one of {names}"])
    cluster.drain(plan, args.pipeline)
    return 0


def down(argv: Sequence[str] | None = None) -> int:
    """Stops all pipelines and the directory."""
    args = _parser("down", "Drain and stop all pipelines, and the directory.").parse_args(argv)
    plan = _joined(args)
    from ppstream.fleet import cluster

    cluster.down(plan)
    return 0


def _joined(args: argparse.Namespace) -> FleetPlan:
    """The fleet, with this process in the cluster."""
    if find_spec("ray") is None:
        raise ConfigError(["ray is not installed: pip install 'ppstream[fleet]'"])
    plan = fleet_config.read(args.fleet)
    from ppstream.fleet import cluster

    cluster.join(args.address, authenticated=not args.no_authentication)
    return plan


def _all_serve(plan: FleetPlan, found: DirectoryStatus) -> bool:
    serving = {row.report.pipeline for row in found.pipelines if row.phase in SERVING}
    return serving >= set(plan.fleet.pipeline_names())


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"ppstream fleet {command}", description=description)
    parser.add_argument("fleet", type=Path, help="the fleet's TOML")
    parser.add_argument("--address", default="auto", help="of the Ray cluster (auto)")
    parser.add_argument(
        "--no-authentication", action="store_true", help="accept a cluster without token"
    )
    return parser
