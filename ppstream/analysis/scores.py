"""The two scores of a window: the published one per envelope, and the robust one over sums.

Pure. ``compat`` is the published definition to the letter: medians of per-envelope ratios. What
decides is ``primary``: overlap S = (Sigma - T) / (Sigma - M) with Sigma the busy time of all serial
resources, M that of the busiest and T the window. Busy never contains waiting that has a stamp; of
what a stage waits for inside, ``contention.py`` knows more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from statistics import fmean, median
from typing import Final

from ppstream.analysis.bootstrap import Row, interval
from ppstream.analysis.period_model import PipelineForm, StageTimes
from ppstream.analysis.places import StageBTimes
from ppstream.analysis.records import Envelope, Topology
from ppstream.analysis.segments import JudgedSpan, Segment

COMPAT_SCORE_MIN: Final = 0.30
RATIO_FLOOR_NS: Final = 1_000  # of the published ratio's denominator
STAGE_MIN_NS: Final = 50_000  # below this the published ratio is undefined
HELD_MAX_NS: Final = 1_000_000  # a receipt so soon behind the decode that made room was held
HELD_SHARE: Final = 0.1  # of the mean period
CEILING_MIN: Final = 1.10  # of Sigma / M: below it overlap has next to nothing to hide
RESOURCE_TITLES: Final = {
    "r0": "rank 0",
    "r0A": "rank 0 A",
    "r0C": "rank 0 C",
    "gpu0": "rank 0 GPU",
    "mesh": "policy rank",
    "link": "links",
}


@dataclass(frozen=True, slots=True)
class Compat:
    """Medians over envelopes, in ns; the score is None where a stage is too short for it."""

    period_ns: float
    stage0_ns: float
    stage1_ns: float
    hidden_ns: float
    score: float | None
    gate: bool


@dataclass(frozen=True, slots=True)
class Primary:
    """Sums over the window, in ns, and what follows from them; ratios are clipped nowhere."""

    n: int
    span_ns: int
    busy_ns: dict[str, int]  # serial resources, ``gpu0`` (enters M only) and ``link`` (all hops)
    s: float | None
    s_low: float | None
    s_high: float | None
    s_all: float | None
    times: StageTimes  # means in ns, as the model takes them

    @property
    def period_ns(self) -> float:
        return self.span_ns / self.n

    @property
    def sigma_ns(self) -> int:
        return sum(self.busy_ns[name] for name in self.busy_ns if name not in ("gpu0", "link"))

    @property
    def max_ns(self) -> int:
        return max(self.busy_ns[name] for name in self.busy_ns if name != "link")

    @property
    def efficiency(self) -> float:
        """E: how close the busiest resource is to never idling."""
        return self.max_ns / self.span_ns

    @property
    def in_turn_ns(self) -> float:
        """The period of one rank that runs all stages in turn: of replicas a whole B."""
        return sum(self.times.stages.values())

    @property
    def gain(self) -> float:
        """G: what overlap gives over running in turn."""
        return self.in_turn_ns / self.period_ns

    @property
    def ceiling(self) -> float:
        """G*: what overlap could ever give."""
        return self.n * self.in_turn_ns / self.max_ns if self.max_ns else 1.0

    @property
    def is_beyond_s(self) -> bool:
        """True where replicas gain, and A and C are too short for S to tell anything."""
        return self.sigma_ns < CEILING_MIN * self.max_ns and self.ceiling >= CEILING_MIN

    @property
    def saved(self) -> float:
        """Share of what can be saved over one rank that runs all stages in turn."""
        return saved_share(self.in_turn_ns, self.period_ns, self.max_ns / self.n)

    @property
    def overhead(self) -> float:
        """Share of the window that no resource explains when all ran in turn."""
        explained_ns = self.sigma_ns + self.busy_ns.get("link", 0)
        return max(0, self.span_ns - explained_ns) / self.span_ns

    @property
    def places(self) -> dict[str, float]:
        """Busy shares of the policy ranks."""
        own = {name: ns for name, ns in self.busy_ns.items() if name.startswith(("mesh", "place"))}
        return {name: ns / self.span_ns for name, ns in own.items()}

    @property
    def utilisation(self) -> dict[str, float]:
        """Busy shares of all resources; ``mesh`` is all policy ranks together, of their time."""
        shares = {name: busy_ns / self.span_ns for name, busy_ns in self.busy_ns.items()}
        return (
            shares
            if "mesh" in shares or not self.places
            else shares | {"mesh": fmean(self.places.values())}
        )

    @property
    def rank0(self) -> dict[str, float]:
        """Busy shares of rank 0's resources."""
        others = (*self.places, "link", "mesh")
        return {name: share for name, share in self.utilisation.items() if name not in others}


def saved_share(in_turn_ns: float, period_ns: float, slowest_ns: float) -> float:
    """0 where all stages run in turn on one rank, 1 where the slowest resource never idles."""
    return (in_turn_ns - period_ns) / max(1.0, in_turn_ns - slowest_ns)


def form_of(topology: Topology) -> PipelineForm:
    return PipelineForm(
        topology.threads,
        topology.order,
        topology.credit,
        topology.d_in,
        topology.d_out,
        topology.replicas,
    )


def compat(window: JudgedSpan, outstanding_max: int, q_decode_max: int) -> Compat | None:
    """The published score; None without emits that carry all its stamps.

    Args:
        window: what is judged.
        outstanding_max: most envelopes in flight to the mesh.
        q_decode_max: most results that waited for decode.
    """
    periods, stage0, stage1, hidden, ratios = [], [], [], [], []
    for segment in window.segments:
        for envelope, period_ns in zip(segment.emitted[1:], segment.periods_ns, strict=True):
            stages = _published_stages(envelope, window.topology.replicas)
            if stages is None:
                return None
            hidden.append(max(0, sum(stages) - period_ns))
            ratios.append(hidden[-1] / max(RATIO_FLOOR_NS, min(stages)))
            periods.append(period_ns)
            stage0.append(stages[0])
            stage1.append(stages[1])
    if not periods:
        return None
    middle, s0, s1 = median(periods), median(stage0), median(stage1)
    score = median(ratios) if min(s0, s1) >= STAGE_MIN_NS else None
    topology = window.topology
    gate = (
        score is not None
        and score >= COMPAT_SCORE_MIN
        and outstanding_max <= topology.d_in
        and q_decode_max <= topology.d_out
        and abs(middle - max(s0, s1)) < abs(middle - (s0 + s1))
    )
    return Compat(middle, s0, s1, median(hidden), score, gate)


def primary(window: JudgedSpan, *, resampled: bool = True) -> Primary | None:
    """The window form; None without periods or when an emit lacks A, B or C.

    The interval of S is left out unless ``resampled``: it costs most of the time of a long window.
    """
    if window.n == 0 or window.span_ns <= 0 or missing_stages(window):
        return None
    stage_b = StageBTimes(window.measured, window.topology)
    if stage_b.lost and stage_b.is_whole:
        return None
    names = resource_names(window.topology, stage_b.names)
    each = (_rows(segment, window.topology, stage_b) for segment in window.segments)
    runs = [[*rows] if resampled else [_sums(rows)] for rows in each]
    span_ns, *busy = _sums(row for rows in runs for row in rows)
    busy_ns = dict(zip(names, busy, strict=True))
    transport = _transport_ns(window)
    shared = len([name for name in names if name != "gpu0"])

    def overlap(sums: Row) -> float | None:
        return _overlap(sum(sums[1 : 1 + shared]), sums[0], max(sums[1:]))

    ends = interval(runs, overlap) if resampled else None
    s_all = None
    if transport is not None:
        busy_ns["link"] = min(transport, span_ns)
        sigma = sum(busy[:shared]) + busy_ns["link"]
        s_all = _overlap(sigma, span_ns, max(*busy, busy_ns["link"]))
    return Primary(
        n=window.n,
        span_ns=span_ns,
        busy_ns=busy_ns,
        s=overlap((span_ns, *busy)),
        s_low=ends[0] if ends else None,
        s_high=ends[1] if ends else None,
        s_all=s_all,
        times=_mean_times(window, 0 if transport is None else _free_transport_ns(window), stage_b),
    )


def resource_names(topology: Topology, policy: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Serial resources; ``gpu0`` only where rank 0's stamps are its device's.

    ``policy`` are those of the policy ranks, where they are not the topology's.

    World size 1 runs all stages in turn: one resource, and no overlap is defined.
    """
    if topology.world_size == 1:
        return ("r0",)
    threads = ("r0A", "r0C") if topology.threads == "split" else ("r0",)
    policy = topology.policy_names if policy is None else policy
    return (*threads, *policy, *(("gpu0",) if topology.device_stamped else ()))


def resource_title(name: str) -> str:
    """A serial resource for people; any other text as it is."""
    for kind in ("place", "replica"):
        if name.removeprefix(kind).isdecimal():
            return name.replace(kind, f"{kind} ")
    return RESOURCE_TITLES.get(name, name)


def missing_stages(window: JudgedSpan) -> list[str]:
    """Fields that an emitted envelope of the window lacks and that the score needs."""
    needed = ("tA0", "tA1", "tDecode") + (("B_ns",) if window.topology.world_size > 1 else ())
    return [name for name in needed if any(getattr(e, name) is None for e in window.emitted)]


def stage_a_ns(envelope: Envelope) -> int:
    host = between(envelope.tA0, envelope.tA1)
    return max(host, envelope.eA_ns or 0)


def stage_c_ns(envelope: Envelope) -> int:
    return between(envelope.tDecode, envelope.tEmit) - (envelope.w_emit_ns or 0)


def between(start: int | None, end: int | None) -> int:
    """``end - start`` of one clock; 0 where a dropped envelope never got there."""
    return 0 if start is None or end is None else end - start


def transport_ns(envelope: Envelope) -> int | None:
    """Both transfers of one envelope, without synchronised clocks."""
    sent, received, stay_ns = envelope.tSend, envelope.tRecv, envelope.residence_ns
    return (
        None if sent is None or received is None or stay_ns is None else received - sent - stay_ns
    )


def _published_stages(envelope: Envelope, replicas: int) -> tuple[int, int] | None:
    """Stage 1 is a policy rank's share of B: so long as one has several, none sets the period."""
    stamps = (envelope.tA0, envelope.tA1, envelope.tRecv, envelope.tEmit, envelope.B_ns)
    if None in stamps:
        return None
    stage0 = between(envelope.tA0, envelope.tA1) + between(envelope.tRecv, envelope.tEmit)
    return stage0, (envelope.B_ns or 0) // replicas


def _sums(rows: Iterable[Row]) -> Row:
    """The sum of each column, without a list of the rows."""
    sums: Row = ()
    for row in rows:
        sums = tuple(map(add, sums, row)) if sums else row
    return sums


def _rows(segment: Segment, topology: Topology, stage_b: StageBTimes) -> Iterator[Row]:
    """Yields period and busy times per emit; those of a dropped envelope go to the next emit."""
    width = len(resource_names(topology, stage_b.names))
    intervals = [
        (e.tA0, e.tA1)
        for e in (segment.envelopes if topology.device_stamped else ())
        if e.tA0 is not None and e.tA1 is not None
    ]
    carried = [0] * width
    previous = segment.first.tEmit
    for envelope in segment.measured:
        busy = _busy(envelope, topology, stage_b.of(envelope), intervals)
        carried = [a + b for a, b in zip(carried, busy, strict=True)]
        if envelope.is_emitted:
            yield (between(previous, envelope.tEmit), *carried)
            carried = [0] * width
            previous = envelope.tEmit


def _busy(
    envelope: Envelope,
    topology: Topology,
    policy: tuple[int, ...],
    intervals: list[tuple[int, int]],
) -> list[int]:
    a, c = stage_a_ns(envelope), stage_c_ns(envelope)
    if topology.world_size == 1:
        return [a + sum(policy) + c]
    busy = [a, c, *policy] if topology.threads == "split" else [a + c, *policy]
    if topology.device_stamped:
        busy.append(a + c - _shared_ns(envelope, intervals))
    return busy


def _shared_ns(envelope: Envelope, intervals: list[tuple[int, int]]) -> int:
    """Time this C ran beside any A on the same device: counted once in their union."""
    start, end = envelope.tDecode, envelope.tEmit
    if start is None or end is None:
        return 0
    shared = 0
    for i in range(bisect_left(intervals, (start, start)) - 1, len(intervals)):
        if i >= 0:
            a0, a1 = intervals[i]
            if a0 >= end:
                break
            shared += max(0, min(a1, end) - max(a0, start))
    return shared


def _overlap(sigma_ns: int, span_ns: int, max_ns: int) -> float | None:
    return (sigma_ns - span_ns) / (sigma_ns - max_ns) if sigma_ns > max_ns else None


def _transport_ns(window: JudgedSpan) -> int | None:
    """Sum over the window; None when an emitted envelope lacks a part of it.

    Of replicas what is left when results did not wait for the one before.
    """
    known = [transport_ns(e) for e in window.measured]
    if any(ns is None and e.is_emitted for ns, e in zip(known, window.measured, strict=True)):
        return None
    if window.topology.has_replicas:
        return round(_free_transport_ns(window) * window.n)
    return sum(ns or 0 for ns in known)


def _free_transport_ns(window: JudgedSpan) -> float:
    """Both transfers of one envelope, on average, where nothing held its receipt back.

    A result that waits for a place in D_out is on no link, though it is not received yet; nor is
    one of a replica that waits for the result before. Where every receipt was held back nothing is
    known of the link, but it limits nothing either: 0.
    """
    held_ns = min(HELD_MAX_NS, HELD_SHARE * window.span_ns / window.n)
    free = []
    for segment in window.segments:
        for e in segment.measured:
            giver = segment.at(e.seq - window.topology.d_out)
            before = segment.at(e.seq - 1) if window.topology.has_replicas else giver
            is_first = before is giver or _is_behind(e, before, held_ns)
            if giver is not None and between(giver.tDecode, e.tRecv) > held_ns and is_first:
                free.append(transport_ns(e) or 0)
    return fmean(free) if free else 0.0


def _is_behind(e: Envelope, before: Envelope | None, held_ns: float) -> bool:
    """True where the result before was received well before this one."""
    return before is not None and between(before.tRecv, e.tRecv) > held_ns


def mean_times(
    envelopes: Sequence[Envelope], n: int, stage_b: StageBTimes, hops: Sequence[float] | None = None
) -> StageTimes:
    """Mean times of ``n`` emits; what was dropped between them took time, too."""
    return StageTimes.of_chain(
        sum(map(stage_a_ns, envelopes)) / n,
        stage_b.means(envelopes, n),
        sum(map(stage_c_ns, envelopes)) / n,
        hops,
    )


def _mean_times(window: JudgedSpan, transport_ns: float, stage_b: StageBTimes) -> StageTimes:
    """Means over the window; one number for all transfers is all that the stamps give."""
    hops = len(stage_b.names) + 1
    return mean_times(window.measured, window.n, stage_b, [transport_ns / hops] * hops)
