"""RowInput: all rings of one robot, whose they are, and what that robot says it executes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from ppstream.ingest.ring import RingBank, SensorRing
from ppstream.ingest.sample_ledger import CLOCK_JUMP, CLOSED, NEW_EPISODE
from ppstream.ingest.stamp_filter import FUTURE_LIMIT_NS, StampFilter


class Need(NamedTuple):
    """Samples that a window must have of a stream: the policy cannot see that they are missing."""

    most_ns: int  # how much older than the window's end its newest sample may be
    samples: int = 1  # not newer than the end


NOTHING_NEEDED: Final[Mapping[str, Need]] = {}


class Commitment(NamedTuple):
    """A Prefix that can be used: ``actions [n, dim]`` float32, finite, n of at least 1."""

    start_ns: int
    dt_ns: int
    expires_ns: int
    delay_ns: int
    actions: np.ndarray[Any, Any]


class RowInput:
    """The place of one robot: a ring per stream, and whose they are.

    ``session`` is 0 while the place is free; ``session_epoch`` counts the session's episodes.
    ``instruction_id`` names the text that the policy follows for it (``instructions.py``), and
    ``conditioning_epoch`` counts the robot's instructions. ``awaits_text``: its robot came with a
    text that the policy has not answered yet, and is not served without it.

    Args:
        banks: one per stream, by its name.
        row: this place's index in them.
        reference: the stream whose newest stamp ends the window.
        needs: by stream without whose samples the policy acts blindly.
        stale_ns, future_ns: as ``StampFilter``.
    """

    def __init__(
        self,
        banks: Mapping[str, RingBank],
        row: int,
        reference: str,
        stale_ns: int | None = None,
        needs: Mapping[str, Need] = NOTHING_NEEDED,
        future_ns: int = FUTURE_LIMIT_NS,
    ) -> None:
        self.clock = StampFilter(lambda: self._clear(CLOCK_JUMP), stale_ns, future_ns)
        self.rings = {name: SensorRing(bank, row, self.clock) for name, bank in banks.items()}
        self.reference = self.rings[reference]
        self.needs = tuple((self.rings[name], need) for name, need in needs.items())
        self.session = 0
        self.session_epoch = 0
        self.instruction_id = 0  # 0: none
        self.conditioning_epoch = 0
        self.awaits_text = False
        self.robot = ""  # the name that its session said
        self.commitment: Commitment | None = None  # what it executes meanwhile, as it last said

    @property
    def present(self) -> bool:
        """True when a window can be cut that ends at the newest sample of the reference stream."""
        return self.present_at(None)

    def present_at(self, end_ns: int | None) -> bool:
        """True when a window can be cut: the row is taken, awaits no text, the reference stream has
        a sample, and no stream lacks those that are needed.

        ``end_ns``: where the window ends; None: at the newest sample of the reference stream.
        """
        if self.session == 0 or self.awaits_text or self.reference.count == 0:
            return False
        return not self.needs or not self.lacks_samples(end_ns)

    def lacks_samples(self, end_ns: int | None) -> bool:
        """True when a stream has not the samples without which the policy acts blindly.

        ``end_ns``: as ``present_at``.
        """
        end_ns = self.reference.newest_ns if end_ns is None else end_ns
        return any(_is_unmet(ring, need, end_ns) for ring, need in self.needs)

    def lacks(self, stream: str) -> bool:
        """True when no window is cut for want of samples of ``stream``, which is needed."""
        wanted, end_ns = self.rings[stream], self.reference.newest_ns
        return any(ring is wanted and _is_unmet(ring, need, end_ns) for ring, need in self.needs)

    def open(self, session: int, *, is_real_time: bool = True) -> None:
        """Give the free place to ``session``; false for a recording fed at any other speed."""
        assert session != 0, "session 0 means nobody"
        assert self.session == 0, f"session {session} opens a row that is {self.session}'s"
        self.session = session
        self.session_epoch = 0
        self.clock.restart(is_real_time=is_real_time)

    def close(self) -> None:
        """The session is over: the place is free and the rings are empty."""
        self._clear(CLOSED)
        self.session = 0
        self.session_epoch = 0
        self.instruction_id = self.conditioning_epoch = 0
        self.awaits_text = False

    def new_episode(self) -> None:
        """The robot starts anew: nothing older may reach a window. Its clock goes on."""
        self._clear(NEW_EPISODE)
        self.session_epoch += 1

    def _clear(self, reason: str) -> None:
        self.commitment = None
        for ring in self.rings.values():
            ring.clear(reason)


def _is_unmet(ring: SensorRing, need: Need, end_ns: int) -> bool:
    return end_ns - ring.newest_at(end_ns, need.samples) > need.most_ns
