"""Service of robots: latency by their number, time to safe for each fault, reconnects, lateness.

Real ranks, real clients, real signals; a policy without work, paced by the sample, over unix://.
Latency is from an observation's stamp to its action in the callback, all robots at the same rate
and in turn. Lateness is that of a control loop's ticks beside a bare clock loop of the same script.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
from bench import control_loop as bench_control_loop
from bench.latency import NAMES, STATE_DIM, rank_settings, wait_ready
from claimed_numbers import Claim, ratio, shares
from drill.time_to_safe import LEASE_MS, RATE_HZ, SafeTime, measure_faults
from real_runs import (
    RankPair,
    Spread,
    Target,
    ending_cleanly,
    print_environment,
    print_targets,
    spread,
    write_json,
)

from ppstream.core.clock import now_ns
from ppstream.robot.client import RobotClient
from ppstream.robot.control_loop import LoopStatistics
from ppstream.wire.robot_messages import ActionChunk

ROBOTS: Final = (1, 8, 32)
ROBOT_HZ: Final = 10.0  # of each: 32 of them are 320 observations a second
SECONDS: Final = 6.0
WARM: Final = 5  # observations of each robot that are not counted
RUN_S: Final = 90.0
TICK_MS: Final = 1000 / RATE_HZ
LATE_MS: Final = 10.0  # of a tick on a machine that ranks and robot share
PARTS: Final = ("latency", "faults", "lateness")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--robots", nargs="+", type=int, default=ROBOTS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each number of robots")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    mode = "policy without work, paced by sample, serial, unix"
    print_environment(mode)
    results: dict[str, object] = {}
    targets: list[Target] = []
    claims: list[Claim] = []
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        folder = Path(name)
        if "latency" in options.parts:
            found = {n: latency(folder, n, options.seconds) for n in options.robots}
            print_latency(found)
            claims += latency_claims(found)
            results["latency_ms"] = {
                str(n): asdict(row.taken_ms) | {"answered": row.answered, "asked": row.asked}
                for n, row in found.items()
            }
        if "faults" in options.parts:
            faults, recovery_ms = measure_faults(folder)
            targets += print_faults(faults, recovery_ms)
            results["faults"] = [asdict(row) for row in faults]
            results["recovery_ms"] = recovery_ms
        if "lateness" in options.parts:
            print()
            targets += lateness(folder / "late", results, claims)
    print_targets(targets)
    write_json(options.json, mode, targets, claims=claims, **results)
    return 0


# ---- latency by the number of robots ------------------------------------------------------------


class RobotLatency(NamedTuple):
    """Of all robots together; what a newer window overtook is asked and not answered."""

    taken_ms: Spread
    answered: int
    asked: int

    @property
    def answered_share(self) -> float:
        return self.answered / self.asked


class Asker:
    """A robot that notes how long each of its observations took to become an action."""

    def __init__(self, endpoint: str, number: int) -> None:
        self.client = RobotClient(
            endpoint,
            robot=f"robot-{number}",
            streams=[("state", STATE_DIM)],
            actions=NAMES,
            on_chunk=self._arrived,
        )
        self.asked = 0
        self.taken_ms: list[float] = []

    def ask(self, state: np.ndarray) -> None:
        self.asked += 1
        self.client.push("state", now_ns(), state)

    def _arrived(self, chunk: ActionChunk) -> None:
        self.taken_ms.append((now_ns() - chunk.window_end_ns) / 1e6)


def latency(folder: Path, robots: int, seconds: float) -> RobotLatency:
    """Observation to action over all robots."""
    folder = folder / f"robots-{robots}"
    folder.mkdir(0o700)
    endpoint = f"unix://{folder}/robots"
    settings = rank_settings(endpoint, "serial", ROBOT_HZ, RUN_S)
    with RankPair(folder, "bench", [*settings, f"batch.rows={robots}"]) as ranks:
        askers = [Asker(endpoint, number) for number in range(robots)]
        try:
            wait_ready(askers[0].client, ranks)
            threads = [threading.Thread(target=a.client.connect, args=(30.0,)) for a in askers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            _tick(askers, seconds)
        finally:
            for asker in askers:
                asker.client.close()
    return RobotLatency(
        spread([taken for asker in askers for taken in asker.taken_ms[WARM:]]),
        sum(len(asker.taken_ms) for asker in askers),
        sum(asker.asked for asker in askers),
    )


def _tick(askers: Sequence[Asker], seconds: float) -> None:
    """Each robot at its rate, one after the other, evenly spread; absolute deadlines."""
    state = np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)
    slot_ns = round(1e9 / ROBOT_HZ / len(askers))
    due_ns = now_ns()
    for _ in range(WARM + round(seconds * ROBOT_HZ)):
        for asker in askers:
            due_ns += slot_ns
            time.sleep(max(0, due_ns - now_ns()) / 1e9)
            asker.ask(state)
    time.sleep(0.2)  # the last answers


def print_latency(found: dict[int, RobotLatency]) -> None:
    columns = f"{'p50':>8} {'p99':>8} {'max':>8} {'n':>6} {'answered':>8}"
    print(f"{'observation to action, ms':28} {columns}")
    for robots, row in found.items():
        name, ms = f"{robots} robot{'s' * (robots > 1)}, {ROBOT_HZ:g} Hz each", row.taken_ms
        numbers = f"{ms.p50:8.2f} {ms.p99:8.2f} {ms.max:8.2f} {ms.n:6}"
        print(f"{name:28} {numbers} {row.answered_share:8.1%}")


def latency_claims(found: dict[int, RobotLatency]) -> list[Claim]:
    """Of what was asked, how much was answered."""
    return [
        ratio(f"{robots} robots: answered", row.answered, row.asked, row.answered_share)
        for robots, row in found.items()
    ]


# ---- faults and lateness ------------------------------------------------------------------------


def print_faults(faults: Sequence[SafeTime], recovery_ms: dict[str, float]) -> list[Target]:
    print(
        f"\n{'from the fault, ms':28} {'last act':>8} {'safe':>8} {'oldest':>8}  resumed by itself"
    )
    for row in faults:
        numbers = f"{row.last_action_ms:8.1f} {row.safe_ms:8.1f} {row.oldest_ms:8.1f}"
        print(f"{row.fault:28} {numbers}  {'YES' if row.resumed else 'no'}")
    for what, ms in recovery_ms.items():
        print(f"{what}: {ms:.1f} ms")
    limit_ms = LEASE_MS + TICK_MS + LATE_MS
    targets = [Target(f"{row.fault}: safe after, ms", limit_ms, row.safe_ms) for row in faults]
    oldest_ms = max(row.oldest_ms for row in faults)
    return [*targets, Target("oldest action executed, ms", LEASE_MS, oldest_ms)]


def lateness(folder: Path, results: dict[str, object], claims: list[Claim]) -> list[Target]:
    """Of a control loop's ticks, and of bare clock loops beside it and in turn with it.

    Results and claims are added to those given.
    """
    folder.mkdir()
    ticks = bench_control_loop.TICKS
    bare_ms, beside_ms, loop = bench_control_loop.measure(folder, ticks, 1)
    rows = bench_control_loop.rows_of(bare_ms, beside_ms, loop)
    bench_control_loop.print_rows(rows, loop)
    shown = ", ".join(f"<= {_us(found.upto_ns)} us: {found.n}" for found in loop.histogram)
    print(f"histogram: {shown}")
    print(f"{loop.collections} collections between ticks")
    results["lateness_ms"] = {way: row._asdict() for way, row in rows.items()}
    targets = bench_control_loop.targets_of(rows)
    claims += bench_control_loop.claims_of(rows, targets, loop, asked=2 * ticks)
    claims.append(histogram_claim(loop))
    return targets


def histogram_claim(loop: LoopStatistics) -> Claim:
    """The histogram's bins hold every tick whose lateness was counted."""
    parts = [found.n / loop.lateness.count for found in loop.histogram]
    return shares("histogram of the ticks' lateness", parts)


def _us(upto_ns: int | None) -> str:
    return "inf" if upto_ns is None else f"{upto_ns / 1e3:g}"


if __name__ == "__main__":
    sys.exit(main())
