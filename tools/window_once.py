"""Cuts a few windows with cameras on a GPU, for a memory checker or a profiler's NVTX filter.

Every window is queued inside the range ``A`` of the domain ``ppstream``; one more kernel runs
outside of it, which a filter must not show. Nobody looks at results or times.
"""

from __future__ import annotations

import bench_device_window as bench
import torch

from ppstream.observe import nvtx_ranges

WINDOWS = 6


def main() -> None:
    robot = bench.Robot(bench.PLAIN + bench.CAMERAS, rows=3)
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
        assert robot.window.take().present == [True] * 3
    torch.zeros(7, device="cuda").sin_()
    torch.cuda.synchronize()
    robot.window.close()
    print(f"ran {WINDOWS} windows, NVTX {'on' if nvtx_ranges.on else 'off'}")


if __name__ == "__main__":
    main()
