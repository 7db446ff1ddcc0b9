"""A run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: trace-event JSON.

One process per rank, one track per thread, link and credit, an arrow per envelope from A over B to
C, counters for queues, ages and memory. Times are microseconds of rank 0's clock from the first
event on; the policy rank's are moved there, and its process says how exact that is. For eyes: the
verdict never reads it. Format: "Trace Event Format", Google, the JSON object form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any, Final

from ppstream.analysis.records import Envelope, LogEvent, RunLog
from ppstream.report.clock_alignment import ClockOffset, policy_clocks
from ppstream.report.spans import WAIT, Span, policy_tracks, spans_of, stage_of, way_of

#: The newest envelopes of a longer run: some 20 events each, and viewers take a few hundred MB.
ENVELOPES_MAX: Final = 20_000
RANKS: Final = 2  # processes of one generation, at least; ids begin at 1: viewers hide process 0
PHASES: Final = "phase"
MIB: Final = 1 << 20
_LAST: Final = 1  # ns before its end that an arrow leaves a span
_ORDER: Final = {"X": 0, "i": 1, "C": 2, "s": 3, "t": 4, "f": 5}  # events of one instant

TraceEvent = dict[str, Any]
_Clocks = Sequence[ClockOffset | None]  # of the policy ranks


def write_trace(path: Path, run: RunLog) -> int:
    """Write ``run`` to ``path``; returns how many envelopes were left out, oldest first.

    Raises:
        OSError: the file cannot be written.
    """
    left_out = max(0, len(run.envelopes) - ENVELOPES_MAX)
    events = trace_events(run)
    about = {"run_id": run.run_id, "envelopes_left_out": left_out, "tool": "ppstream report"}
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents":[\n')
        for number, event in enumerate(events):
            file.write(",\n" if number else "")
            file.write(json.dumps(event, separators=(",", ":")))
        tail = {"displayTimeUnit": "ms", "otherData": about}
        file.write("\n]," + json.dumps(tail)[1:] + "\n")
    return left_out


def trace_events(run: RunLog) -> list[TraceEvent]:
    """Names first, then every event in order of time."""
    kept = run.envelopes[-ENVELOPES_MAX:]
    names: list[TraceEvent] = []
    events: list[TraceEvent] = []
    numbers = count(1)
    for generation, same in groupby(kept, key=lambda e: e.generation):
        envelopes = list(same)
        clocks = policy_clocks(run, envelopes)
        process = _Processes(run, generation, clocks)
        laid = spans_of(envelopes, run.topology, clocks, in_flight=True)
        names += process.names(list(laid.tracks))
        for spans in laid.tracks.values():
            events += [_slice(span, process) for span in spans]
        events += _arrows(laid.tracks, process, numbers, way_of(run.topology))
        events += _counters(envelopes, process)
        events += _memory(run, envelopes, process, clocks)
        events += _marks(run, envelopes, process, clocks)
    events.sort(key=lambda e: (e["ts"], _ORDER[e["ph"]], -e.get("dur", 0)))
    first_ns = events[0]["ts"] if events else 0
    for event in events:
        event["ts"] = _us(event["ts"] - first_ns)
        if "dur" in event:
            event["dur"] = _us(event["dur"])
    return names + events


class _Processes:
    """Which process and thread a track is in one generation."""

    def __init__(self, run: RunLog, generation: int, clocks: _Clocks) -> None:
        self._run, self._generation, self._clocks = run, generation, clocks
        self._policy = policy_tracks(run.topology)
        self._threads: dict[str, int] = {}

    def pid(self, rank: int) -> int:
        """Ranks without a track stand in the last one's process."""
        ranks = max(RANKS, 1 + len(self._policy))
        return 1 + min(rank, ranks - 1) + self._generation * ranks

    def place(self, track: str) -> dict[str, int]:
        rank = self._policy.index(track) + 1 if track in self._policy else 0
        thread = self._threads.setdefault(track, len(self._threads) + 1)
        return {"pid": self.pid(rank), "tid": thread}

    def names(self, tracks: Sequence[str]) -> list[TraceEvent]:
        again = f", generation {self._generation}" if self._generation else ""
        topology = self._run.topology
        labels = {0: f"rank 0{again}"}
        for rank in range(1, 1 + len(self._policy)):
            name = topology.title(rank) if topology.is_chain else "policy rank"
            name = f"replica {rank}" if topology.has_replicas else name
            labels[rank] = f"{name}{again}"
        named = []
        for rank, name in labels.items():
            where = {"pid": self.pid(rank), "tid": 0}
            named.append(_meta("process_name", where, name=name))
            named.append(_meta("process_sort_index", where, sort_index=self.pid(rank)))
            if rank:
                guess = "no B of it is shown" if topology.is_chain else "B is a guess"
                clock = self._clocks[rank - 1]
                exact = clock.text if clock else f"no stamps of this rank: {guess}"
                named.append(_meta("process_labels", where, labels=exact))
        for number, track in enumerate([PHASES, *tracks]):
            where = self.place(track)
            title = f"policy {track}" if track in self._policy else track
            named.append(_meta("thread_name", where, name=title))
            named.append(_meta("thread_sort_index", where, sort_index=number))
        return named


def _slice(span: Span, process: _Processes) -> TraceEvent:
    name = f"wait for {span.note}" if span.kind == WAIT else f"{span.kind} {span.seq}"
    return {
        "ph": "X",
        "name": name,
        "cat": span.kind,
        "ts": span.start_ns,
        "dur": span.end_ns - span.start_ns,
        **process.place(span.track),
        "args": {"seq": span.seq, "epoch": span.epoch, "lane": span.lane},
    }


def _arrows(
    tracks: dict[str, list[Span]], process: _Processes, numbers: Iterator[int], way: Sequence[str]
) -> Iterator[TraceEvent]:
    """From A over B, on every place, to C of each envelope that has all of them."""
    stages: dict[tuple[int, int, int], dict[str, Span]] = {}
    for spans in tracks.values():
        for span in spans:
            if (stage := stage_of(span)) in way:
                stages.setdefault((span.lane, span.epoch, span.seq), {})[stage] = span
    for found in stages.values():
        stops = [found[stage] for stage in way if stage in found]
        if len(stops) < len(way) or not _in_order(stops):
            continue
        number = next(numbers)  # viewers take whole numbers only
        for ph, span in zip(("s", *"t" * (len(way) - 2), "f"), stops, strict=True):
            at = max(span.start_ns, span.end_ns - _LAST) if ph == "s" else span.start_ns
            arrow = {"ph": ph, "name": "envelope", "cat": "flow", "ts": at}
            arrow["id"] = number
            yield arrow | ({"bp": "e"} if ph == "f" else {}) | process.place(span.track)


def _in_order(stops: Sequence[Span]) -> bool:
    """Arrows run forwards, also where a policy rank's clock is known only roughly."""
    begun = [span.start_ns for span in stops[1:]]
    return stops[0].end_ns <= begun[0] and begun == sorted(begun)


def _counters(envelopes: Iterable[Envelope], process: _Processes) -> Iterator[TraceEvent]:
    steps: dict[str, list[tuple[int, int]]] = {"outstanding": [], "q_decode": []}
    where = {"pid": process.pid(0), "tid": 0}
    for e in envelopes:
        for queue, start, end in (
            ("outstanding", e.tSend, e.tRecv),
            ("q_decode", e.tRecv, e.tDecode),
        ):
            if start is not None and end is not None:
                steps[queue] += [(start, 1), (end, -1)]
        if e.tEmit is not None and e.age_rank0_ns is not None:
            yield _counter("age since arrival, ms", where, e.tEmit, {"value": e.age_rank0_ns / 1e6})
        if e.tA0 is not None and e.input_age_ns:
            ages = {stream: age_ns / 1e6 for stream, age_ns in e.input_age_ns.items()}
            yield _counter("age of input, ms", where, e.tA0, ages)
    for queue, changes in steps.items():
        level = 0
        for at, same in groupby(sorted(changes), key=lambda change: change[0]):
            level += sum(step for _, step in same)
            yield _counter(queue, where, at, {"value": level})


def _counter(name: str, where: dict[str, int], at_ns: int, values: dict[str, Any]) -> TraceEvent:
    return {"ph": "C", "name": name, "ts": at_ns, **where, "args": values}


def _memory(
    run: RunLog, envelopes: Sequence[Envelope], process: _Processes, clocks: _Clocks
) -> Iterator[TraceEvent]:
    """Of each rank whose clock is known, while these envelopes were on their way."""
    first_ns, generation = envelopes[0].tA0 or 0, envelopes[0].generation
    for line in run.memory:
        offset_ns = _offset_ns(clocks, line.rank)
        if line.t is None or line.generation != generation or offset_ns is None:
            continue
        at_ns = line.t - offset_ns
        sizes = {"RAM": line.resident_bytes, "allocated": line.allocated_bytes}
        sizes |= {"reserved": line.reserved_bytes, "not torch's": line.non_torch_bytes}
        values = {name: size / MIB for name, size in sizes.items() if size is not None}
        if at_ns >= first_ns and values:
            where = {"pid": process.pid(line.rank), "tid": 0}
            yield _counter("memory, MiB", where, at_ns, values)


def _marks(
    run: RunLog, envelopes: Sequence[Envelope], process: _Processes, clocks: _Clocks
) -> Iterator[TraceEvent]:
    """Events of either rank as marks, rank 0's phases as a track of their own."""
    generation = envelopes[0].generation
    events = [e for e in run.events if e.generation == generation and e.t is not None]
    for event in events:
        offset_ns = _offset_ns(clocks, event.rank)
        if offset_ns is not None:
            at = (event.t or 0) - offset_ns
            mark = {"ph": "i", "name": event.name, "cat": "event", "s": "p", "ts": at}
            yield mark | {"pid": process.pid(event.rank), "tid": 0}
    phases = [e for e in events if e.rank == 0 and e.name == "phase"]
    newest_ns = max(e.tEmit or 0 for e in envelopes)
    yield from _phases(phases, newest_ns, process)


def _offset_ns(clocks: _Clocks, rank: int) -> int | None:
    """Of a rank's clock from rank 0's; None: not known."""
    if rank == 0:
        return 0
    clock = clocks[min(rank, len(clocks)) - 1]
    return None if clock is None else clock.offset_ns


def _phases(
    phases: Sequence[LogEvent], newest_ns: int, process: _Processes
) -> Iterator[TraceEvent]:
    ends = [e.t or 0 for e in phases[1:]]
    for phase, end in zip(phases, [*ends, newest_ns], strict=False):
        start = phase.t or 0
        if end > start:
            span = {"ph": "X", "name": phase.phase or "?", "cat": PHASES, "ts": start}
            yield span | {"dur": end - start, **process.place(PHASES)}


def _meta(what: str, where: dict[str, int], **args: object) -> TraceEvent:
    return {"ph": "M", "name": what, **where, "args": args}


def _us(value_ns: int) -> float:
    return round(value_ns / 1e3, 3)
