"""Overhead of the pipeline over its largest stage, beside the same pipeline written by hand.

Two simulated stages of X ms (stage 0 half in A and half in C), sleeping; D_in = D_out = 2, host
link, time-stamp log on; also 8.6 MB per envelope, and stages without work. Period and stages are
those of the run's own log; the bare pipeline of ``bare_pipeline.py`` runs in between. Medians over
interleaved rounds; ratios are taken within a round. What ``time.sleep`` oversleeps is part of a
stage and shown.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import torch
from bench.bare_pipeline import BareRun
from bench.bare_pipeline import measure as measure_bare
from claimed_numbers import Claim, median_round, pipeline_gain, ratio
from real_runs import (
    Spread,
    Target,
    ending_cleanly,
    measure_bring_up,
    print_environment,
    print_targets,
    spread,
    write_json,
)

THREADS: Final = ("serial", "split")
WIDE_DIM, WIDE_STEPS = 65536, 33  # float32: 8.65 MB
MS: Final = 1e-6  # per ns
SLEEPS: Final = 200  # timed alone, per round
SLEEP_MS: Final = 1.0
ZERO_WORK_US: Final = 100.0


class PipelineCase(NamedTuple):
    """One configuration; ``limit`` is its target: period over largest stage, or None."""

    name: str
    stage_ms: float
    envelopes: int
    limit: float | None
    payload: int = 0


CASES: Final = (
    PipelineCase("1 ms", 1.0, 800, 1.04),
    PipelineCase("5 ms", 5.0, 300, 1.012),
    PipelineCase("20 ms", 20.0, 120, 1.004),
    PipelineCase("5 ms, 8.6 MB", 5.0, 200, 1.10, WIDE_DIM * WIDE_STEPS * 4),
    PipelineCase("no work", 0.0, 5000, None),
)
#: A robot's joints at 50 Hz, and windows of the newest two: what ``no work`` is asked with.
SMALL: Final = (
    'streams=[{name="joints", dim=14, rate_hz=50, reference=true}]',
    "window.steps=2",
    "window.dt_ms=20",
)
WIDE: Final = (
    'streams=[{name="joints", dim=14, rate_hz=1000, reference=true}, '
    f'{{name="wide", dim={WIDE_DIM}, rate_hz=10, group="wide", interpolation="previous"}}]',
    f"window.steps={WIDE_STEPS}",
    "window.dt_ms=1",
    "policy.target=bench.policies:build_reading",
)


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One run. ``stage0_ms``: the busiest resource of rank 0, mean per envelope."""

    period_ms: float
    stage0_ms: float
    stage1_ms: float
    link_ms: float
    periods_ms: tuple[float, ...]

    @property
    def max_stage_ms(self) -> float:
        return max(self.stage0_ms, self.stage1_ms)


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """Medians over the rounds; a ratio is that of the round whose ratio is the median."""

    case: PipelineCase
    threads: str
    rounds: int
    period_ms: float
    stage0_ms: float
    stage1_ms: float
    link_ms: float
    ratio: float  # period / largest stage as measured
    sleep_ratio: float | None  # period / longest sum of sleeps: moving bytes is overhead, too
    bare_period_ms: float
    bare_ratio: float
    bare_sleep_ratio: float | None
    over_bare: float  # period / the bare pipeline's
    gain: float  # what both stages take together / period, in the round of ``ratio``
    periods_ms: Spread
    ratio_ms: tuple[float, float, float]  # period, stage0, stage1 in the round of ``ratio``
    over_bare_ms: tuple[float, float]  # ours and theirs in the round of ``over_bare``


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    torch.set_num_threads(1)
    mode = f"sleeping stages, D 2, host link, log on, {options.rounds} interleaved rounds"
    print_environment(mode)
    cases = [case for case in CASES if case.name in options.cases]
    runs: dict[tuple[PipelineCase, str], list[PipelineRun]] = {}
    bare: dict[PipelineCase, list[BareRun]] = {case: [] for case in cases}
    oversleeps_ms: list[float] = []
    with ending_cleanly():
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", flush=True)
            oversleeps_ms += measure_oversleep()
            for case in cases:
                envelopes = max(100, round(case.envelopes * options.scale))
                for threads in options.threads:
                    found = run_case(case, threads, envelopes)
                    runs.setdefault((case, threads), []).append(found)
                half_ms = case.stage_ms / 2
                bare[case].append(
                    measure_bare(half_ms, case.stage_ms, half_ms, case.payload, envelopes)
                )
    oversleep = spread(oversleeps_ms)
    rows = [summary(*key, found, bare[key[0]], oversleep.mean) for key, found in runs.items()]
    targets = targets_of(rows)
    print_rows(rows, oversleep)
    print_targets(targets)
    results: dict[str, Any] = {"rows": [asdict(r) | {"case": r.case._asdict()} for r in rows]}
    late = asdict(oversleep)
    write_json(options.json, mode, targets, claims=claims_of(rows), oversleep_ms=late, **results)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--threads", nargs="+", choices=THREADS, default=THREADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the envelopes of each run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def run_case(
    case: PipelineCase, threads: str, envelopes: int, cpus: Sequence[int] = ()
) -> PipelineRun:
    """One run of two ranks, each on its own of ``cpus`` if given, judged by its own log."""
    settings = (*case_settings(case), f"pipeline.threads={threads}")
    report, _ = measure_bring_up((*settings, f"bringup.envelopes={envelopes}"), cpus=cpus)
    score = report.primary
    if score is None:
        raise SystemExit(f"{case.name} cannot be scored: {'; '.join(report.statements)}")
    per_envelope = MS / score.n
    rank0 = [busy for name, busy in score.busy_ns.items() if name.startswith("r0")]
    return PipelineRun(
        period_ms=score.period_ns * MS,
        stage0_ms=max(rank0) * per_envelope,
        stage1_ms=score.busy_ns["mesh"] * per_envelope,
        link_ms=score.busy_ns.get("link", 0) * per_envelope,
        periods_ms=tuple(p * MS for s in report.window.segments for p in s.periods_ns),
    )


def case_settings(case: PipelineCase) -> list[str]:
    """Both stages take ``stage_ms``: stage 0 half in A and half in C."""
    settings = [
        f"policy.options.b_ms={case.stage_ms}",
        f"simulate.a_ms={case.stage_ms / 2}",
        f"simulate.c_ms={case.stage_ms / 2}",
        "bringup.standalone=2",
    ]
    if case.payload:
        options = (
            f'policy.options={{group="wide", steps={WIDE_STEPS}, dim={WIDE_DIM}, '
            f"b_ms={case.stage_ms}, horizon=16, action_dim=7}}"
        )
        return [*settings[1:], *WIDE, options]
    return settings if case.stage_ms else [*settings, *SMALL]


def measure_oversleep() -> list[float]:
    """By how many ms ``time.sleep`` is late, on this machine at this moment."""
    late_ms = []
    for _ in range(SLEEPS):
        began = time.monotonic_ns()
        time.sleep(SLEEP_MS / 1e3)
        late_ms.append((time.monotonic_ns() - began) * MS - SLEEP_MS)
    return late_ms


def summary(
    case: PipelineCase,
    threads: str,
    runs: Sequence[PipelineRun],
    bare: Sequence[BareRun],
    oversleep_ms: float,
) -> PipelineRow:
    """Medians over the rounds; ratios are taken within a round, then the (lower) median."""
    # stage 0 sleeps twice, B once; split, A and C sleep side by side and B's is the longest
    sleeps_ms = case.stage_ms + oversleep_ms * (2 if threads == "serial" else 1)
    bare_sleeps_ms = case.stage_ms + 2 * oversleep_ms
    sleeping = case.stage_ms > 0
    pairs = [(ours.period_ms, theirs.period_ms) for ours, theirs in zip(runs, bare, strict=True)]
    typical = median_round(runs, lambda run: run.period_ms / run.max_stage_ms)
    return PipelineRow(
        case=case,
        threads=threads,
        rounds=len(runs),
        period_ms=median(run.period_ms for run in runs),
        stage0_ms=median(run.stage0_ms for run in runs),
        stage1_ms=median(run.stage1_ms for run in runs),
        link_ms=median(run.link_ms for run in runs),
        ratio=median_low([run.period_ms / run.max_stage_ms for run in runs]),
        sleep_ratio=median(run.period_ms / sleeps_ms for run in runs) if sleeping else None,
        bare_period_ms=median(run.period_ms for run in bare),
        bare_ratio=median(run.period_ms / run.max_stage_ms for run in bare),
        bare_sleep_ratio=median(r.period_ms / bare_sleeps_ms for r in bare) if sleeping else None,
        over_bare=median_low([ours_ms / theirs_ms for ours_ms, theirs_ms in pairs]),
        gain=(typical.stage0_ms + typical.stage1_ms) / typical.period_ms,
        periods_ms=spread([period for run in runs for period in run.periods_ms]),
        ratio_ms=(typical.period_ms, typical.stage0_ms, typical.stage1_ms),
        over_bare_ms=median_round(pairs, lambda pair: pair[0] / pair[1]),
    )


def targets_of(rows: Sequence[PipelineRow]) -> list[Target]:
    """Each over the largest stage as it timed itself; a stage includes the bytes it moves."""
    targets = []
    for row in rows:
        case = row.case
        if case.limit is None:
            what = f"no work, {row.threads}: us per envelope"
            targets.append(Target(what, ZERO_WORK_US, row.period_ms * 1e3))
        else:
            what = f"{case.name}, {row.threads}: period / largest stage"
            targets.append(Target(what, case.limit, row.ratio))
    return targets


def claims_of(rows: Sequence[PipelineRow]) -> list[Claim]:
    """Each ratio from the numbers of the one round whose ratio is the median."""
    claims = []
    for row in rows:
        what = f"{row.case.name}, {row.threads}"
        period_ms, *stages_ms = row.ratio_ms
        claims += [
            ratio(f"{what}: period / largest stage", period_ms, max(stages_ms), row.ratio),
            ratio(f"{what}: ours / bare", *row.over_bare_ms, row.over_bare),
            pipeline_gain(f"{what}: gain", [sum(stages_ms)], [period_ms], row.gain),
        ]
    return claims


def print_rows(rows: Sequence[PipelineRow], oversleep: Spread) -> None:
    print(
        f"\n{'stages':13} {'threads':7} {'period':>8} {'p50':>8} {'p99':>8} {'max':>8} {'n':>6}"
        f" {'stage0':>8} {'stage1':>8} {'link':>7} {'P/max':>6} {'gain':>5} {'P/sleep':>7} | bare"
        f" {'period':>8} {'P/max':>6} {'P/sleep':>7} | ours/bare"
    )
    for row in rows:
        p = row.periods_ms
        print(
            f"{row.case.name:13} {row.threads:7} {row.period_ms:8.3f} {p.p50:8.3f} {p.p99:8.3f}"
            f" {p.max:8.3f} {p.n:6} {row.stage0_ms:8.3f} {row.stage1_ms:8.3f} {row.link_ms:7.3f}"
            f" {row.ratio:6.3f} {row.gain:5.2f} {_or_na(row.sleep_ratio)}"
            f" | {row.bare_period_ms:13.3f}"
            f" {row.bare_ratio:6.3f} {_or_na(row.bare_sleep_ratio)} | {row.over_bare:9.3f}"
        )
    print(
        "times in ms; stage0, stage1: busiest resource of each rank as it timed itself; gain: both "
        "over the period; P/sleep: over the stage's sleeps alone\n"
        f"a sleep of {SLEEP_MS:g} ms is late by {oversleep.mean:.3f} on average, p50 "
        f"{oversleep.p50:.3f}, p99 {oversleep.p99:.3f}, max {oversleep.max:.3f} (n {oversleep.n})"
    )


def _or_na(ratio: float | None) -> str:
    return "     NA" if ratio is None else f"{ratio:7.3f}"


if __name__ == "__main__":
    sys.exit(main())
