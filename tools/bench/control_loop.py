"""Lateness of a robot's control loop at 500 Hz, beside bare clock loops.

The robot pushes samples at a rate of their own, 50 Hz if nothing else is said, and executes what
two real ranks send back; a bare loop only sleeps to the same deadlines. One runs in turn with it
(ABBA), in the same process, while the ranks rest; the other beside it, in a process of its own,
while they work: on a machine with fewer cores than busy processes only that comparison says what
the control loop itself adds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
from bench.latency import NAMES, STATE_DIM, rank_settings, wait_ready
from claimed_numbers import Claim, ratio, shares
from real_runs import (
    RankPair,
    Target,
    ending_cleanly,
    print_environment,
    print_targets,
    spread,
    write_json,
)

from ppstream.robot.client import RobotClient
from ppstream.robot.control_loop import ControlLoop, LoopStatistics

RATE_HZ: Final = 500.0
TICKS: Final = 1250  # of one block; two pairs of blocks give n = 5000 of each way
PAIRS: Final = 2
SAMPLES_HZ: Final = 50.0  # and so many chunks come
ADDED_P99_MAX_MS: Final = 0.05
MS: Final = 1e-6
SPARE_S: Final = 15.0
#: ``bare_loop`` for an interpreter that has nothing else in it.
BESIDE: Final = """
import json, sys, time
period_ns, late_ms = round(1e9 / float(sys.argv[1])), []
due_ns = time.monotonic_ns()
for _ in range(int(sys.argv[2])):
    due_ns += period_ns
    time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
    late_ms.append((time.monotonic_ns() - due_ns) / 1e6)
print(json.dumps(late_ms))
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ticks", type=int, default=TICKS, help="of one block")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of blocks ABBA")
    parser.add_argument("--samples-hz", type=float, default=SAMPLES_HZ, help="at most each tick")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    every = max(1, round(RATE_HZ / options.samples_hz))
    mode = (
        f"{RATE_HZ:g} Hz, a sample pushed at {RATE_HZ / every:g} Hz, two ranks, policy without "
        "work, unix"
    )
    print_environment(mode)
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        bare_ms, beside_ms, loop = measure(Path(name), options.ticks, options.pairs, every)
    rows = rows_of(bare_ms, beside_ms, loop)
    print_rows(rows, loop)
    targets = targets_of(rows)
    print_targets(targets)
    lateness = {way: row._asdict() for way, row in rows.items()}
    write_json(
        options.json,
        mode,
        targets,
        claims=claims_of(rows, targets, loop, asked=2 * options.pairs * options.ticks),
        lateness_ms=lateness,
        missed_ticks=loop.missed_ticks,
    )
    return 0


class Lateness(NamedTuple):
    """Lateness of ticks, in ms, and how many there were."""

    p50: float
    p99: float
    max: float
    n: int


def rows_of(
    bare_ms: list[float], beside_ms: list[float], loop: LoopStatistics
) -> dict[str, Lateness]:
    """Returns what ``measure`` found, in ms."""
    bare, beside, late = spread(bare_ms), spread(beside_ms), loop.lateness
    return {
        "control loop": Lateness(late.p50_ns * MS, late.p99_ns * MS, late.max_ns * MS, late.count),
        "bare loop beside it": Lateness(beside.p50, beside.p99, beside.max, beside.n),
        "bare loop in turn": Lateness(bare.p50, bare.p99, bare.max, bare.n),
    }


def print_rows(rows: dict[str, Lateness], loop: LoopStatistics) -> None:
    print(f"\n{'tick lateness, ms':20} {'p50':>8} {'p99':>8} {'max':>8} {'n':>6}")
    for way, row in rows.items():
        print(f"{way:20} {row.p50:8.3f} {row.p99:8.3f} {row.max:8.3f} {row.n:6}")
    print(
        f"{loop.executed} of {loop.ticks} ticks executed an action, {loop.missed_ticks} were missed"
    )


def targets_of(rows: dict[str, Lateness]) -> list[Target]:
    """Returns what the control loop adds to a bare one, under the same load and under less."""
    return [
        Target(f"p99 above a {way}, ms", ADDED_P99_MAX_MS, rows["control loop"].p99 - row.p99)
        for way, row in rows.items()
        if way != "control loop"
    ]


def claims_of(
    rows: dict[str, Lateness], targets: Sequence[Target], loop: LoopStatistics, *, asked: int
) -> list[Claim]:
    """Claims that what each target adds explains our p99, and accounts for every tick."""
    ours = rows["control loop"]
    others = [(way, row.p99) for way, row in rows.items() if way != "control loop"]
    return [
        *(
            shares(f"p99: {way} and what is added", [p99 / ours.p99, target.reached / ours.p99])
            for (way, p99), target in zip(others, targets, strict=True)
        ),
        ratio("ticks begun and missed, of those due", loop.ticks + loop.missed_ticks, asked, 1.0),
        shares("ticks: executed and held", [n / loop.ticks for n in (loop.executed, loop.held)]),
    ]


def measure(
    folder: Path, ticks: int, pairs: int, every: int
) -> tuple[list[float], list[float], LoopStatistics]:
    """Lateness of both bare loops' ticks, in ms, and what the control loop says of its own.

    A sample is pushed at one tick of ``every``.
    """
    endpoint = f"unix://{folder / 'robots'}"
    duration_s = 4 * pairs * ticks / RATE_HZ + SPARE_S
    settings = rank_settings(endpoint, "serial", RATE_HZ / every, duration_s)
    bare_ms: list[float] = []
    beside_ms: list[float] = []
    beside = [sys.executable, "-S", "-c", BESIDE, str(RATE_HZ), str(ticks)]
    streams = [("state", STATE_DIM)]
    number = count()
    state = np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)
    client = RobotClient(endpoint, robot="bench", streams=streams, actions=NAMES)
    loop = ControlLoop(
        RATE_HZ,
        read=lambda now_ns: {"state": state} if next(number) % every == 0 else {},
        write=lambda action: None,
        client=client,
        hold=lambda: None,
        resume=True,  # the bare loop's turns outlast every lease
    )
    with RankPair(folder, "bench", settings) as ranks, client:
        wait_ready(client, ranks)
        for way in ("control", "bare", "bare", "control") * pairs:
            if way == "control":
                with subprocess.Popen(beside, stdout=subprocess.PIPE, text=True) as bare:
                    loop.run((ticks + 0.5) / RATE_HZ)
                    beside_ms += json.loads(bare.communicate()[0])
            else:
                bare_ms += bare_loop(ticks)
        ranks.stop()
    return bare_ms, beside_ms, loop.statistics()


def bare_loop(ticks: int) -> list[float]:
    """Sleep to absolute deadlines and do nothing."""
    period_ns = round(1e9 / RATE_HZ)
    due_ns = time.monotonic_ns()
    late_ms = []
    for _ in range(ticks):
        due_ns += period_ns
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        late_ms.append((time.monotonic_ns() - due_ns) / 1e6)
    return late_ms


if __name__ == "__main__":
    sys.exit(main())
