"""RobotClock: whether a robot's time stamps are plausible, without synchronised clocks.

The *lead* of a sample is its stamp minus its arrival on rank 0. The two clocks share no origin, so
a lead alone means nothing, but on a healthy robot it only falls (the network was slow) or creeps
up (the network was faster, the clocks drift). A backlog after a stall is therefore never mistaken
for a jump. What it is not: an estimate of the offset between the clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ppstream.clock import NS_PER_S

#: Older than any stamp accepted, and far enough from int64's ends for differences of stamps.
NEVER_NS: Final = -(1 << 62)
FUTURE_LIMIT_NS: Final = NS_PER_S
JUMP_SAMPLES: Final = 50  # consecutive late or future ones: not they are wrong, the clock is new


class RobotClock:
    """Judges all streams of one robot together, as they share one clock.

    Args:
        on_jump: called once ``JUMP_SAMPLES`` samples in a row were implausible, none between them
            accepted: must forget everything stamped by the old clock.
    """

    def __init__(self, on_jump: Callable[[], None]) -> None:
        self._on_jump = on_jump
        self._is_real_time = True
        self.restart()

    def restart(self, *, is_real_time: bool | None = None) -> None:
        """Begin anew. Without real time (a recording, fed at any speed) no stamp is too new."""
        if is_real_time is not None:
            self._is_real_time = is_real_time
        self._lead_ns: int | None = None
        self._rejected = 0

    def accepts(self, stamp_ns: int, rx_ns: int) -> bool:
        """Whether ``stamp_ns`` is not ahead of its time; if so it counts as accepted."""
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
        self._rejected = 0
        return True

    def rejects(self) -> bool:
        """Count a late or future sample; True: that was the last straw, the clock starts anew."""
        self._rejected += 1
        if self._rejected < JUMP_SAMPLES:
            return False
        self._on_jump()
        self.restart()
        return True
