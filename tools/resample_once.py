"""Runs the CUDA kernel once in each of its forms, for a memory checker: nobody looks at results."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from ppstream_kernels import MODES, StreamSource, resample_streams

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDTHS = (1, 3, 4, 8, 14, 33, 270)


def main() -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        straight = [_ring(5, 9 * dim, dim, dtype, mode) for dim in WIDTHS for mode in MODES[:3]]
        turning = [_ring(5, 40, 4, dtype, mode) for mode in MODES[3:]]
        for sources in (straight[:1], straight[:4], turning, straight + turning):
            _run(sources, 37)
    _run([_ring(2, slots, 2, torch.float32, "linear") for slots in (2047, 2049, 9000)], 300)
    _run([_ring(70_000, 3, 1, torch.bfloat16, "nearest")], 2)
    print("ran every form")


def _run(sources: list[StreamSource], targets: int) -> None:
    rows, slots = sources[0].stamps_ns.shape
    tgt_ns = torch.randint(-20, 10 * slots, (rows, targets), device="cuda")
    resample_streams(sources, tgt_ns)
    torch.cuda.synchronize()


def _ring(rows: int, slots: int, dim: int, dtype: torch.dtype, mode: str) -> StreamSource:
    """Partly filled and turned."""
    values = torch.randn(rows, slots, dim, device="cuda").to(dtype)
    head = torch.randint(0, slots, (rows,), device="cuda")
    order = (torch.arange(slots, device="cuda") - head[:, None]) % slots
    stamps_ns = torch.randint(0, 20, (rows, slots), device="cuda").cumsum(1).gather(1, order)
    count = torch.randint(0, slots + 1, (rows,), device="cuda")
    return StreamSource(values, stamps_ns, count, head, mode, 15, 30)


if __name__ == "__main__":
    main()
