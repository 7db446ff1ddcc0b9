"""Overhead of the pipeline on two GPUs: stages of 30 to 700 µs, by balance, batch, depth and link.

One pair of rank processes runs every cell, each a bring-up of the product with simulated stages on
both devices; what is printed is what the report's own function says of its log. ``alone`` are the
stages timed alone in the same process; strict = period / the slowest of them. Links other than the
first are run at D = 2 alone. Serial latency is that of D = 1, one envelope at a time. ``--chains``
runs a policy cut into equal places instead, one on each of 2, 3 and 4 GPUs, as far as there are.
``--stamps`` runs cells of the peer link alone, whose times are taken by events, by kernels, by
kernels and by events again. Needs two GPUs, or one with ``--share``: then both ranks take turns on
it, periods mean little, and the host's time an envelope is what is compared. ``--cpu`` runs cells
of the peer link alone, as it is by default, and prints what rank 0's CPU time is for; each cell is
run as it is, and with the loop's calls timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import torch
from claimed_numbers import Claim, ratio, shares
from real_runs import (
    Target,
    free_port,
    measure_bring_up,
    print_environment,
    print_targets,
    rank_environment,
    write_json,
)

SIZES_US: Final = (30, 200, 700)
UNBOUND: Final = 0.3  # of the bound stage: the other one
ENVELOPES: Final = 320  # of a cell, at least
QUICK_SIZES_US: Final = (200,)
LIMIT_S: Final = 280
OVERHEAD_US: Final = 8.0
SERIAL_US: Final = 12.0  # above A + B + C
AGAINST_NCCL: Final = ((200, 0.97), (0, 0.5))  # at the slowest stage of at least so many µs
CPU_US: Final = 30.0


class ChainSize(NamedTuple):
    """Simulated work of each place, and what each hop carries."""

    work_ms: float
    hop_bytes: int
    limit: float  # of the period, against the largest place


CHAINS: Final = (ChainSize(0.7, 135_000, 1.02), ChainSize(5.0, 15_000_000, 1.01))
BUSY_OF_ALONE: Final = 1.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="stages of 200 µs, peer link alone")
    parser.add_argument(
        "--links", default="peer,nccl", help="of peer, pinned, nccl; default: %(default)s"
    )
    parser.add_argument("--envelopes", type=int, default=ENVELOPES, help="least: %(default)s")
    parser.add_argument("--chains", action="store_true", help="places of a cut policy instead")
    parser.add_argument("--stamps", action="store_true", help="times by events and by kernels")
    parser.add_argument("--cpu", action="store_true", help="what rank 0's CPU time is for")
    parser.add_argument("--share", action="store_true", help="both ranks on the first GPU")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.chains:
        return chains(arguments.envelopes, arguments.json)
    links = ["peer"] if arguments.quick else arguments.links.split(",")
    sizes_us = QUICK_SIZES_US if arguments.quick else SIZES_US
    if arguments.cpu:
        cells = list(cpu_cells(sizes_us))
    else:
        cells = list(stamp_cells(sizes_us) if arguments.stamps else grid(links, sizes_us))
    cells = [cell._replace(shares=arguments.share) for cell in cells]
    if arguments.child is not None:
        return child(cells, arguments.envelopes, arguments.child)
    return parent(arguments.json, "quick" if arguments.quick else "grid")


def grid(links: list[str], sizes_us: tuple[int, ...]) -> Iterator[Any]:
    """All cells; those that differ in the link alone stand together."""
    from bench.pipeline_gpu_cells import GpuCell

    for size in sizes_us:
        for rows in (1, 32):
            small = size * UNBOUND
            for name, a, b, depths in (
                ("balanced", size, size, (1, 2, 3)),
                ("A-bound", size, small, (2,)),
                ("B-bound", small, size, (2,)),
            ):
                for depth in depths:
                    for link in links if depth == 2 else links[:1]:
                        yield GpuCell(name, a, b, rows, depth, link)
        if "peer" in links:
            yield GpuCell("balanced", size, size, 1, 2, "peer", "after_window")


def stamp_cells(sizes_us: tuple[int, ...]) -> Iterator[Any]:
    """Balanced cells of one row, each way of taking the times twice."""
    from bench.pipeline_gpu_cells import GpuCell

    for size in sizes_us:
        for depth in (2, 1):
            for stamps in ("events", "auto", "auto", "events"):
                yield GpuCell(
                    f"stamps {stamps}", size, size, 1, depth, "peer", "before_window", stamps
                )


def cpu_cells(sizes_us: tuple[int, ...]) -> Iterator[Any]:
    """Balanced cells of one row, each as it is and with the loop's calls timed."""
    from bench.pipeline_gpu_cells import GpuCell

    for size in sizes_us:
        for where in (False, True):
            name = "cpu parts" if where else "cpu"
            yield GpuCell(name, size, size, 1, 2, "peer", where=where)


def child(cells: list[Any], envelopes: int, output: Path) -> int:
    """One rank; leaves without Python's own end, which a stream that waits could hold up."""
    from bench.pipeline_gpu_cells import run_cells

    found: list[Any] = []

    def report(one: Any) -> None:
        found.append(one._asdict() | {"cell": one.cell._asdict()})
        print_row(one)
        output.write_text(json.dumps(found))

    if os.environ["RANK"] == "0":
        print_head()
    run_cells(cells, envelopes, report)
    sys.stdout.flush()
    os._exit(0)


def parent(results: Path | None, mode: str) -> int:
    print_environment(mode)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [sys.executable, *sys.argv, "--child", str(output)]
        ranks = [subprocess.Popen(command, env=rank_environment(rank, port)) for rank in range(2)]
        try:
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            print(f"no end within {LIMIT_S} s: what follows is what was measured until then")
            codes = [1]
        finally:
            for rank in ranks:
                rank.kill()
        rows = json.loads(output.read_text()) if output.exists() else []
    if any(codes):
        print(f"a rank ended early: exit codes {codes}")
    print_serial(rows)
    targets = targets_of(rows)
    print_targets(targets)
    write_json(results, mode, targets, claims=claims_of(rows), cells=rows)
    return max(abs(code) for code in codes)


def chains(envelopes: int, results: Path | None) -> int:
    """Runs of real ranks, each a bring-up, and what their reports say of their places."""
    print_environment("chains")
    rows = [
        one_chain(places, size, places + more, envelopes)
        for size in CHAINS
        for places in range(2, min(4, torch.cuda.device_count()) + 1)
        for more in (0, 1)
    ]
    targets = []
    for row in rows:
        name = (
            f"{row['places']} places of {row['work_ms']:g} ms, {row['hop_bytes']:,} bytes a hop, "
            f"D {row['depth']}"
        )
        targets += [
            Target(f"{name}: period / largest place", row["limit"], row["of_largest"]),
            Target(f"{name}: busy / alone, worst place", BUSY_OF_ALONE, max(row["of_alone"])),
        ]
    print_targets(targets)
    write_json(results, "chains", targets, chains=rows)
    return int(not rows)


def one_chain(places: int, size: ChainSize, depth: int, envelopes: int) -> dict[str, Any]:
    """A chain of ``places`` GPUs with the same work each."""
    devices = json.dumps([f"cuda:{k}" for k in range(1, places)])
    work = json.dumps([size.work_ms] * places)
    options = f"parts_ms={work},hop_bytes={size.hop_bytes},kind='gpu',horizon=16,action_dim=7"
    report, manifest = measure_bring_up(
        (
            f"placement.policy={devices}",
            f"placement.parts={list(range(places))}",
            f"policy.options={{{options}}}",
            "simulate.a_ms=0",
            "simulate.c_ms=0",
            f"pipeline.d_in={depth}",
            f"pipeline.d_out={places}",
            f"bringup.envelopes={envelopes}",
        ),
        config="bench_gpus",
        world_size=places,
    )
    assert report.primary is not None
    alone = [place.alone_ns or 0 for place in report.places]
    busy = [place.busy_ns or 0 for place in report.places]
    row = {
        "places": places,
        "depth": depth,
        **size._asdict(),
        "period_us": report.primary.period_ns * 1e-3,
        "alone_us": [ns * 1e-3 for ns in alone],
        "busy_us": [ns * 1e-3 for ns in busy],
        "queue_us": [(place.queue_ns or 0) * 1e-3 for place in report.places],
        "hops_us": [place.hop_ns and place.hop_ns * 1e-3 for place in report.places],
        "of_largest": report.primary.period_ns / max(alone),
        "of_alone": [one / other for one, other in zip(busy, alone, strict=True)],
        "s": report.primary.s,
        "verdict": report.verdict.name,
        "link": manifest["topology"]["ranks"][0]["link"],
    }
    print(" ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
    return row


def _short(value: object) -> str:
    if isinstance(value, list):
        return "|".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_head() -> None:
    print(
        f"\n{'cell':9} {'A us':>5} {'B us':>5} {'rows':>4} {'D':>2} {'link':>6} {'credit':>6} |"
        f" {'alone A':>7} {'B':>6} {'C':>5} | {'period':>7} {'strict':>6} {'in run':>6}"
        f" {'over us':>7} {'compat':>6} {'S':>6} {'p99/p50':>7} | {'pick-up':>7} {'p99':>6}"
        f" {'age/P':>6} | {'cpu0':>5} {'cpu1':>5} | verdict",
        flush=True,
    )


def print_row(one: Any) -> None:
    cell, (a, b, c) = one.cell, one.alone_us
    credit = "before" if cell.credit == "before_window" else "after"
    print(
        f"{cell.name:9} {cell.a_us:5.0f} {cell.b_us:5.0f} {cell.rows:4} {cell.depth:2}"
        f" {cell.link:>6} {credit:>6} | {a:7.1f} {b:6.1f} {c:5.1f} | {one.period_us:7.1f}"
        f" {one.strict:6.3f} {one.in_run:6.3f} {one.overhead_us:7.1f} {_or_na(one.compat)}"
        f" {_or_na(one.primary)} {one.p99_us / one.p50_us:7.3f} | {one.picked_us[0]:7.1f}"
        f" {one.picked_us[1]:6.0f} {one.age_periods:6.2f} | {one.cpu_us[0]:5.0f}"
        f" {one.cpu_us[1]:5.0f} | {one.verdict} {' '.join(one.bad_audits)}"
        f" | rank 0: {' '.join(f'{name} {each:.1f}' for name, each in one.cpu0_parts.items())}",
        flush=True,
    )


def print_serial(rows: list[dict[str, Any]]) -> None:
    """Latency with one envelope at a time, one row each."""
    for row in filter(is_serial, rows):
        alone_us = sum(row["alone_us"])
        print(
            f"serial latency, {name_of(row)}: p50 {row['latency_us']:.1f} us"
            f" = A + B + C alone {alone_us:.1f} + {row['latency_us'] - alone_us:.1f};"
            f" until the host has the actions {row['age_us']:.1f}"
        )


def is_serial(row: dict[str, Any]) -> bool:
    cell = row["cell"]
    return cell["depth"] == 1 and cell["rows"] == 1


def name_of(row: dict[str, Any]) -> str:
    cell = row["cell"]
    return f"{cell['name']} {cell['a_us']:g}/{cell['b_us']:g} µs, {cell['rows']} rows"


def targets_of(rows: list[dict[str, Any]]) -> list[Any]:
    """The limits of the cells that have one, on the peer link."""
    targets = []
    for row in rows:
        cell, name = row["cell"], name_of(row)
        if cell["link"] != "peer" or cell["credit"] != "before_window":
            continue
        if is_serial(row):
            over_us = row["latency_us"] - sum(row["alone_us"])
            targets.append(Target(f"{name}: serial latency over A + B + C", SERIAL_US, over_us))
        if cell["depth"] == 1 and cell["name"] == "balanced" and row["compat"] is not None:
            targets.append(Target(f"{name}, D = 1: published score", 0.05, row["compat"]))
        if cell["depth"] != 2:
            continue
        if cell["name"] == "A-bound":
            targets.append(Target(f"{name}: strict", 1.03, row["strict"]))
        else:
            targets.append(Target(f"{name}: overhead in us", OVERHEAD_US, row["overhead_us"]))
        if max(cell["a_us"], cell["b_us"]) >= 200:
            spread = row["p99_us"] / row["p50_us"]
            targets.append(Target(f"{name}: p99 / p50 of the period", 1.05, spread))
        targets.append(Target(f"{name}: CPU us per envelope, rank 0", CPU_US, row["cpu_us"][0]))
    for row, nccl in beside_nccl(rows):
        slowest_us = max(row["cell"]["a_us"], row["cell"]["b_us"])
        limit = next(limit for least_us, limit in AGAINST_NCCL if slowest_us >= least_us)
        ratio_of = row["period_us"] / nccl["period_us"]
        targets.append(Target(f"{name_of(row)}: period / the same on NCCL", limit, ratio_of))
    return targets


def beside_nccl(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of the peer link, each with that of the same cell on NCCL."""
    for row in rows:
        if row["cell"]["link"] == "peer":
            twin = row["cell"] | {"link": "nccl"}
            yield from ((row, other) for other in rows if other["cell"] == twin)


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """Each cell's strict ratio, and that what is over makes up the period."""
    claims = []
    for row in rows:
        cell, slowest_us, period_us = row["cell"], max(row["alone_us"]), row["period_us"]
        name = f"{name_of(row)}, D {cell['depth']}, {cell['link']}, credit {cell['credit']}"
        parts = [slowest_us / period_us, row["overhead_us"] / period_us]
        claims += [
            ratio(f"{name}: period / slowest alone", period_us, slowest_us, row["strict"]),
            shares(f"{name}: slowest alone and what is over", parts),
        ]
    return claims


def _or_na(value: float | None) -> str:
    return "    NA" if value is None else f"{value:6.3f}"


if __name__ == "__main__":
    sys.exit(main())
