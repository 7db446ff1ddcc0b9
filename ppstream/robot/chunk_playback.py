"""Playing: one merged action chunk, the actions it gives at any instant, and what became of it.

Plain arithmetic on one chunk; which of several is due, and for how long two are blended, is
``timeline.py``'s. All instants are the robot's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ppstream.wire.messages import ActionChunk
    from ppstream.wire.provenance import Provenance

Actions: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one merged chunk.

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


@dataclass(slots=True)
class Playing:
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
        between = mixed(left, self.actions[step + 1], within_ns / self.chunk.dt_ns)
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

    def outcome(self) -> Outcome:
        chunk = self.chunk
        until_ns = self.first_ns if self.executed else self.received_ns
        return Outcome(
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


def mixed(left: Actions, right: Actions, share: float) -> Actions:
    """``left + share * (right - left)`` for a share in [0, 1], never outside the two.

    In float64, whose rounding to float32 cannot pass either end.
    """
    start = left.astype(np.float64)
    action: Actions = (start + share * (right - start)).astype(np.float32)
    return action
