"""Robots that a run did not move although it served others, by what they tell. Pure.

A robot that tells of no chunk by a wire of its own is never counted among them, nor is one that
asks when it likes, or was there for a moment alone.
"""

from __future__ import annotations

from typing import Final

from ppstream.analysis.records import RunLog
from ppstream.analysis.requests import streams_on_request
from ppstream.analysis.robot_states import by_robot, name_of

SHARE_MIN: Final = 0.10  # of the service, in all the robot's sessions
TIME_MIN_NS: Final = 5_000_000_000  # and at least so long
ROBOTS_MAX: Final = 4  # that a sentence names


def unmoved(run: RunLog, lasted_ns: int) -> dict[str, str]:
    """Reasons against a service of ``lasted_ns``, each with its sentence.

    Rank 0 had a row for the robot all that time. ``SERVICE_UNSERVED``: no window of it was ever
    whole, and the robot tells of no chunk. ``SERVICE_UNEXECUTED``: it got chunks, and by its own
    account executed none.
    """
    if streams_on_request(run.config):
        return {}
    unserved: list[str] = []
    unexecuted: list[str] = []
    for states in by_robot(run.robot_states):
        sessions = [state.session for state in states]
        time_ns = sum(run.session_times_ns.get(session, 0) for session in sessions)
        if time_ns < max(TIME_MIN_NS, SHARE_MIN * lasted_ns):
            continue
        told = [run.session_chunks[k] for k in sessions if k in run.session_chunks]
        who = f"robot {name_of(states)} was there for {time_ns / 1e9:.0f} s"
        if not told and run.session_gaps_ns.keys().isdisjoint(sessions):
            unserved.append(f"{who} and got no chunk, beside others that did")
        elif told and not any(chunks.executed for chunks in told):
            total = sum(chunks.total for chunks in told)
            unexecuted.append(f"{who}, got {total} chunks and told of none that it executed")
    found = {"SERVICE_UNSERVED": unserved, "SERVICE_UNEXECUTED": unexecuted}
    return {reason: "; ".join(texts[:ROBOTS_MAX]) for reason, texts in found.items() if texts}
