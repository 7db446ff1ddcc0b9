"""RowInput: all rings of one robot, whose they are, and what that robot says it executes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from ppstream.ingest.ring import RingBank, SensorRing
from ppstream.ingest.sample_ledger import CLOCK_JUMP, CLOSED, NEW_EPISODE
from ppstream.ingest.stamp_filter import StampFilter

NOTHING_NEEDED: Final[Mapping[str, int]] = {}


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
        needed_ns: by stream without whose samples the policy acts blindly, how much older than the
            reference's its newest may be.
        stale_ns: samples that were so much longer on their way than others are refused.
    """

    def __init__(
        self,
        banks: Mapping[str, RingBank],
        row: int,
        reference: str,
        stale_ns: int | None = None,
        needed_ns: Mapping[str, int] = NOTHING_NEEDED,
    ) -> None:
        self.clock = StampFilter(lambda: self._clear(CLOCK_JUMP), stale_ns)
        self.rings = {name: SensorRing(bank, row, self.clock) for name, bank in banks.items()}
        self.reference = self.rings[reference]
        self._needed = tuple((self.rings[name], most_ns) for name, most_ns in needed_ns.items())
        self.session = 0
        self.session_epoch = 0
        self.instruction_id = 0  # 0: none
        self.conditioning_epoch = 0
        self.awaits_text = False
        self.robot = ""  # the name that its session said
        self.commitment: Commitment | None = None  # what it executes meanwhile, as it last said

    @property
    def present(self) -> bool:
        """True when a window can be cut: the row is taken, awaits no text, the reference stream has
        a sample, and every stream that is needed has one that is young enough.
        """
        if self.session == 0 or self.awaits_text or self.reference.count == 0:
            return False
        return not any(map(self._is_old, self._needed))

    def lacks(self, stream: str) -> bool:
        """True when no window is cut for want of samples of ``stream``, which is needed."""
        ring = self.rings[stream]
        return any(needed[0] is ring and self._is_old(needed) for needed in self._needed)

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

    def _is_old(self, needed: tuple[SensorRing, int]) -> bool:
        ring, most_ns = needed
        return self.reference.newest_ns - ring.newest_ns > most_ns

    def _clear(self, reason: str) -> None:
        self.commitment = None
        for ring in self.rings.values():
            ring.clear(reason)
