"""SampleNumbers: which of a stream's samples a recording holds, by the numbers they came under.

Windows and resets count all that came; where the recorder lost some, the file has fewer.
"""

from __future__ import annotations


class SampleNumbers:
    """Numbers of one stream's samples, added in order; ``end`` is behind the newest.

    ``begins_late``: those before the first one are in a part of the recording that is not read.
    """

    def __init__(self, *, begins_late: bool = False) -> None:
        self._is_begun = not begins_late
        self.end = 0
        self.lost = 0  # what the recorder had to drop
        self._gaps: list[tuple[int, int]] = []  # number of the first one lost, and behind the last

    def add(self, first: int, samples: int) -> None:
        """Consecutive samples, of which the first has the number ``first``."""
        if first != self.end:
            self._gaps.append((self.end, first))
            self.lost += (first - self.end) * self._is_begun
        self.end = first + samples
        self._is_begun = True

    def held(self, count: int) -> int:
        """Returns how many of the first ``count`` samples are there."""
        count = min(count, self.end)
        return count - sum(min(end, count) - first for first, end in self._gaps if first < count)
