"""Fading: the chunks that were replaced a moment ago and are still blended into the newer one.

An action is a mixture with shares between 0 and 1, so it lies between the chunks it is made of:
whatever limits they keep, it keeps. It begins at what was executed last and ends at the newer
chunk. Bounded: in time by ``blend_ns`` and by how long the older chunk may be executed at all, in
number by ``MAX_FADING``. Which chunk replaces which is ``timeline.py``'s to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from ppstream.robot.chunk_playback import Actions, Playing, mixed

MAX_FADING: Final = 16  # replaced within one blend; then the least of them is let go


class Part(NamedTuple):
    """One chunk of a mixture; ``share`` is of what the older ones leave, the first one's is 1."""

    playing: Playing
    share: float


class Fading:
    """Replaced chunks, oldest first. ``blend_ns`` 0: there are none."""

    def __init__(self, blend_ns: int) -> None:
        self._blend_ns = blend_ns
        self._replaced: list[Playing] = []

    def replace(self, playing: Playing, by: Playing) -> None:
        """``playing`` ends because ``by`` takes over; blended only if it was executed."""
        if not self._blend_ns or not playing.executed:
            return
        self._replaced.append(playing)
        if len(self._replaced) > MAX_FADING:
            del self._replaced[self._least(by.takes_over_ns)]

    def clear(self) -> None:
        self._replaced = []

    def forget(self, playing: Playing, now_ns: int) -> None:
        """Let go what has no share any more in what ``playing`` gives from ``now_ns`` on."""
        if self._replaced:
            parts = self.parts((playing,), now_ns)
            self._replaced = [part.playing for part in parts[:-1]]

    def parts(self, playing: Iterable[Playing], at_ns: int) -> list[Part]:
        """What the action of the last of ``playing`` at ``at_ns`` is mixed from, oldest first."""
        chain = [*self._replaced, *playing]
        parts: list[Part] = []
        for index, newer in enumerate(chain):
            share = 1.0 if index == 0 else self._share(chain[index - 1], newer, at_ns)
            if share >= 1:
                parts.clear()
            parts.append(Part(newer, share))
        return parts

    def _least(self, at_ns: int) -> int:
        """Which replaced chunk is missed least at ``at_ns``: its share of the whole is smallest."""
        left = 1.0
        weights: dict[int, float] = {}
        replaced = self._replaced
        for index in reversed(range(len(replaced))):
            share = self._share(replaced[index - 1], replaced[index], at_ns) if index else 1.0
            weights[index] = left * share
            left *= 1 - share
        return min(weights, key=weights.__getitem__)

    def _share(self, older: Playing, newer: Playing, at_ns: int) -> float:
        """How far ``newer`` has replaced ``older``: from 0 to 1 while they are blended."""
        begin_ns = newer.takes_over_ns
        blend_ns = min(self._blend_ns, older.deadline_ns - begin_ns)
        if blend_ns <= 0:
            return 1.0
        return min(1.0, max(0.0, (at_ns - begin_ns) / blend_ns))


def blended(parts: Sequence[Part], at_ns: int) -> Actions:
    """The mixture at ``at_ns``, ``[dim]``; discrete actions are the newest chunk's alone."""
    action = parts[0].playing.action_at(at_ns)
    for playing, share in parts[1:]:
        newer = playing.action_at(at_ns)
        action = mixed(action, newer, share)
        if playing.discrete is not None:
            action = np.where(playing.discrete, newer, action)
    return action
