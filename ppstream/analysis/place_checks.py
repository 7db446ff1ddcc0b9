"""Checks of several policy ranks and their hops, for ``audits.py``: how far stamps disagree. Pure.

Every check but those between two places uses one rank's clock alone. All are of chains only, but
those of the order, which replicas keep, too, and of credits: of a single policy rank rank 0's line
has everything else that its own lines could be checked against.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ppstream.analysis.places import (
    arrived_ns,
    has_one_clock,
    hops_ns,
    left_ns,
    lines_of_replica,
)
from ppstream.analysis.records import Envelope, PolicyLine, RunLog
from ppstream.analysis.replicas import out_of_turn
from ppstream.analysis.segments import JudgedSpan


def out_of_order(run: RunLog, window: JudgedSpan, slack_ns: int) -> tuple[int, str]:
    """Envelopes whose stamps on some place cannot be, and where the first of them is.

    ``slack_ns`` is for stamps that are not of one clock or one thread: between two places always,
    on one place where a device made them.
    """
    if window.topology.has_replicas:
        slack_ns = slack_ns if window.topology.device_stamped else 0
        wrong = [*out_of_turn(run, window), *_on_replicas(window, slack_ns)]
        return len(wrong), wrong[0] if wrong else ""
    if not window.topology.is_chain:
        return 0, ""
    found = list(_on_places(window, slack_ns if window.topology.device_stamped else 0))
    if has_one_clock(run.manifest):
        found += _between_places(window, slack_ns)
    return len(found), found[0] if found else ""


def _on_places(window: JudgedSpan, slack_ns: int) -> Iterator[str]:
    for place in window.topology.ranks:
        title = window.topology.title(place)
        for before, line in _neighbours(window, place):
            yield from _in_row(before, line, title, slack_ns)


def _in_row(before: PolicyLine, line: PolicyLine, title: str, slack_ns: int = 0) -> Iterator[str]:
    """One rank works on one envelope at a time, in their order."""
    if None in (before.tB0, before.tB1, line.tB0, line.tB1):
        return
    begun, ended = (before.tB0 or 0) - slack_ns, (before.tB1 or 0) - slack_ns
    if (line.tB1 or 0) < (line.tB0 or 0) - slack_ns:
        yield f"{title}: B ends before it begins"
    elif (line.tB1 or 0) <= begun and (line.tB0 or 0) < begun:
        yield f"{title}: B of envelope {line.seq} comes before that of {before.seq}"
    elif (line.tB0 or 0) < ended:
        yield f"{title}: two B at the same time, of envelopes {before.seq} and {line.seq}"


def _on_replicas(window: JudgedSpan, slack_ns: int) -> Iterator[str]:
    for segment in window.segments:
        for rank in window.topology.replica_ranks:
            for before, line in pairwise(lines_of_replica(segment.envelopes, rank)):
                yield from _in_row(before, line, f"replica {rank}", slack_ns)


def _between_places(window: JudgedSpan, slack_ns: int) -> Iterator[str]:
    """On one clock of all ranks: nothing arrives before it left."""
    names = ["rank 0", *map(window.topology.title, window.topology.ranks), "rank 0"]
    for e in window.measured:
        for hop, took_ns in enumerate(hops_ns(e)):
            if took_ns is not None and took_ns < -slack_ns:
                yield f"{names[hop + 1]} has envelope {e.seq} before {names[hop]} sent it"


def unpermitted_ns(run: RunLog, window: JudgedSpan, slack_ns: int) -> int:
    """Sum of what devices begin with an envelope before the result that permits it was sent.

    By the policy rank's own stamps, and ``slack_ns`` later: rank 0's stamp of a receipt may be that
    of the stage A which waited for it.
    """
    topology = window.topology
    if not topology.device_stamped or not has_one_clock(run.manifest):
        return 0
    broken_ns = 0
    for segment in window.segments:
        for e in segment.envelopes:
            giver = segment.at(e.seq - topology.d_in)
            line = None if giver is None else giver.stage1
            given_ns = None if line is None else left_ns(line)
            began_ns = e.tA0 if topology.credit == "before_window" else e.tSend
            if given_ns is not None and began_ns is not None:
                broken_ns += max(0, given_ns - slack_ns - began_ns)
    return broken_ns


def stay_excess_ns(window: JudgedSpan) -> int:
    """Sum of what B outlasts its stay on a place, and of what rank 0's sum of the stays is off."""
    broken_ns = 0
    for e in window.measured if window.topology.is_chain else ():
        lines = [line for line in e.places if line is not None and line.residence_ns is not None]
        broken_ns += sum(max(0, (line.B_ns or 0) - (line.residence_ns or 0)) for line in lines)
        if len(lines) == len(e.places) and e.residence_ns is not None:
            broken_ns += abs(e.residence_ns - sum(line.residence_ns or 0 for line in lines))
    return broken_ns


def slot_excess_ns(window: JudgedSpan) -> int:
    """Sum of what envelopes are on a place before the one D_in earlier left its slot there."""
    topology, broken_ns = window.topology, 0
    for segment in window.segments if topology.is_chain else ():
        for place in topology.ranks:
            for e in segment.envelopes:
                giver, line = segment.at(e.seq - topology.d_in), e.places[place - 1]
                before = None if giver is None else giver.places[place - 1]
                came = None if line is None else arrived_ns(line)
                freed = None if before is None else left_ns(before)
                if came is not None and freed is not None:
                    broken_ns += max(0, freed - came)
    return broken_ns


def device_excess_ns(window: JudgedSpan) -> dict[str, int]:
    """By place: what its device regions outlast their B."""
    return {
        f"eB_ns over B_ns of place{place}": sum(
            max(0, (line.eB_ns or 0) - (line.B_ns or 0))
            for e in window.measured
            if (line := e.places[place - 1]) is not None
        )
        for place in (window.topology.ranks if window.topology.is_chain else ())
    }


def missing_lines(window: JudgedSpan, newest: set[int]) -> tuple[float, str]:
    """The largest share of lines that a place lacks, and its name; those of ``newest`` may."""
    topology, measured = window.topology, window.measured
    shares = {
        topology.title(place): sum(
            e.places[place - 1] is None and id(e) not in newest for e in measured
        )
        / len(measured)
        for place in topology.ranks
    }
    worst = max(shares, key=lambda title: shares[title])
    return shares[worst], worst


def slowest_b_ns(e: Envelope) -> int | None:
    """B of the slowest place by the places' own stamps; None where a line is missing."""
    times = [None if line is None else line.B_ns for line in e.places]
    known = [ns for ns in times if ns is not None]
    return max(known) if known and len(known) == len(times) else None


def _neighbours(window: JudgedSpan, place: int) -> Iterator[tuple[PolicyLine, PolicyLine]]:
    for segment in window.segments:
        lines = [e.places[place - 1] for e in segment.envelopes]
        yield from pairwise(line for line in lines if line is not None)
