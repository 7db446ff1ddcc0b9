"""Lock-step runs: body, sensors, policy, decoder and action timeline in one thread, without clocks.

The pipeline is a delay here: a window is cut every period and its action chunk arrives a fixed time
later. Training, tests and margins are made with it; nothing here proves anything about real time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ppstream import ActionChunk, ActionTimeline, Decoder, Policy
from ppstream_stages.cartpole.history import History, Window
from ppstream_stages.cartpole.layout import ACTION_DT_NS, HORIZON, LEASE_NS
from ppstream_stages.cartpole.physics import CartPole

Array = np.ndarray[Any, Any]
#: From a window to the forces ``[HORIZON]`` of its action chunk: stages B and C.
Controller = Callable[[Window], Array]

HELD_STEPS: Final = 200  # in the fixture, so that the first window is full


def chunk_of(seq: int, end_ns: int, forces: Array) -> ActionChunk:
    """The action chunk ``seq``, with ``forces [HORIZON]``, of the window that ends there."""
    return ActionChunk(
        session=1,
        session_epoch=0,
        epoch=0,
        seq=seq,
        window_end_ns=end_ns,
        start_ns=end_ns + ACTION_DT_NS,
        dt_ns=ACTION_DT_NS,
        expires_ns=end_ns + LEASE_NS,
        horizon=HORIZON,
        actions=forces.astype(np.float32).data.cast("B"),
    )


class Result(NamedTuple):
    """Result of a lock-step run."""

    stood_s: float
    fell: bool
    largest_angle_rad: float


class Episode:
    """One robot in lock step, with every true state it went through (for training)."""

    def __init__(self, seed: int, steps: int) -> None:
        self.body = CartPole(seed)
        self.history = History(steps + HELD_STEPS + 1)
        self.states = np.zeros((steps + HELD_STEPS, 4))
        self._timeline = ActionTimeline(1)
        self._arriving: list[tuple[int, ActionChunk]] = []
        self._chunks = 0
        for _ in range(HELD_STEPS):
            self.step()
        self.body.release()

    def send(self, end_ns: int, forces: Array, arrives_ns: int) -> None:
        """Let the chunk of the window that ended at ``end_ns`` arrive at ``arrives_ns``."""
        self._chunks += 1
        self._arriving.append((arrives_ns, chunk_of(self._chunks, end_ns, forces)))

    def step(self) -> None:
        """One millisecond: what arrived is merged, what is due is executed, else no force."""
        now_ns = self.body.now_ns
        while self._arriving and self._arriving[0][0] <= now_ns:
            self._timeline.merge(self._arriving.pop(0)[1], now_ns)
        action = self._timeline.action_at(now_ns)
        self.states[self.body.steps] = self.body.state
        self.history.extend(self.body.step(0.0 if action is None else float(action[0])))


def unpipelined(policy: Policy, decoder: Decoder) -> Controller:
    """Stages B and C, one after the other, as a controller."""
    out = {spec.name: torch.zeros(1, *spec.shape) for spec in policy.outputs}
    names = [spec.name for spec in policy.inputs]
    actions = np.zeros((HORIZON, 1), dtype=np.float32)

    def control(window: Window) -> Array:
        tensors = (torch.from_numpy(part[None]) for part in window)
        policy(dict(zip(names, tensors, strict=True)), out)
        decoder(0, {name: tensor[0].numpy() for name, tensor in out.items()}, actions)
        return actions[:, 0].copy()

    return control


def simulate(
    controller: Controller, *, delay_ms: float, period_ms: int, seed: int, seconds: float
) -> Result:
    """Run until the pole falls or ``seconds`` have passed since its release."""
    steps = round(seconds * 1000)
    episode = Episode(seed, steps)
    for step in range(steps):
        if step % period_ms == 0:
            end_ns = episode.history.newest_ns
            forces = controller(episode.history.window(end_ns))
            episode.send(end_ns, forces, episode.body.now_ns + round(delay_ms * 1e6))
        episode.step()
        if episode.body.fell_step is not None:
            break
    body = episode.body
    largest = float(np.abs(episode.states[HELD_STEPS : body.steps, 1]).max())
    return Result(body.stood_ns * 1e-9, body.fell_step is not None, largest)
