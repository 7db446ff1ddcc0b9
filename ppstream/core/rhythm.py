"""Rhythm: when the next event is expected, of events that come at even distances.

Robots observe at a rate of their own. Whoever knows it wakes a little before, and the observation
finds code and data in the caches. Nothing depends on it: what comes at another time finds what it
always found.
"""

from __future__ import annotations

from typing import Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S

NEAR_NS: Final = NS_PER_MS  # an event so near to when it was expected is in step
AHEAD_NS: Final = NS_PER_MS // 2  # of one that is expected all is ready: it may come early
ODD_MAX: Final = 2  # in a row that are not: the rhythm is another one from then on
SHORTEST_NS: Final = 4 * NS_PER_MS  # between two
LONGEST_NS: Final = NS_PER_S


def usual(before_ns: int, seen_ns: int) -> int:
    """Returns a mean that forgets, of durations of which one that took long hardly counts.

    Args:
        before_ns: the mean so far; 0: none was seen.
        seen_ns: the newest.
    """
    late_ns = seen_ns - before_ns
    return before_ns + (min(late_ns, before_ns >> 3) >> 3) if before_ns else seen_ns


class Rhythm:
    """Follows the instants of events; of one thread.

    Attributes:
        next_ns: when the next one is expected; None: the newest was out of step, or they are so
            many that caches stay warm, or so few that nobody knows.
    """

    def __init__(self) -> None:
        self._newest_ns = self._expected_ns = self._step_ns = 0
        self._odd = ODD_MAX + 1
        self.next_ns: int | None = None

    def note(self, at_ns: int) -> None:
        """One came at ``at_ns``."""
        late_ns = at_ns - self._expected_ns
        if -NEAR_NS < late_ns < NEAR_NS:
            self._odd = 0
            self._step_ns += late_ns >> 4
            self._expected_ns += late_ns >> 1
        else:
            self._odd += 1
            if self._odd > ODD_MAX:
                self._step_ns = at_ns - self._newest_ns
                self._expected_ns = at_ns
        self._newest_ns = at_ns
        self._expected_ns += self._step_ns
        is_even = self._odd == 0 and SHORTEST_NS <= self._step_ns <= LONGEST_NS
        self.next_ns = self._expected_ns if is_even else None

    def ready_ns(self, now_ns: int, ahead_ns: int = AHEAD_NS) -> int | None:
        """When to get ready, ``ahead_ns`` before the next one or the one behind; None: unknown."""
        if self.next_ns is None:
            return None
        at_ns = self.next_ns - ahead_ns
        if at_ns < now_ns:
            at_ns += self._step_ns
        return None if at_ns < now_ns else at_ns
