"""Runs one piece of GPU work a few times, for a memory checker or a profiler: nobody times it.

``resample`` runs the kernel once in each of its forms; ``put`` sends messages by kernel to itself,
and waits for them; ``window`` cuts windows with cameras inside the range ``A`` of the domain
``ppstream``, with one more kernel outside, which a profiler's NVTX filter must not show.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import torch

from ppstream.observe import nvtx_ranges
from ppstream_kernels import MODES, StreamSource, resample_streams
from ppstream_kernels.cuda_put import Puts, Route
from ppstream_kernels.cuda_wait import Waits
from ppstream_kernels.source import SCALED_DTYPES

WINDOWS = 6
SIZES = (64, 1000, 4096, 65_600, 300_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDTHS = (1, 3, 4, 8, 14, 33, 270)


def resample() -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        straight = [_ring(5, 9 * dim, dim, dtype, mode) for dim in WIDTHS for mode in MODES[:3]]
        turning = [_ring(5, 40, 4, dtype, mode) for mode in MODES[3:]]
        for sources in (straight[:1], straight[:4], turning, straight + turning):
            _run(sources, 37)
        for narrow in SCALED_DTYPES:
            _run(straight[:4] + turning, 37, narrow)
    _run([_ring(2, slots, 2, torch.float32, "linear") for slots in (2047, 2049, 9000)], 300)
    _run([_ring(70_000, 3, 1, torch.bfloat16, "nearest")], 2)
    print("ran every form")


def _run(sources: list[StreamSource], targets: int, dtype: torch.dtype | None = None) -> None:
    rows, slots = sources[0].stamps_ns.shape
    tgt_ns = torch.randint(-20, 10 * slots, (rows, targets), device="cuda")
    width = sum(source.values.shape[2] for source in sources)
    scale = None if dtype is None else torch.full((width,), 0.02, device="cuda")
    resample_streams(sources, tgt_ns, dtype=dtype, scale=scale)
    torch.cuda.synchronize()


def _ring(rows: int, slots: int, dim: int, dtype: torch.dtype, mode: str) -> StreamSource:
    """Partly filled and turned."""
    values = torch.randn(rows, slots, dim, device="cuda").to(dtype)
    head = torch.randint(0, slots, (rows,), device="cuda")
    order = (torch.arange(slots, device="cuda") - head[:, None]) % slots
    stamps_ns = torch.randint(0, 20, (rows, slots), device="cuda").cumsum(1).gather(1, order)
    count = torch.randint(0, slots + 1, (rows,), device="cuda")
    return StreamSource(values, stamps_ns, count, head, mode, 15, 30)


def put() -> None:
    device = torch.device("cuda", 0)
    source, target = (torch.zeros(max(SIZES), dtype=torch.uint8, device=device) for _ in "io")
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    routes = [Route(source.data_ptr(), target.data_ptr(), size) for size in SIZES]
    puts = Puts(device, routes, counter.data_ptr())
    waits = Waits(device, counter.data_ptr())
    stream = torch.cuda.current_stream().cuda_stream
    for message in range(len(SIZES)):
        puts.write_header(message, (message, 1, 2, 3))
        puts.queue(message, message + 1, stream)
        waits.queue(message + 1, stream)  # behind the message: a checker may run one at a time
    torch.cuda.synchronize()
    assert counter.item() == len(SIZES)
    print(f"sent {len(SIZES)} messages")


def window() -> None:
    from bench import device_window as bench

    robot = bench.FilledRows(bench.PLAIN + bench.CAMERAS, rows=3)
    for turn in range(WINDOWS):
        robot.feed((turn + 1) * 300_000_000, frames=True)
        while not robot.window.ingest(0):
            pass
        if nvtx_ranges.on:
            nvtx_ranges.A.push(0, turn)
        robot.window.enqueue(robot.slots[turn % len(robot.slots)], robot.stream)
        if nvtx_ranges.on:
            nvtx_ranges.A.pop()
        robot.stream.synchronize()
        assert robot.window.pop().present == [True] * 3
    torch.zeros(7, device="cuda").sin_()
    torch.cuda.synchronize()
    robot.window.close()
    print(f"ran {WINDOWS} windows, NVTX {'on' if nvtx_ranges.on else 'off'}")


def main() -> None:
    ways = {one.__name__: one for one in (resample, put, window)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=ways)
    ways[parser.parse_args().what]()


if __name__ == "__main__":
    main()
