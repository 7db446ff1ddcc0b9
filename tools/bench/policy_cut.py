"""A policy of 2.7 billion parameters cut over GPUs: rate, latency and age at a robot's client.

Runs ``vla_1`` (whole, on one GPU), ``vla_2`` and further ones one after the other, as far as there
are GPUs, and ``vla_1`` again; each earns *ready*, then serves a robot with three cameras. Full:
joints at 500 Hz, more than any of them answers. Paced: samples of every stream ``PACE`` times as
far apart as one GPU's period, so that one envelope is under way. Ages are taken in the robot's
callback, from the window's end. A last run has ``d_in = 1``, which must be refused.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

import numpy as np
import torch
from claimed_numbers import Claim, ratio, throughput
from real_runs import (
    RankPair,
    Target,
    ending_cleanly,
    measure_bring_up,
    print_environment,
    print_targets,
    write_json,
)

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.config import load
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.robot.client import RobotClient

MOST: Final = 4  # GPUs
GAINS: Final = {2: 1.88, 3: 2.7, 4: 3.3}
OF_LARGEST: Final = 1.02  # a period, against its largest place
AGE_ABOVE_MS: Final = 1.5  # of a paced robot, against one GPU's
S_MIN: Final = 0.95
PACE: Final = 1.5
SETTLE_S: Final = 1.0  # of a new pace
READY_S: Final = 240.0
ENVELOPES: Final = 240  # of bring-up


class CameraRobot:
    """A robot's client that sends what is due, and keeps how old each chunk was as it came.

    Args:
        endpoint: of the service.
        name: of the configuration whose streams it sends.
    """

    def __init__(self, endpoint: str, name: str) -> None:
        config = load.read(name)
        self.sent = {stream.name: 0 for stream in config.streams}
        self.ages_ms: list[float] = []
        self.rates_hz = {stream.name: stream.rate_hz for stream in config.streams}
        self._values = {
            stream.name: np.zeros(stream.dim, stream.dtype) for stream in config.streams
        }
        declared = [(stream.name, stream.dim, stream.dtype) for stream in config.streams]
        self.client = RobotClient(
            endpoint,
            robot="cameras",
            streams=declared,
            actions=config.actions.names,
            on_chunk=lambda chunk: self.ages_ms.append((now_ns() - chunk.window_end_ns) * 1e-6),
        )

    def run(self, duration_s: float, most_hz: float = float("inf")) -> None:
        """Send each stream at its rate, or ``most_hz``, for so long, from now on."""
        periods_ns = {
            name: round(NS_PER_S / min(hz, most_hz)) for name, hz in self.rates_hz.items()
        }
        due_ns = dict.fromkeys(self.sent, now_ns())
        end_ns = now_ns() + round(duration_s * NS_PER_S)
        while (now := now_ns()) < end_ns:
            for name in self.sent:
                if due_ns[name] <= now:
                    due_ns[name] += periods_ns[name]
                    values = self._values[name]
                    values[:] = self.sent[name] % 200
                    self.sent[name] += self.client.push(name, now, values)
            time.sleep(max(0, (min(due_ns.values()) - now_ns()) * 1e-9))

    def measure(self, duration_s: float, most_hz: float = float("inf")) -> tuple[float, float]:
        """Returns chunks a second and their median age in ms, once the pace has settled."""
        self.run(SETTLE_S, most_hz)
        self.ages_ms.clear()
        begun_ns = now_ns()
        self.run(duration_s, most_hz)
        passed_s = (now_ns() - begun_ns) / NS_PER_S
        return len(self.ages_ms) / passed_s, statistics.median(self.ages_ms)


class CutResult(NamedTuple):
    """One configuration; times in ms."""

    name: str
    gpus: int
    places_ms: list[float]  # alone, where the policy is cut
    period_ms: float  # of bring-up; of one GPU by the robot
    s: float | None
    verdict: str
    hz: float  # at the robot
    age_ms: float  # at the robot, at full rate
    paced_hz: float
    paced_age_ms: float
    bad_audits: list[str]


def measure(name: str, gpus: int, served_s: float, paced_hz: float | None) -> CutResult:
    """Bring-up of ``name``, then a robot at full rate and paced (default: by this period)."""
    with tempfile.TemporaryDirectory(prefix="ppstream-bench-") as folder:
        endpoint = f"unix://{folder}/robots"
        settings = (
            f"service.endpoint={endpoint}",
            "service.duration_s=600",
            f"bringup.envelopes={ENVELOPES}",
            "bringup.accept=['NOTHING_TO_HIDE', 'LOW_OVERLAP', 'CONTENDED']",
        )
        with RankPair(Path(folder), name, settings, world_size=gpus) as ranks:
            robot = CameraRobot(endpoint, name)
            with robot.client as client:
                client.connect(READY_S)
                if not client.wait_ready(READY_S):
                    raise SystemExit(f"{name} is not ready:\n{ranks.output()}")
                report = judge(read_run(ranks.directory)) if gpus > 1 else None
                full = robot.measure(served_s)
                paced = robot.measure(served_s, paced_hz or full[0] / PACE)
            ranks.stop()
    if report is None:
        return CutResult(name, gpus, [], 1e3 / full[0], None, "", *full, *paced, [])
    assert report.primary is not None
    return CutResult(
        name,
        gpus,
        [place.alone_ns * 1e-6 for place in report.places if place.alone_ns],
        report.primary.period_ns * 1e-6,
        report.primary.s,
        report.verdict.name,
        *full,
        *paced,
        [name for name, audit in report.audits.items() if audit.ok is False],
    )


def print_found(one: CutResult, whole_ms: float) -> None:
    places = " | ".join(f"{ms:.2f}" for ms in one.places_ms) or "whole"
    s = "NA" if one.s is None else f"{one.s:.3f}"
    gain = f"{whole_ms / one.period_ms:.2f} x one GPU"
    if one.places_ms:
        gain += f", {sum(one.places_ms) / one.period_ms:.2f} x the parts in turn"
    print(
        f"{one.name} on {one.gpus}: places {places} ms; period {one.period_ms:.2f} ms "
        f"({gain}), S {s}, {one.verdict} {' '.join(one.bad_audits)}; "
        f"at the robot {one.hz:.1f} chunks/s, age p50 {one.age_ms:.1f} ms; paced "
        f"{one.paced_hz:.1f}/s, age p50 {one.paced_age_ms:.2f} ms",
        flush=True,
    )


def targets_of(found: Sequence[CutResult]) -> list[Target]:
    """Of every cut, against one GPU in this run: the quicker of its two, and the younger.

    A gain is at most that over the places one after the other, which have no runtime around them.
    """
    alone = [one for one in found if one.gpus == 1]
    age_ms = min(one.paced_age_ms for one in alone)
    targets = []
    for one in found:
        if one.gpus == 1:
            continue
        whole_ms = min(sum(one.places_ms), *(each.period_ms for each in alone))
        name, gain = f"{one.gpus} GPUs", whole_ms / one.period_ms
        largest = one.period_ms / max(one.places_ms)
        targets += [
            Target(f"{name}: {GAINS[one.gpus]} x / gain", 1.0, GAINS[one.gpus] / gain),
            Target(f"{name}: period / largest place", OF_LARGEST, largest),
            Target(f"{name}: {S_MIN} / S", 1.0, S_MIN / (one.s or 1e-9)),
            Target(f"{name}: paced age, ms", age_ms + AGE_ABOVE_MS, one.paced_age_ms),
        ]
    return targets


def claims_of(found: Sequence[CutResult], served_s: float) -> list[Claim]:
    whole_ms = found[0].period_ms
    claims = [
        ratio(f"{one.name}: gain", whole_ms, one.period_ms, whole_ms / one.period_ms)
        for one in found
    ]
    return claims + [
        throughput(f"{one.name}: chunks", round(one.hz * served_s), served_s, one.hz)
        for one in found
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each pace: %(default)s")
    parser.add_argument("--gpus", type=int, default=MOST, help="most, default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args(argv)
    count = min(MOST, arguments.gpus, torch.cuda.device_count())
    if count < 2:
        print("needs two GPUs")
        return 1
    print_environment(f"up to {count} GPUs, {arguments.seconds:g} s at each pace")
    found: list[CutResult] = []
    with ending_cleanly():
        for gpus in (*range(1, count + 1), 1):
            paced_hz = found[0].hz / PACE if found else None
            found.append(measure(f"vla_{gpus}", gpus, arguments.seconds, paced_hz))
            print_found(found[-1], found[0].period_ms)
        refused, _ = measure_bring_up(
            ("pipeline.d_in=1", f"bringup.envelopes={ENVELOPES}"),
            config="vla_2",
            limit_s=READY_S,
        )
    print(f"vla_2 with d_in = 1: {refused.verdict.name} {' '.join(refused.reasons)}")
    targets = targets_of(found)
    targets.append(Target("d_in = 1 is refused (0: it is)", 0, refused.verdict.name != "FAIL"))
    print_targets(targets)
    results = [one._asdict() for one in found]
    claims = claims_of(found, arguments.seconds)
    write_json(arguments.json, "policy_cut", targets, claims=claims, found=results)
    return int(not all(target.met for target in targets))


if __name__ == "__main__":
    sys.exit(main())
