"""Observations that peers are asked with, and the work of the policies behind them: numpy alone.

Imported in virtual environments that have nothing of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np

STATE_DIM: Final = 14
ACTION_DIM: Final = 7
NAMES: Final = tuple(f"j{index}" for index in range(ACTION_DIM))
CAMERAS: Final = ("left", "right", "wrist")
SIDE: Final = 224  # of a camera's frame, uint8 ``[SIDE, SIDE, 3]``
LAYERS: Final = (270, 512, 256, ACTION_DIM)  # of the MLP; the state stands in the first values
ON_GPU: Final = ("act", "vla")  # with torch: ``policies.py`` has them
#: Of a pause the policy's ms; "tiny" is the policy of ``vla_tiny.toml``, with torch.
PAUSES_MS: Final = {"pause": 40.0, "frames": 3.0}
WORKS: Final = ("none", "mlp", "cameras", *PAUSES_MS, "tiny", *ON_GPU)
CAMERAS_OF: Final = {
    "cameras": CAMERAS,
    "frames": CAMERAS,
    "tiny": ("front", "wrist"),
    "act": CAMERAS[:2],
    "vla": CAMERAS,
}
SIDES: Final = {"tiny": 56}  # of works with other frames
HORIZON: Final = 50  # of the policies on a GPU, and how frames are normalised for them
MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)

Array = np.ndarray[Any, Any]
Policy = Callable[[Array], Array]


def observation(work: str) -> dict[str, Array]:
    """The state, and before it the frames that the work reads."""
    cameras = CAMERAS_OF.get(work, ())
    side = SIDES.get(work, SIDE)
    frames = {name: np.full((side, side, 3), 127, np.uint8) for name in cameras}
    return frames | {"state": np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)}


def policy(work: str) -> Policy:
    """Makes float32 actions ``[ACTION_DIM]`` of a state; only the MLP works for them.

    A number instead of a work is a pause of so many ms.
    """
    if work.replace(".", "", 1).isdigit():
        return Pause(float(work))
    if work not in WORKS:
        raise SystemExit(f"no such work: {work}")
    if work in PAUSES_MS:
        return Pause(PAUSES_MS[work])
    return Mlp() if work == "mlp" else Echo()


class Echo:
    """Its actions are the first values of the state."""

    def __call__(self, state: Array) -> Array:
        return state[:ACTION_DIM]


class Pause(Echo):
    """The same, ``ms`` later; no core is busy meanwhile."""

    def __init__(self, ms: float) -> None:
        self._seconds = ms / 1e3

    def __call__(self, state: Array) -> Array:
        time.sleep(self._seconds)
        return super().__call__(state)


class Mlp:
    """Three layers of weights drawn from a seed; its actions lie within -1 and 1."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self._weights = [
            draw.standard_normal(pair, np.float32) / np.sqrt(np.float32(pair[0]))
            for pair in pairwise(LAYERS)
        ]
        self._input = np.zeros(LAYERS[0], np.float32)

    def __call__(self, state: Array) -> Array:
        self._input[:STATE_DIM] = state
        values = self._input
        for weights in self._weights[:-1]:
            values = np.maximum(values @ weights, 0)
        return np.tanh(values @ self._weights[-1])
