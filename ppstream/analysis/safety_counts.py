"""Counts that must be zero: a run with one of them fails whatever its score is.

Pure. They cover the whole run, every phase and generation, not only the measured window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from ppstream.analysis.json_values import mapping_of
from ppstream.analysis.records import Envelope, RunLog

#: An emit that was under way when the cut came may be stamped this much behind it.
CUT_SLACK_NS: Final = 1_000_000
#: Rank 0 looks at a lease as of the emit's own stamp; older logs hold a later one.
EMIT_SLACK_NS: Final = 1_000_000
#: Nothing reaches a robot in these phases, so nothing can reach it expired.
SILENT_PHASES: Final = frozenset({"warming", "bring-up"})


class QueueMaxima(NamedTuple):
    """Most envelopes committed and not answered; most results received and not yet decoding."""

    outstanding: int
    q_decode: int


def safety_counts(run: RunLog) -> dict[str, int]:
    """Counts broken hard promises by reason; only reasons that happened."""
    topology, maxima = run.topology, queue_maxima(run.envelopes)
    beyond = max(0, maxima.outstanding - topology.d_in, maxima.q_decode - topology.d_out)
    counts = {
        "QUEUE_BOUND": 0 if topology.world_size == 1 else beyond,
        "STALE_EMIT": _stale_emits(run),
        "ORDER": _order_violations(run.envelopes),
        "EXPIRED_EMIT": 0 if _is_replay(run) else sum(map(_is_expired_emit, run.envelopes)),
    }
    return {reason: count for reason, count in counts.items() if count}


def queue_maxima(envelopes: Iterable[Envelope]) -> QueueMaxima:
    """From the counters kept at every transition; from the stamps where they were not logged."""
    lines = list(envelopes)
    return QueueMaxima(
        _maximum(lines, "outstanding_max", "tSend", "tRecv"),
        _maximum(lines, "q_decode_max", "tRecv", "tDecode"),
    )


def _maximum(lines: list[Envelope], counter: str, start: str, end: str) -> int:
    counted: list[int] = [v for line in lines if (v := getattr(line, counter)) is not None]
    if counted:
        return max(counted)
    most = 0
    for _, same in groupby(lines, key=lambda e: e.generation):
        level = 0
        for _, step in sorted(_steps(same, start, end)):
            level += step
            most = max(most, level)
    return most


def _steps(lines: Iterable[Envelope], start: str, end: str) -> Iterator[tuple[int, int]]:
    """Leaving sorts before entering at the same instant."""
    for line in lines:
        entered, left = getattr(line, start), getattr(line, end)
        if entered is not None and left is not None and left > entered:
            yield entered, 1
            yield left, -1


def _stale_emits(run: RunLog) -> int:
    """Emits of an older epoch behind a cut, or behind an emit of a newer epoch of their lane."""
    cuts = [
        (e.generation, e.t + CUT_SLACK_NS, e.epoch)
        for e in run.events
        if e.name == "epoch_cut" and e.rank == 0 and e.t is not None and e.epoch is not None
    ]
    stale = 0
    for (generation, _), same in groupby(run.envelopes, key=lambda e: (e.generation, e.lane)):
        emits = sorted((e for e in same if e.is_emitted), key=lambda e: e.tEmit or 0)
        ahead = deque(sorted((t, epoch) for k, t, epoch in cuts if k == generation))
        newest = min((e.epoch for e in emits), default=0)
        for e in emits:
            while ahead and ahead[0][0] < (e.tEmit or 0):
                newest = max(newest, ahead.popleft()[1])
            newest = max(newest, e.epoch)
            stale += e.epoch < newest
    return stale


def _order_violations(envelopes: Iterable[Envelope]) -> int:
    """Emits of one lane and epoch out of the order of ``seq``, or the same ``seq`` twice."""
    emits = (e for e in envelopes if e.is_emitted)
    return sum(
        (b.tEmit or 0) < (a.tEmit or 0) or a.seq == b.seq
        for _, same in groupby(emits, key=lambda e: (e.generation, e.lane, e.epoch))
        for a, b in pairwise(same)
    )


def _is_replay(run: RunLog) -> bool:
    """Windows cut by a recording's time: no robot waits, and rank 0 refuses nothing as expired."""
    return mapping_of(run.config.get("pipeline")).get("windows") == "scheduled"


def _is_expired_emit(envelope: Envelope) -> bool:
    """Certainly too old: older since arrival at rank 0 than the lease; the true age is higher."""
    age_ns, lease_ns = envelope.age_rank0_ns, envelope.lease_ns
    if not envelope.is_emitted or age_ns is None or lease_ns is None:
        return False
    return envelope.phase not in SILENT_PHASES and age_ns > lease_ns + EMIT_SLACK_NS
