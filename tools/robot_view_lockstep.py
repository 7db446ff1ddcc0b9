"""The runs of ``robot_view.py`` without a clock: the same body, sensors, policy and timeline.

A pipeline is modelled as its times: a window is cut whenever a credit is free, stage B answers one
after the other, each in ``B_MS``. So the result does not depend on the machine, and proves nothing
about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ppstream.config import load
from ppstream.core.clock import NS_PER_MS
from ppstream.recording.items import Emitted, Item, RowWindow, SamplesItem
from ppstream.recording.mcap_writer import RecordFile
from ppstream_stages.cartpole import decode, policy
from ppstream_stages.cartpole.layout import LEASE_NS
from ppstream_stages.cartpole.lockstep import (
    HELD_STEPS,
    Controller,
    Episode,
    chunk_of,
    unpipelined,
)

B_MS: Final = 25
A_MS: Final = 1  # from the window's end to stage B
C_MS: Final = 1  # from stage B to the robot
ROBOT: Final = "cartpole"


def record_lockstep(path: Path, depth: int, seconds: float, seed: int = 0) -> Path:
    """Record an episode in which ``depth`` envelopes may be on their way; returns ``path``."""
    config = load.read("demo")
    control = unpipelined(
        policy.build({}, torch.device("cpu")), decode.build(config.decode.options, config.actions)
    )
    steps = round(seconds * 1000)
    episode = Episode(seed, steps)
    items: list[Item] = []
    under_way: deque[int] = deque()  # when each envelope's result is there, ms
    free_ms = 0
    for now_ms in range(HELD_STEPS, HELD_STEPS + steps):
        while under_way and under_way[0] <= now_ms:
            under_way.popleft()
        if len(under_way) < depth:
            free_ms = max(now_ms + A_MS, free_ms) + B_MS
            under_way.append(free_ms)
            items += _answer(episode, control, free_ms + C_MS)
        episode.step()
    items += _encoder(episode.states[HELD_STEPS : HELD_STEPS + steps, :2])
    file = RecordFile(path, config, "lockstep")
    file.write(items)
    file.close()
    return path


def _answer(episode: Episode, control: Controller, arrives_ms: int) -> list[Item]:
    """Cut a window now, let its actions arrive then, and tell of both."""
    end_ns = episode.history.newest_ns
    forces = control(episode.history.window(end_ns))
    arrives_ns = arrives_ms * NS_PER_MS
    episode.send(end_ns, forces, arrives_ns)
    seq = end_ns // NS_PER_MS
    chunk = chunk_of(seq, end_ns, forces)
    header = (ROBOT, episode.body.now_ns, 0, seq, "ready", (1, 0))
    return [
        RowWindow(*header, end_ns, end_ns + LEASE_NS, {}),
        Emitted(ROBOT, arrives_ns, chunk, ""),
    ]


def _encoder(states: np.ndarray[Any, Any]) -> Iterator[Item]:
    """True positions and angles, one a millisecond."""
    for number, state in enumerate(states.astype(np.float32)):
        now_ns = (number + HELD_STEPS) * NS_PER_MS
        stamp = np.array([now_ns], np.int64)
        arrays = stamp.tobytes(), state.tobytes()
        yield SamplesItem(ROBOT, "encoder", number, number + 1, *arrays, now_ns)
