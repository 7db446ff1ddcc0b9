"""The GPU part of ``resample.py``: one launch against everything else that could do the work.

Times are microseconds per call inside CUDA graphs, inputs rotated out of L2 (gpu_timing.py). The
floor is the fastest of nine plain copies of as many bytes as a call must move, stamps and trust
included. Peers give values only and know no rings. Errors are relative (Frobenius) to float64. So
few operations a byte leave the memory as the only roof: torch's copy of 1 GiB.

Also: all streams of a robot in one launch, against one launch per stream and a cat of them (single
launches are our own, and naive kernels: one thread per element, a search each; values only); and
what a call costs the host, and how long the very first one takes.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from bench import gpu_timing
from bench import resample_gpu_peers as peers
from bench.resample_numpy import numpy_us
from torch import Tensor

from ppstream_kernels import Resampled, StreamSource, ops, resample, resample_streams
from ppstream_kernels.cuda_plan import CudaPlan
from ppstream_kernels.cuda_rings import Recorded
from ppstream_kernels.source import SCALED_DTYPES, to_columns

ROBOTS: Final = {  # streams as N x D, targets
    "robot": (((30, 512), (333, 14), (1000, 6)), 50),
    "aligned": (((30, 512), (100, 64), (200, 16)), 50),
    "upsample": (((30, 512), (100, 64), (200, 16)), 200),
}
BATCHES: Final = (1, 32, 256)
Row = dict[str, Any]


def fused_rows(dtype: torch.dtype) -> Iterator[Row]:
    """Every robot at every batch size, printed as it comes, and the range at each batch size."""
    for rows in BATCHES:
        of_batch = [_fused_row(name, rows, dtype) for name in ROBOTS]
        own, naive = (sorted(row[f"vs_{way}"] for row in of_batch) for way in ("apart", "naive"))
        print(
            f"{dtype} B={rows}: fused against own singles + cat {own[0]:.2f}-{own[-1]:.2f}x, "
            f"against naive singles + cat {naive[0]:.2f}-{naive[-1]:.2f}x",
            flush=True,
        )
        yield from of_batch


def _fused_row(name: str, rows: int, dtype: torch.dtype) -> Row:
    """All streams of a robot: one launch against one launch per stream and a cat."""
    streams, targets = ROBOTS[name]
    shapes = [(rows, slots, targets, dim) for slots, dim in streams]
    call_bytes = sum(must_move(shape, dtype) for shape in shapes)
    sets = [[make_inputs(s, dtype) for s in shapes] for _ in range(gpu_timing.sets_for(call_bytes))]
    fused, apart = ([make(one) for one in sets] for make in (_fused_call, _apart_call))
    ways = peers.floors(call_bytes, len(sets)) | {"fused": fused, "apart": apart}
    ways["turned"] = [_fused_call(one, turned=True) for one in sets]
    ways["naive"] = [_naive_call(one) for one in sets]
    times = gpu_timing.graphed_us(ways)
    floor = min(us for way, us in times.items() if way.startswith("floor"))
    error = _error(sets[0])
    row: Row = {
        "streams": name,
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "us": {way: times[way] for way in ("fused", "turned", "apart", "naive")} | {"floor": floor},
        "vs_apart": times["apart"] / times["fused"],
        "vs_naive": times["naive"] / times["fused"],
        "error": error,
    }
    print(
        f"{row['dtype']:9}{name:9} B={rows:<4} fused {times['fused']:6.2f} floor {floor:6.2f} "
        f"turned rings {times['turned']:6.2f}  own singles + cat {times['apart']:6.2f} = "
        f"{row['vs_apart']:.2f}x  naive singles + cat {times['naive']:6.2f} = "
        f"{row['vs_naive']:.2f}x  "
        f"error {error:.0e}",
        flush=True,
    )
    return row


def _fused_call(streams: list[Inputs], *, turned: bool = False) -> Callable[[], object]:
    sources = [_turned(one) if turned else StreamSource(one.src, one.src_ns) for one in streams]
    out = tuple(resample_streams(sources, streams[0].tgt_ns))
    return lambda: resample_streams(sources, streams[0].tgt_ns, out=out)


def _error(streams: list[Inputs]) -> float:
    """The largest of all streams."""
    sources = [StreamSource(one.src, one.src_ns) for one in streams]
    values = resample_streams(sources, streams[0].tgt_ns).values
    parts = values.split([one.src.shape[2] for one in streams], 2)
    return max(
        peers.error_of(part, one.src, one.src_ns, streams[0].tgt_ns)
        for part, one in zip(parts, streams, strict=True)
    )


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


def measure_launching() -> dict[str, float]:
    """Host time of a call, and of the very first one."""
    one = make_inputs((1, 64, 16, 14), torch.bfloat16)
    source = StreamSource(one.src, one.src_ns)
    checked = functools.partial(resample, one.src, one.src_ns, one.tgt_ns, out=one.out)
    plan = CudaPlan(to_columns([source]), 16)
    many = tuple(resample_streams([source], one.tgt_ns))
    plan.run(one.tgt_ns, *many)
    checked()
    single = torch.cuda.CUDAGraph()
    with torch.cuda.graph(single):
        checked()
    recorded = Recorded(lambda _: plan.run(one.tgt_ns, *many), torch.device("cuda", 0))
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (one.src, one.src_ns, one.tgt_ns)
    row = {
        "graph_replay_us": gpu_timing.host_us(single.replay),
        "recorded_replay_us": gpu_timing.host_us(lambda: recorded.queue(stream)),
        "plan_us": gpu_timing.host_us(lambda: plan.run(one.tgt_ns, *many)),
        "out_op_us": gpu_timing.host_us(lambda: ops.resample_out(*arguments, *one.out)),
        "op_us": gpu_timing.host_us(lambda: ops.resample(*arguments)),
        "checked_out_us": gpu_timing.host_us(checked),
    }
    with tempfile.TemporaryDirectory() as folder:
        row |= {name: _first_use_s(folder) for name in ("cold_first_use_s", "kept_first_use_s")}
    print("  ".join(f"{name} {value:.2f}" for name, value in row.items()))
    return row


_FIRST_USE: Final = """
import time, torch
from ppstream_kernels import resample
src, ns = torch.randn(1, 64, 14, device="cuda"), torch.arange(64, device="cuda")[None]
torch.cuda.synchronize()
start = time.perf_counter()
resample(src, ns, ns)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def _first_use_s(cache_folder: str) -> float:
    """In a fresh process with torch and CUDA up; the second one finds the first one's cubin."""
    environment = os.environ | {"XDG_CACHE_HOME": cache_folder, "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", _FIRST_USE], env=environment, check=True, capture_output=True
    )
    return float(ran.stdout)


ORIGIN_NS: Final = 10**18
SPAN_NS: Final = 10**9
TRUST_BYTES: Final = 5  # validity and age of a target


class Inputs(NamedTuple):
    """The tensors of one call."""

    src: Tensor
    src_ns: Tensor
    tgt_ns: Tensor
    out: Resampled


def make_inputs(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """Stamps jittered by up to half a period; a regular grid of targets up to the newest."""
    rows, slots, targets, dim = shape
    period_ns = SPAN_NS // slots
    src_ns = ORIGIN_NS + torch.arange(slots, device="cuda") * period_ns
    src_ns = src_ns + torch.randint(0, period_ns // 2, (rows, slots), device="cuda")
    tgt_ns = ORIGIN_NS + torch.arange(1, targets + 1, device="cuda") * (SPAN_NS // targets)
    src = torch.randn(rows, slots, dim, device="cuda").to(dtype)
    out = (
        torch.empty(rows, targets, dim, dtype=dtype, device="cuda"),
        torch.empty(rows, targets, dtype=torch.bool, device="cuda"),
        torch.empty(rows, targets, device="cuda"),
    )
    return Inputs(src, src_ns, tgt_ns.repeat(rows, 1), Resampled(*out))


def must_move(shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    """Samples that some target needs, all stamps and targets, and what is written."""
    rows, slots, targets, dim = shape
    touched = min(slots, 2 * targets - 1)  # two around each target but the last, which is held
    samples = touched + targets
    per_row = samples * dim * dtype.itemsize + 8 * (slots + targets) + TRUST_BYTES * targets
    return int(rows * per_row)


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
CURVED: Final = (SHAPES[0], SHAPES[5], SHAPES[8])
SCALING: Final = {
    "batch": [(rows, 100, 50, 32) for rows in (1, 8, 64, 512, 4096, 70000)],
    "length": [(32, slots, slots // 2, 32) for slots in (16, 64, 256, 1024, 4096, 16384)],
    "dimension": [(32, 200, 100, dim) for dim in (1, 3, 7, 16, 33, 100, 270, 1024, 4095)],
}
PEERS: Final = ("naive", "triton", "compile", "eager")
SCALED_PEERS: Final = ("naive", "triton", "eager")  # compiling for 21 more shapes takes a minute
FLOP_PER_VALUE: Final = 3  # weight * (second - first) + first
HALVES = torch.bfloat16


def measure(parts: Sequence[str], dtypes: Sequence[torch.dtype]) -> Row:
    """The asked ``parts``, printed as it comes, and returned for JSON."""
    about = _about()
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    ceiling = _copy_bandwidth()
    print(f"torch.copy_ of 1 GiB: {ceiling:.0f} GB/s read and written")
    report: Row = {"about": about, "copy_gb_s": ceiling, "shapes": []}
    for part in parts:
        began = time.perf_counter()
        report |= _PARTS[part](dtypes, ceiling)
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
    return report


def _shapes(dtypes: Sequence[torch.dtype], ceiling: float) -> Row:
    rows = [_shape_row(shape, dtype, ceiling) for dtype in dtypes for shape in SHAPES]
    means = {str(dtype): _means(rows, dtype) for dtype in dtypes}
    return {"shapes": rows, "geometric_means": means}


def _fused(dtypes: Sequence[torch.dtype], _: float) -> Row:
    return {"fused": [row for dtype in dtypes for row in fused_rows(dtype)]}


def _scaling(*_: object) -> Row:
    return {"scaling": {name: _scaling_rows(name) for name in SCALING}}


def _modes(dtypes: Sequence[torch.dtype], ceiling: float) -> Row:
    return {"modes": [_mode_row(shape, dtype, ceiling) for dtype in dtypes for shape in CURVED]}


def _mode_row(shape: tuple[int, int, int, int], dtype: torch.dtype, ceiling: float) -> Row:
    """Lines, cubics, and lines in 8 bits, which write fewer bytes, beside each other."""
    call_bytes, values = must_move(shape, dtype), shape[0] * shape[2] * shape[3]
    sets = [make_inputs(shape, dtype) for _ in range(gpu_timing.sets_for(call_bytes))]
    scale = torch.full((shape[3],), 0.03, device="cuda")
    ways = peers.floors(call_bytes, len(sets))
    ways["linear"] = [_ours(one) for one in sets]
    ways["cubic"] = [_ours(one, mode="cubic") for one in sets]
    for narrow in SCALED_DTYPES:
        outs = [(torch.empty_like(one.out.values, dtype=narrow), *one.out[1:]) for one in sets]
        ways[_name(narrow)] = [
            _ours(one._replace(out=Resampled(*out)), scale=scale)
            for one, out in zip(sets, outs, strict=True)
        ]
    times = gpu_timing.graphed_us(ways)
    us = {name: one for name, one in times.items() if not name.startswith("floor")}
    us["floor"] = min(one for name, one in times.items() if name.startswith("floor"))
    moved = dict.fromkeys(("linear", "cubic"), call_bytes)
    moved |= {_name(one): call_bytes - values * (dtype.itemsize - 1) for one in SCALED_DTYPES}
    share = {name: moved[name] / us[name] / 1e3 / ceiling for name in moved}
    row: Row = {"shape": "x".join(map(str, shape)), "dtype": _name(dtype), "us": us}
    row |= {"bytes": moved, "share_of_copy": share}
    shown = "  ".join(
        f"{name} {us[name]:.2f} = {us[name] / us['linear']:.2f} of linear, {share[name]:.0%}"
        for name in moved
    )
    print(f"{row['dtype']:9}{row['shape']:18} floor {us['floor']:.2f}  {shown}", flush=True)
    return row


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _launching(*_: object) -> Row:
    return {"launching": measure_launching()}


_PARTS: Final[dict[str, Callable[[Sequence[torch.dtype], float], Row]]] = {
    "shapes": _shapes,
    "fused": _fused,
    "scaling": _scaling,
    "modes": _modes,
    "launching": _launching,
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


def _ours(one: Inputs, **options: Any) -> Callable[[], object]:
    return lambda: resample(one.src, one.src_ns, one.tgt_ns, out=one.out, **options)


def _floor_and_ours(
    shape: tuple[int, int, int, int], dtype: torch.dtype, sets: list[Inputs]
) -> dict[str, float]:
    ways = peers.floors(must_move(shape, dtype), len(sets))
    ways["ours"] = [_ours(one) for one in sets]
    times = gpu_timing.graphed_us(ways)
    floor = min(us for name, us in times.items() if name.startswith("floor"))
    return {"floor": floor, "ours": times["ours"]}


def _shape_row(shape: tuple[int, int, int, int], dtype: torch.dtype, ceiling: float) -> Row:
    call_bytes = must_move(shape, dtype)
    sets = [make_inputs(shape, dtype) for _ in range(gpu_timing.sets_for(call_bytes))]
    times = _floor_and_ours(shape, dtype, sets)
    times["hot"] = gpu_timing.graphed_us({"hot": [_ours(sets[0])]})["hot"]
    times |= _peer_times(sets, PEERS, peers.TRITON_CONFIGS)
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
        "flop_per_byte": FLOP_PER_VALUE * one.out.values.numel() / call_bytes,
        "share_of_copy": bandwidth / ceiling,
        **ratios,
        "errors": _errors(sets[0], PEERS),
    }
    _print_row(row)
    return row


def _peer_times(
    sets: list[Inputs], names: Sequence[str], configs: Sequence[tuple[int, int]]
) -> dict[str, float]:
    torch._dynamo.reset()  # or it gives up specialising at the ninth shape
    ways: dict[str, gpu_timing.Calls] = {}
    if "naive" in names:
        ways["naive"] = [peers.naive_call(s.out.values, *s[:3]) for s in sets]
    if "compile" in names:
        ways["compile"] = [_formula_call(peers.compiled_formula, s) for s in sets]
    if "eager" in names:
        ways["eager"] = [_formula_call(peers.formula, s) for s in sets[:16]]
    for config in configs:
        ways[f"triton {config}"] = [peers.triton_call(s.out.values, *s[:3], *config) for s in sets]
    times = gpu_timing.graphed_us(ways)
    return {name: min(us for way, us in times.items() if way.startswith(name)) for name in names}


def _errors(one: Inputs, names: Sequence[str]) -> dict[str, float]:
    inputs, values = (one.src, one.src_ns, one.tgt_ns), one.out.values
    ways: dict[str, Callable[[], object]] = {
        "ours": _ours(one),
        "naive": peers.naive_call(values, *inputs),
        "triton": peers.triton_call(values, *inputs, *peers.TRITON_CONFIGS[0]),
        "compile": lambda: values.copy_(peers.compiled_formula(*inputs)),
        "eager": lambda: values.copy_(peers.formula(*inputs)),
    }

    def after(call: Callable[[], object]) -> float:
        values.fill_(math.nan)
        call()
        return peers.error_of(values, *inputs)

    return {name: after(ways[name]) for name in ("ours", *names)}


def _formula_call(way: Callable[..., Tensor], one: Inputs) -> Callable[[], object]:
    return lambda: way(one.src, one.src_ns, one.tgt_ns)


def _print_row(row: Row) -> None:
    us = row["us"]
    peers_shown = "  ".join(f"{name} {row['vs_' + name]:5.2f}x" for name in PEERS)
    errors = " ".join(f"{name} {error:.0e}" for name, error in row["errors"].items())
    print(
        f"{row['dtype']:9}{row['shape']:18} ours {us['ours']:7.2f} floor {us['floor']:7.2f} "
        f"over {row['over_floor_us']:+5.2f} hot {us['hot']:6.2f}  {row['gb_s']:5.0f} GB/s "
        f"= {row['share_of_copy']:3.0%} of the roof at {row['flop_per_byte']:.2f} flop/B  "
        f"{peers_shown}  numpy {row['numpy_us']:.0f} µs  "
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


def _scaling_rows(name: str) -> list[Row]:
    rows = []
    for shape in SCALING[name]:
        sets_wanted = gpu_timing.sets_for(must_move(shape, HALVES))
        sets = [make_inputs(shape, HALVES) for _ in range(sets_wanted)]
        times = _floor_and_ours(shape, HALVES, sets)
        times |= _peer_times(sets, SCALED_PEERS, peers.TRITON_CONFIGS[1:2])
        one = sets[0]
        errors = _errors(one, SCALED_PEERS)
        host = numpy_us(*(t.cpu().numpy() for t in (one.src.float(), one.src_ns, one.tgt_ns)))
        rows.append(
            {"shape": "x".join(map(str, shape)), "us": times, "numpy_us": host, "errors": errors}
        )
        shown = "  ".join(f"{way} {us:.2f}" for way, us in times.items())
        shown_errors = " ".join(f"{way} {error:.0e}" for way, error in errors.items())
        print(
            f"{name:10}{rows[-1]['shape']:22} {shown}  numpy {host:.0f} µs  errors {shown_errors}",
            flush=True,
        )
    return rows
