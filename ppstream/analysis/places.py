"""The policy ranks one by one: stage B, waits and hops of each place of a chain. Pure.

Place k is the policy rank k; of a single policy rank rank 0's lines tell all, so the policy rank's
own are only witnesses. So it is of replicas, which are one place of several ranks: its time is the
sum of theirs, divided by their number. In a chain rank 0's line has the slowest place alone, and
the rest stands in each rank's own lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Final

from ppstream.analysis.json_values import mapping_of
from ppstream.analysis.records import Envelope, Json, PolicyLine, RunLog, Topology

LOST: Final = 0.5  # share of its lines without which a place's log is lost


def lines_of(envelopes: Iterable[Envelope], place: int) -> list[PolicyLine]:
    """The lines that a place wrote of these envelopes."""
    found = (e.places[place - 1] for e in envelopes if len(e.places) >= place)
    return [line for line in found if line is not None]


def lines_of_replica(envelopes: Iterable[Envelope], rank: int) -> list[PolicyLine]:
    """The lines that a replica wrote of these envelopes."""
    return [e.stage1 for e in envelopes if e.answered_by == rank and e.stage1 is not None]


def replicas_b_ns(envelopes: Sequence[Envelope], topology: Topology) -> dict[int, float]:
    """Mean of stage B on each replica that answered any of these envelopes."""
    each = {rank: lines_of_replica(envelopes, rank) for rank in topology.replica_ranks}
    return {rank: fmean(map(place_b_ns, lines)) for rank, lines in each.items() if lines}


def lost_places(envelopes: Sequence[Envelope], topology: Topology) -> list[int]:
    """Places of a chain without most of their lines: nobody else knows their times."""
    if not topology.is_chain:
        return []
    return [k for k in topology.ranks if len(lines_of(envelopes, k)) <= LOST * len(envelopes)]


class StageBTimes:
    """Stage B on each place, of some envelopes; ``names`` are the places as resources.

    Where no place of a chain has lines, which is so while a run goes on and on other hosts, the
    slowest place stands for all. A single line that is missing counts as its place's mean.
    """

    def __init__(self, envelopes: Sequence[Envelope], topology: Topology) -> None:
        self._replicas = topology.replicas
        self.lost = lost_places(envelopes, topology)
        self.is_whole = len(self.lost) < topology.places if topology.is_chain else True
        self._is_single = not topology.is_chain or not self.is_whole
        self.names = ("mesh",) if self._is_single else topology.policy_names
        lines = [] if self._is_single else [lines_of(envelopes, k) for k in topology.ranks]
        self._usual_ns = [round(fmean(map(place_b_ns, mine))) if mine else 0 for mine in lines]

    def of(self, envelope: Envelope) -> tuple[int, ...]:
        """Busy time for each name: of replicas each one's share of it."""
        if self._is_single:
            return (stage_b_ns(envelope) // self._replicas,)
        if envelope.B_ns is None:
            return (0,) * len(self.names)
        pairs = zip(envelope.places, self._usual_ns, strict=True)
        return tuple(usual if line is None else place_b_ns(line) for line, usual in pairs)

    def means(self, envelopes: Sequence[Envelope], n: int) -> tuple[float, ...]:
        """Durations, of ``n`` emits; what was dropped between them took time, too."""
        if self._is_single:
            return (sum(map(stage_b_ns, envelopes)) / n,)
        return tuple(sum(column) / n for column in zip(*map(self.of, envelopes), strict=True))


def stage_b_ns(envelope: Envelope) -> int:
    """Device time where B is one device region, else the policy rank's interval.

    Of a chain: on its slowest place.
    """
    return envelope.B_ns or 0 if envelope.eB_ns is None else envelope.eB_ns


def place_b_ns(line: PolicyLine) -> int:
    """The same of one policy rank's line."""
    return line.B_ns or 0 if line.eB_ns is None else line.eB_ns


def arrived_ns(line: PolicyLine) -> int | None:
    """When the complete envelope was there, by the place's clock."""
    left = left_ns(line)
    return None if left is None or line.residence_ns is None else left - line.residence_ns


def left_ns(line: PolicyLine) -> int | None:
    """When its output was committed to the next hop, by the place's clock."""
    if line.tOut is not None:
        return line.tOut
    return None if line.tB1 is None else line.tB1 + (line.wait_output_ns or 0)


def hops_ns(envelope: Envelope) -> tuple[int | None, ...]:
    """Each hop of one envelope, on one clock of all ranks: to every place, and back to rank 0."""
    left: int | None = envelope.tSend
    found: list[int | None] = []
    for line in envelope.places:
        came = None if line is None else arrived_ns(line)
        found.append(None if came is None or left is None else came - left)
        left = None if line is None else left_ns(line)
    back = envelope.tRecv
    return (*found, None if back is None or left is None else back - left)


def has_one_clock(manifest: Json) -> bool:
    """All ranks ran on one boot of one host, and share CLOCK_MONOTONIC."""
    boots = _boots(manifest)
    return len(boots) > 1 and len(set(boots)) == 1 and boots[0] not in (None, "")


def is_elsewhere(manifest: Json) -> bool:
    """A policy rank ran on another host than rank 0, by its hello: its log is there."""
    boots = [boot for boot in _boots(manifest) if boot is not None]
    return len(set(boots)) > 1


def _boots(manifest: Json) -> list[str | None]:
    """Of every rank as run.json lists it, and as the policy ranks' hellos say; None: not told."""
    ranks = mapping_of(manifest.get("topology")).get("ranks")
    hellos = manifest.get("policy_ranks")
    tables = [*(ranks if isinstance(ranks, list) else ())]
    facts = [manifest.get("policy_rank"), *(hellos if isinstance(hellos, list) else ())]
    tables += [table for table in facts if isinstance(table, Mapping) and "boot_id" in table]
    boots = [table.get("boot_id") for table in tables if isinstance(table, Mapping)]
    return [boot if isinstance(boot, str) else None for boot in boots]


def mean_hops_ns(run: RunLog, envelopes: Iterable[Envelope]) -> tuple[float | None, ...]:
    """Of every hop by itself; None where it is not known, as of ranks with clocks of their own."""
    lines = list(envelopes)
    if not lines or not has_one_clock(run.manifest):
        return (None,) * (run.topology.places + 1)
    columns = zip(*map(hops_ns, lines), strict=True)
    known = [[ns for ns in column if ns is not None] for column in columns]
    return tuple(fmean(hop) if hop else None for hop in known)
