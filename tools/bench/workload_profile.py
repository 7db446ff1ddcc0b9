"""GPU time of a step, kernel by kernel, and its time by the clock. Not a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]


def kernel_us(step: Step, repeats: int) -> dict[str, float]:
    """GPU time per step by kernel name, and ``union``: with overlaps counted once."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    spans = []
    totals: dict[str, float] = {}
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            length = event.time_range.end - event.time_range.start
            totals[event.name] = totals.get(event.name, 0.0) + length / repeats
    return totals | {"union": _union(spans) / repeats}


def _union(spans: list[tuple[float, float]]) -> float:
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def wall_us(step: Step, repeats: int) -> float:
    """Per step, back to back; the GPU is waited for at the end only."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats * 1e6
