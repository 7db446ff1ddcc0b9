"""Sweep of queue depths: period, latency and age by D, beside what the model expects.

Every cell (stage times, threads, D_in = D_out = D) is a run of two real ranks with simulated
stages, of one more for each further B of a chain ``A:B1:B2:C``; its bring-up is the measurement, so
cells that the gate refuses are measured, too. With ``--replicas`` the policy rank is so many
replicas, and each period stands beside the shortest possible one: of the times that were asked
for, with ``--kind gpu`` of those that the run measured, one stage at a time. With ``--devices``
ranks are on these GPUs, A and C work there, and ``--kind gpu`` has stage B do so, too; ranks that
share a GPU need one that sleeps. All cells run forwards, then backwards. The model is given the
stage times that the same run measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from claimed_numbers import Claim, ratio
from d_sweep_cells import (
    Advice,
    Pass,
    Stages,
    SweepCell,
    SweepRow,
    abba,
    cells,
    combine,
    gap_targets,
    parse_stages,
    recommend,
    replica_cells,
    replica_targets,
)
from real_runs import (
    ending_cleanly,
    measure_bring_up,
    print_environment,
    print_targets,
    write_json,
)

from ppstream.analysis.run_report import RunReport
from ppstream.analysis.run_statistics import latencies_ns
from ppstream.config import load
from ppstream.ingest.intake import build_intake
from ppstream.links.headers import link_shape
from ppstream.policy.compatibility import build_parts

DEPTHS: Final = (1, 2, 3, 4)
THREADS: Final = ("serial", "split")
BALANCED: Final = Stages(3, 10, 4)
BEHIND_A: Final = Stages(5, 20, 0)  # what replicas are for
C_HEAVY: Final = Stages(3, 6, 7)  # C sets the period where it has a thread of its own
ENVELOPES: Final = 200  # a run; each cell has two
QUICK_ENVELOPES: Final = 100
MS: Final = 1e-6  # per ns


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    torch.set_num_threads(1)
    where = f"ranks on {', '.join(options.devices)}" if options.devices else "host link"
    mode = f"{options.kind} stages, {where}, log on, 2 x {options.envelopes} envelopes, ABBA"
    print_environment(mode)
    chosen = cells(options.stages, options.threads, options.depths)
    if options.replicas:
        chosen = replica_cells(options.stages, options.threads, options.replicas)
    order = abba(chosen)
    passes: dict[SweepCell, list[Pass]] = {}
    with ending_cleanly():
        for number, cell in enumerate(order, start=1):
            print(f"{number}/{len(order)}  {cell.stages}  {cell.threads}  D {cell.depth}")
            sys.stdout.flush()
            found = run_cell(cell, options.kind, options.envelopes, options.devices)
            passes.setdefault(cell, []).append(found)
    rows = [combine(cell, found, slot_bytes(cell)) for cell, found in passes.items()]
    advice, targets = recommend(rows), gap_targets(rows)
    print_rows(rows)
    if options.replicas:
        advice, targets = [], replica_targets(rows, options.kind)
    else:
        print_advice(advice)
    print_targets(targets)
    if options.plot is not None:
        plot(rows, options.plot)
    write_json(
        options.json,
        mode,
        targets,
        claims=claims_of(rows),
        rows=[*map(_row_dict, rows)],
        recommended=[_advice_dict(item) for item in advice],
    )
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--stages", type=parse_stages, nargs="+", metavar="A:B:C", help="in ms; A:B1:B2:C: a chain"
    )
    parser.add_argument("--threads", nargs="+", choices=THREADS)
    parser.add_argument("--depths", type=int, nargs="+", metavar="D")
    parser.add_argument(
        "--replicas", type=int, nargs="+", metavar="R", help="of the policy rank, with D = R + 1"
    )
    parser.add_argument("--kind", choices=("sleep", "spin", "gpu"), default="sleep")
    parser.add_argument(
        "--devices", nargs="+", metavar="cuda:N", default=[], help="of the ranks, in turn"
    )
    parser.add_argument("--envelopes", type=int, help="a run, at least 100; each cell has two runs")
    parser.add_argument("--quick", action="store_true", help="two short cells")
    parser.add_argument("--plot", type=Path, help=".png or .svg")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    quick = options.quick
    if options.replicas:
        options.stages = options.stages or [BEHIND_A]
        options.threads = options.threads or THREADS[1:]
    options.stages = options.stages or ([BALANCED] if quick else [BALANCED, C_HEAVY])
    options.threads = options.threads or (THREADS[:1] if quick else THREADS)
    options.depths = options.depths or (DEPTHS[:2] if quick else DEPTHS)
    options.envelopes = options.envelopes or (QUICK_ENVELOPES if quick else ENVELOPES)
    return options


# ---- one cell ---------------------------------------------------------------------------------


def run_cell(cell: SweepCell, kind: str, envelopes: int, devices: Sequence[str] = ()) -> Pass:
    """One run of all ranks; exits when it did not get through bring-up."""
    settings = [
        *_settings(cell, kind, devices),
        f"bringup.envelopes={envelopes}",
        "bringup.standalone=2",
    ]
    report, _ = measure_bring_up(settings, world_size=cell.stages.ranks)
    return read_pass(report)


def read_pass(report: RunReport) -> Pass:
    score, model, alone = report.primary, report.model, report.alone
    if score is None or model is None or alone is None:
        raise SystemExit(f"run {report.run_id} cannot be scored: {'; '.join(report.statements)}")
    emitted, times = report.window.emitted, alone.times
    b_ms, *behind_ms = (place_ns * MS for place_ns in times.places)
    return Pass(
        alone=Stages(times.a * MS, b_ms, times.c * MS, tuple(behind_ms)),
        period_ms=score.period_ns * MS,
        model_ms=model.period_ns * MS,
        formula=model.formula,
        overlap=score.s,
        efficiency=score.efficiency,
        latencies_ms=tuple(value * MS for value in latencies_ns(report.window)),
        ages_ms=tuple(e.age_rank0_ns * MS for e in emitted if e.age_rank0_ns is not None),
        verdict=" ".join([report.verdict.name, *report.reasons]),
    )


def slot_bytes(cell: SweepCell) -> int:
    """Returns the bytes of the slots of both directions."""
    config = load.read("bench", _settings(cell, "sleep"))
    *_, policy = build_parts(config, torch.device("cpu"))
    shape = link_shape(config, build_intake(config).cutter.inputs, policy.outputs, 0)
    envelopes = shape.envelope_slots * shape.envelope.slot_bytes
    results = shape.result_slots * shape.result.slot_bytes
    return cell.stages.replicas * (envelopes + results)


def _settings(cell: SweepCell, kind: str, devices: Sequence[str] = ()) -> list[str]:
    places_ms = cell.stages.places_ms
    policy = [f"policy.options.b_ms={cell.stages.b_ms}"]
    if len(places_ms) > 1:
        devices, parts = ", ".join(['"cpu"'] * len(places_ms)), list(range(1, 1 + len(places_ms)))
        policy = [
            f"policy.options={{parts_ms = {list(places_ms)}, horizon = 16, action_dim = 7}}",
            f"placement.policy=[{devices}]",
            f"placement.parts={parts}",
        ]
    if devices:
        ranks = [devices[rank % len(devices)] for rank in range(cell.stages.ranks)]
        policy += [
            f"placement.rank0={ranks[0]}",
            f"placement.policy=[{', '.join(map(repr, ranks[1:]))}]",
            f"policy.graph={str(kind == 'gpu').lower()}",
        ]
    return [
        *policy,
        f"simulate.a_ms={cell.stages.a_ms}",
        f"simulate.c_ms={cell.stages.c_ms}",
        f"simulate.kind={'gpu' if devices else kind}",
        f"policy.options.kind={kind}",
        f"placement.replicas={cell.stages.replicas}",
        f"pipeline.threads={cell.threads}",
        f"pipeline.d_in={cell.depth}",
        f"pipeline.d_out={cell.depth}",
    ]


# ---- what is shown ----------------------------------------------------------------------------


def print_rows(rows: Sequence[SweepRow]) -> None:
    print(
        f"\n{'':24} {'threads':7}  D {'period':>8} {'model':>8} {'gap':>7} {'S':>5} {'E':>5}"
        f" {'latency p50':>11} {'p99':>6} {'max':>6} {'age p50':>8} {'slots':>9}  {'n':>4}"
        "  model's limit | verdicts"
    )
    for row in rows:
        stages, threads, depth = row.cell
        overlap = "  NA " if row.overlap is None else f"{row.overlap:5.2f}"
        print(
            f"{stages!s:24} {threads:7} {depth:2} {row.period_ms:8.3f} {row.model_ms:8.3f}"
            f" {row.gap:+7.1%} {overlap} {row.efficiency:5.2f} {row.latency_ms.p50:11.1f}"
            f" {row.latency_ms.p99:6.1f} {row.latency_ms.max:6.1f} {row.age_ms.p50:8.1f}"
            f" {row.slot_bytes / 1024:6.1f} KB  {row.latency_ms.n:4}"
            f"  {row.formula} | {', '.join(dict.fromkeys(row.verdicts))}"
        )
    print("times in ms; age: from the newest sample's arrival on rank 0 to emit")


def print_advice(advice: Sequence[Advice]) -> None:
    print("\nrecommended: the smallest D within 2 % of the best period")
    for row, price in advice:
        stages, threads, depth = row.cell
        paid = "no smaller D was measured"
        if price is not None:
            paid = (
                f"against D {price.over_depth}: period {-price.saved_ms:+.2f} ms, "
                f"age {price.age_ms:+.1f} ms, memory {price.slot_bytes / 1024:+.1f} KB"
            )
        print(
            f"  {stages!s:24} {threads:7} D {depth}: period {row.period_ms:.2f} ms, "
            f"age p50 {row.age_ms.p50:.1f} ms, slots {row.slot_bytes / 1024:.1f} KB; {paid}"
        )


def plot(rows: Sequence[SweepRow], path: Path) -> None:
    """Period and latency over D, one row of panels for each stage times."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    settings = list(dict.fromkeys(row.cell.stages for row in rows))
    figure, panels = pyplot.subplots(
        len(settings), 2, figsize=(10, 3.6 * len(settings)), squeeze=False, layout="constrained"
    )
    for (left, right), stages in zip(panels, settings, strict=True):
        for threads, colour in zip(THREADS, ("tab:blue", "tab:orange"), strict=True):
            chosen = [r for r in rows if r.cell.stages == stages and r.cell.threads == threads]
            if not chosen:
                continue
            depths = [row.cell.depth for row in chosen]
            measured, model = [r.period_ms for r in chosen], [r.model_ms for r in chosen]
            left.plot(depths, measured, "o", color=colour, label=f"{threads}, measured")
            left.plot(depths, model, "--", color=colour, label=f"{threads}, model")
            p50, p99 = [r.latency_ms.p50 for r in chosen], [r.latency_ms.p99 for r in chosen]
            right.plot(depths, p50, "o-", color=colour, label=f"{threads}, p50")
            right.plot(depths, p99, "^:", color=colour, label=f"{threads}, p99")
        left.set(title=str(stages), xlabel="D_in = D_out", ylabel="period, ms")
        right.set(title="start of A to emit", xlabel="D_in = D_out", ylabel="latency, ms")
        for panel in (left, right):
            panel.set_ylim(0, 1.05 * panel.get_ylim()[1])  # from zero, and no point on the edge
            panel.set_xticks(sorted({row.cell.depth for row in rows}))
            panel.legend()
    figure.savefig(path)
    pyplot.close(figure)
    print(f"\nplot: {path}")


def claims_of(rows: Sequence[SweepRow]) -> list[Claim]:
    """Each cell's period over the model's."""
    return [
        ratio(
            f"{r.cell.stages} {r.cell.threads} D {r.cell.depth}: period / model's",
            r.period_ms,
            r.model_ms,
            1 + r.gap,
        )
        for r in rows
    ]


def _row_dict(row: SweepRow) -> dict[str, Any]:
    alone = row.alone._asdict()
    return asdict(row) | {"cell": _cell_dict(row.cell), "alone": alone, "gap": row.gap}


def _advice_dict(item: Advice) -> dict[str, Any]:
    price = item.price._asdict() if item.price else None
    return {"cell": _cell_dict(item.row.cell), "price": price}


def _cell_dict(cell: SweepCell) -> dict[str, Any]:
    return cell._asdict() | {"stages": cell.stages._asdict()}


if __name__ == "__main__":
    sys.exit(main())
