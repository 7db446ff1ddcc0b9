"""What a RobotClient counts, as one record, and the line of it that people read."""

from __future__ import annotations

from dataclasses import dataclass

from ppstream.core.clock import NS_PER_MS
from ppstream.core.durations import Quantiles
from ppstream.robot.timeline_counts import TimelineStatistics


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """How a client gets its session back.

    ``attempts``: times it asked since it holds none; 0 while it holds one. ``pause_ns``: what it
    waits between two of them now. ``refusal``: the last answer, if it was one. ``outage``: from
    noticing a loss to the new session, over all losses.
    """

    attempts: int
    pause_ns: int
    refusal: str | None
    outage: Quantiles


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """Counts since the start; ``age`` is observation to action, in the robot's clock.

    ``failure``: what ended the receiving thread, with its traceback; None: it lives.
    ``unsent``: samples pushed while nobody could take them. ``dropped``: chunks that were not for
    this robot as it was; the timeline counts the rest. ``undecodable``: frames. ``dispatch``: from
    the receipt of a chunk to the execution of its first action.
    """

    session: int
    phase: str
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
        """For people: the connection, and the oldest action executed so far."""
        if self.failure is not None:
            state = self.failure.partition("\n")[0]
        elif self.session:
            state = f"session {self.session:x}, {self.phase}"
        else:
            again = self.reconnecting
            why = f" ({again.refusal})" if again.refusal else ""
            pause = f"{again.pause_ns / NS_PER_MS:g} ms"
            state = f"no session{why}: asked {again.attempts} times, pause {pause}"
        age = f"age p50 {self.age.p50_ns / NS_PER_MS:.1f} p99 {self.age.p99_ns / NS_PER_MS:.1f} ms"
        return f"{state}; {age}; {self.timeline.oldest_text()}"
