"""Spans of every thread, link and queue: envelopes on named tracks. Pure.

For pictures and traces. All instants are rank 0's clock; a policy rank's are moved there by its
offset of ``clock_alignment``. Waits are logged as durations: each is drawn where it ended, at the
start of what it waited for, and never over other work of its track. A log that contradicts itself
is drawn as far as it goes: a span ends where the next of its track begins, and that is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from ppstream.analysis.places import arrived_ns, left_ns
from ppstream.analysis.records import Envelope, Topology
from ppstream.report.clock_alignment import ClockOffset

POLICY: Final = "B"
REPLICA: Final = "B of replica"
LINK_IN: Final = "link in"
LINK_OUT: Final = "link out"
LINK: Final = "link"  # between two places of a chain
WAIT: Final = "wait"
SHORTEST_NS: Final = 1_000  # a wait below this is drawn nowhere
#: Fields of rank 0's waits in front of A, in the order in which a loop goes through them.
WAITS_A: Final = {"w_input_ns": "input", "w_credit_ns": "a credit", "w_slot_ns": "a slot"}


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that happened on one track; ``kind`` is a stage, a link, or ``wait``."""

    track: str
    kind: str  # A | B | C | link in | link out | link | flight | wait
    start_ns: int
    end_ns: int
    seq: int
    lane: int = 0
    epoch: int = 0
    note: str = ""  # of a wait: for what


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans by track, in order of time, disjoint within a track."""

    tracks: dict[str, list[Span]]
    cut_short: int  # spans that ran into the next of their track: the log contradicts itself


def track_names(topology: Topology) -> list[str]:
    """From rank 0 outwards; the in-flight tracks, one per credit, come last."""
    if topology.world_size == 1:
        return ["A + B + C"]
    rank0 = ["A", "C"] if topology.threads == "split" else ["A + C"]
    if topology.has_replicas:  # each has links of its own, where results wait for their turn
        return [*rank0, *policy_tracks(topology)]
    first, *others = policy_tracks(topology)
    between = [name for k, b in enumerate(others, start=1) for name in (f"{LINK} {k}", b)]
    return [*rank0, LINK_IN, first, *between, LINK_OUT]


def policy_tracks(topology: Topology) -> list[str]:
    """Of every policy rank, in their order; none where one process runs all stages."""
    if topology.world_size == 1:
        return []
    if topology.has_replicas:
        return [f"{REPLICA} {rank}" for rank in topology.replica_ranks]
    return [f"{POLICY}{k}" for k in topology.ranks] if topology.is_chain else [POLICY]


def way_of(topology: Topology) -> list[str]:
    """Names of an envelope's stages, as ``stage_of`` gives them."""
    places = [POLICY] if topology.has_replicas else policy_tracks(topology) or [POLICY]
    return ["A", *places, "C"]


def stage_of(span: Span) -> str:
    """The stage's name: of a chain's B with its place."""
    return span.track if span.kind == "B" and span.track[1:].isdecimal() else span.kind


def spans_of(
    envelopes: Sequence[Envelope],
    topology: Topology,
    clocks: Sequence[ClockOffset | None],
    *,
    in_flight: bool = False,
) -> Spans:
    """Spans of ``envelopes``, which are of one generation.

    Args:
        envelopes: in any order; dropped ones show as far as they got.
        topology: which tracks there are.
        clocks: of the policy ranks. The B of a single one, or of a replica, without a clock is
            placed in the middle of its round trip, that of a chain's place nowhere.
        in_flight: add a track per credit, with an envelope from tSend to tRecv.
    """
    tracks: dict[str, list[Span]] = {name: [] for name in track_names(topology)}
    for e in envelopes:
        for span in _work(e, topology, clocks):
            tracks[span.track].append(span)
        if in_flight and e.tSend is not None and e.tRecv is not None:
            name = f"credit {e.seq % topology.d_in}"
            span = Span(name, "flight", e.tSend, e.tRecv, e.seq, e.lane, e.epoch)
            tracks.setdefault(name, []).append(span)
    for waiting in _waits(envelopes, topology, clocks):
        tracks[waiting.track].append(waiting)
    laid = {name: _disjoint(spans) for name, spans in tracks.items()}
    return Spans({n: spans for n, (spans, _) in laid.items()}, sum(c for _, c in laid.values()))


def _work(e: Envelope, topology: Topology, clocks: Sequence[ClockOffset | None]) -> Iterator[Span]:
    names = track_names(topology)
    ids = (e.seq, e.lane, e.epoch)
    if e.tA0 is not None and e.tA1 is not None:
        yield Span(names[0], "A", e.tA0, e.tA1, *ids)
    if e.tDecode is not None and e.tEmit is not None:
        on = "C" if "C" in names else names[0]
        yield Span(on, "C", e.tDecode, e.tEmit - (e.w_emit_ns or 0), *ids)
    if topology.is_chain:
        yield from _chain(e, topology, clocks)
        return
    b = policy_span_ns(e, _clock_of(e, clocks))
    if b is None:
        return
    yield Span(_track_of(e, names) or names[0], "B", *b, *ids)
    complete = e.residence_ns is not None and e.tSend is not None and e.tRecv is not None
    if LINK_IN in names and complete:
        sent, received = e.tSend or 0, e.tRecv or 0
        half = max(0, received - sent - (e.residence_ns or 0)) // 2  # only both are measured
        yield Span(LINK_IN, LINK_IN, sent, max(sent, min(sent + half, b[0])), *ids)
        yield Span(LINK_OUT, LINK_OUT, min(received, max(received - half, b[1])), received, *ids)


def _track_of(e: Envelope, names: Sequence[str]) -> str | None:
    """Of the B of an envelope that passes one policy rank; None where none has a track."""
    rank = e.replica or e.answered_by
    return next((name for name in (POLICY, f"{REPLICA} {rank}") if name in names), None)


def _clock_of(e: Envelope, clocks: Sequence[ClockOffset | None]) -> ClockOffset | None:
    """Of the policy rank that an envelope passes."""
    at = (e.answered_by or 1) - 1
    return clocks[at] if at < len(clocks) else None


def _chain(e: Envelope, topology: Topology, clocks: Sequence[ClockOffset | None]) -> Iterator[Span]:
    """B on every place, and the hops between them whose both ends are known."""
    ids = (e.seq, e.lane, e.epoch)
    hops = [LINK_IN, *(f"{LINK} {k}" for k in range(1, topology.places)), LINK_OUT]
    sent = e.tSend
    for track, hop, line, clock in zip(
        policy_tracks(topology), hops, e.places, clocks, strict=False
    ):
        came = left = None
        if line is not None and clock is not None and None not in (line.tB0, line.tB1):
            offset = clock.offset_ns
            yield Span(track, "B", (line.tB0 or 0) - offset, (line.tB1 or 0) - offset, *ids)
            came, left = (
                None if t is None else t - offset for t in (arrived_ns(line), left_ns(line))
            )
        if sent is not None and came is not None and came >= sent:
            yield Span(hop, LINK_IN if hop == LINK_IN else LINK, sent, came, *ids)
        sent = left
    if sent is not None and e.tRecv is not None and e.tRecv >= sent:
        yield Span(LINK_OUT, LINK_OUT, sent, e.tRecv, *ids)


def policy_span_ns(e: Envelope, clock: ClockOffset | None) -> tuple[int, int] | None:
    """When B ran, on rank 0's clock; in the middle of the round trip without the rank's stamps."""
    own = e.stage1
    if own is not None and own.tB0 is not None and own.tB1 is not None and clock is not None:
        return own.tB0 - clock.offset_ns, own.tB1 - clock.offset_ns
    if e.B_ns is None or e.tSend is None or e.tRecv is None:
        return None
    middle = (e.tSend + e.tRecv) // 2
    return middle - e.B_ns // 2, middle + e.B_ns - e.B_ns // 2


def _waits(
    envelopes: Sequence[Envelope], topology: Topology, clocks: Sequence[ClockOffset | None]
) -> Iterator[Span]:
    names = track_names(topology)
    on_c = "C" if "C" in names else names[0]
    for e in envelopes:
        if e.tA0 is not None:
            ahead = [(getattr(e, field) or 0, why) for field, why in WAITS_A.items()]
            yield from _before(names[0], e, e.tA0, ahead)
        if e.tDecode is not None:
            yield from _before(on_c, e, e.tDecode, [(e.w_result_ns or 0, "the result")])
        if topology.is_chain:
            for track, line, own in zip(policy_tracks(topology), e.places, clocks, strict=False):
                if line is not None and own is not None and line.tB0 is not None:
                    wait_ns = [(line.wait_input_ns or 0, "an envelope")]
                    yield from _before(track, e, line.tB0 - own.offset_ns, wait_ns)
            continue
        b, on_b = policy_span_ns(e, _clock_of(e, clocks)), _track_of(e, names)
        if b is not None and on_b is not None:
            yield from _before(on_b, e, b[0], [(e.wait_input_ns or 0, "an envelope")])


def _before(
    track: str, e: Envelope, at_ns: int, waits: Sequence[tuple[int, str]]
) -> Iterator[Span]:
    """Waits one behind the other, the last of them ending at ``at_ns``."""
    for length_ns, why in reversed(waits):
        if length_ns >= SHORTEST_NS:
            yield Span(track, WAIT, at_ns - length_ns, at_ns, e.seq, e.lane, e.epoch, why)
            at_ns -= length_ns


def _disjoint(spans: Sequence[Span]) -> tuple[list[Span], int]:
    """In order of time; work is cut at the next work, waits give way to work on either side."""
    work = sorted((s for s in spans if s.kind != WAIT), key=lambda s: (s.start_ns, s.end_ns))
    cut = sum(a.end_ns > b.start_ns for a, b in pairwise(work))
    laid = [replace(a, end_ns=min(a.end_ns, b.start_ns)) for a, b in pairwise(work)] + work[-1:]
    waits = sorted((s for s in spans if s.kind == WAIT), key=lambda s: s.end_ns)
    return sorted([*laid, *_between(laid, waits)], key=lambda s: (s.start_ns, s.end_ns)), cut


def _between(work: Sequence[Span], waits: Sequence[Span]) -> Iterator[Span]:
    """Yields the part of each wait that lies in the gap that ends where it ends."""
    at, free_ns = 0, 0  # free_ns: end of everything that was laid so far
    for wait in waits:
        while at < len(work) and work[at].start_ns < wait.end_ns:
            free_ns = max(free_ns, work[at].end_ns)
            at += 1
        start = max(wait.start_ns, free_ns)
        if start < wait.end_ns:
            yield replace(wait, start_ns=start)
            free_ns = wait.end_ns
