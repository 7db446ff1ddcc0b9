"""Accounts of robots: the newest of each session, those of each robot in all of them, and chunks.

Pure. A robot is known by its name; one whose log has none is another one in each session.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from ppstream.analysis.records import Chunks, RobotStateLine, RunLog
from ppstream.analysis.requests import ROBOTS_MAX


class RobotStates:
    """The newest account of each session: its counts go on.

    Attributes:
        begun: by session, its generation and the stamp of its first account.
    """

    def __init__(self) -> None:
        self.begun: dict[int, tuple[int, int]] = {}
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
            self.begun.setdefault(state.session, (generation, t))
        before_ns = self._told_before_ns.get(session, 0)
        held_ns = None if state.held_ns is None else max(0, state.held_ns - before_ns)
        self._newest[session] = state._replace(held_ns=held_ns)

    def by_session(self) -> tuple[RobotStateLine, ...]:
        return tuple(self._newest.values())


class ChunkReports:
    """Reports of robots what became of their chunks.

    Attributes:
        ages_ns: of executed chunks.
        unexecuted_ages_ns: of the others, by session.
        oldest_ns: of any single action; 0: no robot told it.
        by_session: counts.
    """

    def __init__(self) -> None:
        self.ages_ns = array("q")
        self.unexecuted_ages_ns: dict[int, array[int]] = {}
        self.oldest_ns = 0
        self.by_session: dict[int, Chunks] = {}

    def add(self, session: int, age_ns: int | None, oldest_ns: int, *, is_executed: bool) -> None:
        """Count one report."""
        if age_ns is not None:
            unexecuted = self.unexecuted_ages_ns.setdefault(session, array("q"))
            (self.ages_ns if is_executed else unexecuted).append(age_ns)
        self.oldest_ns = max(self.oldest_ns, oldest_ns)
        executed, total = self.by_session.get(session, (0, 0))
        self.by_session[session] = Chunks(executed + is_executed, total + 1)


class RobotAccount(NamedTuple):
    """A robot in all its sessions; None: none of them said it."""

    name: str
    holds: int | None
    held_ns: int | None
    faults: int | None
    fault: str  # the newest; empty: none
    chunk_gap_ns: int | None  # the longest


def with_waits(run: RunLog) -> tuple[RobotStateLine, ...]:
    """The accounts of sessions; a wait for the first chunk, which rank 0 saw, is a gap as well."""
    return tuple(
        state
        if state.chunk_gap_ns is None
        else state._replace(
            chunk_gap_ns=max(state.chunk_gap_ns, run.first_waits_ns.get(state.session, 0))
        )
        for state in run.robot_states
    )


def robot_accounts(states: Iterable[RobotStateLine]) -> list[RobotAccount]:
    """Each robot, or ``ROBOTS_MAX`` that held for longest and one row of the others."""
    robots = by_robot(states)
    if len(robots) > ROBOTS_MAX:
        robots.sort(key=_held_ns, reverse=True)
    shown = [_account(name_of(sessions), sessions) for sessions in robots[:ROBOTS_MAX]]
    if rest := robots[ROBOTS_MAX:]:
        shown.append(_account(f"{len(rest)} others", [*chain.from_iterable(rest)]))
    return shown


def longest_held(states: Iterable[RobotStateLine]) -> RobotAccount | None:
    """The robot that held for longest in all; None without any."""
    worst = max(by_robot(states), key=_held_ns, default=None)
    return None if worst is None else _account(name_of(worst), worst)


def by_robot(states: Iterable[RobotStateLine]) -> list[list[RobotStateLine]]:
    """The sessions of each robot."""
    sessions: dict[str | int, list[RobotStateLine]] = {}
    for state in states:
        sessions.setdefault(state.robot or state.session, []).append(state)
    return [*sessions.values()]


def _held_ns(sessions: Iterable[RobotStateLine]) -> int:
    return sum(state.held_ns or 0 for state in sessions)


def name_of(sessions: list[RobotStateLine]) -> str:
    """A robot for people."""
    newest, n = sessions[-1], len(sessions)
    return f"{newest.robot} ({n} sessions)" if n > 1 and newest.robot else newest.name


def _account(name: str, sessions: list[RobotStateLine]) -> RobotAccount:
    holds, held_ns, faults, gaps_ns = (
        [n for state in sessions if (n := getattr(state, field)) is not None]
        for field in ("holds", "held_ns", "faults", "chunk_gap_ns")
    )
    return RobotAccount(
        name=name,
        holds=sum(holds) if holds else None,
        held_ns=sum(held_ns) if held_ns else None,
        faults=sum(faults) if faults else None,
        fault=next((state.fault for state in reversed(sessions) if state.fault), ""),
        chunk_gap_ns=max(gaps_ns, default=None),
    )
