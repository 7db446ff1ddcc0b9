"""Run two ranks and a robot for a long time under random faults, and look for what grows or drifts.

Cuts, hangs, delays and noise in the robot's connection, robots that are killed and replaced, epoch
cuts, failing and late results, pauses of either side: one at a time, each followed by calm. Memory,
descriptors and threads of every process are sampled; period and age are compared between the first
and the last part of the calm. Ends with 1 when something grew, drifted, or did not recover.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


from drill.faults import Recovering, dropped, robot
from drill.recovering import HOUR_S, RECOVERING
from drill.scene import Failed, Scene, started
from real_runs import ending_cleanly, environment

from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.cpus import MachineMeter
from ppstream.core.interpreter import freeze_garbage

SAMPLE_S: Final = 5.0
CALM_S: Final = (2.0, 5.0)
WARM_SHARE: Final = 0.15  # of the time: caches and pools fill; nothing is judged
JUDGED_MIN: Final = 10.0  # minutes: of a shorter soak growth and drift are shown, not judged
PART: Final = 0.25  # of what is judged: the first and the last part are compared
MEMORY_MB_PER_H: Final = 1.0
DRIFT: Final = 0.10  # of period and of age, between the parts
MOVES_S: Final = 20.0  # the slowest recovery is a new robot process
#: The first would leave marks that the judgement reads as a fault; of the others one does both.
UNFIT: Final = ("disk-full", "clock-jumps-forward", "clock-jumps-back")
CLOCK_JUMPS: Final = Recovering(
    "clock-jumps",
    "F29",
    "the robot's clock is set an hour ahead, and back",
    robot("clock_s", HOUR_S),
    dropped("future"),
    5.0,
    undo=robot("clock_s", 0.0),
)
NAMES: Final = ("rank 0", "policy rank")
#: Of /proc/PID/status; pages of files are no growth: the code of a rare fault is read when it runs.
OWN_MEMORY: Final = ("RssAnon", "RssShmem")


@dataclass(frozen=True)
class ProcessSample:
    """One process at one moment."""

    at_s: float
    memory_mb: float
    descriptors: int
    threads: int


@dataclass
class Soak:
    """Findings of a run."""

    minutes: float
    faults: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[ProcessSample]] = field(default_factory=dict)
    calm_ns: list[tuple[int, int]] = field(default_factory=list)
    oldest_ms: float = 0.0
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Soak for ``--minutes``; 0 when nothing grew, drifted or stayed broken."""
    args = _parser().parse_args()
    soak = Soak(args.minutes)
    with (
        ending_cleanly(),
        tempfile.TemporaryDirectory(prefix="ppstream-soak-") as name,
        started(Path(name)) as scene,
    ):
        _run(scene, soak, random.Random(args.seed))
        drifts = _drifts(scene, soak)
        if all(code is None for code in scene.codes()):
            scene.stop()
        if imbalance := scene.imbalance():
            soak.problems.append(f"ledger: {imbalance}")
    growths = [_growth(name, soak.samples[name]) for name in NAMES]
    if args.minutes >= JUDGED_MIN:
        soak.problems += [text for found in (*growths, *drifts) for text in found["problems"]]
    _print_result(soak, growths, drifts)
    if args.json is not None:
        found = {"environment": environment(), **asdict(soak), "growth": growths, "drift": drifts}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if soak.problems else 0


def _run(scene: Scene, soak: Soak, rng: random.Random) -> None:
    faults = [CLOCK_JUMPS, *(fault for fault in RECOVERING if fault.name not in UNFIT)]
    start = time.monotonic()
    end = start + 60 * soak.minutes
    while time.monotonic() < end:
        began_ns = now_ns()
        _sample_for(scene, soak, rng.uniform(*CALM_S))
        soak.calm_ns.append((began_ns, now_ns()))
        fault = rng.choice(faults)
        soak.faults[fault.name] = soak.faults.get(fault.name, 0) + 1
        broken_s, broken_ns = time.monotonic() - start, now_ns()
        machine = MachineMeter(0)
        try:
            _break(scene, fault)
        except Failed as error:
            text = f"{fault.name}, {broken_s:.1f} s from the start: {error}"
            soak.problems.append(f"{text}; {_witnesses(scene, broken_ns, machine)}")
            if any(code is not None for code in scene.codes()):
                return
        freeze_garbage()  # to look through an hour of lines takes half a second: the cable stood
        moved = [tick.true_ms for tick in scene.ticks(began_ns) if tick.moved]
        soak.oldest_ms = max([soak.oldest_ms, *moved])


def _break(scene: Scene, fault: Recovering) -> None:
    at_ns = now_ns()
    fault.inject(scene)
    try:
        scene.wait("evidence", fault.seen_s + MOVES_S, lambda: fault.seen(scene, at_ns))
    finally:
        fault.undo(scene)
    scene.wait_moving(MOVES_S, now_ns())


def _witnesses(scene: Scene, since_ns: int, machine: MachineMeter) -> str:
    """Words what tells a fault of ours from a machine that stood still."""
    ticks_ns = [tick.at_ns for tick in scene.ticks(since_ns)]
    emits_ns = [line["tEmit"] for line in scene.lines() if line.get("tEmit", 0) >= since_ns]
    gaps_ms = [
        max((b - a for a, b in pairwise(instants_ns)), default=0) / NS_PER_MS
        for instants_ns in (ticks_ns, emits_ns)
    ]
    stolen = machine.read().steal_share
    share = "unknown" if stolen is None else f"{stolen:.0%}"
    return (
        f"ticks of the robot up to {gaps_ms[0]:.0f} ms apart, chunks of rank 0 {gaps_ms[1]:.0f}; "
        f"stolen from the machine: {share}"
    )


def _sample_for(scene: Scene, soak: Soak, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, process in zip(NAMES, scene.ranks.processes, strict=True):
            taken = soak.samples.setdefault(name, [])
            now_s = now_ns() / NS_PER_S
            if not taken or now_s - taken[-1].at_s >= SAMPLE_S:
                taken.append(_sample(process.pid, now_s))
        time.sleep(0.2)


def _sample(pid: int, at_s: float) -> ProcessSample:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    memory_mb = sum(int(fields[kind].split()[0]) for kind in OWN_MEMORY) / 1024
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return ProcessSample(at_s, memory_mb, descriptors, int(fields["Threads"]))


# ---- judge ------------------------------------------------------------------------------------


def _growth(name: str, samples: Sequence[ProcessSample]) -> dict[str, Any]:
    """The slope of memory over the judged time, and what is there more of at its end."""
    judged = samples[int(WARM_SHARE * len(samples)) :]
    slope, error = _slope([s.at_s / 3600 for s in judged], [s.memory_mb for s in judged])
    found: dict[str, Any] = {"process": name, "mb_per_h": slope, "standard_error": error}
    problems = []
    if slope - 2 * error > MEMORY_MB_PER_H:
        problems.append(f"{name}: memory grows by {slope:.1f} MB/h (+-{2 * error:.1f})")
    counts: dict[str, Callable[[ProcessSample], int]] = {
        "descriptors": lambda sample: sample.descriptors,
        "threads": lambda sample: sample.threads,
    }
    for what, count in counts.items():
        part = max(1, round(PART * len(judged)))
        first, last = (median(map(count, of)) for of in (judged[:part], judged[-part:]))
        found[what] = [first, last]
        if last > first:
            problems.append(f"{name}: {first:g} {what} at first, {last:g} at last")
    return found | {"memory_mb": judged[-1].memory_mb, "problems": problems}


def _slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares, with its standard error."""
    n = len(x)
    if n < 3:
        return 0.0, float("inf")
    mx, my = sum(x) / n, sum(y) / n
    sxx = sum((a - mx) ** 2 for a in x)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sxx
    rest = sum((b - my - slope * (a - mx)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, (rest / (n - 2) / sxx) ** 0.5


def _drifts(scene: Scene, soak: Soak) -> list[dict[str, Any]]:
    """Median period and age in the first and in the last part of the calm."""
    calm = soak.calm_ns[int(WARM_SHARE * len(soak.calm_ns)) :]
    part = max(1, round(PART * len(calm)))
    found = []
    parts = [_calm_values(scene, spans) for spans in (calm[:part], calm[-part:])]
    for index, name in enumerate(("period", "age")):
        first, last = (median(values[index]) / 1e6 for values in parts)
        drift: dict[str, Any] = {"what": name, "first_ms": first, "last_ms": last, "problems": []}
        if last > first * (1 + DRIFT):
            drift["problems"].append(f"{name} went from {first:.2f} to {last:.2f} ms")
        found.append(drift)
    return found


def _calm_values(scene: Scene, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    periods, ages, before = [], [], None
    for line in scene.lines():
        at = line.get("tEmit") if line["kind"] == "envelope" else None
        if at is None:
            continue
        if any(begin + NS_PER_S // 2 < at < end for begin, end in spans):
            ages.append(line["age_rank0_ns"])
            if before is not None:
                periods.append(at - before)
        before = at
    return periods or [0], ages or [0]


def _print_result(
    soak: Soak, growths: Sequence[dict[str, Any]], drifts: Sequence[dict[str, Any]]
) -> None:
    print(f"{soak.minutes:g} minutes, {sum(soak.faults.values())} faults: {soak.faults}")
    for growth in growths:
        print(
            f"{growth['process']}: memory {growth['memory_mb']:.0f} MB, "
            f"{growth['mb_per_h']:+.2f} +- {2 * growth['standard_error']:.2f} MB/h; descriptors "
            f"{growth['descriptors']}, threads {growth['threads']} (first and last part)"
        )
    for drift in drifts:
        print(
            f"{drift['what']}: {drift['first_ms']:.2f} ms at first, {drift['last_ms']:.2f} at last"
        )
    print(f"oldest action executed: {soak.oldest_ms:.0f} ms")
    for problem in soak.problems:
        print(f"PROBLEM {problem}")
    print("MISSED" if soak.problems else "nothing grew, drifted or stayed broken")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the faults' order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen there, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
