"""Inject faults into real runs, and check that each ends or recovers within its bound.

Starts two rank processes and a robot process with its own control loop, breaks something with
signals, orders to the policy, a proxy in the robot's connection or a full disk, and prints per
fault what was expected and seen, how long it took, and whether the ledgers balance. Ends with 1
when a fault misses its bound. What each fault is stands in ``drill/ending.py`` (the run ends),
``drill/recovering.py`` (it goes on), ``drill/floods.py`` (others flood), ``drill/launches.py``
(launchers), ``drill/contention.py``
(gate and report must not be fooled), ``drill/two_hosts.py`` and ``drill/gpu.py`` (two GPUs, with
``--gpu``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


from drill.contention import CONTENTION
from drill.ending import CHAIN_ENDINGS, ENDINGS, MESH_ENDINGS
from drill.faults import SAFE_S, Ending, Recovering
from drill.floods import FLOODS
from drill.gpu import (
    GPU_CHAIN_ENDINGS,
    GPU_ENDINGS,
    GPU_RECOVERING,
    GPU_SETTINGS,
    beyond_these_gpus,
    missing,
)
from drill.judging import (
    NOT_STARTED,
    ORPHAN_S,
    FaultOutcome,
    judge_ledger,
    judge_robot,
    merged,
    print_outcome,
)
from drill.launches import LAUNCHES, LaunchDrill
from drill.recovering import RECOVERING
from drill.replica_losses import REPLICA_ENDINGS, REPLICA_RECOVERING
from drill.scene import END_LIMIT_S, Failed, Scene, started
from drill.two_hosts import HOSTS
from real_runs import POLL_S, ROOT, ending_cleanly, environment

from ppstream.core.clock import NS_PER_S, now_ns

#: One of each mechanism, for CI.
QUICK: Final = (
    "freeze-policy-rank",
    "cut-by-operator",
    "policy-raises-once",
    "policy-raises-oddly",
    "policy-calls-exit",
    "policy-writes-nothing-once",
    "policy-outlier",
    "cable-cut",
    "emergency-stop",
    "clock-jumps-forward",
)


class Tier(NamedTuple):
    """Faults for one kind of machine; ``settings`` change the drill's configuration for all."""

    recovering: tuple[Recovering, ...]
    endings: tuple[Ending, ...]
    launches: tuple[LaunchDrill, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[Recovering | Ending | LaunchDrill, ...]:
        return (*self.recovering, *self.endings, *self.launches)


CPU: Final = Tier(
    (*RECOVERING, *FLOODS, *REPLICA_RECOVERING),
    (*ENDINGS, *CHAIN_ENDINGS, *REPLICA_ENDINGS, *MESH_ENDINGS),
    (*LAUNCHES, *CONTENTION, *HOSTS),
)
GPU: Final = Tier(GPU_RECOVERING, (*GPU_ENDINGS, *GPU_CHAIN_ENDINGS), settings=GPU_SETTINGS)


def main() -> int:
    """Run the faults asked for; 0 when every one kept its bound."""
    args = _parser().parse_args()
    tier = GPU if args.gpu else CPU
    if args.list:
        for fault in tier.faults:
            print(f"{fault.name:34} {fault.ids:17} {fault.does}")
        return 0
    if args.gpu and args.quick:
        raise SystemExit("--quick: its faults need no GPU; without --gpu, or --gpu --only NAME ...")
    if args.gpu and (why := missing()):
        print(f"skipped: {why}")
        return 0
    names = QUICK if args.quick else args.only or [fault.name for fault in tier.faults]
    if unknown := set(names) - {fault.name for fault in tier.faults}:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}; see --list")
    if args.gpu and (beyond := set(names) & set(beyond_these_gpus())):
        names = [name for name in names if name not in beyond]
        print(f"left out, they need three GPUs: {', '.join(sorted(beyond))}")
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-drill-") as name:
        outcomes = drill(names, Path(name), print_outcome, args.overrides, tier)
    missed = [outcome for outcome in outcomes if outcome.missed]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} faults kept their bounds")
    if args.json is not None:
        found = {"environment": environment(), "faults": [asdict(o) for o in outcomes]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.markdown is not None:
        page = args.markdown.read_text() if args.markdown.exists() else ""
        args.markdown.write_text(merged(page, outcomes))
    return 1 if missed else 0


def drill(
    names: Sequence[str],
    folder: Path,
    print_outcome: Callable[[FaultOutcome], None],
    overrides: Sequence[str] = (),
    tier: Tier = CPU,
) -> list[FaultOutcome]:
    """Inject the faults of these names; neighbours that recover share one run.

    ``overrides`` changes the drill's configuration, as ``--set``; launches keep theirs.
    """
    outcomes = []
    settings = (*tier.settings, *overrides)

    def add(outcome: FaultOutcome) -> None:
        outcomes.append(outcome)
        print_outcome(outcome)

    left = [fault for fault in tier.recovering if fault.name in names]
    while left:  # a run that a fault ended by mistake is replaced, one of other settings, too
        own = left[0].settings
        try:
            with started(folder / f"recovering{len(left)}", (*settings, *own)) as scene:
                while left and left[0].settings == own and scene.is_running:
                    add(recovers(scene, left.pop(0)))
        except Failed as error:  # to start
            add(not_started(left.pop(0), error))
    for fault in tier.endings:
        if fault.name in names:
            add(ends(folder / fault.name, fault, settings))
    for launch in tier.launches:
        if launch.name in names:
            add(launches(folder / launch.name, launch))
    return outcomes


def not_started(fault: Recovering, error: Failed) -> FaultOutcome:
    """As it ends when the run that it needs does not begin."""
    missed = NOT_STARTED + str(error)
    return FaultOutcome(fault.name, fault.ids, fault.does, "a run", missed=missed)


def recovers(scene: Scene, fault: Recovering) -> FaultOutcome:
    """One fault that the run survives, to the robot's moving again."""
    expected = f"seen in {fault.seen_s:g} s, the robot moves {fault.moves_s:g} s after it is over"
    outcome = FaultOutcome(fault.name, fault.ids, fault.does, expected)
    at_ns = now_ns()
    try:
        fault.inject(scene)
        outcome.seen = scene.wait("evidence", fault.seen_s, lambda: fault.seen(scene, at_ns))
        outcome.notice_s = (now_ns() - at_ns) / NS_PER_S
        fault.undo(scene)
        undone_ns = now_ns()
        time.sleep(POLL_S)
        scene.wait_moving(fault.moves_s, undone_ns)
        outcome.moves_s = (now_ns() - undone_ns) / NS_PER_S
    except Failed as error:
        outcome.missed = str(error)
        with suppress(Failed):
            fault.undo(scene)
    judge_robot(scene, outcome, at_ns, must_hold=fault.holds)
    judge_ledger(outcome, scene.imbalance())
    return outcome


def ends(folder: Path, fault: Ending, overrides: Sequence[str]) -> FaultOutcome:
    """One fault that ends the run, to the end of every process."""
    wanted = " and ".join(str(code) for code in fault.codes)
    outcome = FaultOutcome(
        fault.name, fault.ids, fault.does, f"codes {wanted} within {fault.gone_s:g} s"
    )
    settings = [*overrides, *(setting.format(folder=folder) for setting in fault.settings)]
    prefix = NOT_STARTED
    try:
        with started(folder, settings) as scene:
            prefix = ""
            at_ns = now_ns()
            fault.inject(scene)
            outcome.notice_s = _until(scene, at_ns, any)
            outcome.gone_s = _until(scene, at_ns, all)
            outcome.codes = tuple(scene.codes())
            _judge_end(scene, fault, outcome)
            scene.wait("the robot holds", SAFE_S, lambda: scene.has_held_since(at_ns))
            judge_robot(scene, outcome, at_ns, must_hold=True)
            judge_ledger(outcome, scene.imbalance())
            scene.wait("no orphan", ORPHAN_S, lambda: not scene.orphans() or None)
            outcome.orphans = "none"
    except Failed as error:
        outcome.missed = outcome.missed or prefix + str(error)
    return outcome


def launches(folder: Path, launch: LaunchDrill) -> FaultOutcome:
    """One fault of starting, restarting or hosts."""
    outcome = FaultOutcome(launch.name, launch.ids, launch.does, launch.expected)
    folder.mkdir(parents=True)
    try:
        launch.run(folder, outcome)
    except Failed as error:
        outcome.missed = outcome.missed or str(error)
    return outcome


def _until(scene: Scene, at_ns: int, enough: Callable[[list[bool]], bool]) -> float:
    def look() -> bool | None:
        return enough([code is not None for code in scene.codes()]) or None

    scene.wait("the end of the ranks", END_LIMIT_S, look)
    return (now_ns() - at_ns) / NS_PER_S


def _judge_end(scene: Scene, fault: Ending, outcome: FaultOutcome) -> None:
    output = scene.ranks.output()
    texts = [
        line for line in output.splitlines() if line.startswith("ppstream: ") and "exit" in line
    ]
    outcome.seen = texts[0].removeprefix("ppstream: ") if texts else "nothing said"
    outcome.seen = outcome.seen.replace(f"{ROOT}/", "")
    pairs = zip(fault.codes, outcome.codes, strict=True)
    if any(wanted is not None and wanted != found for wanted, found in pairs):
        outcome.missed = f"codes {outcome.codes}:\n{output[-1500:]}"
    elif fault.leaves is not None and not _has(scene.ranks.directory, *fault.leaves):
        outcome.missed = f"no {fault.leaves[1]} in {fault.leaves[0]}"
    elif fault.says not in output:
        outcome.missed = f"the ranks did not say {fault.says!r}"
    elif (outcome.gone_s or 0) > fault.gone_s:
        outcome.missed = f"gone after {outcome.gone_s:.2f} s, limit {fault.gone_s:g} s"


def _has(folder: Path, name: str, text: str) -> bool:
    return (folder / name).exists() and text in (folder / name).read_text()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults, see --list")
    parser.add_argument("--quick", action="store_true", help="one of each mechanism")
    parser.add_argument("--gpu", action="store_true", help="the faults between two GPUs instead")
    parser.add_argument("--list", action="store_true", help="print every fault and leave")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="PATH=VALUE",
        help="change the drill's configuration, e.g. placement.policy=cuda:1",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen there, too")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="the same as a table; in a page that has one, its rows are replaced, or added",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
