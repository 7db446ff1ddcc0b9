"""Makes weights.safetensors: ``python -m ppstream_stages.cartpole.train --out FILE``.

Imitation of an LQR that knows the state, by a network that sees only noisy histories. The label of
a step ahead is what the LQR does in the state that really was there then, on runs with the
pipeline's delays: first the LQR's own runs, then the network's (DAgger, Ross et al., 2011), so that
delay and chunks in flight are in the data and not in a formula. One core, under ten minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import mujoco
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from ppstream_stages.cartpole import plant
from ppstream_stages.cartpole.history import Window
from ppstream_stages.cartpole.layout import (
    ACTION_DT_NS,
    FORCE_MAX_N,
    HORIZON,
    STEP_NS,
    WINDOW_DT_NS,
    WINDOW_STEPS,
)
from ppstream_stages.cartpole.lockstep import Episode
from ppstream_stages.cartpole.physics import CartPole
from ppstream_stages.cartpole.policy import (
    FORCE_SCALE_N,
    STATE_SCALE,
    WEIGHTS,
    HistoryTransformer,
    Seen,
    seen_by_views,
)

Array = np.ndarray[Any, Any]

SEED: Final = 1
EPISODE_STEPS: Final = 4000
PERIOD_STEPS: Final = 10
DELAY_STEPS: Final = (10, 61)  # drawn per episode
#: Episodes collected and optimiser steps taken, round by round; the first is the LQR's.
ROUNDS: Final = ((24, 900), (16, 500), (16, 500), (16, 700))
BATCH: Final = 32
LEARNING_RATE: Final = 1.5e-3
NEWEST: Final = 40  # window steps with a label: the older ones have seen too little
EXPLORATION_N: Final = 1.5  # the LQR's forces are off by this much (standard deviation)

_CHUNK: Final = ACTION_DT_NS // STEP_NS
_AHEAD: Final = _CHUNK * (1 + np.arange(HORIZON))
_BACK: Final = (np.arange(NEWEST) - (NEWEST - 1)) * (WINDOW_DT_NS // STEP_NS)
_FIRST: Final = WINDOW_STEPS * WINDOW_DT_NS // STEP_NS


def teacher_gain() -> Array:
    """The LQR gain ``[4]`` for MuJoCo's own linearisation of the released robot at upright."""
    body = CartPole(0)
    body.release()
    mujoco.mj_forward(body.model, body.data)
    a, b = np.zeros((4, 4)), np.zeros((4, 1))
    centred = True
    mujoco.mjd_transitionFD(body.model, body.data, 1e-6, centred, a, b, None, None)
    gain: Array = plant.lqr(a, b)[0][0]
    return gain


def teach(states: Array, gain: Array) -> Array:
    """The LQR's forces for states ``[..., 4]``, within the limit."""
    forces: Array = np.clip(-(states @ gain), -FORCE_MAX_N, FORCE_MAX_N)
    return forces


def planned(state: Array, gain: Array) -> Array:
    """Forces ``[HORIZON]`` of the LQR along its own closed loop from ``state``."""
    states, forces = state[None], []
    for step in range(_CHUNK * HORIZON + 1):
        force = teach(states, gain)
        if step and step % _CHUNK == 0:
            forces.append(force[0])
        states = plant.advance(states, force, STEP_NS * 1e-9)
    return np.asarray(forces)


class Student:
    """The network as it is now, seeing everything, for many robots at once."""

    def __init__(self, network: HistoryTransformer) -> None:
        self._network = network
        masks = seen_by_views()
        self._everything = Seen(masks.values[:1], masks.streams[:1])

    @torch.inference_mode()
    def __call__(self, windows: Sequence[Window]) -> Array:
        """Forces ``[len(windows), HORIZON]``."""
        features = self._network.features(*_stack(windows), self._everything)
        forces: Array = (self._network(features)[0][:, 0] * FORCE_SCALE_N).numpy()
        return forces


def collect(
    count: int, gain: Array, student: Student | None, random: np.random.Generator
) -> list[Episode]:
    """Episodes driven by the student, or by the LQR without one; all in lock step."""
    episodes = [Episode(int(random.integers(2**31)), EPISODE_STEPS) for _ in range(count)]
    delays_ns = random.integers(*DELAY_STEPS, size=count) * STEP_NS
    for step in range(EPISODE_STEPS):
        standing = [e for e in range(count) if episodes[e].body.fell_step is None]
        if step % PERIOD_STEPS == 0 and standing:
            if student is None:
                forces = np.stack([planned(episodes[e].body.state, gain) for e in standing])
                forces += random.normal(0.0, EXPLORATION_N, (len(standing), 1))
            else:
                ends = [episodes[e].history for e in standing]
                forces = student([history.window(history.newest_ns) for history in ends])
            for e, chunk in zip(standing, forces, strict=True):
                episode = episodes[e]
                arrives_ns = episode.body.now_ns + int(delays_ns[e])
                episode.send(episode.history.newest_ns, chunk, arrives_ns)
        for e in standing:
            episodes[e].step()
    return episodes


class Lessons:
    """Batches of windows with their labels, drawn from episodes."""

    def __init__(self, gain: Array, random: np.random.Generator) -> None:
        self._gain = gain
        self._random = random
        self._episodes: list[Episode] = []
        self._masks = seen_by_views()

    def add(self, episodes: Sequence[Episode]) -> None:
        """Take over all that lived long enough to have labels."""
        shortest = _FIRST + int(_AHEAD[-1]) + 1
        self._episodes += [e for e in episodes if e.body.steps > shortest]

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Seen, Tensor, Tensor]:
        """Windows and what they may see, then forces ``[BATCH, NEWEST, H]`` and states, scaled."""
        windows, states, ahead = [], [], []
        for pick in self._random.integers(len(self._episodes), size=BATCH):
            episode = self._episodes[pick]
            end = int(self._random.integers(_FIRST, episode.body.steps - _AHEAD[-1]))
            windows.append(episode.history.window(end * STEP_NS))
            steps = end + _BACK
            states.append(episode.states[steps])
            ahead.append(episode.states[steps[:, None] + _AHEAD])
        views = torch.from_numpy(self._random.integers(len(self._masks.values), size=BATCH))
        seen = Seen(self._masks.values[views], self._masks.streams[views])
        forces = teach(np.stack(ahead), self._gain) / FORCE_SCALE_N
        estimates = np.stack(states) / np.asarray(STATE_SCALE)
        return (
            *_stack(windows),
            seen,
            torch.from_numpy(forces).float(),
            torch.from_numpy(estimates).float(),
        )


def train(seed: int, rounds: Sequence[tuple[int, int]]) -> HistoryTransformer:
    """The trained network; prints one line per round."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    gain = teacher_gain()
    network, lessons = HistoryTransformer(), Lessons(gain, random)
    optimiser = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, LEARNING_RATE, total_steps=sum(steps for _, steps in rounds), pct_start=0.1
    )
    began = time.monotonic()
    for number, (count, steps) in enumerate(rounds):
        student = Student(network) if number else None
        episodes = collect(count, gain, student, random)
        lessons.add(episodes)
        losses = [_learn(network, lessons, optimiser, schedule) for _ in range(steps)]
        stood_s = np.mean([episode.body.stood_ns for episode in episodes]) * 1e-9
        print(
            f"round {number}: collected runs stood {stood_s:.2f} s of {EPISODE_STEPS / 1000:.0f}, "
            f"loss {np.mean(losses[-100:]):.5f}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return network


def _learn(
    network: HistoryTransformer,
    lessons: Lessons,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> float:
    values, valid, age_s, seen, forces, states = lessons.draw()
    features = network.features(values, valid, age_s, seen)
    guessed_forces, guessed_states = network(features, NEWEST)
    loss = smooth_l1_loss(guessed_forces, forces, beta=0.5)
    loss = loss + 0.5 * smooth_l1_loss(guessed_states, states, beta=0.5)
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    schedule.step()
    return float(loss.detach())


def _stack(windows: Sequence[Window]) -> tuple[Tensor, Tensor, Tensor]:
    """Values, validity and ages of many windows, each ``[len(windows), T, ...]``."""
    columns = zip(*windows, strict=True)
    values, valid, age_s = (torch.from_numpy(np.stack(column)) for column in columns)
    return values, valid, age_s


def main() -> None:
    """Train and write the weights."""
    parser = argparse.ArgumentParser(description="Train the cart-pole policy of the demo.")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="where the weights go")
    parser.add_argument("--seed", type=int, default=SEED)
    chosen = parser.parse_args()
    network = train(chosen.seed, ROUNDS)
    save_file(network.state_dict(), chosen.out, metadata={"seed": str(chosen.seed)})
    print(f"wrote {chosen.out}, {chosen.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
