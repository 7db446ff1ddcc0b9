"""A policy of 2.7 billion parameters cut over GPUs: rate, latency and age at a robot's client.

Runs ``vla_1`` (whole, on one GPU), ``vla_2`` and further ones one after the other, as far as there
are GPUs, and ``vla_1`` again; each earns *ready*, then serves a robot with three cameras. Full:
joints at 500 Hz, more than any of them answers. Paced: samples of every stream ``PACE`` times as
far apart as one GPU's period, so that one envelope is under way. Ages are taken in the robot's
callback, from the window's end. A last run has ``d_in = 1``, which must be refused.

``--mesh`` measures the price of computing a policy on several GPUs at once: ``vla_1``, and a policy
of the size of ACT without cameras, whole on one policy rank and sharded over a mesh of 2 and 4, the
sizes that divide their 8 heads. Rank 0 is on the CPU in all of these runs, as a mesh has it. A mesh
is a way to fit a model, not to hurry it: no speed is asked of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from ppstream.analysis.memory_use import GIB, by_rank, with_gpu
from ppstream.config import load
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError
from ppstream.robot.client import RobotClient

MOST: Final = 4  # GPUs
GAINS: Final = {2: 1.88, 3: 2.7, 4: 3.3}
OF_LARGEST: Final = 1.02  # a period, against its largest place
AGE_ABOVE_MS: Final = 1.5  # of a paced robot, against one GPU's
S_MIN: Final = 0.95
PACE: Final = 1.5
SETTLE_S: Final = 1.0  # of a new pace
CHUNK_S: Final = 20.0  # longest wait for a chunk beyond what was asked for,
CHUNK_LOOK_S: Final = 0.1  # in such steps
READY_S: Final = 240.0
LOOK_S: Final = 0.5  # between looks at ranks that start
ENVELOPES: Final = 240  # of bring-up
SECONDS: Final = 10.0  # of each pace
MESH_SECONDS: Final = 5.0  # of the only one
MESH_SIZES: Final = (1, 2, 4)
#: Configurations whose policy is sharded, and settings of each: no simulated work beside a policy.
MESHED: Final = {
    "vla_1": (f"bringup.envelopes={ENVELOPES}",),
    "two_gpus": (
        "bringup.envelopes=2000",
        'simulate={a_ms=0, c_ms=0, kind="sleep"}',
    ),
}
LONG_MS: Final = 5.0  # OF_LARGEST is asked of places that take so long: hops are no part of them


class CameraRobot:
    """A robot's client that sends what is due, and keeps how old each chunk was as it came.

    Args:
        endpoint: of the service.
        name: of the configuration whose streams it sends.
        robot: its own name.
    """

    def __init__(self, endpoint: str, name: str, robot: str = "cameras") -> None:
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
            robot=robot,
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
        """Returns chunks a second and their median age in ms, once the pace has settled.

        Goes on, ``CHUNK_S`` at most, until a chunk has come. Raises SystemExit: none has.
        """
        self.run(SETTLE_S, most_hz)
        self.ages_ms.clear()
        begun_ns = now_ns()
        self.run(duration_s, most_hz)
        while not self.ages_ms:
            if (passed_s := (now_ns() - begun_ns) / NS_PER_S) > duration_s + CHUNK_S:
                raise SystemExit(
                    f"no chunk came within {passed_s:.1f} s, want at least one: see rank 0's log"
                )
            self.run(CHUNK_LOOK_S, most_hz)
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


@contextmanager
def ready(
    name: str, settings: Sequence[str], world_size: int
) -> Iterator[tuple[CameraRobot, RankPair]]:
    """A robot that ``name`` serves, and its ranks, which drain when the ``with`` block is left."""
    with tempfile.TemporaryDirectory(prefix="ppstream-bench-") as folder:
        endpoint = f"unix://{folder}/robots"
        served = (
            f"service.endpoint={endpoint}",
            "service.duration_s=600",
            "bringup.accept=['NOTHING_TO_HIDE', 'LOW_OVERLAP', 'CONTENDED']",
        )
        with RankPair(Path(folder), name, (*served, *settings), world_size=world_size) as ranks:
            robot = CameraRobot(endpoint, name)
            with robot.client as client:
                limit = time.monotonic() + READY_S
                while not client.ready:
                    is_over = any(rank.poll() is not None for rank in ranks.processes)
                    if is_over or time.monotonic() > limit:
                        raise SystemExit(f"{name} is not ready:\n{ranks.output()}")
                    with suppress(PeerLostError):
                        client.connect(LOOK_S)
                        client.wait_ready(LOOK_S)
                yield robot, ranks
            ranks.stop()


def measure(name: str, gpus: int, served_s: float, paced_hz: float | None) -> CutResult:
    """Bring-up of ``name``, then a robot at full rate and paced (default: by this period)."""
    with ready(name, (f"bringup.envelopes={ENVELOPES}",), gpus) as (robot, ranks):
        report = judge(read_run(ranks.directory)) if gpus > 1 else None
        full = robot.measure(served_s)
        paced = robot.measure(served_s, paced_hz or full[0] / PACE)
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


# ---- a mesh -----------------------------------------------------------------------------------


class MeshResult(NamedTuple):
    """One policy on ``ranks`` policy ranks at once; times in ms."""

    name: str
    ranks: int
    rank0_ms: float  # A and C alone
    b_ms: float  # B alone, on the leader
    period_ms: float  # of bring-up
    s: float | None
    verdict: str
    hz: float  # at the robot, at full rate
    age_ms: float
    memory_gib: list[float]  # that torch holds on each policy rank's GPU while serving,
    loading_gib: list[float]  # and the most it held
    bad_audits: list[str]

    @property
    def slowest_ms(self) -> float:
        return max(self.rank0_ms, self.b_ms)


def on_gpus(ranks: int) -> tuple[str, ...]:
    """Settings of a GPU for each rank of the mesh, and of rank 0 on the CPU."""
    return "placement.rank0=cpu", f"placement.policy={[f'cuda:{n}' for n in range(ranks)]}"


def measure_mesh(name: str, settings: Sequence[str], size: int, served_s: float) -> MeshResult:
    """Bring-up of ``name`` on a mesh of ``size`` ranks, then a robot at full rate."""
    wanted = (*settings, f"placement.mesh={size}")
    with ready(name, wanted, 1 + size) as (robot, ranks):
        report = judge(read_run(ranks.directory))
        hz, age_ms = robot.measure(served_s)
        memory = by_rank(read_run(ranks.directory))
    assert report.primary is not None
    rank0, place = report.places
    seen = [with_gpu(memory.get(rank, [])) for rank in range(1, 1 + size)]
    return MeshResult(
        name,
        size,
        (rank0.alone_ns or 0) * 1e-6,
        (place.alone_ns or 0) * 1e-6,
        report.primary.period_ns * 1e-6,
        report.primary.s,
        " ".join([report.verdict.name, *report.reasons]),
        hz,
        age_ms,
        [(lines[-1].allocated_bytes or 0) / GIB for lines in seen if lines],
        [max(line.allocated_max_bytes or 0 for line in lines) / GIB for lines in seen if lines],
        [name for name, audit in report.audits.items() if audit.ok is False],
    )


def print_mesh(one: MeshResult, whole: MeshResult) -> None:
    s = "NA" if one.s is None else f"{one.s:.3f}"
    memory, loading = (
        ", ".join(f"{gib:.2f}" for gib in found) for found in (one.memory_gib, one.loading_gib)
    )
    where = "whole" if one.ranks == 1 else f"mesh of {one.ranks}"
    print(
        f"{one.name}, {where}: B alone {one.b_ms:.3f} ms ({whole.b_ms / one.b_ms:.2f} x as fast as "
        f"whole), A + C {one.rank0_ms:.3f} ms; period {one.period_ms:.3f} ms "
        f"({whole.period_ms / one.period_ms:.2f} x), S {s}, {one.verdict} "
        f"{' '.join(one.bad_audits)}; at the robot {one.hz:.1f} chunks/s "
        f"({one.hz / whole.hz:.2f} x), age p50 {one.age_ms:.2f} ms; GPU memory "
        f"{memory or 'NA'} GiB, at most {loading or 'NA'}",
        flush=True,
    )


def mesh_targets(found: Sequence[MeshResult]) -> list[Target]:
    """The period of every policy that is no shorter than its hops, against its slowest stage."""
    return [
        Target(
            f"{one.name} on {one.ranks}: period / slowest stage",
            OF_LARGEST,
            one.period_ms / one.slowest_ms,
        )
        for one in found
        if one.slowest_ms >= LONG_MS
    ]


def mesh_claims(found: Sequence[MeshResult], served_s: float) -> list[Claim]:
    claims, wholes = [], {one.name: one for one in found if one.ranks == 1}
    for one in found:
        what, whole = f"{one.name} on {one.ranks}", wholes[one.name]
        quicker, rate = whole.b_ms / one.b_ms, whole.period_ms / one.period_ms
        claims += [
            ratio(f"{what}: B against whole", whole.b_ms, one.b_ms, quicker),
            ratio(f"{what}: rate against whole", whole.period_ms, one.period_ms, rate),
            throughput(f"{what}: chunks", round(one.hz * served_s), served_s, one.hz),
        ]
    return claims


def run_meshes(count: int, served_s: float, json: Path | None) -> int:
    """Each policy whole, then on meshes of up to ``count`` GPUs; 1 when a target is missed."""
    found: list[MeshResult] = []
    with ending_cleanly():
        for name, settings in MESHED.items():
            whole: MeshResult | None = None
            for size in (size for size in MESH_SIZES if size <= count):
                found.append(measure_mesh(name, (*settings, *on_gpus(size)), size, served_s))
                whole = whole or found[-1]
                print_mesh(found[-1], whole)
    targets = mesh_targets(found)
    print_targets(targets)
    claims = mesh_claims(found, served_s)
    results = [one._asdict() for one in found]
    write_json(json, "policy_cut --mesh", targets, claims=claims, found=results)
    return int(not all(target.met for target in targets))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, help=f"of each pace: {SECONDS:g}, with --mesh {MESH_SECONDS:g}"
    )
    parser.add_argument("--gpus", type=int, default=MOST, help="most, default: %(default)s")
    parser.add_argument("--mesh", action="store_true", help="a policy on several GPUs at once")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args(argv)
    served_s = arguments.seconds or (MESH_SECONDS if arguments.mesh else SECONDS)
    count = min(MOST, arguments.gpus, torch.cuda.device_count())
    if count < 2:
        print(f"needs two GPUs, got {count}")
        return 1
    print_environment(f"up to {count} GPUs, {served_s:g} s at each pace")
    if arguments.mesh:
        return run_meshes(count, served_s, arguments.json)
    found: list[CutResult] = []
    with ending_cleanly():
        for gpus in (*range(1, count + 1), 1):
            paced_hz = found[0].hz / PACE if found else None
            found.append(measure(f"vla_{gpus}", gpus, served_s, paced_hz))
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
    claims = claims_of(found, served_s)
    write_json(arguments.json, "policy_cut", targets, claims=claims, found=results)
    return int(not all(target.met for target in targets))


if __name__ == "__main__":
    sys.exit(main())
