"""The offset between a robot's clock and rank 0's, with its uncertainty: for traces, nothing else.

Rank 0 asks, the robot answers with what its clock shows. The answer was read somewhere between
question and arrival, so half the round trip bounds the error. No sample, lease or action is ever
judged by it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

READINGS: Final = 16  # the best of so many counts, so that drift is followed


class Offset(NamedTuple):
    """Robot's clock minus rank 0's, exact to plus or minus ``uncertainty_ns``."""

    offset_ns: int
    uncertainty_ns: int


class OffsetEstimate:
    """The least uncertain of one robot's last readings."""

    def __init__(self) -> None:
        self._readings: deque[Offset] = deque(maxlen=READINGS)

    def add(self, asked_ns: int, robot_ns: int, heard_ns: int) -> Offset | None:
        """One answer: when it was asked and heard by rank 0's clock, and what the robot's showed.

        Returns:
            The best estimate now; None when the answer cannot be one: it came before the question.
        """
        round_trip_ns = heard_ns - asked_ns
        if round_trip_ns < 0:
            return None
        half_ns = (round_trip_ns + 1) // 2
        self._readings.append(Offset(robot_ns - asked_ns - half_ns, half_ns))
        return min(self._readings, key=lambda reading: reading.uncertainty_ns)
