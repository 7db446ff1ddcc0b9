"""Robots that a run did not move, by what they tell. Pure.

A robot that tells of no chunk by a wire of its own is never counted among those that execute none,
and none is that was there for a moment alone. One that asks when it likes is unserved where it
asked in vain: its samples were refused, or a gateway answered none of its requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

from ppstream.analysis.json_values import shown
from ppstream.analysis.records import RobotStateLine, RunLog
from ppstream.analysis.requests import is_on_request
from ppstream.analysis.robot_states import by_robot, name_of
from ppstream.analysis.run_report import RobotChunks
from ppstream.core.phases import ENDING, SERVING
from ppstream.core.quantiles import quantiles

SHARE_MIN: Final = 0.10  # of a service that moved others, in the robot's newest sessions
TIME_MIN_NS: Final = 5_000_000_000  # and at least so long
ROBOTS_MAX: Final = 4  # that a sentence names
REFUSED_MIN: Final = 0.5  # of a stream's samples
VAIN_MIN: Final = 5  # requests that a gateway answered no robot of; fewer are somebody's trial
VAIN_SHARE_MIN: Final = 0.10  # of all its requests
UNREADY: Final = ("not_ready", "peer_lost", "gateway_ends")  # errors while there was no run
LATE_MAX: Final = 0.10  # of the chunks that robots received, or that one did
#: Drops of samples for want of a window, whatever they were worth.
UNASKED: Final = frozenset({"overwritten", "passed_over", "closed", "new_episode"})


def unmoved(
    run: RunLog, lease_ns: int, lasted_ns: int = 0, late_ns: int | None = None
) -> dict[str, str]:
    """Reasons against a service, each with its sentence: of each robot's newest sessions.

    ``SERVICE_UNSERVED``: the robot was there in service, and none of its windows came to a chunk.
    ``SERVICE_UNEXECUTED``: it got chunks, and by its own account executed none.

    Args:
        run: its records.
        lease_ns: who is there for no longer wants for nothing.
        lasted_ns: from the first envelope of service to the last; 0: there was none.
        late_ns: an older chunk is late, and that is why it is not executed; None: nobody says.
    """
    nobody_names_rows = lasted_ns and not run.session_gaps_ns
    refused = _refused_robots(run, lasted_ns) if is_on_request(run.config) else None
    least_ns = max(TIME_MIN_NS, SHARE_MIN * lasted_ns) if lasted_ns else lease_ns
    others = ", beside others that did" if lasted_ns else _lacking_streams(run)
    times_ns = _times_ns(run, lease_ns)
    unserved: list[str] = []
    unexecuted: list[str] = []
    for all_states in () if nobody_names_rows else by_robot(run.robot_states):
        states, time_ns = _newest(all_states, times_ns, least_ns)
        if time_ns < least_ns or (refused is not None and states[-1].robot not in refused):
            continue
        sessions = [state.session for state in states]
        told = [run.session_chunks[k] for k in sessions if k in run.session_chunks]
        who = f"robot {name_of(states)} was there for {time_ns / 1e9:.1f} s"
        if not told and run.session_gaps_ns.keys().isdisjoint(sessions):
            ailing = _ailing_streams(run, states[-1].robot) if lasted_ns else ""
            unserved.append(f"{who} and got no chunk{ailing}")
        elif refused is None and told and not any(chunks.executed for chunks in told):
            total = sum(chunks.total for chunks in told)
            late = [] if late_ns is None else _late_ns(run, sessions, late_ns)
            if len(late) > LATE_MAX * total:  # which ``late_chunks`` tells
                continue
            unexecuted.append(f"{who}, got {total} chunks and told of none that it executed")
    found = {}
    in_vain = [_some(unserved) + others] if unserved else []
    if in_vain := [*in_vain, *_unanswered(run)]:
        found["SERVICE_UNSERVED"] = _some(in_vain)
    if unexecuted:
        found["SERVICE_UNEXECUTED"] = _some(unexecuted)
    return found


def late_chunks(run: RunLog, chunks: RobotChunks, lease_ns: int, lasted_ns: int) -> str:
    """Returns which robots got too many chunks too late, or all together; empty: none did.

    Args:
        run: its records.
        chunks: of all robots.
        lease_ns: who is there for no longer is not judged by itself.
        lasted_ns: from the first envelope of service to the last.
    """
    limit_ns, is_lone = chunks.limit_ns, len(run.session_chunks) == 1
    if limit_ns is None:
        return ""
    if late := [] if is_lone else [*_late_robots(run, lease_ns, lasted_ns, limit_ns)]:
        return _some([*map(str, late)])
    return str(chunks) if chunks.late_share > LATE_MAX else ""


def _late_robots(
    run: RunLog, lease_ns: int, lasted_ns: int, limit_ns: int
) -> Iterator[RobotChunks]:
    """Yields those that were there long enough, by their newest sessions."""
    least_ns, times_ns = max(TIME_MIN_NS, SHARE_MIN * lasted_ns), _times_ns(run, lease_ns)
    for all_states in by_robot(run.robot_states):
        states, time_ns = _newest(all_states, times_ns, least_ns)
        sessions = [state.session for state in states]
        told = [run.session_chunks[k] for k in sessions if k in run.session_chunks]
        executed, total = (sum(counts) for counts in zip(*told, strict=True)) if told else (0, 0)
        late_ns = _late_ns(run, sessions, limit_ns)
        if time_ns >= least_ns and len(late_ns) > LATE_MAX * total:
            who = f"robot {name_of(states)}"
            yield RobotChunks(executed, total - executed, quantiles(late_ns), limit_ns, who)


def _newest(
    states: list[RobotStateLine], times_ns: Mapping[int, int], least_ns: float
) -> tuple[list[RobotStateLine], int]:
    """The newest sessions that lasted long enough together, oldest first, and how long."""
    time_ns = 0
    for k in reversed(range(len(states))):
        time_ns += times_ns.get(states[k].session, 0)
        if time_ns >= least_ns:
            return states[k:], time_ns
    return states, time_ns


def _late_ns(run: RunLog, sessions: Iterable[int], limit_ns: int) -> list[int]:
    ages_ns = (ns for session in sessions for ns in run.unexecuted_ages_ns.get(session, ()))
    return [ns for ns in ages_ns if ns > limit_ns]


def _some(texts: list[str]) -> str:
    more = f"; and {len(texts) - ROBOTS_MAX} more" if len(texts) > ROBOTS_MAX else ""
    return "; ".join(texts[:ROBOTS_MAX]) + more


def _lacking_streams(run: RunLog) -> str:
    """The streams of which no sample came, or of which most were refused, with the reasons."""
    silent = [shown(ledger.stream) for ledger in run.stream_ledgers if not ledger.received]
    texts = [f"no sample of {', '.join(silent)} came"] if silent else []
    texts += _refused_streams(run)
    return f": {'; '.join(texts)}" if texts else ""


def _refused_streams(run: RunLog) -> Iterator[str]:
    for ledger in run.stream_ledgers:
        refused = {why: n for why, n in ledger.dropped.items() if n and why not in UNASKED}
        if sum(refused.values()) > REFUSED_MIN * ledger.received:
            reasons = ", ".join(f"{n} {shown(why)}" for why, n in refused.items())
            yield f"{reasons} of {ledger.received} samples of {shown(ledger.stream)}"


def _refused_robots(run: RunLog, lasted_ns: int) -> set[str | None]:
    """Robots whose samples were refused; all where none was served and nobody says whose."""
    found: set[str | None] = {
        str(event.fields.get("robot"))
        for event in run.events
        if event.name == "sensor" and event.fields.get("condition") == "refused"
    }
    if found or lasted_ns or not any(_refused_streams(run)):
        return found
    return {state.robot for state in run.robot_states}


def _unanswered(run: RunLog) -> Iterator[str]:
    """Yields each robot of which a gateway answered no request that it could have answered.

    A robot that is sent away comes again under another name: they count together.
    """
    failed = [
        (row, {why: n for why, n in row.errors.items() if n and why not in UNREADY})
        for row in run.requests
        if not row.answered
    ]
    vain = sum(sum(errors.values()) for _, errors in failed)
    if vain < VAIN_MIN or vain < VAIN_SHARE_MIN * sum(row.requests for row in run.requests):
        return
    for row, errors in failed:
        if errors:
            reasons = ", ".join(f"{n} {why}" for why, n in errors.items())
            who = f"robot {row.robot} ({row.wire}) had 0 of {row.requests} requests answered"
            yield f"{who}: {reasons}"


def _ailing_streams(run: RunLog, robot: str | None) -> str:
    """The streams of one robot that were silent or refused when rank 0 last said how they were."""
    newest = {
        shown(str(event.fields.get("stream"))): event.fields.get("condition")
        for event in run.events
        if event.name == "sensor" and robot and event.fields.get("robot") == robot
    }
    texts = [f"{name} {what}" for name, what in newest.items() if what in ("silent", "refused")]
    return f" ({', '.join(texts)})" if texts else ""


def _times_ns(run: RunLog, lease_ns: int) -> dict[int, int]:
    """Times for which sessions were there in service; those up to a lease are left out.

    From the first that its robot told of itself to the last that rank 0 heard of it. Where the log
    tells of nobody who left: to the newest envelope with its row, or to the end without any.
    """
    served = _served_ns(run)
    left: dict[int, int] = {}
    for event in run.events:
        session, heard_ns = event.fields.get("session"), event.fields.get("heard_ns")
        if event.name == "robot_left" and isinstance(session, int) and isinstance(heard_ns, int):
            left[session] = heard_ns
    found = {}
    for session, (generation, begun_ns) in run.sessions_begun.items():
        from_ns, to_ns = served.get(generation, (0, 0))
        if not left and session in run.first_waits_ns:
            to_ns = min(to_ns, max(from_ns, begun_ns) + run.first_waits_ns[session])
        time_ns = min(to_ns, left.get(session, to_ns)) - max(from_ns, begun_ns)
        if time_ns > lease_ns:
            found[session] = time_ns
    return found


def _served_ns(run: RunLog) -> dict[int, tuple[int, int]]:
    """Begin and end of each generation's service by rank 0: at its last event or ledger at most."""
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    newest: dict[int, int] = {}
    for t, generation, phase in _marks(run):
        if t is None:
            continue
        newest[generation] = max(t, newest.get(generation, t))
        for phases, first in ((SERVING, began), (ENDING, ended)):
            if phase in phases:
                first[generation] = min(t, first.get(generation, t))
    return {k: (t, min(newest[k], ended.get(k, newest[k]))) for k, t in began.items()}


def _marks(run: RunLog) -> Iterator[tuple[int | None, int, str | None]]:
    """Yields stamps of rank 0, each with its generation and the phase that holds from there on.

    Of the envelopes of service the first and the last one alone.
    """
    for event in run.events:
        if event.rank == 0:
            yield event.t, event.generation, event.phase
    for ledger in run.envelope_ledgers:
        yield ledger.t, ledger.generation, None
    for generation, same in groupby(run.envelopes, key=lambda e: e.generation):
        served = [e for e in same if e.phase in SERVING]
        begun = [e for e in served if e.tA0 is not None]
        if begun:
            yield min(e.tA0 or 0 for e in begun), generation, begun[0].phase
            yield max(e.tA0 or 0 for e in begun), generation, None
        yield max((t for e in served if (t := e.tEmit) is not None), default=None), generation, None
