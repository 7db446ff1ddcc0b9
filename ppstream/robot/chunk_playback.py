"""Playback of action chunks: the actions that a merged chunk gives at any instant, and its fate.

``ChunkPlayback`` is plain arithmetic on one chunk. ``Blending`` holds the chunks that were replaced
a moment ago and are still blended into the newer one. A blended action is a mixture with shares
between 0 and 1, so it lies between its chunks and keeps whatever limits they keep; it begins at the
action executed last and ends at the newer chunk. Blending is bounded: in time by ``blend_ns`` and
by how long the older chunk may be executed, in number by ``MAX_FADING``. ``timeline.py`` decides
which chunk is due and which replaces which. All instants are the robot's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from ppstream.wire.robot_messages import ActionChunk, Provenance

Actions: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
MAX_FADING: Final = 16  # replaced within one blend; then the least of them is let go


class BlendPart(NamedTuple):
    """One chunk of a mixture; ``share`` is of what the older ones leave, the first one's is 1."""

    playing: ChunkPlayback
    share: float


class Blending:
    """Replaced chunks, oldest first. ``blend_ns`` 0: there are none."""

    def __init__(self, blend_ns: int) -> None:
        self._blend_ns = blend_ns
        self._replaced: list[ChunkPlayback] = []

    def replace(self, playing: ChunkPlayback, by: ChunkPlayback) -> None:
        """``playing`` ends because ``by`` takes over; blended only if it was executed."""
        if not self._blend_ns or not playing.executed:
            return
        self._replaced.append(playing)
        if len(self._replaced) > MAX_FADING:
            del self._replaced[self._least(by.takes_over_ns)]

    def clear(self) -> None:
        self._replaced = []

    def forget(self, playing: ChunkPlayback, now_ns: int) -> None:
        """Let go what has no share any more in what ``playing`` gives from ``now_ns`` on."""
        if self._replaced:
            parts = self.parts((playing,), now_ns)
            self._replaced = [part.playing for part in parts[:-1]]

    def parts(self, playing: Iterable[ChunkPlayback], at_ns: int) -> list[BlendPart]:
        """Returns the parts of the newest of ``playing``'s action at ``at_ns``, oldest first."""
        chain = [*self._replaced, *playing]
        parts: list[BlendPart] = []
        for index, newer in enumerate(chain):
            share = 1.0 if index == 0 else self._share(chain[index - 1], newer, at_ns)
            if share >= 1:
                parts.clear()
            parts.append(BlendPart(newer, share))
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

    def _share(self, older: ChunkPlayback, newer: ChunkPlayback, at_ns: int) -> float:
        """Returns how far ``newer`` has replaced ``older``: from 0 to 1 while they are blended."""
        begin_ns = newer.takes_over_ns
        blend_ns = min(self._blend_ns, older.deadline_ns - begin_ns)
        if blend_ns <= 0:
            return 1.0
        return min(1.0, max(0.0, (at_ns - begin_ns) / blend_ns))


def blended(parts: Sequence[BlendPart], at_ns: int) -> Actions:
    """The mixture at ``at_ns``, ``[dim]``; discrete actions are the newest chunk's alone."""
    action = parts[0].playing.action_at(at_ns)
    for playing, share in parts[1:]:
        newer = playing.action_at(at_ns)
        action = interpolate(action, newer, share)
        if playing.discrete is not None:
            action = np.where(playing.discrete, newer, action)
    return action


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """Fate of one merged chunk.

    ``age_ns``: from its window's end to the execution of its first action, or to its receipt when
    none was executed. ``oldest_ns``: same, to that of its last action, while it was blended from
    the older chunk's window. ``dispatch_ns``: from its receipt to the execution of its first
    action. ``executed`` and ``skipped`` count its steps.
    """

    session: int
    epoch: int
    seq: int
    age_ns: int
    executed: int
    skipped: int
    oldest_ns: int = 0
    dispatch_ns: int = 0
    provenance: Provenance | None = None


class ChunkPlayback(msgspec.Struct, eq=False):
    """A merged chunk and how far it was executed.

    ``actions`` is ``[horizon, dim]`` and read only; ``discrete`` marks the actions that are
    switched. After ``deadline_ns`` none may be executed.
    """

    chunk: ActionChunk
    actions: Actions
    discrete: Mask | None
    received_ns: int
    deadline_ns: int
    first_ns: int = 0
    oldest_ns: int = 0
    last_step: int = -1
    executed: int = 0
    skipped: int = 0

    @property
    def takes_over_ns(self) -> int:
        """When it replaces the chunk before it."""
        return max(self.chunk.start_ns, self.received_ns)

    def step_at(self, at_ns: int) -> int:
        """The newest step due at ``at_ns``: behind the last point that one, before the first -1."""
        step = (at_ns - self.chunk.start_ns) // self.chunk.dt_ns
        return max(-1, min(step, self.chunk.horizon - 1))

    def action_at(self, at_ns: int) -> Actions:
        """Linear between the policy's points, whose own bits come back on a point; ``[dim]``.

        Behind the last point that one is held, before the first that one is given. Discrete actions
        keep the value of the newest point.
        """
        since_ns = at_ns - self.chunk.start_ns
        step, within_ns = divmod(since_ns, self.chunk.dt_ns)
        if step < 0 or step >= self.chunk.horizon - 1 or within_ns == 0:
            point: Actions = self.actions[max(0, min(step, self.chunk.horizon - 1))].copy()
            return point
        left = self.actions[step]
        between = interpolate(left, self.actions[step + 1], within_ns / self.chunk.dt_ns)
        return between if self.discrete is None else np.where(self.discrete, left, between)

    def play(self, step: int, at_ns: int, age_ns: int) -> None:
        """Count ``step`` as executed at ``at_ns``, ``age_ns`` after its window's end."""
        if not self.executed:
            self.first_ns = at_ns
        self.oldest_ns = max(self.oldest_ns, age_ns)
        if step > self.last_step:
            self.skipped += step - self.last_step - 1
            self.executed += 1
            self.last_step = step

    def outcome(self) -> ChunkOutcome:
        chunk = self.chunk
        until_ns = self.first_ns if self.executed else self.received_ns
        return ChunkOutcome(
            session=chunk.session,
            epoch=chunk.epoch,
            seq=chunk.seq,
            age_ns=until_ns - chunk.window_end_ns,
            executed=self.executed,
            skipped=self.skipped,
            oldest_ns=self.oldest_ns,
            dispatch_ns=until_ns - self.received_ns,
            provenance=chunk.provenance,
        )


def interpolate(left: Actions, right: Actions, share: float) -> Actions:
    """``left + share * (right - left)`` for a share in [0, 1], never outside the two.

    In float64, whose rounding to float32 cannot pass either end.
    """
    start = left.astype(np.float64)
    action: Actions = (start + share * (right - start)).astype(np.float32)
    return action
