"""Where each serial thread's time went: residuals and excess behind two of the audits.

Pure. Sums are taken between a thread's own last stamps at both ends of a segment, so that a latency
that differs between the ends is no residual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ppstream.records import Envelope
from ppstream.scores import between, stage_a_ns, stage_c_ns
from ppstream.segments import Segment, Window

WAITS_A: Final = ("w_input_ns", "w_credit_ns", "w_slot_ns")
WAITS_C: Final = ("w_result_ns", "w_emit_ns")


def residuals_ns(window: Window) -> dict[str, float]:
    """Per thread: span minus busy, named waits and link calls.

    Positive: time nobody claims. Negative: time claimed twice.
    """
    split = window.topology.threads == "split"
    parts: dict[str, Callable[[Segment], float]] = {
        **({"r0A": _residual_a, "r0C": _residual_c} if split else {"r0": _residual_r0}),
        "mesh": lambda segment: _residual_mesh(segment, window.topology.replicas),
    }
    return {name: sum(map(part, window.segments)) for name, part in parts.items()}


def excess_ns(window: Window) -> dict[str, float]:
    """Per resource: busy time minus the span of its own thread."""

    def mesh(segment: Segment) -> float:
        return _total(segment, _host_b_ns) / window.topology.replicas - _mesh_span_ns(segment)

    def r0a(segment: Segment) -> float:
        return _total(segment, stage_a_ns) - between(segment.first.tA1, segment.last.tA1)

    def r0c(segment: Segment) -> float:
        return _total(segment, stage_c_ns) - segment.span_ns

    def r0(segment: Segment) -> float:
        return _total(segment, stage_a_ns) + r0c(segment)

    split = window.topology.threads == "split"
    parts = {**({"r0A": r0a, "r0C": r0c} if split else {"r0": r0}), "mesh": mesh}
    return {name: sum(map(part, window.segments)) for name, part in parts.items()}


def unlogged_waits(window: Window) -> tuple[str, ...]:
    """A thread none of whose waits is logged cannot be audited; single absent ones count as 0."""
    groups = (WAITS_A, WAITS_C, ("wait_input_ns", "wait_output_ns", "idle_ns"))
    return tuple(
        group[0]
        for group in groups
        if not any(getattr(e, name) is not None for e in window.measured for name in group)
    )


def _residual_a(segment: Segment) -> float:
    span = between(segment.first.tA1, segment.last.tA1)
    return span - _total(segment, _host_a_ns) - _waits(segment, (*WAITS_A, "busy_link_ns"))


def _residual_c(segment: Segment) -> float:
    return (
        segment.span_ns
        - _total(segment, stage_c_ns)
        - _waits(segment, (*WAITS_C, "busy_link_c_ns"))
    )


def _residual_r0(segment: Segment) -> float:
    busy = _total(segment, _host_a_ns) + _total(segment, stage_c_ns)
    return segment.span_ns - busy - _waits(segment, (*WAITS_A, *WAITS_C, "busy_link_ns"))


def _residual_mesh(segment: Segment, replicas: int) -> float:
    """The policy rank's link calls stand in its own lines only.

    Without those lines they lie hidden in ``idle_ns``, the whole gap: then the named waits may not
    exceed the time, and the gap has to fill it.
    """
    span = _mesh_span_ns(segment) * replicas
    busy = _total(segment, _host_b_ns)
    named = span - busy - _waits(segment, ("wait_input_ns", "wait_output_ns"))
    if all(e.stage1 is not None for e in segment.measured):
        return named - sum((e.stage1.busy_link_ns or 0) for e in segment.measured if e.stage1)
    if any(e.idle_ns is not None for e in segment.measured):
        unfilled = span - busy - _waits(segment, ("idle_ns",))
        return min(0.0, named) + max(0.0, unfilled)
    return named


def _mesh_span_ns(segment: Segment) -> int:
    """Between the policy rank's own stamps; between receipts where its file is missing."""
    first, last = segment.first.stage1, segment.last.stage1
    if first and last and first.tB1 is not None and last.tB1 is not None:
        return last.tB1 - first.tB1
    return between(segment.first.tRecv, segment.last.tRecv) or segment.span_ns


def _waits(segment: Segment, names: tuple[str, ...]) -> int:
    return sum(getattr(e, name) or 0 for e in segment.measured for name in names)


def _total(segment: Segment, part: Callable[[Envelope], int]) -> int:
    return sum(part(e) for e in segment.measured)


def _host_a_ns(envelope: Envelope) -> int:
    """The thread's own time: device work of A may go on while the thread waits."""
    return between(envelope.tA0, envelope.tA1)


def _host_b_ns(envelope: Envelope) -> int:
    return envelope.B_ns or 0
