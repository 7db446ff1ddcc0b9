"""The GPU part of ``bench_resample.py``: one launch against everything else that could do the work.

Times are microseconds per call inside CUDA graphs, inputs rotated out of L2 (gpu_timing.py). The
floor is the fastest of nine plain copies of as many bytes as a call must move, stamps and trust
included. Peers give values only and know no rings. Errors are relative (Frobenius) to float64.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from typing import Any, Final

import gpu_timing
import numpy as np
import resample_peers as peers
import torch
from resample_inputs import SPAN_NS, Inputs, make_inputs, must_move
from resample_launching import measure_launching
from resample_numpy import numpy_us
from torch import Tensor

from ppstream_kernels import StreamSource, resample, resample_streams

SHAPES: Final = (  # B, N, T, D
    (256, 100, 50, 32),
    (32, 500, 250, 256),
    (32, 500, 250, 14),
    (1, 500, 250, 270),
    (1, 64, 16, 14),
    (2048, 100, 50, 32),
    (256, 400, 200, 32),
    (256, 100, 50, 128),
    (1024, 500, 250, 256),
)
SCALING: Final = {
    "batch": [(rows, 100, 50, 32) for rows in (1, 8, 64, 512, 4096, 70000)],
    "length": [(32, slots, slots // 2, 32) for slots in (16, 64, 256, 1024, 4096, 16384)],
    "dimension": [(32, 200, 100, dim) for dim in (1, 3, 7, 16, 33, 100, 270, 1024, 4095)],
}
ROBOTS: Final = {  # streams as N x D, targets
    "robot": (((30, 512), (333, 14), (1000, 6)), 50),
    "aligned": (((30, 512), (100, 64), (200, 16)), 50),
    "upsample": (((30, 512), (100, 64), (200, 16)), 200),
}
HALVES, SINGLES = torch.bfloat16, torch.float32
Row = dict[str, Any]


def measure(*, quick: bool = False) -> Row:
    """Everything, printed as it comes, and returned for JSON."""
    about = _about()
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    ceiling = _copy_bandwidth()
    print(f"torch.copy_ of 1 GiB: {ceiling:.0f} GB/s read and written")
    dtypes = (HALVES,) if quick else (HALVES, SINGLES)
    shapes = [_shape_row(shape, dtype, ceiling) for dtype in dtypes for shape in SHAPES]
    means = {str(dtype): _means(shapes, dtype) for dtype in dtypes}
    robots = [
        _robot_row(name, rows, dtype)
        for dtype in dtypes
        for name in ROBOTS
        for rows in (1, 32, 256)
    ]
    scaling = {} if quick else {name: _scaling_rows(name) for name in SCALING}
    launching = measure_launching()
    return {
        "about": about,
        "copy_gb_s": ceiling,
        "shapes": shapes,
        "geometric_means": means,
        "fused": robots,
        "scaling": scaling,
        "launching": launching,
    }


def _about() -> Row:
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
    }


def _copy_bandwidth() -> float:
    one, other = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    times_ms = []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        other.copy_(one)
        stop.record()
        stop.synchronize()
        times_ms.append(start.elapsed_time(stop))
    return float(2 * one.nbytes / np.median(times_ms) / 1e6)


def _floors(call_bytes: int, sets: int) -> dict[str, gpu_timing.Calls]:
    half = max(16, call_bytes // 2 // 16 * 16)
    pairs = [
        [torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(sets)
    ]
    return {
        f"floor {config}": [peers.copy_call(*pair, *config) for pair in pairs]
        for config in peers.COPY_CONFIGS
    }


def _ours(one: Inputs) -> Callable[[], object]:
    return lambda: resample(one.src, one.src_ns, one.tgt_ns, out=one.out)


def _floor_and_ours(
    shape: tuple[int, int, int, int], dtype: torch.dtype, sets: list[Inputs]
) -> dict[str, float]:
    ways = _floors(must_move(shape, dtype), len(sets))
    ways["ours"] = [_ours(one) for one in sets]
    times = gpu_timing.graphed_us(ways)
    floor = min(us for name, us in times.items() if name.startswith("floor"))
    return {"floor": floor, "ours": times["ours"]}


def _shape_row(shape: tuple[int, int, int, int], dtype: torch.dtype, ceiling: float) -> Row:
    call_bytes = must_move(shape, dtype)
    sets = [make_inputs(shape, dtype) for _ in range(gpu_timing.sets_for(call_bytes))]
    times = _floor_and_ours(shape, dtype, sets)
    times["hot"] = gpu_timing.graphed_us({"hot": [_ours(sets[0])]})["hot"]
    times |= _peer_times(sets)
    bandwidth, one = call_bytes / times["ours"] / 1e3, sets[0]
    ratios = {f"vs_{name}": times[name] / times["ours"] for name in PEERS}
    row: Row = {
        "shape": "x".join(map(str, shape)),
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": call_bytes,
        "us": times,
        "numpy_us": numpy_us(*(t.cpu().numpy() for t in (one.src.float(), one.src_ns, one.tgt_ns))),
        "over_floor_us": times["ours"] - times["floor"],
        "gb_s": bandwidth,
        "share_of_copy": bandwidth / ceiling,
        **ratios,
        "errors": _errors(sets[0]),
    }
    _print_row(row)
    return row


PEERS: Final = ("naive", "triton", "compile", "eager")


def _peer_times(sets: list[Inputs]) -> dict[str, float]:
    torch._dynamo.reset()  # or it gives up specialising at the ninth shape
    ways: dict[str, gpu_timing.Calls] = {
        "naive": [peers.naive_call(s.out.values, s.src, s.src_ns, s.tgt_ns) for s in sets],
        "compile": [_formula_call(peers.compiled_formula, s) for s in sets],
        "eager": [_formula_call(peers.formula, s) for s in sets[:16]],
    }
    for config in peers.TRITON_CONFIGS:
        ways[f"triton {config}"] = [
            peers.triton_call(s.out.values, s.src, s.src_ns, s.tgt_ns, *config) for s in sets
        ]
    times = gpu_timing.graphed_us(ways)
    best = min(us for name, us in times.items() if name.startswith("triton"))
    return {name: times[name] for name in ("naive", "compile", "eager")} | {"triton": best}


def _formula_call(way: Callable[..., Tensor], one: Inputs) -> Callable[[], object]:
    return lambda: way(one.src, one.src_ns, one.tgt_ns)


def _errors(one: Inputs) -> dict[str, float]:
    rows = slice(0, 64)
    src, src_ns, tgt_ns = one.src[rows], one.src_ns[rows], one.tgt_ns[rows]
    exact = peers.formula(src.double(), src_ns, tgt_ns, torch.float64)

    def error(values: Tensor) -> float:
        return float((values[rows].double() - exact).norm() / exact.norm())

    def after(call: Callable[[], object]) -> float:
        one.out.values.fill_(math.nan)
        call()
        return error(one.out.values)

    tensors = (one.out.values, one.src, one.src_ns, one.tgt_ns)
    return {
        "ours": after(_ours(one)),
        "naive": after(peers.naive_call(*tensors)),
        "triton": after(peers.triton_call(*tensors, *peers.TRITON_CONFIGS[0])),
        "compile": error(peers.compiled_formula(one.src, one.src_ns, one.tgt_ns)),
        "eager": error(peers.formula(one.src, one.src_ns, one.tgt_ns)),
    }


def _print_row(row: Row) -> None:
    us = row["us"]
    peers_shown = "  ".join(f"{name} {row['vs_' + name]:5.2f}x" for name in PEERS)
    errors = " ".join(f"{name} {error:.0e}" for name, error in row["errors"].items())
    print(
        f"{row['dtype']:9}{row['shape']:18} ours {us['ours']:7.2f} floor {us['floor']:7.2f} "
        f"over {row['over_floor_us']:+5.2f} hot {us['hot']:6.2f}  {row['gb_s']:5.0f} GB/s "
        f"{row['share_of_copy']:4.0%}  {peers_shown}  numpy {row['numpy_us']:.0f} µs  "
        f"errors {errors}",
        flush=True,
    )


def _means(shapes: list[Row], dtype: torch.dtype) -> Row:
    rows = [row for row in shapes if row["dtype"] == str(dtype).removeprefix("torch.")]
    means = {
        name: math.exp(sum(math.log(row[f"vs_{name}"]) for row in rows) / len(rows))
        for name in PEERS
    }
    print(f"{dtype} geometric means: " + "  ".join(f"{k} {v:.2f}x" for k, v in means.items()))
    return means


def _robot_row(name: str, rows: int, dtype: torch.dtype) -> Row:
    """All streams of a robot: one launch against one launch per stream and a cat."""
    streams, targets = ROBOTS[name]
    shapes = [(rows, slots, targets, dim) for slots, dim in streams]
    call_bytes = sum(must_move(shape, dtype) for shape in shapes)
    sets = [[make_inputs(s, dtype) for s in shapes] for _ in range(gpu_timing.sets_for(call_bytes))]
    fused, apart = ([make(one) for one in sets] for make in (_fused_call, _apart_call))
    ways = _floors(call_bytes, len(sets)) | {"fused": fused, "apart": apart}
    ways["turned"] = [_fused_call(one, turned=True) for one in sets]
    ways["naive"] = [_naive_call(one) for one in sets]
    times = gpu_timing.graphed_us(ways)
    floor = min(us for way, us in times.items() if way.startswith("floor"))
    row: Row = {
        "streams": name,
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "us": {way: times[way] for way in ("fused", "turned", "apart", "naive")} | {"floor": floor},
        "vs_apart": times["apart"] / times["fused"],
        "vs_naive": times["naive"] / times["fused"],
    }
    print(
        f"{row['dtype']:9}{name:9} B={rows:<4} fused {times['fused']:6.2f} floor {floor:6.2f} "
        f"turned rings {times['turned']:6.2f}  apart {times['apart']:6.2f} = "
        f"{row['vs_apart']:.2f}x  naive {times['naive']:6.2f} = {row['vs_naive']:.2f}x",
        flush=True,
    )
    return row


def _fused_call(streams: list[Inputs], *, turned: bool = False) -> Callable[[], object]:
    sources = [_turned(one) if turned else StreamSource(one.src, one.src_ns) for one in streams]
    out = tuple(resample_streams(sources, streams[0].tgt_ns))
    return lambda: resample_streams(sources, streams[0].tgt_ns, out=out)


def _turned(one: Inputs) -> StreamSource:
    """The same samples as a full ring that wraps a third of the way, with limits."""
    rows, slots = one.src_ns.shape
    head = slots // 3
    numbers = [torch.full((rows,), number, device="cuda") for number in (slots, head)]
    ring = (one.src, one.src_ns.roll(head, 1), *numbers)  # which values those are costs no time
    return StreamSource(*ring, "linear", SPAN_NS // 10, SPAN_NS)


def _naive_call(streams: list[Inputs]) -> Callable[[], object]:
    whole = torch.cat([one.out.values for one in streams], 2)
    calls = [peers.naive_call(one.out.values, *one[:3]) for one in streams]

    def call() -> None:
        for resample_one in calls:
            resample_one()
        torch.cat([one.out.values for one in streams], 2, out=whole)

    return call


def _apart_call(streams: list[Inputs]) -> Callable[[], object]:
    whole = torch.cat([one.out.values for one in streams], 2)

    def call() -> None:
        for one in streams:
            resample(one.src, one.src_ns, one.tgt_ns, out=one.out)
        torch.cat([one.out.values for one in streams], 2, out=whole)

    return call


def _scaling_rows(name: str) -> list[Row]:
    rows = []
    for shape in SCALING[name]:
        sets_wanted = gpu_timing.sets_for(must_move(shape, HALVES))
        sets = [make_inputs(shape, HALVES) for _ in range(sets_wanted)]
        times = _floor_and_ours(shape, HALVES, sets)
        rows.append({"shape": "x".join(map(str, shape)), "us": times})
        print(
            f"{name:10}{rows[-1]['shape']:22} ours {times['ours']:8.2f} floor {times['floor']:8.2f}"
        )
    return rows
