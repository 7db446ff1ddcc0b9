"""The timeline of a few typical periods: every thread and link, and both queues below it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from ppstream.analysis.records import Envelope, RunLog, Topology
from ppstream.report.clock_alignment import policy_clocks
from ppstream.report.html.svg import Axis, Drawing, steps
from ppstream.report.series import Stretch
from ppstream.report.spans import (
    LINK,
    LINK_IN,
    LINK_OUT,
    POLICY,
    REPLICA,
    WAIT,
    Span,
    policy_tracks,
    spans_of,
    stage_of,
    way_of,
)

WIDTH: Final = 1060.0
LEFT: Final = 116.0
ROW: Final = 40.0  # one track
BAR: Final = 28.0  # of a stage; links are thin
THIN: Final = 12.0
QUEUES: Final = 78.0  # height of the queues' chart
LABEL_MIN: Final = 42.0  # a bar narrower than this carries no text
LINKS: Final = (LINK_IN, LINK, LINK_OUT)
CLASSES: Final = {"A": "a", "B": "b", "C": "c", WAIT: "wait"} | dict.fromkeys(LINKS, "link")
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
    laid = spans_of(stretch.shown, run.topology, policy_clocks(run, stretch.shown))
    titles = TITLES | {
        track: f"{track}: {', '.join(run.topology.parts_of(k)) or f'place {k}'}"
        for k, track in enumerate(policy_tracks(run.topology), start=1)
        if run.topology.is_chain
    }
    titles |= {f"{REPLICA} {rank}": f"replica {rank}: B" for rank in run.topology.replica_ranks}
    rows = {name: 14 + number * ROW for number, name in enumerate(laid.tracks)}
    bottom = 14 + len(rows) * ROW
    drawing = Drawing(WIDTH, bottom + 34 + QUEUES + 30, "what every thread and link did when")
    time = Axis(0.0, (stretch.end_ns - stretch.start_ns) / 1e6, LEFT, WIDTH - 12)
    drawing.x_axis(time, bottom, "ms", top=10)
    for name, spans in laid.tracks.items():
        drawing.text(0, rows[name] + ROW / 2 + 4, titles.get(name, name), "row")
        for span in spans:
            _bar(drawing, span, rows[name], time, stretch)
    _ways(drawing, laid.tracks, rows, time, stretch, way_of(run.topology))
    _queues(drawing, stretch, run.topology, time, bottom + 34)
    return str(drawing)


def stretch_note(run: RunLog, stretch: Stretch) -> str:
    """Words how exact the policy rank's place in the picture is."""
    if run.topology.world_size == 1:
        return "One process runs all stages in turn."
    clocks = policy_clocks(run, stretch.shown)
    known = [clock for clock in clocks if clock is not None]
    if run.topology.is_chain and any(None in e.places for e in stretch.shown):
        return "Stamps of a policy rank are missing: its B is not shown."
    if len(known) < len(clocks):
        return (
            "The policy rank's own stamps are missing: B is drawn in the middle of its round trip."
        )
    if all(clock.shared for clock in known):
        ranks = "Both" if len(clocks) == 1 else "All"
        return f"{ranks} ranks share one clock: every bar is drawn at its measured time."
    worst = max(known, key=lambda clock: clock.uncertainty_ns)
    return (
        f"The ranks have different clocks ({worst.text}); only the position of B depends on them."
    )


def _bar(drawing: Drawing, span: Span, top: float, time: Axis, stretch: Stretch) -> None:
    begin, end = max(span.start_ns, stretch.start_ns), min(span.end_ns, stretch.end_ns)
    if begin >= end:
        return
    x, until = (time((t - stretch.start_ns) / 1e6) for t in (begin, end))
    height = THIN if span.kind in LINKS else BAR
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
    time: Axis,
    stretch: Stretch,
    way: Sequence[str],
) -> None:
    """Thin lines from A over B to C of every envelope, a bold one for one in the middle."""
    stages: dict[int, dict[str, Span]] = {}
    for spans in tracks.values():
        for span in spans:
            if (stage := stage_of(span)) in way:
                stages.setdefault(span.seq, {})[stage] = span
    inside = {
        seq: found
        for seq, found in stages.items()
        if len(found) == len(way)
        and found["A"].end_ns >= stretch.start_ns
        and found["C"].start_ns <= stretch.end_ns
    }
    if len(rows) == 1 or not inside:
        return
    bold = sorted(inside)[len(inside) // 2]
    for seq in sorted(inside, key=lambda s: s == bold):
        for start, end in pairwise(way):
            one, two = inside[seq][start], inside[seq][end]
            down = rows[two.track] > rows[one.track]
            y1 = rows[one.track] + ROW / 2 + (BAR / 2 if down else -BAR / 2)
            y2 = rows[two.track] + ROW / 2 - (BAR / 2 if down else -BAR / 2)
            x1, x2 = (time((t - stretch.start_ns) / 1e6) for t in (one.end_ns, two.start_ns))
            drawing.path([(x1, y1), (x2, y2)], "hop" if seq == bold else "hops")


def _queues(drawing: Drawing, stretch: Stretch, topology: Topology, time: Axis, top: float) -> None:
    """Envelopes outstanding, and results that wait for C, from the stamps of these envelopes."""
    if topology.world_size == 1:
        return
    most = max(topology.d_in, topology.d_out)
    level = Axis(0, most + 0.4, top + QUEUES, top + 6)
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
