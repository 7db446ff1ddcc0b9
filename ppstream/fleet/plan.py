"""``ppstream fleet plan``: the pipelines and GPUs that a fleet needs, from measured times.

Every way to build a pipeline that is asked about (rows, replicas) is simulated full
(``simulation.py``), since a full one has the oldest actions and failures fill them; then spare
pipelines are added until failures (``outages.py``) leave hardly a robot without a row. The same
seed gives the same answer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np

from ppstream.config.run_tables import D_IN_MAX, REPLICAS_MAX
from ppstream.config.schema import ROWS_MAX
from ppstream.core.errors import ConfigError
from ppstream.fleet import outages, simulation
from ppstream.fleet.outages import Failures
from ppstream.fleet.service_times import Duration, ServiceTimes, of_report
from ppstream.fleet.simulation import Pacing, RobotGroup, Shape, SimulatedService

PIPELINES_SIMULATED: Final = 16  # pipelines that are alike, each with phases of its own
SECONDS: Final = 30.0  # of each
SPARES_MAX: Final = 1000
SAMPLES_MIN: Final = 2  # of each robot, so that one lies behind the warm-up
NO_ANSWER: Final = 1


@dataclass(frozen=True)
class FleetQuestion:
    """Question: robots, their rate, the oldest action in use at p99, and what may fail."""

    robots: int
    rate_hz: float
    age_ms: float
    net_ms: float
    failures: Failures
    without_row_max: float = 1e-4  # of all robots' time


@dataclass(frozen=True)
class Candidate:
    """One way to build a pipeline, full of robots."""

    rows: int
    replicas: int
    gpus: int  # of one pipeline
    period_ms: float
    age_p50_ms: float
    age_p99_ms: float
    latency_p99_ms: float
    answered_share: float
    is_fit: bool
    lacks: Literal["", "age", "spares"] = ""  # why it does not fit
    pipelines: int = 0  # spares included; 0: it does not fit
    spares: int = 0
    held_s_per_day: float = 0.0  # of one robot
    without_row_s_per_day: float = 0.0  # of them

    @property
    def all_gpus(self) -> int:
        return self.pipelines * self.gpus


def plan(
    fleet: FleetQuestion,
    builds: Sequence[tuple[ServiceTimes, Shape, int]],
    *,
    seconds: float = SECONDS,
    seed: int = 0,
) -> list[Candidate]:
    """Every build with what the fleet would need of it, the fewest GPUs first, misfits last.

    Args:
        fleet: the question.
        builds: times, shape and GPUs of a pipeline; its rows stand in the times.
        seconds: simulated, of each of ``PIPELINES_SIMULATED`` pipelines.
        seed: of all draws.
    """
    found = []
    for times, shape, gpus in builds:
        rng = np.random.default_rng([seed, times.rows, shape.replicas])
        one = _full(fleet, times, shape, gpus, seconds, rng)
        found.append(_with_spares(fleet, one, rng) if one.is_fit else one)
    return sorted(found, key=lambda one: (not one.is_fit, one.all_gpus, one.age_p99_ms))


def _full(
    fleet: FleetQuestion,
    times: ServiceTimes,
    shape: Shape,
    gpus: int,
    seconds: float,
    rng: np.random.Generator,
) -> Candidate:
    """Pipelines with as many robots as they have rows, as far as the fleet has them."""
    robots = RobotGroup(min(times.rows, fleet.robots), fleet.rate_hz, fleet.net_ms)
    count = min(PIPELINES_SIMULATED, math.ceil(fleet.robots / times.rows))
    served = [simulation.simulate(times, robots, shape, seconds, rng) for _ in range(count)]
    ages = np.concatenate([one.ages_ms for one in served])
    latencies = np.concatenate([one.latencies_ms for one in served])
    p50, p99 = _percentiles(ages)
    return Candidate(
        rows=times.rows,
        replicas=shape.replicas,
        gpus=gpus,
        period_ms=_mean(served, "period_ms"),
        age_p50_ms=p50,
        age_p99_ms=p99,
        latency_p99_ms=_percentiles(latencies)[1],
        answered_share=_mean(served, "answered_share"),
        is_fit=p99 <= fleet.age_ms,
        lacks="" if p99 <= fleet.age_ms else "age",
    )


def _with_spares(fleet: FleetQuestion, one: Candidate, rng: np.random.Generator) -> Candidate:
    """The fewest pipelines of this build that hold the robots through failures.

    Each try doubles the spares, up to those that suffice; what lies between is halved.
    """
    needed = math.ceil(fleet.robots / one.rows)
    found, too_few, spares = None, -1, 0
    while too_few + 1 < (SPARES_MAX + 1 if found is None else found.spares):
        held = outages.simulate(fleet.robots, needed + spares, one.rows, fleet.failures, rng)
        if held.without_row_share <= fleet.without_row_max:
            day_s = 24 * outages.S_PER_H
            found = replace(
                one,
                pipelines=needed + spares,
                spares=spares,
                held_s_per_day=held.share * day_s,
                without_row_s_per_day=held.without_row_share * day_s,
            )
        else:
            too_few = spares
        if found is None:
            spares = min(max(1, 2 * spares), SPARES_MAX)
        else:
            spares = (too_few + found.spares) // 2
    return found or replace(one, is_fit=False, lacks="spares")


def _percentiles(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    p50, p99 = np.percentile(values, (50, 99)) if len(values) else (math.inf, math.inf)
    return float(p50), float(p99)


def _mean(served: Sequence[SimulatedService], name: str) -> float:
    return float(np.mean([getattr(one, name) for one in served]))


# ---- the command ------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """``ppstream fleet plan``: prints the answer; 1: no build that was asked about fits.

    Raises:
        ConfigError: holds what is wrong with the question.
    """
    args = _parser().parse_args(argv)
    fleet = FleetQuestion(
        args.robots,
        args.hz,
        args.age_ms,
        args.net_ms,
        Failures(args.mtbf_h, args.repair_s, args.move_s),
        args.without_row_max,
    )
    if args.seconds * args.hz < SAMPLES_MIN:
        raise ConfigError(
            [
                f"--seconds: got {args.seconds:g} with --hz {args.hz:g}, want "
                f"{math.ceil(SAMPLES_MIN / args.hz)} or more: {SAMPLES_MIN} samples of a robot"
            ]
        )
    builds = [*_builds(args)]
    found = plan(fleet, builds, seconds=args.seconds, seed=args.seed)
    assumed = [*_assumptions(fleet, args, {times.mesh for times, _, _ in builds})]
    if args.json:
        rows = [_finite(asdict(one)) | {"all_gpus": one.all_gpus} for one in found]
        print(
            json.dumps({"fleet": asdict(fleet), "candidates": rows, "assumes": assumed}, indent=1)
        )
    else:
        print("\n".join([*_text(fleet, found), "", "assumes", *(f"  {line}" for line in assumed)]))
    return 0 if found[0].is_fit else NO_ANSWER


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: null."""
    return {name: None if value == math.inf else value for name, value in values.items()}


def _builds(args: argparse.Namespace) -> Iterator[tuple[ServiceTimes, Shape, int]]:
    """Each number of rows, with each number of replicas."""
    base = None if args.report is None else of_report(args.report)
    if args.b_ms and args.rows:
        raise ConfigError([f"--rows: got {args.rows} with --b-ms, want --b-ms {args.rows}=MS"])
    if args.b_ms and (base is not None or args.a_ms is not None):
        choices = _by_rows(args.b_ms)
    elif base is not None:
        choices = {args.rows or base.rows: base.places}
    else:
        raise ConfigError(["want --report FILE, or --a-ms and --b-ms: the times of the stages"])
    for rows, places in choices.items():
        if rows > ROWS_MAX:
            raise ConfigError([f"rows of a pipeline: got {rows}, want {ROWS_MAX} at most"])
        times = _times(args, base, places, rows)
        for replicas in args.replicas:
            if replicas > 1 and len(places) > 1:
                text = f"got {replicas} with {len(places)} places, want 1: a chain has no replicas"
                raise ConfigError([f"--replicas: {text}"])
            d_in = args.d_in or (max(times.d_in, replicas + 1) if replicas > 1 else times.d_in)
            if replicas > REPLICAS_MAX:
                raise ConfigError([f"--replicas: got {replicas}, want {REPLICAS_MAX} at most"])
            if d_in > D_IN_MAX and not args.d_in:
                text = f"got {len(places)} places, which want --d-in {d_in}, {D_IN_MAX} at most"
                raise ConfigError([f"--b-ms: {text}: give --d-in, or fewer places"])
            if d_in > D_IN_MAX:
                raise ConfigError([f"--d-in: got {d_in}, want {D_IN_MAX} at most"])
            shape = Shape(args.pacing, args.threads, replicas, args.gather_ms)
            gpus = args.gpus_rank0 + len(places) * times.mesh * replicas
            yield replace(times, d_in=d_in), shape, gpus


def _by_rows(texts: Sequence[str]) -> dict[int, tuple[Duration, ...]]:
    """``ROWS=B1,B2``: the time of each place of a pipeline with so many rows."""
    found: dict[int, tuple[Duration, ...]] = {}
    for text in texts:
        rows, _, durations = text.rpartition("=")
        if not (rows or "1").isdecimal() or int(rows or 1) < 1:
            raise ConfigError([f"--b-ms: got {text!r}, want ROWS=MS, such as 8=31"])
        if int(rows or 1) in found:
            raise ConfigError([f"--b-ms: got {text!r} beside another time of its rows, want one"])
        found[int(rows or 1)] = tuple(Duration.parse(one) for one in durations.split(","))
    return found


def _times(
    args: argparse.Namespace,
    base: ServiceTimes | None,
    places: tuple[Duration, ...],
    rows: int,
) -> ServiceTimes:
    hops = (Duration.constant(args.hop_ms),) * (len(places) + 1)
    if base is None:
        a, c = Duration.parse(args.a_ms), Duration.parse(args.c_ms or "0")
        return ServiceTimes(a, places, c, hops, args.d_in or len(places) + 1, rows)
    a = base.a if args.a_ms is None else Duration.parse(args.a_ms)
    c = base.c if args.c_ms is None else Duration.parse(args.c_ms)
    if len(base.places) == len(places):
        return replace(base, a=a, places=places, c=c, rows=rows)
    return ServiceTimes(a, places, c, hops, base.d_in, rows)


def _text(fleet: FleetQuestion, found: Sequence[Candidate]) -> Iterator[str]:
    question = f"{fleet.robots} robots at {fleet.rate_hz:g} Hz with p99 age <= {fleet.age_ms:g} ms"
    best = found[0]
    if best.is_fit:
        spare = f", {best.spares} of them spare" if best.spares else ""
        yield (
            f"{question}: {best.all_gpus} GPUs. {best.pipelines} pipelines{spare}, each with "
            f"batch.rows = {best.rows} and {best.gpus} GPU{'s' * (best.gpus > 1)}"
        )
        yield (
            f"a robot holds {best.held_s_per_day:.2g} s a day, "
            f"{best.without_row_s_per_day:.2g} s of them without a free row"
        )
    else:
        yield f"{question}: no. {_reason(fleet, best)}"
    yield ""
    yield f"{'rows':>5} {'repl.':>5} {'period':>8} {'age p50':>8} {'p99':>8} {'answered':>9} " + (
        f"{'pipelines':>10} {'GPUs':>6}   times in ms, pipelines full"
    )
    for one in found:
        misfit = "too old" if one.lacks == "age" else "too few spares"
        need = f"{one.pipelines:>10} {one.all_gpus:>6}" if one.is_fit else f"{misfit:>17}"
        yield (
            f"{one.rows:>5} {one.replicas:>5} {one.period_ms:>8.2f} {one.age_p50_ms:>8.1f} "
            f"{one.age_p99_ms:>8.1f} {one.answered_share:>9.1%} {need}"
        )


def _reason(fleet: FleetQuestion, best: Candidate) -> str:
    """Names what the best misfit lacks, and the remedy."""
    one = fleet.failures
    if best.lacks == "spares":
        return (
            f"Of failures every {one.mtbf_h:g} h (--mtbf-h), {one.repair_s:g} s each (--repair-s), "
            f"robots are without a row for over {fleet.without_row_max:g} of their time also with "
            f"{SPARES_MAX} spare pipelines; repair sooner, or raise --without-row-max"
        )
    if best.age_p99_ms == math.inf:
        return "No action came within the time that was simulated; raise --seconds"
    return (
        f"The youngest is {best.age_p99_ms:.0f} ms; try fewer rows, more replicas, a cut over more "
        "places or a faster policy"
    )


def _assumptions(fleet: FleetQuestion, args: argparse.Namespace, meshes: set[int]) -> Iterator[str]:
    where = args.report or "flags"
    yield f"service times of {where}: they hold on every GPU, and B takes as long with rows free"
    gpus = " or ".join(map(str, sorted(meshes)))
    yield f"GPUs of a place of the policy: {gpus}; more than 1 of a mesh that --report has"
    yield f"robots sample {fleet.rate_hz:g} times a second, each in a phase of its own"
    yield f"the network takes {fleet.net_ms:g} ms each way, always"
    yield "age: of the newest window whose actions a robot has, at any moment"
    yield f"pacing {args.pacing}, {args.threads} threads; rank 0 has {args.gpus_rank0} GPUs"
    one = fleet.failures
    yield (
        f"a pipeline fails every {one.mtbf_h:g} h and serves again after {one.repair_s:g} s; its "
        f"robots are served elsewhere after {one.move_s:g} s; at most {fleet.without_row_max:g} of "
        "their time passes without a free row"
    )
    yield (
        f"at most {PIPELINES_SIMULATED} pipelines of a kind simulated for {args.seconds:g} s each, "
        f"and {outages.FAILURES} failures; seed {args.seed}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream fleet plan",
        description="How many pipelines and GPUs a fleet needs, by a simulation with the times "
        "that a run measured. Starts nothing.",
    )
    parser.add_argument("--robots", type=_count, required=True)
    parser.add_argument("--hz", type=_positive, required=True, help="samples a second of each")
    parser.add_argument("--age-ms", type=_positive, required=True, help="p99 of an action's age")
    parser.add_argument("--net-ms", type=_not_negative, default=1.0, help="network, one way (1)")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="times of ppstream report --json, or a run's folder",
    )
    parser.add_argument("--a-ms", help="stage A: MEDIAN or MEDIAN:P99")
    parser.add_argument(
        "--b-ms",
        nargs="+",
        metavar="ROWS=MS",
        help="stage B by batch.rows; of a chain ROWS=MS,MS: a time for each place",
    )
    parser.add_argument("--c-ms", help="stage C: MEDIAN or MEDIAN:P99")
    parser.add_argument(
        "--hop-ms", type=_not_negative, default=0.1, help="of a hop, without a report"
    )
    parser.add_argument("--rows", type=_count, help="of the report's run, if that does not say it")
    parser.add_argument("--replicas", type=_count, nargs="+", default=[1], help="of the policy")
    parser.add_argument("--d-in", type=_count, help="default: as measured, else as a run has it")
    parser.add_argument("--threads", choices=("serial", "split"), default="serial")
    parser.add_argument("--pacing", choices=get_args(Pacing), default="sample")
    parser.add_argument("--gather-ms", type=_not_negative, default=0.0, help="of pacing rows")
    parser.add_argument("--gpus-rank0", type=_number, default=0, help="0: rank 0 works on a CPU")
    parser.add_argument("--mtbf-h", type=_positive, default=720.0, help="of a pipeline (720)")
    parser.add_argument("--repair-s", type=_positive, default=120.0, help="until it serves (120)")
    parser.add_argument("--move-s", type=_positive, default=10.0, help="of a robot (10)")
    parser.add_argument(
        "--without-row-max",
        type=_positive,
        default=1e-4,
        help="share of the robots' time without a free row (0.0001); less takes spares",
    )
    parser.add_argument("--seconds", type=_positive, default=SECONDS, help="simulated")
    parser.add_argument("--seed", type=_number, default=0)
    parser.add_argument("--json", action="store_true")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, want 1 or more")
    return value


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {value}, want 0 or more")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {value:g}, want 0 or more")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {value:g}, want a number above 0")
    return value
