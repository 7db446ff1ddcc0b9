"""The report page's charts of a whole window: periods, latency, age, queues, depth. Pure.

Each takes numbers and gives an SVG element, or an empty string where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ppstream.analysis.run_report import RunReport
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

WIDTH: Final = 510.0
LEFT: Final = 44.0
RIGHT: Final = WIDTH - 10
MS: Final = 1e-6  # per ns
STAGE_CLASS: Final = {"A": "a", "B": "b", "C": "c", "both links": "link", "all hops": "link"}
RESOURCES: Final = {
    "r0": ("r0: A + C", "c"),
    "r0A": ("r0: A", "a"),
    "r0C": ("r0: C", "c"),
    "mesh": ("policy: B", "b"),
    "gpu0": ("gpu0: A and C", "gpu"),
    "link": ("links", "link"),
}


def resources(report: RunReport) -> str:
    """Draws the utilisation of each serial resource."""
    score = report.primary
    if score is None:
        return ""
    drawing = Drawing(WIDTH, 30.0 * len(score.busy_ns) + 30, "busy share of every resource")
    share = Axis(0, 1, 110, RIGHT - 96)
    drawing.x_axis(Axis(0, 100, share.start, share.end), drawing.height - 24, "%", top=4)
    for row, name in enumerate(score.busy_ns):
        busy = score.utilisation[name]
        title, kind = RESOURCES.get(name, (f"place {name.removeprefix('place')}: B", "b"))
        title = "r0: A + B + C" if not score.places else title
        y = 6 + 30.0 * row
        drawing.text(0, y + 16, title, "row")
        drawing.rect(share.start, y, share.end - share.start, 22, "back")
        drawing.rect(share.start, y, share(min(busy, 1)) - share.start, 22, kind)
        each = score.busy_ns[name] / score.n * MS
        drawing.text(share.end + 8, y + 16, f"{busy:.0%}  {each:.2f} ms")
    return str(drawing)


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
    low = min([bins.low, *(value for _, value, _ in refs)])
    high = max([bins.high, *(value for _, value, _ in refs)])
    drawing = Drawing(WIDTH, 220, f"distribution of the {what}")
    x = Axis(low, high, LEFT, RIGHT)
    y = Axis(0, max(bins.counts), 186, 34)
    drawing.y_axis(y, LEFT, RIGHT)
    for number, count in enumerate(bins.counts):
        start, end = (bins.low + bins.width * k for k in (number, number + 1))
        tip = f"{start:.3g} to {end:.3g} ms: {count}"
        width = x(end) - x(start) - 0.6
        if count:
            drawing.rect(x(start), y(count), width, y(0) - y(count), "b", tip)
    drawing.x_axis(x, 186, "ms")
    for number, (name, value, kind) in enumerate(refs):
        drawing.line(x(value), 30, x(value), 186, kind)
        side = "end" if x(value) > (LEFT + RIGHT) / 2 else "start"
        shift = -5 if side == "end" else 5
        drawing.text(x(value) + shift, 12 + 14 * number, f"{name} {value:.2f} ms", "note", side)
    if bins.beyond:
        drawing.text(RIGHT, 48, f"{bins.beyond} beyond {bins.high:.3g} ms", "note", "end")
    return str(drawing)


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
    drawing = Drawing(WIDTH, 24.0 * (len(shown) + 1) + 30, "parts of the latency")
    x = Axis(0, total, 140, RIGHT - 70)
    drawing.x_axis(x, drawing.height - 24, "ms", top=2)
    at = 0.0
    for row, (name, ms) in enumerate({**shown, "tA0 to tEmit": total}.items()):
        y = 2 + 24.0 * row
        begin = 0.0 if name == "tA0 to tEmit" else at
        kind = (
            "back" if begin == 0.0 and row else STAGE_CLASS.get(name.rstrip("0123456789"), "wait")
        )
        drawing.text(0, y + 15, name, "row")
        drawing.rect(x(begin), y + 2, max(x(begin + ms) - x(begin), 1), 18, kind)
        drawing.text(x(begin + max(ms, 0)) + 6, y + 15, f"{ms:.2f} ms", "note")
        at += ms
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
    y = Axis(0, 1.12 * tallest, 176, 12)
    drawing.y_axis(y, LEFT, RIGHT, "ms")
    drawing.line(LEFT, 176, RIGHT, 176, "axis")
    for d in curve:
        drawing.text(x(d.d_in), 192, f"D_in {d.d_in}", "tick", "middle")
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
        drawing.text(point[0], point[1] - 11, f"{d.period_ns * MS:.1f} ms", "note", "middle")
        high = y(d.latency_ns * MS)
        drawing.text(point[0], high - 8, f"{d.latency_ns * MS:.1f} ms", "note", "middle")


def critical_path_chart(path: Mapping[str, Mapping[str, float]]) -> str:
    """Draws what the starts of each stage waited for last."""
    drawing = Drawing(WIDTH, 44.0 * len(path) + 4, "waits before the starts of each stage")
    x = Axis(0, 1, 26, RIGHT)
    for row, (stage, shares) in enumerate(path.items()):
        y = 2 + 44.0 * row
        drawing.text(0, y + 18, stage, "row")
        at = 0.0
        for number, (name, share) in enumerate(shares.items()):
            kind = STAGE_CLASS[stage[0]] if number == 0 else ("wait" if number % 2 else "back")
            width = x(at + share) - x(at)
            drawing.rect(x(at), y, width, 24, kind, f"{name}: {share:.1%}")
            at += share
        note = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        drawing.text(26, y + 38, note, "note")
    return str(drawing) if path else ""
