"""The trace of one process, of either profiler: work, copies and named ranges. Pure.

``kineto.py`` and ``nsys.py`` fill it, ``findings.py`` computes from it. Work is
kernels of a GPU, or, in a trace without any, operators of the CPU with their own time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

#: Category by what a kernel's or operator's name contains; the first that matches holds.
CATEGORIES: Final = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (
            "communication",
            r"nccl|all_?reduce|all_?gather|reduce_?scatter|sendrecv|broadcast_kernel|^put(_stamped)?$",
        ),
        ("resample", r"resample|ppstream|^(scatter|begin|prefix|frames)$"),  # our own
        ("attention", r"attention|flash|fmha|\bsdpa"),
        (
            "matmul",
            r"gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|wgmma|triton_tem|conv"
            r"|::(add)?b?mm\b|::linear|::(baddbmm|einsum)",
        ),
        ("softmax", r"soft_?max"),
        ("reduce", r"reduce|norm|::(sum|mean|max|min|argmax|any|all|var|std)\b|welford"),
        (
            "copy/memset",
            r"memcpy|memset|\bcopy_?\b|copy_kernel|CatArray|FillFunctor|gather|index_?select"
            r"|::(_to_copy|clone|contiguous|cat|fill_|zero_)",
        ),
        (
            "elementwise",
            r"elementwise|vectorized|pointwise|fused|gelu|relu|tanh|sigmoid"
            r"|::(add|sub|mul|div|exp|log|sqrt|pow|neg|clamp|where|abs|sin|cos)_?\b",
        ),
    )
)
OTHER: Final = "other"
#: Kernels that only wait: a device that runs one is idle.
WAITING: Final = ("wait_for_count", "wait_stamped")


class Work(NamedTuple):
    """One kernel, or one CPU operator; ``busy_ns`` leaves out what ran inside it."""

    name: str
    start_ns: int
    end_ns: int
    busy_ns: int
    lane: str  # device and stream, or thread
    shape: tuple[int, ...] | None  # grid and block of a launch
    launched_ns: int | None  # when the host asked for it, on the ranges' clock
    thread: int | None  # that asked


class Copy(NamedTuple):
    """One copy or memset of a device."""

    kind: str
    bytes: int
    start_ns: int
    end_ns: int
    launched_ns: int | None = None  # as of Work
    thread: int | None = None


class TraceRange(NamedTuple):
    """A named range of one host thread."""

    name: str
    start_ns: int
    end_ns: int
    thread: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything of one file. ``source`` names the file and what wrote it."""

    source: str
    is_gpu: bool
    work: Sequence[Work]
    copies: Sequence[Copy]
    ranges: Sequence[TraceRange]
    launch_ns: int = 0  # host time inside launch calls


def category(name: str) -> str:
    """Returns the kind of work of a kernel or operator, by its name."""
    return next((kind for kind, pattern in CATEGORIES if pattern.search(name)), OTHER)
