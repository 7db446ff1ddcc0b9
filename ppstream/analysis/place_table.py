"""The table of a chain's ranks: what each one does, waits for and hands on; a better cut. Pure.

One row a rank, rank 0 among them. Of a single policy rank it has the same numbers as the rest of
the report, under the names that a chain has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from ppstream.analysis.contention import Alone
from ppstream.analysis.period_model import period
from ppstream.analysis.places import (
    arrived_ns,
    lines_of,
    mean_hops_ns,
    place_b_ns,
    replicas_b_ns,
)
from ppstream.analysis.policy_cut import Costs, PolicyCut, best_cut
from ppstream.analysis.records import PolicyLine, RunLog
from ppstream.analysis.scores import Primary, form_of
from ppstream.analysis.segments import JudgedSpan

WORTH: Final = 0.03  # of the period: the model is good for that, and less is no reason to move
HELD_SHARE: Final = 0.05  # of the period: a shorter hop holds nothing up
HELD_TIMES: Final = 3.0  # the other hops


@dataclass(frozen=True, slots=True)
class MeshMember:
    """A rank of a mesh behind its leader: mean of stage B in ns, its waits for others in it."""

    rank: int
    busy_ns: float | None
    leader: int = 1


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """One rank of a run: means of an envelope in ns; None: not known.

    ``wait_input_ns``: it had nothing to do; ``wait_output_ns``: for room behind it; on rank 0 what
    A waits for, and what the emit does. ``queue_ns``: an envelope was there and B had not begun.
    ``hop_ns``: the hop that leaves the rank; the last one ends on rank 0. Replicas are one row:
    ``share`` is the share of their time, all other times are an envelope's.
    """

    rank: int
    parts: tuple[str, ...]
    device: str
    alone_ns: float | None
    busy_ns: float | None
    share: float | None  # of the time
    wait_input_ns: float | None
    wait_output_ns: float | None
    queue_ns: float | None
    hop_ns: float | None
    ranks: tuple[int, ...] = ()  # of the place: several are replicas
    replicas_ns: tuple[float | None, ...] = ()  # B of each of them
    members: tuple[MeshMember, ...] = ()  # that compute the place with it


@dataclass(frozen=True, slots=True)
class BetterCut:
    """A cut of the same policy onto the same ranks that the model expects to be quicker."""

    limiting: int  # the place that sets the period now
    moved: dict[int, tuple[str, ...]]  # parts that go elsewhere, by the place they go to
    placement: tuple[int, ...]
    period_ns: float


def place_rows(
    run: RunLog, window: JudgedSpan, score: Primary | None, alone: Alone | None
) -> list[PlaceRow]:
    """Of every rank; none where one process runs all stages."""
    topology, measured = run.topology, window.measured
    if topology.world_size == 1 or not measured or not window.n:
        return []
    hops = mean_hops_ns(run, measured)
    busy: dict[str, int] = {} if score is None else score.busy_ns
    alone_ns = {} if alone is None else alone.times.stages
    waits = ("w_input_ns", "w_credit_ns", "w_slot_ns")
    own = [busy[name] for name in ("r0", "r0A", "r0C") if name in busy]
    rows = [
        PlaceRow(
            rank=0,
            parts=topology.parts_of(0),
            device=topology.device_of(0),
            alone_ns=alone_ns["A"] + alone_ns["C"] if alone_ns else None,
            busy_ns=sum(own) / window.n if own else None,
            share=max(own) / window.span_ns if own and window.span_ns else None,
            wait_input_ns=sum(getattr(e, w) or 0 for e in measured for w in waits) / window.n,
            wait_output_ns=sum(e.w_emit_ns or 0 for e in measured) / window.n,
            queue_ns=fmean((e.tDecode or 0) - (e.tRecv or 0) for e in window.emitted),
            hop_ns=hops[0],
            ranks=(0,),
        )
    ]
    by_replica = replicas_b_ns(measured, topology)
    for place, name in zip(topology.ranks, topology.policy_names, strict=True):
        lines = lines_of(measured, place)
        busy_ns = busy.get(name)
        own_alone = alone_ns.get(f"B{place}", None if topology.is_chain else alone_ns.get("B"))
        rows.append(
            PlaceRow(
                rank=place,
                parts=topology.parts_of(place),
                device=topology.device_of(place),
                alone_ns=own_alone,
                busy_ns=None if busy_ns is None else topology.replicas * busy_ns / window.n,
                share=None if busy_ns is None else busy_ns / window.span_ns,
                wait_input_ns=_mean(lines, "wait_input_ns"),
                wait_output_ns=_mean(lines, "wait_output_ns"),
                queue_ns=_queue_ns(lines),
                hop_ns=hops[place],
                ranks=topology.ranks_of(place),
                replicas_ns=tuple(map(by_replica.get, topology.replica_ranks)),
                members=_members(run, window),
            )
        )
    return rows


def _members(run: RunLog, window: JudgedSpan) -> tuple[MeshMember, ...]:
    """Of the only place that can be a mesh, or several as replicas, in the judged envelopes."""
    leader_of = dict(zip(run.topology.members, run.topology.leaders, strict=False))
    judged = {(envelope.epoch, envelope.seq) for envelope in window.measured}
    found = []
    for rank, lines in sorted(run.members.items()):
        mine = [place_b_ns(line) for line in lines if (line.epoch, line.seq) in judged]
        found.append(MeshMember(rank, fmean(mine) if mine else None, leader_of.get(rank, 1)))
    return tuple(found)


def held_hop(rows: Sequence[PlaceRow], period_ns: float) -> PlaceRow | None:
    """The place whose hop takes long and far longer than the others: something holds it."""
    known = [row for row in rows if row.hop_ns is not None]
    if len(known) < 3:  # of two hops nobody can say which one is usual
        return None
    worst = max(known, key=lambda row: row.hop_ns or 0)
    others = median(row.hop_ns or 0 for row in known if row is not worst)
    took = worst.hop_ns or 0
    return worst if took > max(HELD_SHARE * period_ns, HELD_TIMES * others) else None


def better_cut(run: RunLog, score: Primary | None) -> BetterCut | None:
    """The best cut by the parts' times alone; None where they are not known, or the cut is it."""
    topology, times = run.topology, None if score is None else score.times
    if topology.has_replicas:
        return None
    names = [name for parts in topology.parts for name in parts]
    alone = run.standalone.parts_ns if run.standalone is not None else {}
    if times is None or not times.behind or not names or not set(names) <= set(alone):
        return None
    parts = tuple(float(alone[name]) for name in names)
    front = sum(alone[name] for name in topology.parts[0])
    hops = (fmean(times.hops),) * (len(parts) + 1)
    costs = Costs(parts, hops, a=max(0.0, times.a - front), c=times.c)
    placement = tuple(k for k, own in enumerate(topology.parts) for _ in own)
    if set(topology.ranks) - set(placement):
        return None
    cut = PolicyCut(tuple(placement.index(k) for k in topology.ranks), costs)
    found, form = best_cut(costs, topology.world_size), form_of(topology)
    expected_ns = period(found.times, form)
    if expected_ns > (1 - WORTH) * period(cut.times, form):
        return None
    moved: dict[int, tuple[str, ...]] = {}
    for name, before, to in zip(names, placement, found.placement, strict=True):
        if before != to:
            moved[to] = (*moved.get(to, ()), name)
    limiting = max(range(len(cut.loads)), key=lambda k: cut.loads[k])
    return BetterCut(limiting, moved, found.placement, expected_ns)


def _queue_ns(lines: Sequence[PolicyLine]) -> float | None:
    """From the complete envelope to B."""
    stays = [(line.tB0, arrived_ns(line)) for line in lines]
    known = [begun - came for begun, came in stays if begun is not None and came is not None]
    return fmean(known) if known else None


def _mean(lines: Sequence[PolicyLine], name: str) -> float | None:
    known = [ns for line in lines if (ns := getattr(line, name)) is not None]
    return fmean(known) if known else None
