"""The report page's memory of every rank, and its stages by the device's clock. Pure.

Draws what is logged: a run without a GPU has no GPU here, one without memory lines no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ppstream.analysis.device_times import ClockSeen, StageOnDevice
from ppstream.analysis.memory_use import GIB, GpuUse, MemoryUse, by_rank, with_gpu
from ppstream.analysis.records import MemoryLine, RunLog
from ppstream.report.formatting import gib, ms, percent
from ppstream.report.html.charts import NOTE, RIGHT, SAMPLE, WIDTH, legend
from ppstream.report.html.svg import Axis, Drawing
from ppstream.report.html.tables import Cell, table
from ppstream.report.series import over_time

LEFT: Final = 58.0
PLOT: Final = 92.0  # height
#: What of a rank is drawn, in which line, under which name.
LINES: Final = (
    ("reserved_bytes", "curve", "reserved"),
    ("allocated_bytes", "curve3", "allocated"),
    ("non_torch_bytes", "curve2", "not torch's"),
)


def memory_charts(run: RunLog) -> str:
    """RAM of all ranks, and the GPU of each that has one, over the time of the log."""
    ranks = by_rank(run)
    gpus = {rank: found for rank, lines in ranks.items() if (found := with_gpu(lines))}
    return _ram_chart(ranks) + "".join(_gpu_chart(rank, lines) for rank, lines in gpus.items())


def _ram_chart(ranks: dict[int, list[MemoryLine]]) -> str:
    kinds = ("curve", "curve2", "curve3")
    curves = [
        (f"rank {rank}", kinds[number % len(kinds)], _series(lines, "resident_bytes"))
        for number, (rank, lines) in enumerate(ranks.items())
    ]
    return _chart("RAM", curves)


def _gpu_chart(rank: int, lines: Sequence[MemoryLine]) -> str:
    curves = [(name, kind, _series(lines, field)) for field, kind, name in LINES]
    return _chart(f"GPU of rank {rank}", curves)


def _series(lines: Sequence[MemoryLine], field: str) -> list[tuple[float, float]]:
    """Seconds since the rank's first line, and GiB."""
    first = lines[0].t or 0
    at = [((m.t or 0) - first) / 1e9 for m in lines]
    values = [(getattr(m, field) or 0) / GIB for m in lines]
    return [(point.at, point.high) for point in over_time(at, values)]


def _chart(title: str, curves: Sequence[tuple[str, str, list[tuple[float, float]]]]) -> str:
    longest = max((points[-1][0] for _, _, points in curves if points), default=0.0)
    most = max((value for _, _, points in curves for _, value in points), default=0.0)
    if longest <= 0 or most <= 0:
        return ""
    places = legend([name for name, _, _ in curves], 2 * NOTE - 3)
    top = places[-1][1] + 10
    bottom = top + PLOT
    drawing = Drawing(WIDTH, bottom + 30, f"memory over time: {title}")
    x = Axis(0, longest, LEFT, RIGHT)
    y = Axis(0, 1.15 * most, bottom, top)
    drawing.text(0, NOTE - 3, title, "row")
    drawing.y_axis(y, LEFT, RIGHT, "GiB", about=3)
    drawing.x_axis(x, bottom, "s")
    for (name, kind, points), (at, line) in zip(curves, places, strict=True):
        drawing.path([(x(t), y(value)) for t, value in points], kind)
        drawing.path([(at, line - 4), (at + SAMPLE, line - 4)], kind)
        drawing.text(at + SAMPLE + 5, line, name, "note")
    return str(drawing)


def memory_table(uses: Sequence[MemoryUse]) -> str:
    """A column for every rank."""
    rows: list[Sequence[str | Cell]] = [
        ("RAM at most", *((gib(use.resident_max_bytes), "n") for use in uses)),
        (
            "RAM grown while ready",
            *((gib(use.resident_grown_bytes), "n bad" if use.leaks else "n") for use in uses),
        ),
    ]
    gpus = [use.gpu for use in uses]
    if any(gpus):
        sizes = {
            "GPU allocated at most": "allocated_max_bytes",
            "reserved at most": "reserved_max_bytes",
            "not torch's at most": "non_torch_max_bytes",
            "free at least": "free_min_bytes",
        }
        rows += [(what, *(_size(gpu, name) for gpu in gpus)) for what, name in sizes.items()]
        counts = {
            "segments asked of CUDA while ready": "segments_grown",
            "allocation retries": "alloc_retries",
            "allocations refused": "ooms",
        }
        rows += [(what, *(_count(gpu, name) for gpu in gpus)) for what, name in counts.items()]
    return table(("", *(f"rank {use.rank}" for use in uses)), rows if uses else (), numbers=True)


def _size(gpu: GpuUse | None, name: str) -> Cell:
    return ("", "n") if gpu is None else (gib(getattr(gpu, name)), "n")


def _count(gpu: GpuUse | None, name: str) -> Cell:
    if gpu is None:
        return "", "n"
    count: int = getattr(gpu, name)
    return f"{count}", "n bad" if count else "n good"


def device_table(stages: Sequence[StageOnDevice]) -> str:
    """Each stage by its device's clock, and by the host's where that is another measure."""
    rows: list[Sequence[str | Cell]] = []
    for found in stages:
        host = "same events" if found.host is None else ms(found.host.p50_ns)
        apart = "" if found.apart is None else percent(found.apart, signed=True)
        alone = "" if found.alone_ns is None else ms(found.alone_ns)
        here = found.device
        device = [(ms(ns), "n") for ns in (here.p50_ns, here.p95_ns, here.max_ns)]
        last: list[Cell] = [(host, "n"), (apart, "n bad" if found.disagrees else "n")]
        rows.append([found.stage, *device, (alone, "n"), *last])
    head = ("stage", "p50", "p95", "max", "alone", "host p50", "apart")
    return table(head, rows, numbers=True)


def device_note(stages: Sequence[StageOnDevice], clocks: Sequence[ClockSeen]) -> str:
    """Words the finding, and how exact the device's clock was mapped to the host's."""
    texts = [
        f"The host's {found.stage} takes {ms(found.host.p50_ns)}, "
        f"the device's {ms(found.device.p50_ns)}."
        for found in stages
        if found.host is not None and found.disagrees
    ]
    if texts:
        texts.append("Launches, waits and Python make up the difference.")
    texts += [
        f"Rank {clock.rank}'s device clock: {clock.renewals} anchors, none wider than "
        f"{clock.bracket_max_ns / 1e3:.0f} µs, at most {clock.surprise_max_ns / 1e3:.1f} µs off "
        f"the one before, drift {clock.drift_ppb / 1e3:+.1f} ppm."
        for clock in clocks
    ]
    return " ".join(texts)
