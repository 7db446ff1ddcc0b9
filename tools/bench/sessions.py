"""Time that 1, 8 and 32 robots wait for their actions, beside one more that misbehaves.

Two real ranks serve all robots as rows of one batch, paced by their samples. Each robot pushes at
its own moment; counted is the time from the push to its callback with the chunk that answers it, on
one host, by one clock. *worst p99* is that of the robot that fared worst, *lost* had no answer.
Then one more robot, a process of its own, is frozen (SIGSTOP), killed (SIGKILL), or floods rank 0
with frames, and the others are measured again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
from bench.latency import READY_LIMIT_S, US, rank_settings
from bench.peers_work import ACTION_DIM, NAMES, STATE_DIM
from claimed_numbers import Claim, shares
from real_runs import RankPair, Spread, ending_cleanly, print_environment, spread, write_json

from ppstream.robot.client import RobotClient
from ppstream.wire.robot_messages import ActionChunk

COUNTS: Final = (1, 8, 32)
CASES: Final = ("all well", "one frozen", "one killed", "one floods")
RATE_HZ: Final = 20.0
SETTLE_S: Final = 1.0
BAD: Final = "bad"


class Served(NamedTuple):
    """One case: all robots' waits, the p99 of the one that fared worst, and what came of it all."""

    waits_us: Spread
    worst_p99_us: float
    unanswered: int
    pushed: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--robots", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--rate-hz", type=float, default=RATE_HZ, help="of each robot")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--misbehave", nargs=2, metavar=("ENDPOINT", "CASE"), help="be that robot")
    options = parser.parse_args(argv)
    if options.misbehave:
        return misbehave(*options.misbehave)
    mode = f"each robot at {options.rate_hz:g} Hz, policy without work, paced by sample, unix"
    print_environment(mode)
    columns = " ".join(f"{name:>8}" for name in ("p50", "p99", "max"))
    print(f"\n{'observation to action, us':28} {columns} {'n':>6} {'worst p99':>10} {'lost':>5}")
    found: dict[str, dict[str, Any]] = {}
    claims: list[Claim] = []
    with ending_cleanly():
        for count in options.robots:
            for case, served in measure(count, options).items():
                name = f"{count} robots, {case}"
                claims.append(answered(name, served))
                found[name] = asdict(served.waits_us) | {
                    "worst_robot_p99": served.worst_p99_us,
                    "unanswered": served.unanswered,
                    "pushed": served.pushed,
                }
                print_case(name, served)
    write_json(options.json, mode, [], claims=claims, observation_to_action_us=found)
    return 0


def print_case(name: str, served: Served) -> None:
    waits_us, worst_us, lost, _ = served
    numbers = " ".join(f"{value:8.0f}" for value in (waits_us.p50, waits_us.p99, waits_us.max))
    print(f"{name:28} {numbers} {waits_us.n:6} {worst_us:10.0f} {lost:5}", flush=True)


def answered(name: str, served: Served) -> Claim:
    """Every pushed sample was answered or is counted as lost."""
    counts = (served.waits_us.n, served.unanswered)
    return shares(f"{name}: answered and lost", [count / served.pushed for count in counts])


def measure(count: int, options: argparse.Namespace) -> dict[str, Served]:
    """Measures each case."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        endpoint = f"unix://{name}/robots"
        duration_s = READY_LIMIT_S + len(CASES) * (options.seconds + 20)
        settings = rank_settings(endpoint, "serial", options.rate_hz, duration_s)
        settings += [f"batch.rows={count + 1}", "bringup.overlap_min=0"]  # not what is asked here
        with RankPair(Path(name), "bench", settings) as ranks, Fleet(endpoint, count) as fleet:
            fleet.start(ranks)
            for case in CASES:
                with one_more(endpoint, case):
                    found[case] = fleet.measure(options.rate_hz, options.seconds)
    return found


class Fleet:
    """Robots that behave, in this process: one thread pushes for all, each client has its own."""

    def __init__(self, endpoint: str, count: int) -> None:
        self._asked: list[dict[int, int]] = [{} for _ in range(count)]  # stamp -> pushed at
        self._waits_us: list[list[float]] = [[] for _ in range(count)]
        self.clients = [self._client(endpoint, number) for number in range(count)]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()

    def start(self, ranks: RankPair) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        for client in self.clients:
            client.connect(READY_LIMIT_S)
        while not all(client.wait_ready(0.1) for client in self.clients):
            if time.monotonic() > deadline or any(p.poll() is not None for p in ranks.processes):
                raise SystemExit(f"the run did not become ready:\n{ranks.output()}")

    def measure(self, rate_hz: float, seconds: float) -> Served:
        self._push(rate_hz, SETTLE_S)
        for waits_us, asked in zip(self._waits_us, self._asked, strict=True):
            waits_us.clear()
            asked.clear()
        pushed = self._push(rate_hz, seconds)
        time.sleep(SETTLE_S / 2)
        waits = [[*each] for each in self._waits_us]
        unanswered = sum(len(asked) for asked in self._asked)
        worst_us = max(spread(each).p99 for each in waits if each)
        return Served(
            spread([wait for each in waits for wait in each]), worst_us, unanswered, pushed
        )

    def _push(self, rate_hz: float, seconds: float) -> int:
        """Each robot in its turn, evenly spread over the period, at absolute times; how often."""
        step_ns = round(1e9 / rate_hz / len(self.clients))
        state = np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)
        due_ns = time.monotonic_ns()
        turns = round(seconds * rate_hz * len(self.clients))
        for turn in range(turns):
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            number = turn % len(self.clients)
            stamp_ns = time.monotonic_ns()
            self._asked[number][stamp_ns] = stamp_ns
            self.clients[number].push("state", stamp_ns, state)
            due_ns += step_ns
        return turns

    def _client(self, endpoint: str, number: int) -> RobotClient:
        def arrived(chunk: ActionChunk) -> None:
            pushed_ns = self._asked[number].pop(chunk.window_end_ns, None)
            if pushed_ns is not None:
                self._waits_us[number].append((time.monotonic_ns() - pushed_ns) * US)

        return make_client(endpoint, f"robot{number}", arrived)


def make_client(endpoint: str, robot: str, on_chunk: Any = None) -> RobotClient:
    streams = [("state", STATE_DIM)]
    return RobotClient(endpoint, robot=robot, streams=streams, actions=NAMES, on_chunk=on_chunk)


@contextmanager
def one_more(endpoint: str, case: str) -> Iterator[None]:
    """One more robot, a process of its own, that misbehaves inside the ``with`` block."""
    if case == CASES[0]:
        yield
        return
    command = [sys.executable, __file__, "--misbehave", endpoint, case]
    robot = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert robot.stdout is not None
        assert robot.stdout.readline(), "the robot that shall misbehave did not connect"
        if case == "one frozen":
            robot.send_signal(signal.SIGSTOP)
        elif case == "one killed":
            robot.kill()
        yield
    finally:
        robot.kill()
        robot.wait()
        assert robot.stdout is not None
        robot.stdout.close()


def misbehave(endpoint: str, case: str) -> int:
    """Connect, serve a while like any robot, then do what ``case`` says until killed."""
    client = make_client(endpoint, f"{BAD}{os.getpid()}")
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        try:
            client.connect(1.0)
            break
        except Exception:  # noqa: BLE001 - the row of the one before is free after its silence
            time.sleep(0.2)
    state = np.zeros(STATE_DIM, np.float32)
    client.push("state", time.monotonic_ns(), state)
    print("connected", flush=True)
    threading.Event().wait(0.2)
    while case == "one floods":
        client.push("state", time.monotonic_ns(), state)
    while True:
        client.push("state", time.monotonic_ns(), state)
        time.sleep(1 / RATE_HZ)


if __name__ == "__main__":
    assert len(NAMES) == ACTION_DIM
    sys.exit(main())
