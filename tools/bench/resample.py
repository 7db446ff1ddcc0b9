"""Measures resampling beside the torch formula that people write by hand, interleaved in one run.

    python tools/bench/resample.py [--device cpu] [--calls 300] [--json FILE]
    python tools/bench/resample.py --device cuda [--quick] [--json FILE]
        [--only shapes fused scaling modes launching] [--dtypes bfloat16 float32]

On a GPU see bench/resample_gpu.py. On a CPU:

Four ways: a plan (prepared once, as the pipeline does per window), the op (into a given output,
with its checks and preparation in every call), and the formula, searchsorted + index_select + lerp
on int64 stamps, which returns values only: no validity, no age, no ring, into fresh memory; and the
same with numpy, row by row. One thread. Times are wall clock per call, in turn; a ratio is of two
medians. The error is the largest of the plan, relative to the largest sample, against the float64
reference.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
import torch
from bench.resample_numpy import by_numpy
from claimed_numbers import Claim, bandwidth, ratio, write_audited
from torch import Tensor

from ppstream_kernels import ResamplePlan, StreamSource, resample_streams
from ppstream_kernels.reference import resample_reference

ORIGIN_NS = 10**18
SPAN_NS = 10**9
WARM_UP_CALLS = 20
BATCHES = ((1, 500, 250, 270), (32, 500, 250, 14), (256, 100, 50, 32))  # B, N, T, D
WINDOW = ((512, 14), (1024, 6), (2048, 8))  # ring size and D of a robot's three streams
WINDOW_TARGETS = (16, 32, 64)
PARTS = ("shapes", "fused", "scaling", "modes", "launching")  # on a GPU
DTYPES = ("bfloat16", "float32")
WAYS = ("plan", "op", "formula", "numpy")


Out = tuple[Tensor, Tensor, Tensor]  # values, valid, age_s


class ResampleCase(NamedTuple):
    """Four ways to the same values; the first two write into ``out``."""

    name: str
    plan: Callable[[], object]
    op: Callable[[], object]
    formula: Callable[[], object]
    numpy: Callable[[], object]
    out: Out
    reference: np.ndarray


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.device == "cuda":
        from bench import resample_gpu  # needs a GPU, cuda-core and Triton

        quick: bool = arguments.quick
        parts = arguments.only or [part for part in PARTS if not (quick and part == "scaling")]
        dtypes = arguments.dtypes or (DTYPES[:1] if quick else DTYPES)
        report = resample_gpu.measure(parts, [getattr(torch, name) for name in dtypes])
        return write_audited(arguments.json, report, gpu_claims(report))
    about = {
        "machine": platform.processor() or platform.machine(),
        "device": arguments.device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "calls": arguments.calls,
    }
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    cases = [_batch_case(*shape) for shape in BATCHES]
    cases += [_window_case(targets, wrapped) for targets in WINDOW_TARGETS for wrapped in (0, 1)]
    columns = "".join(f"{f'{way} µs min/p50/p99/max':>29}" for way in WAYS)
    print(f"{'case':31}{columns}{'plan':>7}{'op':>6}{'error':>9}")
    rows = [_measure(case, arguments.calls) for case in cases]
    return write_audited(arguments.json, {"about": about, "rows": rows}, _claims(rows))


def gpu_claims(report: dict[str, Any]) -> list[Claim]:
    """Bytes a call must move over its time, its share of a copy, and the peers' times over ours."""
    claims = []
    for row in report["shapes"]:
        what, us, moved = f"{row['dtype']} {row['shape']}", row["us"], row["gb_s"]
        claims += [
            bandwidth(f"{what}: bytes moved", row["bytes"], us["ours"] / 1e6, moved * 1e9),
            ratio(f"{what}: share of a copy", moved, report["copy_gb_s"], row["share_of_copy"]),
        ]
        peers = [key.removeprefix("vs_") for key in row if key.startswith("vs_")]
        claims += [ratio(f"{what}: {p} / ours", us[p], us["ours"], row[f"vs_{p}"]) for p in peers]
    for row in report.get("modes", ()):
        for name, share in row["share_of_copy"].items():
            moved = row["bytes"][name] / row["us"][name] / 1e3
            what = f"{row['dtype']} {row['shape']} {name}: share of a copy"
            claims.append(ratio(what, moved, report["copy_gb_s"], share))
    return claims


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Each way's median over the formula's."""
    return [
        ratio(f"{row['case']}: {way} / formula", us[way]["p50"], us["formula"]["p50"], claimed)
        for row in rows
        for us in (row["us"],)
        for way, claimed in row["ratio"].items()
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="on a GPU: bfloat16, no scaling")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="on a GPU: these parts")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="on a GPU: of shapes and fused")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _batch_case(rows: int, slots: int, targets: int, dim: int) -> ResampleCase:
    src, src_ns, tgt_ns = _samples(rows, slots, dim), _stamps(rows, slots), _targets(rows, targets)
    return _case(
        f"linear {rows}x{slots}x{targets}x{dim}",
        [StreamSource(src, src_ns)],
        tgt_ns,
        [(src, src_ns)],
    )


def _window_case(targets: int, wrapped: int) -> ResampleCase:
    """One robot's window as the pipeline cuts it: three full rings, limits set, into a slot.

    The formula knows no rings, so it gets the samples already in order.
    """
    tgt_ns = _targets(1, targets)
    plain = [(_samples(1, slots, dim), _stamps(1, slots)) for slots, dim in WINDOW]
    sources = []
    for src, src_ns in plain:
        turn = wrapped * src.shape[1] // 3
        ring = (src.roll(turn, 1), src_ns.roll(turn, 1))
        count, head = torch.tensor([src.shape[1]]), torch.tensor([turn])
        sources.append(StreamSource(*ring, count, head, "linear", SPAN_NS // 10, SPAN_NS))
    name = f"window of 3 rings, T={targets}{', wrapped' if wrapped else ''}"
    return _case(name, sources, tgt_ns, plain)


def _case(
    name: str, sources: list[StreamSource], tgt_ns: Tensor, plain: list[tuple[Tensor, Tensor]]
) -> ResampleCase:
    shape, streams = tgt_ns.shape, len(sources)
    width = sum(source.values.shape[2] for source in sources)
    valid = torch.empty(*shape, streams, dtype=torch.bool)
    out = (torch.empty(*shape, width), valid, torch.empty(*shape, streams))
    plan = ResamplePlan(sources, shape[1], distinct=True)  # as the pipeline's rings are
    exact = [resample_reference(s.numpy(), ns.numpy(), tgt_ns.numpy()).values for s, ns in plain]

    arrays = [(samples.numpy(), stamps_ns.numpy()) for samples, stamps_ns in plain]

    def by_formula() -> Tensor:
        parts = [formula(*one, tgt_ns) for one in plain]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    return ResampleCase(
        name,
        lambda: plan(tgt_ns, out),
        lambda: resample_streams(sources, tgt_ns, out=out),
        by_formula,
        lambda: [by_numpy(*one, tgt_ns.numpy()) for one in arrays],
        out,
        np.concatenate(exact, 2),
    )


def formula(src: Tensor, src_ns: Tensor, tgt_ns: Tensor) -> Tensor:
    """Resamples as one writes it without a library: searchsorted, index_select, lerp."""
    rows, slots, dim = src.shape
    after = torch.searchsorted(src_ns, tgt_ns, right=True).clamp_(1, slots - 1)
    before_ns = src_ns.gather(1, after - 1)
    gap_ns = src_ns.gather(1, after) - before_ns
    weight = ((tgt_ns - before_ns) / gap_ns).clamp_(0, 1).view(-1, 1)
    flat = (after + torch.arange(rows).mul_(slots).unsqueeze(1)).view(-1)
    samples = src.view(-1, dim)
    first, second = samples.index_select(0, flat - 1), samples.index_select(0, flat)
    return torch.lerp(first, second, weight).view(rows, -1, dim)


def _samples(rows: int, slots: int, dim: int) -> Tensor:
    return torch.randn(rows, slots, dim)


def _stamps(rows: int, slots: int) -> Tensor:
    """Jittered by up to half a period, strictly rising."""
    period_ns = SPAN_NS // slots
    jitter_ns = torch.randint(0, period_ns // 2, (rows, slots))
    return ORIGIN_NS + torch.arange(slots) * period_ns + jitter_ns


def _targets(rows: int, targets: int) -> Tensor:
    """A regular grid within the stamps, up to the newest one or just beyond."""
    return (ORIGIN_NS + torch.arange(1, targets + 1) * (SPAN_NS // targets)).repeat(rows, 1)


def _measure(case: ResampleCase, calls: int) -> dict[str, Any]:
    times_us = {way: np.empty(calls) for way in WAYS}
    for call in range(-WARM_UP_CALLS, calls):
        for way, taken_us in times_us.items():
            taken_us[call] = _time_us(getattr(case, way))
    case.plan()
    error = np.abs(case.out[0].numpy() - case.reference).max() / np.abs(case.reference).max()
    summaries = {way: _summary(taken_us) for way, taken_us in times_us.items()}
    p50_us = {way: summary["p50"] for way, summary in summaries.items()}
    ratios = {way: p50_us[way] / p50_us["formula"] for way in ("plan", "op")}
    shown = "".join(
        f"{' / '.join(f'{us:.0f}' for us in summary.values()):>29}"
        for summary in summaries.values()
    )
    print(f"{case.name:31}{shown}{ratios['plan']:7.2f}{ratios['op']:6.2f}{error:9.1e}")
    return {"case": case.name, "us": summaries, "ratio": ratios, "error": float(error)}


def _time_us(call: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start_ns) / 1e3


def _summary(times_us: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(times_us, (50, 99))
    shown = {"min": times_us.min(), "p50": p50, "p99": p99, "max": times_us.max()}
    return {name: float(us) for name, us in shown.items()}


if __name__ == "__main__":
    main()
