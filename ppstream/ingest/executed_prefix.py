"""The executed prefix: what a robot executes while its next action chunk is being made.

The inputs of real-time chunking (Black, Galliker, Levine 2025): each robot says after a chunk came
what it goes on to execute and how long chunks took; stage A lays that beside the steps of the chunk
that the policy is about to make. The policy keeps the first ``delay_steps`` of them, since they
will have been executed when its answer comes, and may join the rest. What it makes of them is its
own matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.core.clock import NS_PER_MS
from ppstream.core.specs import TensorSpec
from ppstream.ingest.rows import Commitment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ppstream.config.schema import ActionConfig
    from ppstream.ingest.rows import RowInput
    from ppstream.wire.robot_messages import Prefix

ACTION_BYTES: Final = 4  # float32
VALUES: Final = "executed_prefix"
DELAY: Final = "delay_steps"

Array = np.ndarray[Any, Any]


def commitment(prefix: Prefix, dim: int) -> Commitment | None:
    """Reads what the robot says it executes; None when nothing of it can be executed."""
    if not prefix.actions or len(prefix.actions) % (ACTION_BYTES * dim):
        return None
    actions = np.frombuffer(bytes(prefix.actions), dtype=np.float32).reshape(-1, dim)
    if not np.isfinite(actions).all():
        return None
    return Commitment(prefix.start_ns, prefix.dt_ns, prefix.expires_ns, prefix.delay_ns, actions)


def prefix_specs(actions: ActionConfig) -> tuple[TensorSpec, ...]:
    """Tensors of an envelope, per row: ``executed_prefix [P, dim]`` and ``delay_steps []`` int64.

    None when ``actions.prefix_steps`` is 0.
    """
    if not actions.prefix_steps:
        return ()
    shape = (actions.prefix_steps, len(actions.names))
    return TensorSpec(VALUES, shape), TensorSpec(DELAY, (), "int64")


class PrefixWriter:
    """Writes the tensors of ``prefix_specs``; for the thread that owns the rows.

    Row p of a prefix belongs to step p of the chunk to be made, due ``(p + 1) * dt`` after the
    window's end; between the robot's own points it is linear, as the robot plays it, and behind
    the last one that is held. ``delay_steps`` counts the steps that are over when a chunk takes as
    long as the slowest of the last few. Both are 0 while nothing is known: a new episode, a free
    row, or an answer older than its lease.
    """

    def __init__(self, actions: ActionConfig, rows: Sequence[RowInput]) -> None:
        self._rows = rows
        self._dt_ns = round(actions.dt_ms * NS_PER_MS)
        self._offsets_ns = np.arange(1, actions.prefix_steps + 1, dtype=np.int64) * self._dt_ns
        self._discrete = [name in actions.discrete for name in actions.names]

    def write(self, out: Mapping[str, Tensor], ends_ns: Sequence[int]) -> None:
        """For windows that end at ``ends_ns``, robot clock, one of each row."""
        prefixes, delays = out[VALUES].numpy(), out[DELAY].numpy()
        for row, (served, end_ns) in enumerate(zip(self._rows, ends_ns, strict=True)):
            commitment = served.commitment if served.present_at(end_ns) else None
            if commitment is None or end_ns + self._dt_ns > commitment.expires_ns:
                prefixes[row], delays[row] = 0, 0
                continue
            prefixes[row] = self._at(commitment, end_ns + self._offsets_ns)
            over = -(-(commitment.delay_ns - self._dt_ns) // self._dt_ns)
            delays[row] = max(0, min(over, len(self._offsets_ns)))

    def _at(self, commitment: Commitment, due_ns: Array) -> Array:
        last = len(commitment.actions) - 1
        position = np.clip((due_ns - commitment.start_ns) / commitment.dt_ns, 0, last)
        left = position.astype(np.int64)
        share = (position - left)[:, None]
        share = np.where(self._discrete, 0.0, share)
        before, behind = commitment.actions[left], commitment.actions[np.minimum(left + 1, last)]
        between: Array = before + share * (behind - before)
        return between
