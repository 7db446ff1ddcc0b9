"""Findings of a trace: shares, stages, passes, copies, gaps, launches, and what limits it. Pure.

Kernels that run at two speeds are told apart by the shape of their launch, or within one: a mean
over both hides them, and "warm-up" is a guess, since two launch shapes are two kinds of work.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Final, NamedTuple

from ppstream.report.kernels.trace import WAITING, Copy, Trace, TraceRange, Work, category

WARM_UP: Final = "warm"  # ranges with this in their name are left out, with all inside them
PREFIX: Final = "ppstream:"  # of the loops' own ranges in a torch.profiler trace
PASSES: Final = ("B", "A")  # the range that one envelope is, when nobody says another
SHORT_GAP_NS: Final = 50_000  # a device that waits so briefly waits for the next launch
FEW_BUSY: Final = 0.5
MOSTLY: Final = 0.6
MODES_RATIO: Final = 1.5  # two speeds are this far apart
MODES_CALLS_MIN: Final = 20
SHAPE_CALLS_MIN: Final = 5
MODE_SHARE_MIN: Final = 0.1  # of the calls, on either side


class Modes(NamedTuple):
    """One kernel with two speeds, and why."""

    name: str
    why: str
    slow_ns: float
    fast_ns: float


def two_speeds(work: Iterable[Work]) -> Iterable[Modes]:
    """Kernels with two speeds: by launch shape, or with one shape alone."""
    by_name: dict[str, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for one in work:
        if one.shape is not None:
            by_name[one.name][one.shape].append(one.busy_ns)
    for name, shapes in sorted(by_name.items()):
        means = {s: fmean(v) for s, v in shapes.items() if len(v) >= SHAPE_CALLS_MIN}
        if len(means) > 1:
            slow, fast = max(means, key=lambda s: means[s]), min(means, key=lambda s: means[s])
            if means[slow] >= MODES_RATIO * means[fast]:
                yield Modes(
                    name, f"launch {_launch(slow)} or {_launch(fast)}", means[slow], means[fast]
                )
        for shape, values in shapes.items():
            if len(values) >= MODES_CALLS_MIN and (split := _split(values)) is not None:
                yield Modes(
                    name, f"one launch, {_launch(shape)}: look at clocks, L2, a neighbour", *split
                )


def _launch(shape: tuple[int, ...]) -> str:
    grid, block = shape[:3], shape[3:]
    return f"{'x'.join(map(str, grid))} blocks of {'x'.join(map(str, block))}"


def _split(values: Sequence[int]) -> tuple[float, float] | None:
    """Means of the slower and the faster part, cut at the widest hole; None: there is one speed."""
    ordered = sorted(values)
    few = max(1, round(MODE_SHARE_MIN * len(ordered)))
    cut = max(range(few, len(ordered) - few + 1), key=lambda i: ordered[i] - ordered[i - 1])
    fast, slow = fmean(ordered[:cut]), fmean(ordered[cut:])
    hole = ordered[cut] / max(1, ordered[cut - 1])
    return (slow, fast) if slow >= MODES_RATIO * fast and hole >= (1 + MODES_RATIO) / 2 else None


class Sum(NamedTuple):
    """Durations of one kernel, category or stage, in ns."""

    name: str
    calls: int
    total_ns: int
    share: float  # of all work
    mean_ns: float
    min_ns: int
    max_ns: int
    std_ns: float


class IdleGaps(NamedTuple):
    """Time of the span in which nothing ran."""

    n: int
    total_ns: int
    longest_ns: int
    short_ns: int  # the part in gaps below SHORT_GAP_NS


class CopySum(NamedTuple):
    """Copies of one kind."""

    kind: str
    n: int
    bytes: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class TraceFindings:
    """Everything about one trace."""

    source: str
    is_gpu: bool
    span_ns: int
    busy_ns: int  # union of all lanes
    work_ns: int  # sum over all lanes
    kernels: list[Sum]
    categories: list[Sum]
    stages: list[Sum]  # work by the range that launched it
    ranges: list[Sum]  # the host's time in each range; share is of the span
    pass_name: str | None
    passes: int
    calls_in_passes: int
    skipped: int  # calls inside warm-up ranges
    copies: list[CopySum]
    modes: list[Modes]
    gaps: IdleGaps
    launch_ns: int

    @property
    def busy_share(self) -> float:
        return self.busy_ns / self.span_ns if self.span_ns else 0.0

    @property
    def launch_index(self) -> float:
        """Share of the time, busy or briefly idle, in which the device waits for a launch."""
        return self.gaps.short_ns / ((self.busy_ns + self.gaps.short_ns) or 1)


def findings(trace: Trace, *, pass_name: str | None = None, skip: str = WARM_UP) -> TraceFindings:
    """All of it; ``pass_name`` is the range of one envelope, ``skip`` a pattern of warm-up ones."""
    left_out = re.compile(skip, re.IGNORECASE)
    working = [work for work in trace.work if work.name not in WAITING]
    within = enclosing(trace.ranges, working)
    kept, ranges_of = [], []
    for work, names in zip(working, within, strict=True):
        if not any(map(left_out.search, names)):
            kept.append(work)
            ranges_of.append(names)
    asked = zip(trace.copies, enclosing(trace.ranges, trace.copies), strict=True)
    copies = [copy for copy, names in asked if not any(map(left_out.search, names))]
    ranges: dict[str, list[int]] = defaultdict(list)
    for found in trace.ranges:
        if not left_out.search(found.name):
            ranges[_short(found.name)].append(found.end_ns - found.start_ns)
    name = pass_name or _pass_name(ranges)
    total_ns = sum(work.busy_ns for work in kept)
    merged = _merged((work.start_ns, work.end_ns) for work in kept)
    span_ns = merged[-1][1] - merged[0][0] if merged else _span_ns(trace.ranges)
    stages: dict[str, list[int]] = defaultdict(list)
    for work, names in zip(kept, ranges_of, strict=True):
        for stage in dict.fromkeys(names):
            stages[stage].append(work.busy_ns)
    return TraceFindings(
        source=trace.source,
        is_gpu=trace.is_gpu,
        span_ns=span_ns,
        busy_ns=sum(end - start for start, end in merged),
        work_ns=total_ns,
        kernels=_sums(_grouped(kept, lambda work: work.name), total_ns),
        categories=_sums(_grouped(kept, lambda work: category(work.name)), total_ns),
        stages=_sums(stages, total_ns),
        ranges=_sums(ranges, span_ns),
        pass_name=name,
        passes=len(ranges.get(name, ())) if name else 0,
        calls_in_passes=sum(name in names for names in ranges_of),
        skipped=len(within) - len(kept),
        copies=_copies(copies),
        modes=list(two_speeds(kept)),
        gaps=_gaps(merged),
        launch_ns=trace.launch_ns,
    )


def enclosing(ranges: Iterable[TraceRange], asked: Sequence[Work | Copy]) -> list[tuple[str, ...]]:
    """For each piece of work the ranges that were open where it was launched, outermost first."""
    threads: dict[int, list[TraceRange]] = defaultdict(list)
    for found in ranges:
        threads[found.thread].append(found)
    for nested in threads.values():
        nested.sort(key=lambda r: (r.start_ns, -r.end_ns))
    order = sorted(range(len(asked)), key=lambda i: asked[i].launched_ns or 0)
    within: list[tuple[str, ...]] = [()] * len(asked)
    open_: dict[int, list[TraceRange]] = defaultdict(list)
    next_: dict[int, int] = defaultdict(int)
    for index in order:
        work = asked[index]
        if work.launched_ns is None or work.thread is None:
            continue
        nested, stack = threads[work.thread], open_[work.thread]
        while next_[work.thread] < len(nested):
            candidate = nested[next_[work.thread]]
            if candidate.start_ns > work.launched_ns:
                break
            stack.append(candidate)
            next_[work.thread] += 1
        stack[:] = [r for r in stack if r.end_ns > work.launched_ns]
        within[index] = tuple(_short(r.name) for r in stack)
    return within


def bottleneck(f: TraceFindings) -> tuple[str, str]:
    """The class of what limits the traced process, and the line that says why."""
    copy_ns = sum(c.total_ns for c in f.copies)
    by = {c.name: c.share for c in f.categories}
    math = by.get("matmul", 0.0) + by.get("attention", 0.0)
    moving = sum(by.get(name, 0.0) for name in ("elementwise", "reduce", "softmax", "copy/memset"))
    idle = f"busy {f.busy_share:.0%} of {f.span_ns / 1e6:.1f} ms"
    if not f.work_ns:
        return "none", "no kernels and no operators: only the ranges show what the host did"
    if not f.is_gpu:
        if f.busy_share < FEW_BUSY:
            return "cpu", f"no kernels; operators are {idle}: the rest is Python, or a wait"
        kind = "compute" if math >= MOSTLY else "memory" if moving >= MOSTLY else "cpu"
        return kind, f"no kernels; operators are {idle}, matmul and attention {math:.0%} of it"
    if copy_ns > f.work_ns:
        return "io", f"copies take {copy_ns / 1e6:.2f} ms, kernels {f.work_ns / 1e6:.2f} ms"
    if f.launch_index > 1 - MOSTLY:
        return (
            "launch",
            f"the device waits {f.launch_index:.0%} of its time for a launch: record a CUDA graph",
        )
    if f.busy_share < FEW_BUSY:
        long_ns = f.gaps.total_ns - f.gaps.short_ns
        return "cpu", f"{idle}; {long_ns / 1e6:.1f} ms idle in long gaps: it has nothing to do"
    if math >= MOSTLY:
        return "compute", f"{idle}, matmul and attention {math:.0%} of it"
    if moving >= MOSTLY:
        return "memory", f"{idle}, work that only moves data {moving:.0%} of it"
    return "mixed", f"{idle}, matmul and attention {math:.0%}, moving data {moving:.0%}"


def _pass_name(ranges: Mapping[str, Sequence[int]]) -> str | None:
    for name in PASSES:
        if name in ranges:
            return name
    return max(sorted(ranges), key=lambda name: len(ranges[name]), default=None)


def _span_ns(ranges: Sequence[TraceRange]) -> int:
    if not ranges:
        return 0
    return max(r.end_ns for r in ranges) - min(r.start_ns for r in ranges)


def _short(name: str) -> str:
    return name.removeprefix(PREFIX)


def _grouped(work: Iterable[Work], key: Callable[[Work], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for one in work:
        groups[key(one)].append(one.busy_ns)
    return groups


def _sums(groups: Mapping[str, list[int]], total_ns: int) -> list[Sum]:
    """Largest share first."""
    found = [
        Sum(
            name,
            len(values),
            sum(values),
            sum(values) / (total_ns or 1),
            fmean(values),
            min(values),
            max(values),
            pstdev(values),
        )
        for name, values in groups.items()
    ]
    return sorted(found, key=lambda s: (-s.total_ns, s.name))


def _copies(copies: Iterable[Copy]) -> list[CopySum]:
    groups: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        groups[copy.kind].append(copy)
    return [
        CopySum(
            kind, len(found), sum(c.bytes for c in found), sum(c.end_ns - c.start_ns for c in found)
        )
        for kind, found in sorted(groups.items())
    ]


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint spans in order of time."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _gaps(merged: Sequence[tuple[int, int]]) -> IdleGaps:
    gaps = [after[0] - before[1] for before, after in pairwise(merged)]
    short = sum(gap for gap in gaps if gap < SHORT_GAP_NS)
    return IdleGaps(len(gaps), sum(gaps), max(gaps, default=0), short)
