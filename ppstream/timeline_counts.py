"""What an ActionTimeline counts, and the record it shows; plain numbers, nothing is decided."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ppstream.clock import NS_PER_MS
from ppstream.playing import Outcome


@dataclass(frozen=True, slots=True)
class TimelineStatistics:
    """Counts since the start: received = refused + executed + superseded + pending.

    ``executed``: at least one step was; ``superseded``: none, a newer chunk came first.
    ``oldest_ns``: window end to execution of the oldest action executed; ``max_age_ns``: what it
    may be at most, 0 when the lease alone says; ``too_old``: how often an action was refused for
    it though its lease still ran.
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
        if not self.executed and not self.oldest_ns:
            return "no action executed"
        limit = f" of {self.max_age_ns / NS_PER_MS:g}" if self.max_age_ns else ""
        return f"oldest action executed: {self.oldest_ns / NS_PER_MS:.1f} ms{limit}"


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

    def end(self, outcome: Outcome) -> None:
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
