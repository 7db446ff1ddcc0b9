"""The timeline of a few typical periods: every thread and link, and both queues below it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ppstream.analysis.records import Envelope, RunLog, Topology
from ppstream.report.clock_alignment import policy_clock
from ppstream.report.html.svg import Drawing, Scale, steps
from ppstream.report.series import Stretch
from ppstream.report.spans import LINK_IN, LINK_OUT, POLICY, WAIT, Span, spans_of

WIDTH: Final = 1060.0
LEFT: Final = 116.0
ROW: Final = 40.0  # one track
BAR: Final = 28.0  # of a stage; links are thin
THIN: Final = 12.0
QUEUES: Final = 78.0  # height of the queues' chart
LABEL_MIN: Final = 42.0  # a bar narrower than this carries no text
CLASSES: Final = {"A": "a", "B": "b", "C": "c", LINK_IN: "link", LINK_OUT: "link", WAIT: "wait"}
TITLES: Final = {
    "A + C": "rank 0: A + C",
    "A + B + C": "one rank",
    "A": "rank 0: A",
    "C": "rank 0: C",
    POLICY: "policy rank: B",
    LINK_IN: "link in",
    LINK_OUT: "link out",
}


def timeline(run: RunLog, stretch: Stretch) -> str:
    """All tracks over the stretch's time, the way of one envelope marked."""
    clock = policy_clock(run, stretch.shown)
    laid = spans_of(stretch.shown, run.topology, clock)
    rows = {name: 14 + place * ROW for place, name in enumerate(laid.tracks)}
    bottom = 14 + len(rows) * ROW
    drawing = Drawing(WIDTH, bottom + 34 + QUEUES + 30, "what every thread and link did when")
    time = Scale(0.0, (stretch.end_ns - stretch.start_ns) / 1e6, LEFT, WIDTH - 12)
    drawing.x_axis(time, bottom, "ms", top=10)
    for name, spans in laid.tracks.items():
        drawing.text(0, rows[name] + ROW / 2 + 4, TITLES.get(name, name), "row")
        for span in spans:
            _bar(drawing, span, rows[name], time, stretch)
    _ways(drawing, laid.tracks, rows, time, stretch)
    _queues(drawing, stretch, run.topology, time, bottom + 34)
    return str(drawing)


def stretch_note(run: RunLog, stretch: Stretch) -> str:
    """Words how exact the policy rank's place in the picture is."""
    if run.topology.world_size == 1:
        return "One process runs all stages in turn."
    clock = policy_clock(run, stretch.shown)
    if clock is None:
        return "The policy rank's own stamps are missing: B stands in the middle of its round trip."
    if clock.shared:
        return "Both ranks share one clock: every bar stands where it was measured."
    return f"The ranks have different clocks ({clock.text}); only B's place depends on it."


def _bar(drawing: Drawing, span: Span, top: float, time: Scale, stretch: Stretch) -> None:
    begin, end = max(span.start_ns, stretch.start_ns), min(span.end_ns, stretch.end_ns)
    if begin >= end:
        return
    x, until = (time((t - stretch.start_ns) / 1e6) for t in (begin, end))
    height = THIN if span.kind in (LINK_IN, LINK_OUT) else BAR
    y = top + (ROW - height) / 2
    ms = (span.end_ns - span.start_ns) / 1e6
    what = f"wait for {span.note}" if span.kind == WAIT else f"{span.kind} of envelope {span.seq}"
    drawing.rect(x, y, max(until - x, 0.8), height, CLASSES[span.kind], f"{what}: {ms:.3f} ms")
    if span.kind in ("A", "B", "C") and until - x >= LABEL_MIN:
        inside = f"in-{CLASSES[span.kind]}"
        drawing.text((x + until) / 2, y + 18, f"{span.kind} {span.seq}", inside, "middle")


def _ways(
    drawing: Drawing,
    tracks: dict[str, list[Span]],
    rows: dict[str, float],
    time: Scale,
    stretch: Stretch,
) -> None:
    """Thin lines from A over B to C of every envelope, a bold one for one in the middle."""
    stages: dict[int, dict[str, Span]] = {}
    for spans in tracks.values():
        for span in spans:
            if span.kind in ("A", "B", "C"):
                stages.setdefault(span.seq, {})[span.kind] = span
    inside = {
        seq: found
        for seq, found in stages.items()
        if len(found) == 3
        and found["A"].end_ns >= stretch.start_ns
        and found["C"].start_ns <= stretch.end_ns
    }
    if len(rows) == 1 or not inside:
        return
    bold = sorted(inside)[len(inside) // 2]
    for seq in sorted(inside, key=lambda s: s == bold):
        for start, end in (("A", "B"), ("B", "C")):
            one, two = inside[seq][start], inside[seq][end]
            down = rows[two.track] > rows[one.track]
            y1 = rows[one.track] + ROW / 2 + (BAR / 2 if down else -BAR / 2)
            y2 = rows[two.track] + ROW / 2 - (BAR / 2 if down else -BAR / 2)
            x1, x2 = (time((t - stretch.start_ns) / 1e6) for t in (one.end_ns, two.start_ns))
            drawing.path([(x1, y1), (x2, y2)], "hop" if seq == bold else "hops")


def _queues(
    drawing: Drawing, stretch: Stretch, topology: Topology, time: Scale, top: float
) -> None:
    """Envelopes outstanding, and results that wait for C, from the stamps of these envelopes."""
    if topology.world_size == 1:
        return
    most = max(topology.d_in, topology.d_out)
    level = Scale(0, most + 0.4, top + QUEUES, top + 6)
    for value in range(most + 1):
        drawing.line(LEFT, level(value), WIDTH - 12, level(value), "bound" if value else "axis")
        drawing.text(LEFT - 7, level(value) + 4, f"{value}", "tick", "end")
    drawing.text(0, top + 34, "queues", "row")
    for kind, start, end in (("step", "tSend", "tRecv"), ("step2", "tRecv", "tDecode")):
        at, levels = _levels(stretch, stretch.shown, start, end)
        xs = [time((t - stretch.start_ns) / 1e6) for t in at]
        drawing.path([(x, level(v)) for x, v in steps(xs, levels, WIDTH - 12)], kind)


def _levels(
    stretch: Stretch, shown: Sequence[Envelope], start: str, end: str
) -> tuple[list[int], list[int]]:
    changes = []
    for e in shown:
        entered, left = getattr(e, start), getattr(e, end)
        if entered is not None and left is not None and entered < left:
            changes += [(entered, 1), (left, -1)]
    at, levels, level = [stretch.start_ns], [0], 0
    for instant, change in sorted(changes):
        level += change
        if instant <= stretch.start_ns:
            levels[0] = level
        elif instant < stretch.end_ns:
            at.append(instant)
            levels.append(level)
    return at, levels
