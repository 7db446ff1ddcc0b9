"""A strict reader of trace-event JSON: what Perfetto and chrome://tracing silently misdraw.

``problems`` lists every violation: unknown or incomplete events, time that runs backwards, slices
of a track that overlap without nesting, arrows without both ends or that hang in the air.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final

TICK: Final = 0.0015  # µs: times are printed to three digits

TraceEvent = dict[str, Any]

NEEDED: Final = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "i": {"name", "cat", "ts", "s", "pid", "tid"},
    "C": {"name", "ts", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
OPTIONAL: Final = {"X": {"args"}}
NAMES: Final = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def problems(trace: Any) -> list[str]:
    """Everything wrong with a decoded trace; empty when a viewer will draw it as it is meant."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["not an object with a list of traceEvents"]
    events = trace["traceEvents"]
    shape = [text for place, event in enumerate(events) for text in _shape(place, event)]
    if shape:
        return shape
    checks = (_time, _nesting, _flows, _named)
    return [text for check in checks for text in check(events)]


def _shape(place: int, event: Any) -> Iterator[str]:
    ph = event.get("ph") if isinstance(event, dict) else None
    if ph not in NEEDED:
        yield f"event {place}: phase {ph!r} is not used here"
        return
    keys = set(event) - {"ph"}
    if not NEEDED[ph] <= keys or keys - NEEDED[ph] - OPTIONAL.get(ph, set()):
        yield f"event {place} ({ph}): keys {sorted(keys)}"
        return
    for key in ("ts", "dur", "pid", "tid"):
        value = event.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"event {place} ({ph}): {key} is {value!r}"
        elif not math.isfinite(value) or value < 0:
            yield f"event {place} ({ph}): {key} is {value}"
    if ph in "stf" and (type(event["id"]) is not int or event["id"] < 0):
        yield f"event {place} ({ph}): id is {event['id']!r}; Perfetto takes whole numbers"
    if ph == "M" and set(event["args"]) != {NAMES.get(event["name"])}:
        yield f"event {place}: metadata {event['name']!r} with {event['args']}"
    if ph == "C" and not all(isinstance(v, int | float) for v in event["args"].values()):
        yield f"event {place}: counter {event['name']!r} with {event['args']}"
    if ph == "i" and event["s"] not in ("g", "p", "t"):
        yield f"event {place}: scope {event['s']!r}"


def _time(events: list[TraceEvent]) -> Iterator[str]:
    """File order is time order; names come first."""
    before = -1.0
    for place, event in enumerate(events):
        if event["ph"] == "M":
            if before >= 0:
                yield f"event {place}: a name behind the first event"
            continue
        if event["ts"] < before:
            yield f"event {place}: ts {event['ts']} behind {before}"
        before = event["ts"]


def _nesting(events: list[TraceEvent]) -> Iterator[str]:
    """Slices of one track lie apart or one inside the other."""
    open_until: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        stack = open_until[event["pid"], event["tid"]]
        start, end = event["ts"], event["ts"] + event["dur"]
        while stack and stack[-1] <= start + TICK:
            stack.pop()
        if stack and end > stack[-1] + TICK:
            yield f"slice {event['name']!r} at {start} ends {end}, its parent {stack[-1]}"
        stack.append(end)


def _flows(events: list[TraceEvent]) -> Iterator[str]:
    """Every arrow has one start and one end, in order, each within a slice of its track."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    arrows: dict[Any, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["cat"], event["name"], event["id"]].append(event)
            track = slices[event["pid"], event["tid"]]
            at = bisect_right(track, (event["ts"] + TICK, math.inf)) - 1
            if at < 0 or event["ts"] > track[at][1] + TICK:
                yield f"arrow {event['id']} ({event['ph']}) at {event['ts']} hangs in the air"
    for key, steps in arrows.items():
        kinds = Counter(step["ph"] for step in steps)
        order = [step["ph"] for step in sorted(steps, key=lambda s: s["ts"])]
        if kinds["s"] != 1 or kinds["f"] != 1 or order[0] != "s" or order[-1] != "f":
            yield f"arrow {key[-1]}: {order}"


def _named(events: list[TraceEvent]) -> Iterator[str]:
    """Whatever draws a slice has a process name and a thread name, each once."""
    given = Counter(
        (e["name"], e["pid"], e["tid"] if e["name"].startswith("thread") else 0)
        for e in events
        if e["ph"] == "M"
    )
    yield from (f"{key} is said {count} times" for key, count in given.items() if count > 1)
    for pid in {e["pid"] for e in events if e["ph"] != "M"}:
        if not given["process_name", pid, 0]:
            yield f"process {pid} has no name"
    for pid, tid in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        if not given["thread_name", pid, tid]:
            yield f"thread {tid} of process {pid} has no name"
