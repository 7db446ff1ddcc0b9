"""Inject faults into real runs, and check that each ends or recovers within its bound.

Starts two rank processes and a robot process with its own control loop, breaks something with
signals, orders to the policy, a proxy in the robot's connection or a full disk, and prints per
fault what was expected and seen, how long it took, and whether the ledgers balance. Ends with 1
when a fault misses its bound. What each fault is stands in ``drill_ending.py`` (the run ends),
``drill_recovering.py`` (it goes on) and ``drill_launches.py`` (launchers and hosts).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench_runs import POLL_S, ending_cleanly, environment
from drill_ending import ENDINGS
from drill_faults import SAFE_S, Ending, Recovering
from drill_launches import LAUNCHES
from drill_recovering import RECOVERING
from drill_scene import END_LIMIT_S, Failed, Scene, started

from ppstream.clock import NS_PER_S, now_ns

#: One of each mechanism, for CI.
QUICK: Final = (
    "freeze-policy-rank",
    "cut-by-operator",
    "policy-raises-once",
    "policy-outlier",
    "cable-cut",
    "clock-jumps-forward",
)
ORPHAN_S: Final = 5.0  # a robot that a rank started leaves by itself within this
OLDEST_MS: Final = 300.0  # the drill's lease: no older action may be executed


@dataclass
class Outcome:
    """One fault, as it went; times in seconds from the injection, None where they do not apply."""

    name: str
    ids: str
    does: str
    expected: str
    seen: str = ""
    notice_s: float | None = None
    gone_s: float | None = None
    safe_s: float | None = None
    moves_s: float | None = None
    oldest_ms: float | None = None
    codes: tuple[int | None, ...] = ()
    ledger: str = ""
    missed: str = ""  # why it did not meet what was expected


def main() -> int:
    """Run the faults asked for; 0 when every one kept its bound."""
    args = _parser().parse_args()
    faults = (*RECOVERING, *ENDINGS, *LAUNCHES)
    if args.list:
        for fault in faults:
            print(f"{fault.name:30}{fault.ids:18}{fault.does}")
        return 0
    names = QUICK if args.quick else args.only or [fault.name for fault in faults]
    if unknown := set(names) - {fault.name for fault in faults}:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}; see --list")
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-drill-") as name:
        outcomes = drill(names, Path(name), _tell, args.overrides)
    missed = [outcome for outcome in outcomes if outcome.missed]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} faults kept their bounds")
    if args.json is not None:
        found = {"environment": environment(), "faults": [asdict(o) for o in outcomes]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if missed else 0


def drill(
    names: Sequence[str],
    folder: Path,
    tell: Callable[[Outcome], None],
    overrides: Sequence[str] = (),
) -> list[Outcome]:
    """Inject the faults of these names; those that recover share one run.

    ``overrides`` changes the drill's configuration, as ``--set``; launches keep theirs.
    """
    outcomes = []

    def add(outcome: Outcome) -> None:
        outcomes.append(outcome)
        tell(outcome)

    recovering = [fault for fault in RECOVERING if fault.name in names]
    left = list(recovering)
    while left:  # a run that a fault ended by mistake is replaced
        with started(folder / f"recovering{len(left)}", overrides) as scene:
            while left and not any(code is not None for code in scene.codes()):
                add(recovers(scene, left.pop(0)))
    for fault in ENDINGS:
        if fault.name in names:
            add(ends(folder / fault.name, fault, overrides))
    for launch in LAUNCHES:
        if launch.name in names:
            outcome = Outcome(launch.name, launch.ids, launch.does, launch.expected)
            try:
                outcome.seen, outcome.gone_s = launch.run(folder / launch.name)
            except Failed as error:
                outcome.missed = str(error)
            add(outcome)
    return outcomes


def recovers(scene: Scene, fault: Recovering) -> Outcome:
    """One fault that the run survives, to the robot's moving again."""
    expected = f"seen in {fault.seen_s:g} s, the robot moves {fault.moves_s:g} s after it is over"
    outcome = Outcome(fault.name, fault.ids, fault.does, expected)
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
    _judge_robot(scene, outcome, at_ns, must_hold=fault.holds)
    _judge_ledger(scene, outcome)
    return outcome


def ends(folder: Path, fault: Ending, overrides: Sequence[str]) -> Outcome:
    """One fault that ends the run, to the end of every process."""
    wanted = " and ".join(str(code) for code in fault.codes)
    outcome = Outcome(
        fault.name, fault.ids, fault.does, f"codes {wanted} within {fault.gone_s:g} s"
    )
    settings = [*overrides, *(setting.format(folder=folder) for setting in fault.settings)]
    try:
        with started(folder, settings) as scene:
            at_ns = now_ns()
            fault.inject(scene)
            outcome.notice_s = _until(scene, at_ns, any)
            outcome.gone_s = _until(scene, at_ns, all)
            outcome.codes = tuple(scene.codes())
            _judge_end(scene, fault, outcome)
            scene.wait("the robot holds", SAFE_S, lambda: scene.has_held_since(at_ns))
            _judge_robot(scene, outcome, at_ns, must_hold=True)
            _judge_ledger(scene, outcome)
            scene.wait("no orphan", ORPHAN_S, lambda: not scene.orphans() or None)
    except Failed as error:
        outcome.missed = outcome.missed or str(error)
    return outcome


def _until(scene: Scene, at_ns: int, enough: Callable[[list[bool]], bool]) -> float:
    def look() -> bool | None:
        return enough([code is not None for code in scene.codes()]) or None

    scene.wait("the end of the ranks", END_LIMIT_S, look)
    return (now_ns() - at_ns) / NS_PER_S


def _judge_end(scene: Scene, fault: Ending, outcome: Outcome) -> None:
    output = scene.ranks.output()
    said = [
        line for line in output.splitlines() if line.startswith("ppstream: ") and "exit" in line
    ]
    outcome.seen = said[0].removeprefix("ppstream: ") if said else "nothing said"
    pairs = zip(fault.codes, outcome.codes, strict=True)
    if any(wanted is not None and wanted != found for wanted, found in pairs):
        outcome.missed = f"codes {outcome.codes}"
    elif fault.stacks and not _names_culprit(scene.ranks.directory / fault.stacks):
        outcome.missed = f"no stacks of the culprit in {fault.stacks}"
    elif fault.says not in output:
        outcome.missed = f"the ranks did not say {fault.says!r}"
    elif (outcome.gone_s or 0) > fault.gone_s:
        outcome.missed = f"gone after {outcome.gone_s:.2f} s, limit {fault.gone_s:g} s"


def _names_culprit(stacks: Path) -> bool:
    return stacks.exists() and "drill_policy.py" in stacks.read_text()


def _judge_robot(scene: Scene, outcome: Outcome, at_ns: int, *, must_hold: bool) -> None:
    ticks = scene.ticks(at_ns)
    held_ns = next((tick.at_ns for tick in ticks if not tick.moved), None)
    outcome.oldest_ms = max((tick.age_ms for tick in ticks if tick.moved), default=None)
    if must_hold and held_ns is None:
        outcome.missed = outcome.missed or "the robot never held"
    if held_ns is not None:
        outcome.safe_s = (held_ns - at_ns) / NS_PER_S
    if (outcome.oldest_ms or 0.0) > OLDEST_MS:
        outcome.missed = (
            outcome.missed or f"an action of age {outcome.oldest_ms:.0f} ms was executed"
        )


def _judge_ledger(scene: Scene, outcome: Outcome) -> None:
    outcome.ledger = scene.imbalance() or "balances"
    if outcome.ledger != "balances":
        outcome.missed = outcome.missed or f"ledger: {outcome.ledger}"


def _tell(outcome: Outcome) -> None:
    """One line now, and below it what was seen."""
    times = (
        ("noticed", outcome.notice_s),
        ("gone", outcome.gone_s),
        ("safe", outcome.safe_s),
        ("moves", outcome.moves_s),
    )
    shown = "  ".join(f"{word} {value:.2f} s" for word, value in times if value is not None)
    oldest = "" if outcome.oldest_ms is None else f"  oldest action {outcome.oldest_ms:.0f} ms"
    codes = "" if not outcome.codes else f"  codes {outcome.codes}"
    verdict = "MISSED" if outcome.missed else "ok    "
    ledger = f"  ledger {outcome.ledger}" if outcome.ledger else ""
    print(f"{verdict} {outcome.name:30}{shown}{oldest}{codes}{ledger}")
    print(f"       {outcome.does}; expected {outcome.expected}; seen: {outcome.seen[:160]}")
    if outcome.missed:
        print(f"       missed: {outcome.missed[-1500:]}")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults, see --list")
    parser.add_argument("--quick", action="store_true", help="one of each mechanism")
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
