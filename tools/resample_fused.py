"""All streams of a robot in one launch, against one launch per stream and a cat of them.

Single launches are our own, and naive kernels (one thread per element, a search each; values only).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import gpu_timing
import resample_peers as peers
import torch
from resample_inputs import SPAN_NS, Inputs, make_inputs, must_move

from ppstream_kernels import StreamSource, resample, resample_streams

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
        of_batch = [_row(name, rows, dtype) for name in ROBOTS]
        own, naive = (sorted(row[f"vs_{way}"] for row in of_batch) for way in ("apart", "naive"))
        print(
            f"{dtype} B={rows}: fused against own singles + cat {own[0]:.2f}-{own[-1]:.2f}x, "
            f"against naive singles + cat {naive[0]:.2f}-{naive[-1]:.2f}x",
            flush=True,
        )
        yield from of_batch


def _row(name: str, rows: int, dtype: torch.dtype) -> Row:
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
