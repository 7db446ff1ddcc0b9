"""TimeAccount: where the time of one serial thread goes, other than into its stages.

Each moment is a stage's, a wait's or the link's: what lies between the end of one stage or wait and
the beginning of the next is the link's, with the loop around it. So a thread that loses its
processor anywhere leaves no time that nobody claims. Time claimed twice, by a stage that is stamped
into a wait, is not taken back from anybody: it shows.
"""

from __future__ import annotations

from typing import Final

from ppstream.core.clock import now_ns

LINK: Final = "link"


class TimeAccount:
    """Owned by one thread; ``end`` it once when that thread starts or goes on after a pause."""

    def __init__(self) -> None:
        self._ns = dict.fromkeys(("input", "credit", "result", LINK), 0)
        self._since_ns = now_ns()

    def begin(self) -> int:
        """A stage or a wait begins: time since the last one's end was the link's. Returns now."""
        now = now_ns()
        self._ns[LINK] += now - self._since_ns
        self._since_ns = now
        return now

    def end(self, cause: str | None = None, at_ns: int | None = None) -> int:
        """It ends: with the cause of a wait, without one for a stage. Returns now.

        With ``at_ns`` it ended then, and what has followed is the link's.
        """
        now = at_ns or now_ns()
        if cause is not None:
            self._ns[cause] += now - self._since_ns
        self._since_ns = now
        return now

    def stage(self, began_ns: int, ended_ns: int) -> None:
        """A stage that has stamped itself, after the fact."""
        if began_ns > self._since_ns:
            self._ns[LINK] += began_ns - self._since_ns
        self._since_ns = ended_ns

    def pop_ns(self, cause: str) -> int:
        """Returns the time that has gone to it since the last call."""
        taken_ns, self._ns[cause] = self._ns[cause], 0
        return taken_ns
