"""RobotClock: whether a robot's time stamps are plausible, without synchronised clocks.

The *lead* of a sample is its stamp minus its arrival on rank 0. The two clocks share no origin, so
a lead alone means nothing, but on a healthy robot it only falls (the network was slow) or creeps
up (the network was faster, the clocks drift). A backlog after a stall is therefore never mistaken
for a jump; what of it is too old for any window is told apart: its lead is far below the best of
late. What it is not: an estimate of the offset between the clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ppstream.clock import NS_PER_S

#: Older than any stamp accepted, and far enough from int64's ends for differences of stamps.
NEVER_NS: Final = -(1 << 62)
FUTURE_LIMIT_NS: Final = NS_PER_S
JUMP_SAMPLES: Final = 50  # consecutive late or future ones: not they are wrong, the clock is new
BEST_NS: Final = 10 * NS_PER_S  # the best lead of late is that of one to two of these: clocks drift
BACKLOG_NS: Final = NS_PER_S  # stale for longer than this is no backlog: the clock stood still


class RobotClock:
    """Judges all streams of one robot together, as they share one clock.

    Args:
        on_jump: called once ``JUMP_SAMPLES`` samples in a row were implausible, none between them
            accepted: must forget everything stamped by the old clock.
        stale_ns: what was so much longer on its way than the quickest of late is of no use any
            more; None: everything is.
    """

    def __init__(self, on_jump: Callable[[], None], stale_ns: int | None = None) -> None:
        self._on_jump = on_jump
        self._stale_ns = stale_ns
        self._is_real_time = True
        self.restart()

    def restart(self, *, is_real_time: bool | None = None) -> None:
        """Begin anew. Without real time (a recording, fed at any speed) no stamp is too new."""
        if is_real_time is not None:
            self._is_real_time = is_real_time
        self._lead_ns: int | None = None
        self._rejected = 0
        self._stale_since_ns: int | None = None
        self._begin_best(NEVER_NS, 0)

    def accepts(self, stamp_ns: int, rx_ns: int) -> bool:
        """Whether ``stamp_ns`` is not ahead of its time nor stale; if so it counts as accepted."""
        lead_ns = stamp_ns - rx_ns
        if self._lead_ns is None:
            if stamp_ns > -NEVER_NS:
                return False
            self._lead_ns = lead_ns
        elif lead_ns > self._lead_ns:
            if stamp_ns > -NEVER_NS or (
                self._is_real_time and lead_ns > self._lead_ns + FUTURE_LIMIT_NS
            ):
                return False
            self._lead_ns = lead_ns
        elif lead_ns < self._floor_ns:
            return False
        if lead_ns > self._best_ns or rx_ns >= self._best_until_ns:
            self._improve(lead_ns, rx_ns)
        self._rejected = 0
        self._stale_since_ns = None
        return True

    def is_stale(self, stamp_ns: int, rx_ns: int) -> bool:
        """Whether a sample that is newer than all before was too long on its way.

        When that goes on for ``BACKLOG_NS``, it is no backlog that a reader catches up with: from
        then on the lead of the day counts.
        """
        lead_ns = stamp_ns - rx_ns
        if lead_ns >= self._floor_ns:
            return False
        if self._stale_since_ns is None:
            self._stale_since_ns = rx_ns
        elif rx_ns - self._stale_since_ns > BACKLOG_NS:
            self._begin_best(lead_ns, rx_ns)
            return False
        return True

    def rejects(self) -> bool:
        """Count a late or future sample; True: that was the last straw, the clock starts anew."""
        self._rejected += 1
        if self._rejected < JUMP_SAMPLES:
            return False
        self._on_jump()
        self.restart()
        return True

    def _begin_best(self, lead_ns: int, rx_ns: int) -> None:
        """Forget how quick samples were; ``lead_ns`` is the only one known."""
        self._previous_ns = self._best_ns = lead_ns
        self._best_until_ns = rx_ns + BEST_NS
        self._set_floor()

    def _improve(self, lead_ns: int, rx_ns: int) -> None:
        if rx_ns >= self._best_until_ns:
            self._previous_ns, self._best_ns = self._best_ns, lead_ns
            self._best_until_ns = rx_ns + BEST_NS
        self._best_ns = max(self._best_ns, lead_ns)
        self._set_floor()

    def _set_floor(self) -> None:
        best_ns = max(self._best_ns, self._previous_ns)
        counts = self._stale_ns is not None and self._is_real_time and best_ns > NEVER_NS
        self._floor_ns = best_ns - (self._stale_ns or 0) if counts else 4 * NEVER_NS
