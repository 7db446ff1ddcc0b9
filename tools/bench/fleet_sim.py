"""The simulation behind ``ppstream fleet plan`` against real runs of one and of two pipelines.

Real ranks, links and clients; stages that sleep, so that a busy machine disturbs them less. Robots
sample at their rate in phases of their own, four to a pipeline. The simulation gets the robots'
samples and the durations that the same run measured in service; what it must find out is what waits
for what. Rounds of one and of two pipelines alternate.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

import numpy as np
from bench.latency import NAMES, STATE_DIM, rank_settings, wait_ready
from claimed_numbers import ratio
from real_runs import (
    RankPair,
    Target,
    ending_cleanly,
    print_environment,
    print_targets,
    write_json,
)

from ppstream.analysis.log_reader import read_run
from ppstream.core.clock import now_ns
from ppstream.fleet.service_times import Floats, of_run
from ppstream.fleet.simulation import WARM_SHARE, Shape, ages_at, serve
from ppstream.robot.client import RobotClient
from ppstream.wire.robot_messages import ActionChunk

ROWS: Final = 4
ROBOT_HZ: Final = 12.0
A_MS, B_MS, C_MS = 5.0, 40.0, 2.0
HORIZON: Final = 50  # of 20 ms: no chunk that comes is past, else nobody would hear of it
ROUNDS: Final = 3
SECONDS: Final = 10.0
RUN_S: Final = 120.0
PIPELINES: Final = (1, 2)
LIMIT: Final = 0.10  # of the difference, as a share of what is real
MS: Final = 1e-6  # per ns
MOMENTS: Final = 4000  # of each robot, at which its age is read


class Found(NamedTuple):
    """Ages of the robots' newest windows and the period, in ms."""

    ages_ms: Floats
    periods_ms: Floats

    def numbers(self) -> dict[str, float]:
        p50, p99 = np.percentile(self.ages_ms, (50, 99))
        period = float(self.periods_ms.mean())
        return {"age p50": float(p50), "age p99": float(p99), "period": period}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each round")
    parser.add_argument("--seed", type=int, default=0, help="of phases and draws")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    mode = f"A {A_MS:g}, B {B_MS:g}, C {C_MS:g} ms asleep; {ROWS} robots at {ROBOT_HZ:g} Hz each"
    print_environment(mode)
    pairs: dict[int, list[tuple[Found, Found]]] = {count: [] for count in PIPELINES}
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        for turn in range(options.rounds):
            for count in PIPELINES:
                folder = Path(name) / f"{turn}-{count}"
                folder.mkdir()
                pairs[count] += measure(folder, count, options.seconds, options.seed + turn)
    targets, claims = [], []
    rows: dict[str, dict[str, float]] = {}
    print(f"{'':24} {'real':>9} {'simulated':>9} {'ratio':>7}")
    for count, found in pairs.items():
        real, simulated = (joined(side).numbers() for side in zip(*found, strict=True))
        for what, value in real.items():
            title = f"{count} pipeline{'s' * (count > 1)}: {what}"
            quotient = simulated[what] / value
            print(f"{title:24} {value:9.2f} {simulated[what]:9.2f} {quotient:7.3f}")
            targets.append(Target(f"{title}: off by", LIMIT, abs(quotient - 1)))
            claims.append(ratio(title, simulated[what], value, quotient))
            rows[title] = {"real_ms": value, "simulated_ms": simulated[what]}
    print_targets(targets)
    write_json(options.json, mode, targets, claims=claims, rows=rows)
    return 0


def measure(folder: Path, count: int, seconds: float, seed: int) -> list[tuple[Found, Found]]:
    """Pipelines beside each other; what was real and what is simulated, of each."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        pipelines = [stack.enter_context(_pipeline(folder / f"{k}")) for k in range(count)]
        robots = [
            [
                stack.enter_context(_Robot(_endpoint(folder / f"{k}"), n, rng.random() / ROBOT_HZ))
                for n in range(ROWS)
            ]
            for k in range(count)
        ]
        for pipeline, group in zip(pipelines, robots, strict=True):
            wait_ready(group[0].client, pipeline)
            for robot in group:
                robot.client.connect(30.0)
        begin_ns = now_ns() + round(0.5e9)
        threads = [
            threading.Thread(target=robot.play, args=(begin_ns, seconds))
            for group in robots
            for robot in group
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.3)  # the last answers
        for pipeline in pipelines:
            pipeline.stop()
        return [
            _compared(pipeline.directory, group, begin_ns, seconds, seed)
            for pipeline, group in zip(pipelines, robots, strict=True)
        ]


def joined(found: Sequence[Found]) -> Found:
    """All rounds together."""
    ages, periods = zip(*found, strict=True)
    return Found(np.concatenate(ages), np.concatenate(periods))


class _Robot:
    """A robot that samples at its rate and notes when each window's chunk came."""

    def __init__(self, endpoint: str, number: int, phase_s: float) -> None:
        self.client = RobotClient(
            endpoint,
            robot=f"robot-{number}",
            streams=[("state", STATE_DIM)],
            actions=NAMES,
            on_chunk=self._arrived,
        )
        self._phase_s = phase_s
        self.stamps_ns: list[int] = []
        self.chunks_ns: list[tuple[int, int]] = []  # arrival, window's end

    def play(self, begin_ns: int, seconds: float) -> None:
        state = np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)
        for turn in range(int(seconds * ROBOT_HZ)):
            due_ns = begin_ns + round((self._phase_s + turn / ROBOT_HZ) * 1e9)
            time.sleep(max(0, due_ns - now_ns()) / 1e9)
            self.stamps_ns.append(now_ns())
            self.client.push("state", self.stamps_ns[-1], state)

    def _arrived(self, chunk: ActionChunk) -> None:
        self.chunks_ns.append((now_ns(), chunk.window_end_ns))

    def __enter__(self) -> _Robot:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def _pipeline(folder: Path) -> RankPair:
    folder.mkdir(0o700)
    settings = [
        *rank_settings(_endpoint(folder), "serial", ROBOT_HZ, RUN_S),
        f"batch.rows={ROWS}",
        f"simulate.a_ms={A_MS}",
        f"simulate.c_ms={C_MS}",
        "policy.target=ppstream_stages.simulated:build",
        f'policy.options={{b_ms={B_MS}, kind="sleep", horizon={HORIZON}, action_dim={len(NAMES)}}}',
        f"actions.horizon={HORIZON}",
        "actions.lease_ms=2000",
        'bringup.accept=["NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"]',
    ]
    return RankPair(folder, "bench", settings)


def _endpoint(folder: Path) -> str:
    return f"unix://{folder}/robots"


def _compared(
    run: Path, robots: Sequence[_Robot], begin_ns: int, seconds: float, seed: int
) -> tuple[Found, Found]:
    rng = np.random.default_rng(seed)
    warm_ms, end_ms = WARM_SHARE * seconds * 1e3, seconds * 1e3
    ages = []
    for robot in robots:
        chunks = (np.array(robot.chunks_ns, dtype=np.float64) - begin_ns) * MS
        moments = rng.uniform(warm_ms, end_ms, MOMENTS)
        ages.append(ages_at(moments, chunks[:, 0], chunks[:, 1]))
    begins = [(e.tA0 - begin_ns) * MS for e in read_run(run).envelopes if e.tA0 is not None]
    periods = np.diff([at for at in begins if warm_ms <= at <= end_ms])
    stamps = [(np.array(robot.stamps_ns, dtype=np.float64) - begin_ns) * MS for robot in robots]
    served = serve(of_run(run, "ready"), stamps, 0.0, Shape(), seconds, rng)
    return (
        Found(np.concatenate(ages), periods),
        Found(served.ages_ms, np.full(len(periods), served.period_ms)),
    )


if __name__ == "__main__":
    sys.exit(main())
