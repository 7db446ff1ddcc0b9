"""How late a robot's control loop ticks at 500 Hz, beside a bare clock loop of the same process.

The robot pushes a sample each tick and executes what two real ranks send back; the bare loop only
sleeps to the same deadlines. Both run in turn (ABBA), with the client's receive thread alive.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from bench_latency import NAMES, STATE_DIM, rank_settings, wait_ready
from bench_runs import (
    RankPair,
    Target,
    ending_cleanly,
    print_environment,
    print_targets,
    spread,
    write_json,
)

from ppstream.control_loop import ControlLoop, LoopStatistics
from ppstream.robot import RobotClient

RATE_HZ: Final = 500.0
TICKS: Final = 1250  # of one block; two pairs of blocks give n = 5000 of each way
PAIRS: Final = 2
ADDED_P99_MAX_MS: Final = 0.1
MS: Final = 1e-6
SPARE_S: Final = 15.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ticks", type=int, default=TICKS, help="of one block")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of blocks ABBA")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    mode = f"{RATE_HZ:g} Hz, a sample pushed each tick, two ranks, policy without work, ipc"
    print_environment(mode)
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        bare_ms, loop = measure(Path(name), options.ticks, options.pairs)
    bare = spread(bare_ms)
    late = loop.lateness
    rows = {
        "control loop": Lateness(late.p50_ns * MS, late.p99_ns * MS, late.max_ns * MS, late.count),
        "bare loop": Lateness(bare.p50, bare.p99, bare.max, bare.n),
    }
    print(f"\n{'tick lateness, ms':20} {'p50':>8} {'p99':>8} {'max':>8} {'n':>6}")
    for way, row in rows.items():
        print(f"{way:20} {row.p50:8.3f} {row.p99:8.3f} {row.max:8.3f} {row.n:6}")
    print(
        f"{loop.executed} of {loop.ticks} ticks executed an action, {loop.missed_ticks} were missed"
    )
    added_ms = rows["control loop"].p99 - rows["bare loop"].p99
    targets = [Target("p99 above a bare clock loop, ms", ADDED_P99_MAX_MS, added_ms)]
    print_targets(targets)
    lateness = {way: row._asdict() for way, row in rows.items()}
    write_json(options.json, mode, targets, lateness_ms=lateness, missed_ticks=loop.missed_ticks)
    return 0


class Lateness(NamedTuple):
    """How late ticks began, in ms, and how many there were."""

    p50: float
    p99: float
    max: float
    n: int


def measure(folder: Path, ticks: int, pairs: int) -> tuple[list[float], LoopStatistics]:
    """Lateness of the bare loop's ticks, in ms, and what the control loop says of its own."""
    endpoint = f"ipc://{folder / 'robots'}"
    duration_s = 4 * pairs * ticks / RATE_HZ + SPARE_S
    settings = rank_settings(endpoint, "serial", RATE_HZ, duration_s)
    bare_ms: list[float] = []
    streams = [("state", STATE_DIM)]
    state = np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)
    client = RobotClient(endpoint, robot="bench", streams=streams, actions=NAMES)
    loop = ControlLoop(
        RATE_HZ,
        read=lambda now_ns: {"state": state},
        write=lambda action: None,
        client=client,
        hold=lambda: None,
        resume=True,  # the bare loop's turns outlast every lease
    )
    with RankPair(folder, "bench", settings) as ranks, client:
        wait_ready(client, ranks)
        for way in ("control", "bare", "bare", "control") * pairs:
            if way == "control":
                loop.run((ticks + 0.5) / RATE_HZ)
            else:
                bare_ms += bare_loop(ticks)
        ranks.stop()
    return bare_ms, loop.statistics()


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
