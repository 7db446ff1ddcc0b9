"""Accounts of robots: the newest of each session, and the holds of each robot in all of them.

Pure. A robot is known by its name; one whose log has none is another one in each session.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ppstream.analysis.records import RobotStateLine


class RobotStates:
    """The newest account of each session: its counts go on."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], RobotStateLine] = {}  # by generation and session
        self._told_before_ns: dict[tuple[int, int], int] = {}
        self._told_at: dict[tuple[int, str], int] = {}  # by generation and robot

    def add(self, generation: int, t: int | None, state: RobotStateLine) -> None:
        """Count one line, stamped ``t`` by rank 0.

        A hold that is under way when a session begins belongs to it in full: what the session
        before has told of it is taken off.
        """
        session, robot = (generation, state.session), (generation, state.robot or "")
        told_at = self._told_at.get(robot) if state.robot else None
        if session not in self._newest and t is not None and told_at is not None:
            self._told_before_ns[session] = max(0, (state.held_ns or 0) - max(0, t - told_at))
        if t is not None:
            self._told_at[robot] = t
        before_ns = self._told_before_ns.get(session, 0)
        held_ns = None if state.held_ns is None else max(0, state.held_ns - before_ns)
        self._newest[session] = state._replace(held_ns=held_ns)

    def by_session(self) -> tuple[RobotStateLine, ...]:
        return tuple(self._newest.values())


class RobotHolds(NamedTuple):
    """Hold time and faults of a robot in all its sessions."""

    name: str
    held_ns: int
    faults: int
    fault: str  # the newest; empty: none


def longest_held(states: Iterable[RobotStateLine]) -> RobotHolds | None:
    """The robot that held for longest in all; None without any."""
    sessions: dict[str | int, list[RobotStateLine]] = {}
    for state in states:
        sessions.setdefault(state.robot or state.session, []).append(state)
    return max(map(_holds, sessions.values()), key=lambda robot: robot.held_ns, default=None)


def _holds(sessions: list[RobotStateLine]) -> RobotHolds:
    newest, n = sessions[-1], len(sessions)
    return RobotHolds(
        name=f"{newest.robot} ({n} sessions)" if n > 1 and newest.robot else newest.name,
        held_ns=sum(state.held_ns or 0 for state in sessions),
        faults=sum(state.faults or 0 for state in sessions),
        fault=next((state.fault for state in reversed(sessions) if state.fault), ""),
    )
