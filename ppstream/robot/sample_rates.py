"""SampleRates: how many samples rank 0 takes of each stream in a second, known before they leave.

Rank 0 refuses what comes above (``sessions/table.py``). A robot that asks would wait for an answer
that never comes, or get one that was computed from the frames of before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import RateError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class SampleRates:
    """Observations of one robot, those of the newest second; for one thread at a time.

    Args:
        per_s: samples of a stream at most; of streams that are missing any number.
    """

    def __init__(self, per_s: Mapping[str, int]) -> None:
        self.per_s = per_s
        self._recent = {name: deque[int](maxlen=samples) for name, samples in per_s.items()}

    def note(self, streams: Collection[str], now_ns: int) -> None:
        """An observation with one sample of each of ``streams`` is about to leave.

        Raises:
            RateError: rank 0 would refuse one of them; none is counted.
        """
        recent = {name: times for name, times in self._recent.items() if name in streams}
        for name, times in recent.items():
            if len(times) == times.maxlen and now_ns - times[0] < NS_PER_S:
                raise RateError(
                    f"{len(times)} observations came within a second, which is all that rank 0 "
                    f"takes of {name}; ask less often, or raise max_request_hz (rate_hz) of {name}"
                )
        for times in recent.values():
            times.append(now_ns)
