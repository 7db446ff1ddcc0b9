"""Answer: the chunk that ``RobotClient.ask`` returns for an observation."""

from __future__ import annotations

from typing import NamedTuple

from ppstream.robot.chunk_playback import Actions
from ppstream.robot.timeline import Refusal
from ppstream.wire.robot_messages import ActionChunk


class Answer(NamedTuple):
    """Action chunk that came for an observation, as ``RobotClient.ask`` returns it.

    Attributes:
        chunk: with its window's end, steps and lease.
        actions: float32 ``[horizon, dim]``, sharing the chunk's memory.
        refusal: the reason why ``ActionTimeline.merge`` rejected the chunk, such as a late arrival;
            None: the timeline has the chunk.
    """

    chunk: ActionChunk
    actions: Actions
    refusal: Refusal | None
