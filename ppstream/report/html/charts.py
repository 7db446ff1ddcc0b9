"""The report page's charts of a whole window: periods, latency, age, queues, depth. Pure.

Each takes numbers and gives an SVG element, or an empty string where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Final

from ppstream.analysis.run_report import RunReport
from ppstream.report.formatting import RARE, ms
from ppstream.report.html.svg import Axis, Drawing, steps
from ppstream.report.series import (
    Bins,
    ExpectedDepth,
    Point,
    bins_of,
    depth_curve,
    emit_times_s,
    latency_parts,
    over_time,
    periods_ns,
    queue_levels,
)

WIDTH: Final = 360.0  # a narrow window's: elsewhere a chart grows, and the sheet's fonts shrink
LEFT: Final = 54.0
RIGHT: Final = WIDTH - 10
ROW: Final = 33.0  # a bar below its name
BAR: Final = 13.0
NOTE: Final = 15.0  # a line of text
NOTE_CHARS: Final = 48  # in it
SAMPLE: Final = 20.0  # of a line, before its name
MS: Final = 1e-6  # per ns
STAGE_CLASS: Final = {"A": "a", "B": "b", "C": "c", "both links": "link", "all hops": "link"}
RESOURCES: Final = {
    "r0": ("rank 0: A + C", "c"),
    "r0A": ("rank 0: A", "a"),
    "r0C": ("rank 0: C", "c"),
    "mesh": ("policy rank: B", "b"),
    "gpu0": ("rank 0's GPU: A and C", "gpu"),
    "link": ("links", "link"),
}


def resources(report: RunReport) -> str:
    """Draws the utilisation of each serial resource."""
    score = report.primary
    if score is None:
        return ""
    drawing = Drawing(WIDTH, ROW * len(score.busy_ns) + 26, "busy share of every resource")
    share = Axis(0, 1, 0, RIGHT)
    drawing.x_axis(Axis(0, 100, share.start, share.end), drawing.height - 22, "%", top=4)
    for row, name in enumerate(score.busy_ns):
        busy = score.utilisation[name]
        title, kind = RESOURCES.get(name, (f"place {name.removeprefix('place')}: B", "b"))
        title = "rank 0: A + B + C" if not score.places else title
        if name == "mesh" and report.window.topology.has_replicas:
            title = f"{report.window.topology.replicas} replicas: B"
        each = score.busy_ns[name] / score.n * MS
        _named_bar(drawing, row, title, f"{busy:.0%}  {each:.2f} ms")
        top = ROW * row + NOTE + 2
        drawing.rect(share.start, top, share.end - share.start, BAR, "back")
        drawing.rect(share.start, top, share(min(busy, 1)) - share.start, BAR, kind)
    return str(drawing)


def _named_bar(drawing: Drawing, row: int, name: str, value: str) -> None:
    """The line above a bar: its name and its value, at both ends."""
    drawing.text(0, ROW * row + NOTE - 3, name, "row")
    drawing.text(RIGHT, ROW * row + NOTE - 3, value, "note", "end")


def period_histogram(report: RunReport) -> str:
    """Periods, with what the slowest stage and the model would allow."""
    bins = bins_of([p * MS for p in periods_ns(report.window)])
    score = report.primary
    if bins is None or score is None:
        return ""
    refs = [("mean", score.period_ns * MS, "ref")]
    if report.model is not None:
        refs.append(("model", report.model.period_ns * MS, "ref2"))
    return _histogram(bins, "period", refs)


def age_histogram(ages_ms: Sequence[float]) -> str:
    """Ages of executed actions."""
    bins = bins_of(ages_ms)
    return "" if bins is None else _histogram(bins, "age", [])


def _histogram(bins: Bins, what: str, refs: Sequence[tuple[str, float, str]]) -> str:
    """Bars below the lines of text, so that no bar is ever behind a text."""
    low = min([bins.low, *(value for _, value, _ in refs)])
    high = max([bins.high, *(value for _, value, _ in refs)])
    names = [f"{name} {value:.2f} ms" for name, value, _ in refs]
    names += [f"{bins.beyond} beyond {bins.high:.3g} ms"] if bins.beyond else []
    places = legend(names, NOTE - 3)
    top = places[-1][1] + 10 if places else 8.0
    bottom = top + 140
    drawing = Drawing(WIDTH, bottom + 26, f"distribution of the {what}")
    x = Axis(low, high, LEFT, RIGHT)
    y = Axis(0, max(bins.counts), bottom, top)
    drawing.y_axis(y, LEFT, RIGHT)
    for number, count in enumerate(bins.counts):
        start, end = (bins.low + bins.width * k for k in (number, number + 1))
        tip = f"{start:.3g} to {end:.3g} ms: {count}"
        width = x(end) - x(start) - 0.6
        if count:
            drawing.rect(x(start), y(count), width, y(0) - y(count), "b", tip)
    drawing.x_axis(x, bottom, "ms")
    for (_, value, kind), (at, line) in zip(refs, places, strict=False):
        drawing.line(x(value), top, x(value), bottom, kind)
        drawing.line(at, line - 4, at + SAMPLE, line - 4, kind)
    for name, (at, line) in zip(names, places, strict=True):
        drawing.text(at + SAMPLE + 5, line, name, "note")
    return str(drawing)


def legend(names: Sequence[str], line: float) -> list[tuple[float, float]]:
    """Places of names, each with room for a sample before it, as many in a line as fit."""
    found: list[tuple[float, float]] = []
    at = 0.0
    for name in names:
        width = SAMPLE + 14 + 7.5 * len(name)
        if at and at + width > WIDTH:
            at, line = 0.0, line + NOTE
        found.append((at, line))
        at += width
    return found


def period_drift(report: RunReport) -> str:
    """The period over time: middle, 10 to 90 %, and the largest of each stretch."""
    window = report.window
    points = over_time(emit_times_s(window), [p * MS for p in periods_ns(window)])
    if len(points) < 2:
        return ""
    drawing = Drawing(WIDTH, 220, "period over time")
    ceiling = sorted(p.top for p in points)[int(0.95 * (len(points) - 1))]
    x = Axis(0, points[-1].at, LEFT, RIGHT)
    y = Axis(0, 1.15 * max(ceiling, *(p.high for p in points)), 186, 14)
    drawing.y_axis(y, LEFT, RIGHT, "ms")
    drawing.x_axis(x, 186, "s")
    band = [(x(p.at), y(p.low)) for p in points] + [(x(p.at), y(p.high)) for p in points[::-1]]
    drawing.path(band, "band", closed=True)
    drawing.path([(x(p.at), y(p.middle)) for p in points], "curve")
    _tops(drawing, points, x, y)
    return str(drawing)


def _tops(drawing: Drawing, points: Sequence[Point], x: Axis, y: Axis) -> None:
    """The longest of each stretch where it stands out; those off the sheet stay at its edge."""
    for p in points:
        if p.top > 1.5 * p.middle:
            tip = f"{p.top:.1f} ms, {p.at:.1f} s in"
            drawing.dot(x(p.at), y(min(p.top, y.high)), 3, "top", tip)


def waterfall(report: RunReport) -> str:
    """Draws the time from A's start to emit, mean per part, each where the last one ended."""
    parts = latency_parts(report.window)
    shown = {name: ns * MS for name, ns in parts.items() if abs(ns) >= 1000}
    if not shown:
        return ""
    total = sum(shown.values())
    drawing = Drawing(WIDTH, ROW * (len(shown) + 1) + 26, "parts of the latency")
    x = Axis(0, total, 0, RIGHT)
    drawing.x_axis(x, drawing.height - 22, "ms", top=2)
    at = 0.0
    for row, (name, part_ms) in enumerate({**shown, "tA0 to tEmit": total}.items()):
        is_whole = row == len(shown)
        begin = 0.0 if is_whole else at
        kind = "back" if is_whole else STAGE_CLASS.get(name.rstrip("0123456789"), "wait")
        _named_bar(drawing, row, name, ms(part_ms / MS))
        width = max(x(begin + part_ms) - x(begin), 1)
        drawing.rect(x(begin), ROW * row + NOTE + 2, width, BAR, kind)
        at += part_ms
    return str(drawing)


def queues_over_time(report: RunReport) -> str:
    """Both queues over the whole window: time-weighted mean, and the most in each stretch."""
    topology = report.window.topology
    most = max(topology.d_in, topology.d_out)
    drawing = Drawing(WIDTH, 200, "queue depths over time")
    level = Axis(0, most + 0.3, 166, 12)
    drawn = False
    for queue, kind in (("outstanding", "step"), ("q_decode", "step2")):
        at, means, maxima = queue_levels(report.window, queue)
        if len(at) < 2:
            continue
        x = Axis(0, at[-1], LEFT, RIGHT)
        if not drawn:
            drawing.x_axis(x, 166, "s")
            for value in range(most + 1):
                drawing.line(LEFT, level(value), RIGHT, level(value), "grid")
                drawing.text(LEFT - 7, level(value) + 4, f"{value}", "tick", "end")
            drawn = True
        xs = [x(t) for t in at]
        drawing.path([(a, level(v)) for a, v in steps(xs, means, RIGHT)], kind)
        drawing.line(LEFT, level(max(maxima)), RIGHT, level(max(maxima)), "bound")
    return str(drawing) if drawn else ""


def depths(report: RunReport) -> str:
    """Period and latency that the model expects of each D_in; the one that ran is marked."""
    curve = depth_curve(report.primary, report.window)
    if len(curve) < 2:
        return ""
    drawing = Drawing(WIDTH, 210, "period and latency by depth")
    x = Axis(curve[0].d_in, curve[-1].d_in, LEFT + 12, RIGHT - 12)
    tallest = max(max(d.period_ns, d.latency_ns) for d in curve) * MS
    y = Axis(0, 1.3 * tallest, 176, 12)  # room for both labels
    drawing.y_axis(y, LEFT, RIGHT, "ms")
    drawing.line(LEFT, 176, RIGHT, 176, "axis")
    for d in curve:
        name = f"D_in {d.d_in}" if d is curve[0] else f"{d.d_in}"
        drawing.text(x(d.d_in), 192, name, "tick", "middle")
    drawing.path([(x(d.d_in), y(d.latency_ns * MS)) for d in curve], "curve2")
    drawing.path([(x(d.d_in), y(d.period_ns * MS)) for d in curve], "curve")
    for d in curve:
        here = d.d_in == report.window.topology.d_in
        _depth_dot(drawing, d, x, y, here=here)
    return str(drawing)


def _depth_dot(drawing: Drawing, d: ExpectedDepth, x: Axis, y: Axis, *, here: bool) -> None:
    tip = f"D_in {d.d_in}: period {d.period_ns * MS:.2f} ms, limited by {d.limit}"
    point = x(d.d_in), y(d.period_ns * MS)
    drawing.dot(*point, 6 if here else 4, "here" if here else "b", tip)
    if here:
        drawing.text(point[0], point[1] - 11, ms(d.period_ns), "note", "middle")
        above = min(y(d.latency_ns * MS) - 8, point[1] - 11 - NOTE)
        drawing.text(point[0], above, ms(d.latency_ns), "note", "middle")


def critical_path_chart(path: Mapping[str, Mapping[str, float]]) -> str:
    """Draws what the starts of each stage waited for last."""
    notes = {
        stage: wrap(", ".join(f"{k} {v:.0%}" for k, v in shares.items() if v >= RARE), NOTE_CHARS)
        for stage, shares in path.items()
    }
    height = sum(28 + NOTE * len(lines) for lines in notes.values())
    drawing = Drawing(WIDTH, height + 4, "waits before the starts of each stage")
    x = Axis(0, 1, 26, RIGHT)
    y = 2.0
    for stage, shares in path.items():
        drawing.text(0, y + 15, stage, "row")
        at = 0.0
        for number, (name, share) in enumerate(shares.items()):
            kind = STAGE_CLASS[stage[0]] if number == 0 else ("wait" if number % 2 else "back")
            width = x(at + share) - x(at)
            drawing.rect(x(at), y, width, 20, kind, f"{name}: {share:.1%}")
            at += share
        for number, line in enumerate(notes[stage], start=1):
            drawing.text(26, y + 19 + NOTE * number, line, "note")
        y += 28 + NOTE * len(notes[stage])
    return str(drawing) if path else ""
