"""Counts of a RobotClient, running and as one record, and the line of it that people read.

What an ActionTimeline counts, and the records it shows; plain numbers, nothing is decided.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import counted
from ppstream.core.quantiles import Quantiles
from ppstream.robot.chunk_playback import ChunkOutcome
from ppstream.robot.session import Reconnecting, RobotSession


@dataclass(frozen=True, slots=True)
class TimelineStatistics:
    """Counts since the start: received = refused + executed + superseded + pending.

    ``executed``: at least one step was; ``superseded``: none, a newer chunk came first.
    ``oldest_ns``: window end to execution of the oldest action executed; ``max_age_ns``: its
    limit, 0 when only the lease limits; ``too_old``: how often an action beyond the limit was
    refused though its lease still ran.
    """

    received: int
    refused: dict[str, int]
    executed: int
    superseded: int
    pending: int
    steps_executed: int
    steps_skipped: int
    oldest_ns: int
    max_age_ns: int
    too_old: int

    def oldest_text(self) -> str:
        """For people: ``oldest action executed: 41.3 ms of 60``."""
        return oldest_text(self.oldest_ns, self.max_age_ns)

    def refused_text(self) -> str:
        """For people: ``; of 41 chunks refused: 2 expired``; empty: none was."""
        refused = ", ".join(f"{count} {why}" for why, count in self.refused.items() if count)
        return f"; of {counted(self.received, 'chunk')} refused: {refused}" if refused else ""


def oldest_text(oldest_ns: int, max_age_ns: int) -> str:
    """For people; an age of 0 means that no action was executed."""
    if not oldest_ns:
        return "no action executed"
    limit = f" of {max_age_ns / NS_PER_MS:g}" if max_age_ns else ""
    return f"oldest action executed: {oldest_ns / NS_PER_MS:.1f} ms{limit}"


class Holds(NamedTuple):
    """Executed and held ticks of a robot since its session began.

    ``holds``: times it began to hold though the run was ready and it had executed actions of this
    episode; ``held_ns``: how long, with the hold in progress. ``fault``: the newest of
    ``faults``, in words.
    """

    holds: int
    held_ns: int
    faults: int
    fault: str


@dataclass(slots=True)
class HoldCounts:
    """The running counts of ``Holds``; guarded by the timeline's lock.

    A hold or a fault that is under way when a session begins belongs to it.
    """

    holds: int = 0
    held_ns: int = 0  # of holds that are over
    faults: int = 0
    fault: str = ""
    _since_ns: int | None = None  # the hold under way
    _newest_ns: int = 0  # when it was last seen to go on
    untold: str = ""  # the newest fault, until somebody has logged it
    _latched: str = ""  # the fault under way
    _has_executed: bool = False

    def execute(self, at_ns: int) -> None:
        """An action is executed: nothing is held, no fault stands."""
        self.pause(at_ns)
        self._has_executed = True
        self._latched = ""

    def hold(self, at_ns: int) -> bool:
        """Nothing is executed though the run is ready; True when a hold begins by that."""
        self._newest_ns = at_ns
        if self._since_ns is not None or not self._has_executed:
            return False
        self._since_ns = at_ns
        self.holds += 1
        return True

    def latch(self, fault: str) -> bool:
        """The fault that stands now, empty: none; True when it latched since the last call."""
        is_new = fault not in ("", self._latched)
        self._latched = fault
        if is_new:
            self.faults += 1
            self.fault = self.untold = fault
        return is_new

    def pause(self, at_ns: int) -> None:
        """The hold under way, if any, is over or not counted any longer."""
        if self._since_ns is not None:
            self.held_ns += max(0, at_ns - self._since_ns)
            self._since_ns = None

    def begin_episode(self) -> None:
        """Nothing is owed until the next action."""
        self.pause(self._newest_ns)
        self._has_executed = False

    def begin_session(self) -> None:
        self.holds = int(self._since_ns is not None)
        self.faults = int(self._latched != "")
        self.held_ns, self.fault = 0, self._latched

    def so_far(self, now_ns: int) -> Holds:
        running_ns = 0 if self._since_ns is None else max(0, now_ns - self._since_ns)
        return Holds(self.holds, self.held_ns + running_ns, self.faults, self.fault)


@dataclass(slots=True)
class TimelineCounts:
    """The running counts; guarded by the timeline's lock."""

    received: int = 0
    executed: int = 0
    superseded: int = 0
    steps_executed: int = 0
    steps_skipped: int = 0
    oldest_ns: int = 0
    too_old: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def end(self, outcome: ChunkOutcome) -> None:
        """A chunk ended."""
        self.steps_executed += outcome.executed
        self.steps_skipped += outcome.skipped
        if outcome.executed:
            self.executed += 1
        else:
            self.superseded += 1

    def statistics(self, pending: int, max_age_ns: int) -> TimelineStatistics:
        """A copy."""
        return TimelineStatistics(
            received=self.received,
            refused=dict(self.refused),
            executed=self.executed,
            superseded=self.superseded,
            pending=pending,
            steps_executed=self.steps_executed,
            steps_skipped=self.steps_skipped,
            oldest_ns=self.oldest_ns,
            max_age_ns=max_age_ns,
            too_old=self.too_old,
        )


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """Counts since the start; ``age`` is observation to action, in the robot's clock.

    ``phase_text``: the phase, and why, where streams of this robot degrade the run.
    ``failure``: the exception that ended the receiving thread, with traceback; None: it runs.
    ``unsent``: samples pushed while rank 0 could not receive. ``dropped``: chunks of another
    session or episode, and those unread at the close (``closed``); the timeline counts the
    rest. ``undecodable``: frames. ``dispatch``: from
    the receipt of a chunk to the execution of its first action.
    """

    session: int
    phase: str
    phase_text: str
    failure: str | None
    sessions_opened: int
    reconnecting: Reconnecting
    sent: int
    unsent: int
    undecodable: int
    dropped: dict[str, int]
    timeline: TimelineStatistics
    age: Quantiles
    dispatch: Quantiles

    def line(self) -> str:
        """For people: the connection, the oldest action executed so far, and refused chunks."""
        if self.failure is not None:
            state = self.failure.partition("\n")[0]
        elif self.session:
            state = f"session {self.session:x}, {self.phase_text}"
        else:
            again = self.reconnecting
            why = f" ({again.refusal})" if again.refusal else ""
            pause = f"{again.pause_ns / NS_PER_MS:g} ms"
            state = f"no session{why}: asked {counted(again.attempts, 'time')}, pause {pause}"
        age = f"age p50 {self.age.p50_ns / NS_PER_MS:.1f} p99 {self.age.p99_ns / NS_PER_MS:.1f} ms"
        chunks = f"{self.timeline.oldest_text()}{self.timeline.refused_text()}"
        return f"{state}; {age}; {chunks}"


class ClientCounts:
    """The running counts of ``ClientStatistics`` that nobody else keeps; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = self._unsent = 0
        self._dropped: Counter[str] = Counter()

    def add_samples(self, sent: int, unsent: int) -> None:
        with self._lock:
            self._sent += sent
            self._unsent += unsent

    def add_dropped(self, reason: str) -> None:
        """A chunk was dropped."""
        with self._lock:
            self._dropped[reason] += 1

    def statistics(
        self,
        session: RobotSession,
        timeline: TimelineStatistics,
        times: tuple[Quantiles, Quantiles],
        *,
        failure: str | None,
        undecodable: int,
    ) -> ClientStatistics:
        """A copy, with what others count; ``times``: age and dispatch."""
        age, dispatch = times
        with self._lock:
            return ClientStatistics(
                session=session.session,
                phase=session.phase,
                phase_text=session.phase_text,
                failure=failure,
                sessions_opened=session.opened,
                reconnecting=session.reconnecting(),
                sent=self._sent,
                unsent=self._unsent,
                undecodable=undecodable,
                dropped=dict(self._dropped),
                timeline=timeline,
                age=age,
                dispatch=dispatch,
            )
