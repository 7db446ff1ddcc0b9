"""Time accounting of each serial thread: residuals and excess behind two of the audits.

Pure. A segment is cut on emits, but a thread's time is summed between two of its own ends: of A on
the thread that runs A, of C on a thread C of its own, of B on the policy rank. Whatever that thread
did in between counts, of whichever envelope, so a stall at either end is no residual.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ppstream.analysis.places import lines_of
from ppstream.analysis.records import Envelope, PolicyLine, RunLog
from ppstream.analysis.scores import between, stage_a_ns, stage_c_ns
from ppstream.analysis.segments import JudgedSpan, Segment

WAITS_A: Final = ("w_input_ns", "w_credit_ns", "w_slot_ns")
WAITS_C: Final = ("w_result_ns", "w_emit_ns")


class Threads:
    """Time of every serial thread in ``window``; ``run`` has the envelopes around it."""

    def __init__(self, run: RunLog, window: JudgedSpan) -> None:
        self._window = window
        self._is_split = window.topology.threads == "split"
        self._replicas = window.topology.replicas
        over_ns = max((segment.last.tA1 or 0 for segment in window.segments), default=0)
        lines = (e for e in run.envelopes if e.generation == window.generation)
        decoded = [e for e in lines if e.tDecode is not None and e.tDecode < over_ns]
        self._decoded = sorted(decoded, key=lambda e: e.tDecode or 0)
        self._decodes_ns = [e.tDecode or 0 for e in self._decoded]

    def residuals_ns(self) -> dict[str, float]:
        """By thread: span minus busy, named waits and link calls.

        Positive: time nobody claims. Negative: time claimed twice.
        """
        own = {"r0A": _residual_a, "r0C": _residual_c} if self._is_split else {"r0": self._r0}
        return self._sums({**own, **self._of_policy(self._residual_mesh, _residual_place)})

    def excess_ns(self) -> dict[str, float]:
        """By resource: busy time minus the span of its own thread."""

        def r0(segment: Segment) -> float:
            c_ns = sum(map(stage_c_ns, self._decoded_within(segment)))
            return _total(segment, stage_a_ns) + c_ns - _a_span_ns(segment)

        def r0a(segment: Segment) -> float:
            return _total(segment, stage_a_ns) - _a_span_ns(segment)

        def r0c(segment: Segment) -> float:
            return _total(segment, stage_c_ns) - segment.span_ns

        def mesh(segment: Segment) -> float:
            return _total(segment, _host_b_ns) / self._replicas - _mesh_span_ns(segment).most

        own = {"r0A": r0a, "r0C": r0c} if self._is_split else {"r0": r0}
        return self._sums({**own, **self._of_policy(mesh, _excess_place)})

    def _of_policy(
        self,
        mesh: Callable[[Segment], float],
        of_place: Callable[[Sequence[PolicyLine | None]], float],
    ) -> dict[str, Callable[[Segment], float]]:
        """By policy rank: rank 0's line tells of one alone, of a chain its own lines.

        So do those of replicas where they are whole.
        """
        topology = self._window.topology

        def at(place: int) -> Callable[[Segment], float]:
            return lambda segment: of_place(_lines_at(segment, place))

        def by(rank: int) -> Callable[[Segment], float]:
            return lambda segment: of_place(_own_lines(segment, rank))

        if topology.is_chain:
            return dict(zip(topology.policy_names, map(at, topology.ranks), strict=True))
        if topology.has_replicas and all(e.answered_by for e in self._window.measured):
            return {f"replica{rank}": by(rank) for rank in topology.replica_ranks}
        return {"mesh": mesh}

    def _sums(self, parts: dict[str, Callable[[Segment], float]]) -> dict[str, float]:
        return {name: sum(map(part, self._window.segments)) for name, part in parts.items()}

    def _r0(self, segment: Segment) -> float:
        """From A's end to A's end, with the decodes between and what was waited for them."""
        within = self._decoded_within(segment)
        busy = _total(segment, _host_a_ns) + sum(map(stage_c_ns, within))
        waits = _waits(segment.measured, (*WAITS_A, "busy_link_ns")) + _waits(within, WAITS_C)
        return _a_span_ns(segment) - busy - waits

    def _decoded_within(self, segment: Segment) -> Sequence[Envelope]:
        """Envelopes, dropped ones too, whose decode began between the first and the last A."""
        start, end = (
            bisect_left(self._decodes_ns, e.tA1 or 0) for e in (segment.first, segment.last)
        )
        return self._decoded[start:end]

    def _residual_mesh(self, segment: Segment) -> float:
        """The policy rank's link calls stand in its own lines only.

        Without those lines they lie hidden in ``idle_ns``, the whole gap: then the named waits may
        not exceed the time, and the gap has to fill it.
        """
        span = _mesh_span_ns(segment)
        least, most = span.least * self._replicas, span.most * self._replicas
        named = _total(segment, _host_b_ns)
        filled = named + _waits(segment.measured, ("idle_ns",))
        named += _waits(segment.measured, ("wait_input_ns", "wait_output_ns"))
        if all(e.stage1 is not None for e in segment.measured):
            named += sum((e.stage1.busy_link_ns or 0) for e in segment.measured if e.stage1)
            filled = named
        elif all(e.idle_ns is None for e in segment.measured):
            filled = named
        return min(0, most - named) + max(0, least - filled)


class Unnamed(NamedTuple):
    """Time of one thread outside its stages and named waits, as shares of the thread's time."""

    share: float
    delay: float | None  # it was runnable without a CPU; None: unknown

    @property
    def rest(self) -> float | None:
        """The share that no wait for a CPU explains; None: unknown."""
        return None if self.delay is None else max(0.0, self.share - self.delay)


def unnamed(window: JudgedSpan) -> dict[str, Unnamed]:
    """By thread, as far as its lines tell; none where the stamps are a device's."""
    topology, measured = window.topology, window.measured
    if topology.device_stamped or topology.world_size == 1:
        return {}
    split = topology.threads == "split"
    threads: dict[str, Unnamed | None] = {
        "r0A" if split else "r0": _unnamed(measured, "", sum(map(_a_span_ns, window.segments))),
        "r0C": _unnamed(measured, "_c", window.span_ns) if split else None,
    }
    for name, place in zip(topology.policy_names, topology.ranks, strict=True):
        policy = lines_of(measured, place)
        is_whole = len(policy) == len(measured)
        if topology.is_chain:
            span_ns = sum(_lines_span_ns(_lines_at(each, place)) for each in window.segments)
        else:
            span_ns = sum(_mesh_span_ns(each).least for each in window.segments)
        if not topology.has_replicas:
            threads[name] = _unnamed(policy, "", span_ns) if is_whole else None
    for rank in topology.replica_ranks:
        lines = [_own_lines(each, rank) for each in window.segments]
        known = [line for own in lines for line in own[1:] if line is not None]
        threads[f"replica{rank}"] = _unnamed(known, "", sum(map(_lines_span_ns, lines)))
    return {name: found for name, found in threads.items() if found is not None}


def _unnamed(lines: Sequence[Envelope | PolicyLine], which: str, span_ns: int) -> Unnamed | None:
    link_ns = [getattr(line, f"busy_link{which}_ns") for line in lines]
    delay_ns = [getattr(line, f"run_delay{which}_ns") for line in lines]
    if span_ns <= 0 or all(ns is None for ns in link_ns):
        return None
    delay = None if None in delay_ns else sum(delay_ns) / span_ns
    return Unnamed(sum(ns or 0 for ns in link_ns) / span_ns, delay)


class StageCpu(NamedTuple):
    """Stage A, B or C over a window: CPU time of its thread, and the stage's time; in ns."""

    cpu_ns: int
    stage_ns: int


def stage_cpu(window: JudgedSpan) -> dict[str, StageCpu]:
    """By stage, of the emitted envelopes whose lines tell."""
    emitted = window.emitted
    taken = {
        "A": [(e.cpu_a_ns, _host_a_ns(e)) for e in emitted],
        "B": [(e.stage1.cpu_b_ns, _host_b_ns(e)) for e in emitted if e.stage1 is not None],
        "C": [(e.cpu_c_ns, stage_c_ns(e)) for e in emitted],
    }
    if window.topology.is_chain:
        del taken["B"]
        for place in window.topology.ranks:
            lines_b = lines_of(emitted, place)
            taken[f"B{place}"] = [(line.cpu_b_ns, line.B_ns or 0) for line in lines_b]
    known = {k: [(cpu, ns) for cpu, ns in lines if cpu is not None] for k, lines in taken.items()}
    return {
        stage: StageCpu(sum(cpu for cpu, _ in lines), sum(ns for _, ns in lines))
        for stage, lines in known.items()
        if lines
    }


class _Span(NamedTuple):
    """Bounds of a length of time in ns; equal where it is known."""

    least: int
    most: int


def unlogged_waits(window: JudgedSpan) -> tuple[str, ...]:
    """A thread none of whose waits is logged cannot be audited; single absent ones count as 0."""
    groups = (WAITS_A, WAITS_C, ("wait_input_ns", "wait_output_ns", "idle_ns"))
    return tuple(
        group[0]
        for group in groups
        if not any(getattr(e, name) is not None for e in window.measured for name in group)
    )


def _residual_a(segment: Segment) -> float:
    busy = _total(segment, _host_a_ns) + _waits(segment.measured, (*WAITS_A, "busy_link_ns"))
    return _a_span_ns(segment) - busy


def _residual_c(segment: Segment) -> float:
    busy = _total(segment, stage_c_ns) + _waits(segment.measured, (*WAITS_C, "busy_link_c_ns"))
    return segment.span_ns - busy


def _a_span_ns(segment: Segment) -> int:
    return between(segment.first.tA1, segment.last.tA1)


def _mesh_span_ns(segment: Segment) -> _Span:
    """From the end of B to the end of B, by the policy rank's own stamps.

    Without its file B's end is known to lie between the commit, plus B, and the receipt.
    """
    first, last = segment.first, segment.last
    if first.stage1 and last.stage1 and None not in (first.stage1.tB1, last.stage1.tB1):
        span = between(first.stage1.tB1, last.stage1.tB1)
        return _Span(span, span)
    if first.tRecv is None or last.tRecv is None:
        return _Span(segment.span_ns, segment.span_ns)
    earliest, latest = (
        e.tRecv or 0 if e.tSend is None else e.tSend + _host_b_ns(e) for e in (first, last)
    )
    return _Span(max(0, latest - first.tRecv), last.tRecv - earliest)


def _lines_at(segment: Segment, place: int) -> Sequence[PolicyLine | None]:
    """Of a chain's place, one for each envelope."""
    return [e.places[place - 1] for e in segment.envelopes]


def _own_lines(segment: Segment, rank: int) -> Sequence[PolicyLine | None]:
    """Of a replica, one for each envelope that it answered."""
    return [e.stage1 for e in segment.envelopes if e.answered_by == rank]


def _lines_span_ns(lines: Sequence[PolicyLine | None]) -> int:
    """From the end of B to the end of B, by a rank's own stamps; 0 without them."""
    first, last = (lines[0], lines[-1]) if lines else (None, None)
    return 0 if first is None or last is None else between(first.tB1, last.tB1)


def _residual_place(lines: Sequence[PolicyLine | None]) -> float:
    """0 where a line is missing: another audit says so."""
    span_ns, known = _lines_span_ns(lines), [line for line in lines[1:] if line is not None]
    if len(known) < len(lines) - 1 or not span_ns:
        return 0
    waits = ("wait_input_ns", "wait_output_ns", "busy_link_ns")
    return span_ns - sum(
        (line.B_ns or 0) + sum(getattr(line, name) or 0 for name in waits) for line in known
    )


def _excess_place(lines: Sequence[PolicyLine | None]) -> float:
    span_ns = _lines_span_ns(lines)
    return sum(line.B_ns or 0 for line in lines[1:] if line is not None) - span_ns if span_ns else 0


def _waits(envelopes: Sequence[Envelope], names: tuple[str, ...]) -> int:
    return sum(getattr(e, name) or 0 for e in envelopes for name in names)


def _total(segment: Segment, part: Callable[[Envelope], int]) -> int:
    return sum(part(e) for e in segment.measured)


def _host_a_ns(envelope: Envelope) -> int:
    """The thread's own time: device work of A may go on while the thread waits."""
    return between(envelope.tA0, envelope.tA1)


def _host_b_ns(envelope: Envelope) -> int:
    return envelope.B_ns or 0
