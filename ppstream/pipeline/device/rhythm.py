"""Rhythm: when the next envelope should be done, from how those before it came.

The end of an event has no descriptor: whoever waits for one sleeps and looks. Sleeping until it
should be there, and only then looking often, costs a wake-up an envelope instead of one each 20 µs.
Pure; any clock, as long as it is one.
"""

from __future__ import annotations

from typing import Final

SHIFT: Final = 2  # a quarter of what is new: one late envelope moves little
LEAST_NS: Final = 1_000  # so that what is usually nothing can grow


class Rhythm:
    """Of envelopes that are queued and done in order."""

    def __init__(self) -> None:
        self._done_ns = 0  # the newest one was
        self._gap_ns = 0  # usually, between two of which the second stood queued
        self._alone_ns = 0  # usually, from queueing one behind nothing until it is done

    def done(self, queued_ns: int, done_ns: int) -> None:
        """The envelope that was queued at ``queued_ns`` was done at ``done_ns``."""
        if queued_ns < self._done_ns:
            self._gap_ns = _towards(self._gap_ns, done_ns - self._done_ns)
        else:
            self._alone_ns = _towards(self._alone_ns, done_ns - queued_ns)
        self._done_ns = done_ns

    def due_ns(self, queued_ns: int) -> int:
        """When the oldest that is not done, which was queued at ``queued_ns``, should be."""
        if queued_ns < self._done_ns:
            return self._done_ns + self._gap_ns
        return queued_ns + self._alone_ns


def _towards(usual_ns: int, seen_ns: int) -> int:
    """A share of what is new; an outlier counts for twice the usual, or others would come late."""
    if not usual_ns:
        return seen_ns
    most_ns = 2 * usual_ns + LEAST_NS
    return usual_ns + (((seen_ns if seen_ns < most_ns else most_ns) - usual_ns) >> SHIFT)
