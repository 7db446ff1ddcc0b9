"""Replicas of a policy rank: how busy each is, who holds the others back, whose turn it was. Pure.

All replicas are one place: its busy time is the sum of theirs, divided by their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean
from typing import Final, NamedTuple

from ppstream.analysis.places import replicas_b_ns
from ppstream.analysis.records import RunLog
from ppstream.analysis.segments import JudgedSpan

REPLICA_LOST: Final = "replica_lost"  # event, and why envelopes of that replica are dropped
SLOW: Final = 1.1  # times the B of the others
MS: Final = 1e-6  # per ns


def replica_shares(window: JudgedSpan) -> dict[int, float]:
    """Busy share of each replica by itself: the slowest one sets the pace of all."""
    topology, sent = window.topology, Counter(e.replica for e in window.measured)
    means = replicas_b_ns(window.measured, topology)
    usual = len(window.measured) / topology.replicas
    return {rank: b_ns * sent.get(rank, usual) / window.span_ns for rank, b_ns in means.items()}


class SlowReplica(NamedTuple):
    """A replica whose B takes longer than that of the others, in ns."""

    rank: int
    b_ns: float
    others_ns: float  # their mean


def slow_replica(window: JudgedSpan) -> SlowReplica | None:
    """The slowest replica, if it is far behind the others."""
    means = replicas_b_ns(window.measured, window.topology)
    if len(means) < 2:
        return None
    rank = max(means, key=lambda found: means[found])
    others_ns = fmean(ns for found, ns in means.items() if found != rank)
    return SlowReplica(rank, means[rank], others_ns) if means[rank] > SLOW * others_ns else None


def pace_of(window: JudgedSpan, share: float) -> tuple[str, str, float]:
    """Words who sets the pace of replicas, and what would help; behind them its busy share.

    ``share`` is that of all replicas together.
    """
    slow = slow_replica(window)
    if slow is None:
        return f"each of {window.topology.replicas} replicas", "B or one more replica", share
    return f"replica {slow.rank}", "replica", replica_shares(window)[slow.rank]


def replica_sentences(run: RunLog, window: JudgedSpan) -> Iterator[str]:
    """Yields who holds the others back, and who was lost."""
    replicas, slow = window.topology.replicas, slow_replica(window)
    if slow is not None:
        b_ms, others_ms = slow.b_ns * MS, slow.others_ns * MS
        yield (
            f"replica {slow.rank} holds all back: its B takes {b_ms:.2f} ms, that of the others "
            f"{others_ms:.2f} ms; envelopes go out in turn, so the period is {b_ms / replicas:.2f} "
            f"ms at least, where {others_ms / replicas:.2f} ms would do"
        )
    for event in run.events:
        if event.name == REPLICA_LOST and event.generation == window.generation:
            rank, left = (event.fields.get(name) for name in ("rank", "left"))
            yield f"replica {rank} was lost: {left} of {replicas} went on serving"


def out_of_turn(run: RunLog, window: JudgedSpan) -> Iterator[str]:
    """Yields envelopes that did not go to the replica behind the one before's, or not only.

    A replica that was lost is left out.
    """
    replicas = window.topology.replicas
    lost = {
        event.fields.get("rank")
        for event in run.events
        if event.name == REPLICA_LOST and event.generation == window.generation
    }
    for segment in window.segments:
        for before, e in pairwise(segment.envelopes):
            if before.replica is None or e.replica is None:
                continue
            skipped = (e.replica - before.replica - 1) % replicas
            if not {(before.replica + n) % replicas + 1 for n in range(skipped)} <= lost:
                yield (
                    f"envelope {e.seq} went to replica {e.replica}, out of turn: "
                    f"{before.seq} went to replica {before.replica}"
                )
        for e in segment.envelopes:
            if e.replica is not None and e.answered_by not in (None, e.replica):
                yield f"replica {e.answered_by} answers envelope {e.seq} of replica {e.replica}"
