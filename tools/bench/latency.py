"""From observation to action at 50 Hz through a robot client, beside bare ZeroMQ doing as little.

A policy that echoes, behind two ranks, paced by the sample, against REQ/REP over ipc and against a
chain robot, rank 0, rank 1, rank 0, robot. All three run at the same time; each 20 ms they are
asked one after the other, in rotating order, so that a slow moment of the machine hits all alike.
For the client an action is there when its callback has it; for the others when ``recv`` returns.
Where the time goes is read from the run's own log (one host: one clock).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
from bench.bare_zmq import ACTION_DIM, STATE_DIM, BareServers
from claimed_numbers import Claim, ratio, shares
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

from ppstream.robot.client import RobotClient
from ppstream.wire.robot_messages import ActionChunk

RATE_HZ: Final = 50
WARM: Final = 50  # ticks that are not counted
READY_LIMIT_S: Final = 60.0
ANSWER_LIMIT_S: Final = 1.0
SPARE_S: Final = 60.0  # the ranks end by themselves this long after the last tick, at the latest
US: Final = 1e-3  # per ns
WAYS: Final = ("ppstream", "REQ/REP", "chain")
NAMES: Final = tuple(f"j{index}" for index in range(ACTION_DIM))
LIMITS: Final = (  # (of, over, quantile, at most)
    ("REQ/REP", "p50", 1.35),
    ("REQ/REP", "p99", 1.15),
    ("chain", "p50", 1.20),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One action through the client, in ns of the one clock of this host."""

    stamp_ns: int
    there_ns: int


class Asker:
    """Pushes one observation and waits for the action that answers it."""

    def __init__(self, endpoint: str) -> None:
        self.client = RobotClient(
            endpoint,
            robot="bench",
            streams=[("state", STATE_DIM)],
            actions=NAMES,
            on_chunk=self._arrived,
        )
        self.answers: list[Answer] = []
        self.unanswered = 0
        self._arrival = threading.Event()
        self._asked_ns = 0

    def ask(self, stamp_ns: int, state: np.ndarray[Any, Any]) -> None:
        self._arrival.clear()
        self._asked_ns = stamp_ns
        self.client.push("state", stamp_ns, state)
        if not self._arrival.wait(ANSWER_LIMIT_S):
            self.unanswered += 1

    def _arrived(self, chunk: ActionChunk) -> None:
        if chunk.window_end_ns == self._asked_ns:
            self.answers.append(Answer(chunk.window_end_ns, time.monotonic_ns()))
            self._arrival.set()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1500, help="of each way")
    parser.add_argument("--rate-hz", type=float, default=RATE_HZ, help="of the observations")
    parser.add_argument("--threads", choices=("serial", "split"), default="serial")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    mode = f"{options.rate_hz:g} Hz, policy without work, paced by sample, {options.threads}, unix"
    print_environment(mode)
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        taken_us, parts_us, unanswered = measure(Path(name), options)
    spreads = {way: spread(values) for way, values in taken_us.items()}
    parts = {part: spread(values) for part, values in parts_us.items()}
    targets = targets_of(spreads)
    print_spreads(spreads, parts, unanswered)
    print_targets(targets)
    write_json(
        options.json,
        mode,
        targets,
        claims=claims_of(spreads, parts, targets),
        observation_to_action_us={way: asdict(found) for way, found in spreads.items()},
        parts_us={part: asdict(found) for part, found in parts.items()},
        unanswered=unanswered,
    )
    return 0


def measure(
    folder: Path, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """Durations by way and by part of the way, in µs; and how many requests had no answer."""
    endpoint, requests = f"unix://{folder / 'robots'}", options.requests
    duration_s = (requests + WARM) / options.rate_hz + SPARE_S
    settings = rank_settings(endpoint, options.threads, options.rate_hz, duration_s)
    with RankPair(folder, "bench", settings) as ranks, BareServers(folder) as bare:
        asker = Asker(endpoint)
        with asker.client as client:
            wait_ready(client, ranks)
            taken = tick(asker, bare, requests, options.rate_hz)
        ranks.stop()
        parts = parts_of(asker.answers[-requests:], ranks.directory)
    return taken, parts, asker.unanswered


def wait_ready(client: RobotClient, ranks: RankPair) -> None:
    """Until the run serves; exits with the ranks' output when it does not come to that."""
    deadline = time.monotonic() + READY_LIMIT_S
    client.connect(READY_LIMIT_S)
    while not client.wait_ready(0.5):
        if time.monotonic() > deadline or any(p.poll() is not None for p in ranks.processes):
            raise SystemExit(f"the run did not become ready:\n{ranks.output()}")


def rank_settings(endpoint: str, threads: str, rate_hz: float, duration_s: float) -> list[str]:
    """A 14-dim state to 7 actions, through the policy that echoes."""
    names = ", ".join(f'"{name}"' for name in NAMES)
    low, high = (str([limit] * ACTION_DIM) for limit in (-1.0, 1.0))
    return [
        f'streams=[{{name="state", dim={STATE_DIM}, rate_hz={rate_hz}, reference=true}}]',
        "window.steps=2",
        f"window.dt_ms={1000 / rate_hz}",
        f"actions={{names=[{names}], horizon=1, dt_ms=20, low={low}, high={high}, lease_ms=200}}",
        "policy.target=bench.policies:build_echo",
        f'policy.options={{group="state", steps=2, dim={STATE_DIM}, horizon=1, '
        f"action_dim={ACTION_DIM}}}",
        "simulate.a_ms=0",
        "simulate.c_ms=0",
        "pipeline.pacing=sample",
        f"pipeline.threads={threads}",
        'bringup.accept=["NOTHING_TO_HIDE"]',
        "bringup.envelopes=100",
        f"service.endpoint={endpoint}",
        f"service.duration_s={duration_s}",
    ]


def tick(asker: Asker, bare: BareServers, requests: int, rate_hz: float) -> dict[str, list[float]]:
    """Ask all three ways once a tick; absolute deadlines, rotating order."""
    ways: dict[str, Callable[[int, np.ndarray[Any, Any]], None]] = dict(
        zip(WAYS, (asker.ask, bare.request_reply, bare.chain), strict=True)
    )
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    state = np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)
    slot_ns = round(1e9 / rate_hz / len(WAYS))
    due_ns = time.monotonic_ns()
    for number in range(requests + WARM):
        for place in range(len(WAYS)):
            way = WAYS[(number + place) % len(WAYS)]
            due_ns += slot_ns
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            stamp_ns = time.monotonic_ns()
            ways[way](stamp_ns, state)
            if way != "ppstream" and number >= WARM:
                taken[way].append((time.monotonic_ns() - stamp_ns) * US)
    taken["ppstream"] = [(a.there_ns - a.stamp_ns) * US for a in asker.answers[-requests:]]
    return taken


# ---- where the time goes ----------------------------------------------------------------------

#: Between which stamps each part lies; ``stamp`` and ``there`` are the robot's.
PARTS: Final = {
    "push to rank 0's ring": ("stamp", "tRx"),
    "ring to start of A": ("tRx", "tA0"),
    "A": ("tA0", "tA1"),
    "A to commit": ("tA1", "tSend"),
    "link to policy rank": ("tSend", "tB0"),
    "B": ("tB0", "tB1"),
    "link to rank 0": ("tB1", "tRecv"),
    "received to start of C": ("tRecv", "tDecode"),
    "C and emit": ("tDecode", "tEmit"),
    "emit to robot's callback": ("tEmit", "there"),
}


def parts_of(answers: Sequence[Answer], directory: Path) -> dict[str, list[float]]:
    """Durations in µs of each part, for every answer whose log lines are complete."""
    lines = read_lines(directory)
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for answer in answers:
        stamps = lines.get(answer.stamp_ns, {})
        stamps |= {"stamp": answer.stamp_ns, "there": answer.there_ns}
        if all(end in stamps for pair in PARTS.values() for end in pair):
            for part, (begin, end) in PARTS.items():
                parts[part].append((stamps[end] - stamps[begin]) * US)
    return {part: values for part, values in parts.items() if values}


def read_lines(directory: Path) -> dict[int, dict[str, int]]:
    """By the end of their window: both ranks' lines of the envelopes that were served."""
    ours, theirs = (
        [
            json.loads(line)
            for line in (directory / f"rank{rank}.gen0.jsonl").read_text().splitlines()
        ]
        for rank in (0, 1)
    )
    policy = {(e["epoch"], e["seq"]): e for e in theirs if e["kind"] == "stage1"}
    served = [e for e in ours if e["kind"] == "envelope" and e["phase"] == "ready"]
    return {e["window_end_ns"]: policy.get((e["epoch"], e["seq"]), {}) | e for e in served}


# ---- what is shown ----------------------------------------------------------------------------


def targets_of(spreads: dict[str, Spread]) -> list[Target]:
    ours = spreads["ppstream"]
    return [
        Target(
            f"{quantile} / {quantile} of {way}",
            limit,
            getattr(ours, quantile) / getattr(spreads[way], quantile),
        )
        for way, quantile, limit in LIMITS
    ]


def claims_of(
    spreads: dict[str, Spread], parts: dict[str, Spread], targets: Sequence[Target]
) -> list[Claim]:
    """Each target's ratio, and that the parts make up the whole way."""
    ours = spreads["ppstream"]
    claims = [
        ratio(
            target.what,
            getattr(ours, quantile),
            getattr(spreads[way], quantile),
            target.reached,
        )
        for target, (way, quantile, _) in zip(targets, LIMITS, strict=True)
    ]
    if parts:
        whole = [found.mean / ours.mean for found in parts.values()]
        claims.append(shares("parts of observation to action", whole))
    return claims


def print_spreads(spreads: dict[str, Spread], parts: dict[str, Spread], unanswered: int) -> None:
    print(f"{'observation to action, us':28} {'p50':>8} {'p99':>8} {'max':>8} {'mean':>8} {'n':>6}")
    for way, found in spreads.items():
        print(_line(way, found))
    print(f"unanswered within {ANSWER_LIMIT_S:g} s: {unanswered}\n\nwhere ppstream's time goes, us")
    for part, found in parts.items():
        print(_line(part, found))


def _line(name: str, found: Spread) -> str:
    numbers = " ".join(f"{value:8.1f}" for value in (found.p50, found.p99, found.max, found.mean))
    return f"{name:28} {numbers} {found.n:6}"


if __name__ == "__main__":
    sys.exit(main())
