"""Parts of the time from an observation to its action, at 50 Hz through ``RobotClient.ask``.

A policy that echoes behind two ranks, paced by the sample; ``peers.py`` has the whole beside what
others take for it. The parts are read from the run's own log (one host: one clock).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
from bench.peers_work import ACTION_DIM, NAMES, STATE_DIM
from claimed_numbers import Claim, shares
from real_runs import RankPair, Spread, ending_cleanly, print_environment, spread, write_json

from ppstream.robot.client import RobotClient

RATE_HZ: Final = 50
WARM: Final = 50  # ticks that are not counted
READY_LIMIT_S: Final = 60.0
ANSWER_LIMIT_S: Final = 1.0
SPARE_S: Final = 60.0  # the ranks end by themselves this long after the last tick, at the latest
US: Final = 1e-3  # per ns


class Arrival(NamedTuple):
    """One action at the caller of ``ask``, in ns of the one clock of this host."""

    stamp_ns: int
    there_ns: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rate-hz", type=float, default=RATE_HZ, help="of the observations")
    parser.add_argument("--threads", choices=("serial", "split"), default="serial")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    mode = f"{options.rate_hz:g} Hz, policy without work, paced by sample, {options.threads}, unix"
    print_environment(mode)
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        answers, parts_us = measure(Path(name), options)
    whole = spread([(answer.there_ns - answer.stamp_ns) * US for answer in answers])
    parts = {part: spread(values) for part, values in parts_us.items()}
    print_spreads(whole, parts)
    write_json(
        options.json,
        mode,
        (),
        claims=claims_of(whole, parts),
        observation_to_action_us=asdict(whole),
        parts_us={part: asdict(found) for part, found in parts.items()},
        unanswered=options.requests - whole.n,
    )
    return 0


def measure(
    folder: Path, options: argparse.Namespace
) -> tuple[list[Arrival], dict[str, list[float]]]:
    """Returns what was answered, and durations in µs by part of the way."""
    endpoint, requests = f"unix://{folder / 'robots'}", options.requests
    duration_s = (requests + WARM) / options.rate_hz + SPARE_S
    settings = rank_settings(endpoint, options.threads, options.rate_hz, duration_s)
    streams = [("state", STATE_DIM)]
    with RankPair(folder, "bench", settings) as ranks:
        with RobotClient(endpoint, robot="bench", streams=streams, actions=NAMES) as client:
            wait_ready(client, ranks)
            answers = tick(client, requests, options.rate_hz)
        ranks.stop()
        return answers, parts_of(answers, ranks.directory)


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


def tick(client: RobotClient, requests: int, rate_hz: float) -> list[Arrival]:
    """Ask once a period, at absolute deadlines."""
    state = {"state": np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)}
    answers: list[Arrival] = []
    due_ns = time.monotonic_ns()
    for number in range(requests + WARM):
        due_ns += round(1e9 / rate_hz)
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        state["state"][0] = number / (requests + WARM)
        stamp_ns = time.monotonic_ns()
        with suppress(TimeoutError):
            client.ask(state, ANSWER_LIMIT_S, stamp_ns)
            if number >= WARM:
                answers.append(Arrival(stamp_ns, time.monotonic_ns()))
    return answers


# ---- where the time goes ----------------------------------------------------------------------

#: Between which stamps each part lies; ``stamp`` and ``there`` are the caller's.
PARTS: Final = {
    "ask to rank 0's ring": ("stamp", "tRx"),
    "ring to start of A": ("tRx", "tA0"),
    "A": ("tA0", "tA1"),
    "A to commit": ("tA1", "tSend"),
    "link to policy rank": ("tSend", "tB0"),
    "B": ("tB0", "tB1"),
    "link to rank 0": ("tB1", "tRecv"),
    "received to start of C": ("tRecv", "tDecode"),
    "C and emit": ("tDecode", "tEmit"),
    "emit to the caller": ("tEmit", "there"),
}


def parts_of(answers: Sequence[Arrival], directory: Path) -> dict[str, list[float]]:
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
    """As ``served_lines``, by the end of their window; of runs with one row."""
    return {line["window_end_ns"]: line for line in served_lines(directory)}


def served_lines(directory: Path) -> list[dict[str, Any]]:
    """Both ranks' lines of each envelope that was served, in one; of one rank its own."""
    paths = [directory / f"rank{rank}.gen0.jsonl" for rank in (0, 1)]
    ours, theirs = (
        [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        for path in paths
    )
    policy = {(e["epoch"], e["seq"]): e for e in theirs if e["kind"] == "stage1"}
    served = [e for e in ours if e["kind"] == "envelope" and e["phase"] == "ready"]
    return [policy.get((e["epoch"], e["seq"]), {}) | e for e in served]


# ---- what is shown ----------------------------------------------------------------------------


def claims_of(whole: Spread, parts: dict[str, Spread]) -> list[Claim]:
    """The parts make up the whole way."""
    means = [found.mean / whole.mean for found in parts.values()]
    return [shares("parts of observation to action", means)] if means else []


def print_spreads(whole: Spread, parts: dict[str, Spread]) -> None:
    print(f"{'us':28} {'p50':>8} {'p99':>8} {'max':>8} {'mean':>8} {'n':>6}")
    print(_line("observation to action", whole))
    for part, found in parts.items():
        print(_line(part, found))


def _line(name: str, found: Spread) -> str:
    numbers = " ".join(f"{value:8.1f}" for value in (found.p50, found.p99, found.max, found.mean))
    return f"{name:28} {numbers} {found.n:6}"


if __name__ == "__main__":
    sys.exit(main())
