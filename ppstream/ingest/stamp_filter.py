"""StampFilter: whether a robot's time stamps are plausible, without synchronised clocks.

The *lead* of a sample is its stamp minus its arrival on rank 0. The two clocks share no origin, so
a lead alone means nothing, but on a healthy robot it only falls (the network was slow) or creeps
up (the network was faster, the clocks drift). A backlog after a stall is therefore never mistaken
for a jump; what of it is too old for any window is told apart: its lead is far below the best of
late. What it is not: an estimate of the offset between the clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ppstream import native
from ppstream.core.clock import NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Older than any stamp accepted, and far enough from int64's ends for differences of stamps.
NEVER_NS: Final = -(1 << 62)
FUTURE_LIMIT_NS: Final = NS_PER_S
ASKED_LIMIT_NS: Final = 60 * NS_PER_S  # of samples on request: the ones before may have been slow
JUMP_SAMPLES: Final = 50  # consecutive late or future ones: not they are wrong, the clock is new
BEST_NS: Final = 10 * NS_PER_S  # the best lead of late is that of one to two of these: clocks drift
BACKLOG_NS: Final = NS_PER_S  # stale for longer than this is no backlog: the clock stood still
INT64: Final = np.iinfo(np.int64)


class Judged(NamedTuple):
    """Fate of the first samples of a message: the rest is to be judged after them."""

    good: NDArray[np.bool_]  # of the samples judged; their stamps increase
    late: int
    duplicate: int
    future: int
    stale: int


class StampFilter(native.Clock):
    """Judges all streams of one robot together, as they share one clock.

    Args:
        on_jump: called once ``JUMP_SAMPLES`` samples in a row were implausible, none between them
            accepted: must forget everything stamped by the old clock.
        stale_ns: what was so much longer on its way than the quickest of late is of no use any
            more; None: everything is.
        future_ns: a lead that is so much above the best one is implausible.
    """

    def __init__(
        self,
        on_jump: Callable[[], None],
        stale_ns: int | None = None,
        future_ns: int = FUTURE_LIMIT_NS,
    ) -> None:
        self._on_jump = on_jump
        self.stale_ns, self.future_ns = stale_ns, future_ns
        self._is_real_time = True
        self.restart()

    def restart(self, *, is_real_time: bool | None = None) -> None:
        """Begin anew. Without real time (a recording, fed at any speed) no stamp is too new."""
        if is_real_time is not None:
            self._is_real_time = is_real_time
        self._lead_ns: int | None = None
        self._rejected = 0
        self._stale_since_ns = NEVER_NS  # when the first of a backlog came; never: there is none
        self._begin_best(NEVER_NS, 0)

    def accepts(self, stamp_ns: int, rx_ns: int) -> bool:
        """True when ``stamp_ns`` is neither ahead of its time nor stale; then it is accepted."""
        lead_ns = stamp_ns - rx_ns
        if stamp_ns > -NEVER_NS:
            return False
        if self._lead_ns is None:
            self._lead_ns = lead_ns
            if not self._is_real_time:  # any lead is as good as the best, for ever
                self._best_ns = self._best_until_ns = INT64.max
        elif self._is_real_time and lead_ns > self._lead_ns:
            if lead_ns > self._lead_ns + self.future_ns:
                return False
            self._lead_ns = lead_ns
        elif lead_ns < self._floor_ns:
            return False
        if lead_ns > self._best_ns or rx_ns >= self._best_until_ns:
            self._improve(lead_ns, rx_ns)
        self._rejected = 0
        self._stale_since_ns = NEVER_NS
        return True

    def is_stale(self, stamp_ns: int, rx_ns: int) -> bool:
        """True when a sample that is newer than all before was too long on its way.

        When that goes on for ``BACKLOG_NS``, it is no backlog that a reader catches up with: from
        then on the lead of the day counts.
        """
        lead_ns = stamp_ns - rx_ns
        if lead_ns >= self._floor_ns:
            return False
        if self._stale_since_ns == NEVER_NS:
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

    def judge(self, stamps: NDArray[np.int64], newest_ns: int, rx_ns: int) -> Judged:
        """Judge samples of one message at once, as ``accepts`` and its like do one by one.

        It ends before the first sample that changes how the next ones are judged: the first of a
        clock, one that is ahead by its own limit thanks to one before it, the last straw of a
        jump, or the end of a backlog. That one is for ``accepts``, ``is_stale`` and ``rejects``.

        Args:
            stamps: ``[n]`` int64 ns of the robot's clock.
            newest_ns: stamp of the newest sample that its stream has.
            rx_ns: when the message arrived.
        """
        if self._lead_ns is None and newest_ns < stamps.item(0) <= -NEVER_NS:
            return Judged(np.zeros(0, np.bool_), 0, 0, 0, 0)
        base_ns, bound_ns, floor_ns = self._bounds(rx_ns)
        may_pass = (stamps <= bound_ns) & (stamps >= floor_ns)
        highest = np.maximum.accumulate(np.where(may_pass, stamps, INT64.min))
        earlier = np.concatenate(((INT64.min,), highest[:-1]))  # of this message, taken before
        newest = np.maximum(earlier, newest_ns)
        rises = stamps > newest
        good = rises & may_pass
        late, duplicate = stamps < newest, stamps == newest
        future, stale = rises & (stamps > bound_ns), rises & (stamps < floor_ns)
        stop = len(stamps)
        if self._lead_ns is None:
            stop = _first(good, stop)
        elif self._is_real_time:
            grown = np.minimum(np.maximum(earlier, base_ns) + self.future_ns, -NEVER_NS)
            stop = _first(future & (stamps <= grown), stop)
        if self._stale_since_ns != NEVER_NS and rx_ns - self._stale_since_ns > BACKLOG_NS:
            stop = _first(stale, stop)
        rejected = (late | future).cumsum()
        in_a_row = rejected - np.maximum.accumulate(np.where(good, rejected, -self._rejected))
        stop = _first((late | future) & (in_a_row >= JUMP_SAMPLES), stop)
        good = good[:stop]
        counts = (int(np.count_nonzero(kind[:stop])) for kind in (late, duplicate, future, stale))
        judged = Judged(good, *counts)
        if stop:
            self._note(stamps[:stop][good], rx_ns, int(in_a_row[stop - 1]), judged.stale)
        return judged

    def _bounds(self, rx_ns: int) -> tuple[int, int, int]:
        """Stamps that arrive now: the latest like one before, the latest and the oldest to take."""
        base_ns = NEVER_NS if self._lead_ns is None else self._lead_ns + rx_ns
        ahead_ns = -NEVER_NS
        if self._is_real_time and self._lead_ns is not None:
            ahead_ns = min(ahead_ns, base_ns + self.future_ns)
        bounds = base_ns, max(base_ns, ahead_ns), self._floor_ns + rx_ns
        base_ns, bound_ns, floor_ns = (max(INT64.min, min(INT64.max, at_ns)) for at_ns in bounds)
        return base_ns, bound_ns, floor_ns

    def _note(self, good: NDArray[np.int64], rx_ns: int, rejected: int, stale: int) -> None:
        """Remember what was judged: stamps taken, refused ones since, and whether any was stale."""
        if len(good):
            self.accepts(good.item(0), rx_ns)
            self.accepts(good.item(-1), rx_ns)
        elif stale and self._stale_since_ns == NEVER_NS:
            self._stale_since_ns = rx_ns
        self._rejected = rejected

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
        counts = self.stale_ns is not None and self._is_real_time and best_ns > NEVER_NS
        self._floor_ns = best_ns - (self.stale_ns or 0) if counts else 2 * NEVER_NS


def _first(which: NDArray[np.bool_], end: int) -> int:
    """The index of the first that is true, ``end`` if none before it is."""
    index = int(which.argmax())
    return min(index, end) if which[index] else end
