"""The drill's policy: it moves the robot gently, and fails in the way it is told to.

Orders come through a file that ``policy.options.orders`` names: a kind and for how many envelopes.
The file is looked at once per envelope; without one nothing ever goes wrong here.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ppstream.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

OUTLIER_S: Final = 0.8  # longer than the drill's lease, shorter than its watchdog
FOR_EVER_S: Final = 3600


class DrillPolicy:
    """Actions are a slow sine; the second one tells which share of the imu's values was valid."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        steps = options["steps"]
        self.inputs = (
            TensorSpec("state.values", (steps, options["dim"])),
            TensorSpec("state.valid", (steps, 2), "bool"),
        )
        self.outputs = (TensorSpec("actions", (options["horizon"], options["action_dim"])),)
        self._b_s = options["b_ms"] / 1000
        self._orders = Path(options.get("orders", "/nowhere"))
        self._left = 0
        self._kind = ""
        self._calls = 0

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        time.sleep(self._b_s)
        self._calls += 1
        actions = out["actions"]
        actions[..., 0] = math.sin(self._calls / 100)
        actions[..., 1] = window["state.valid"][..., 1].float().mean()
        if not self._left:
            self._take_order()
        if self._left:
            self._left -= 1
            FAULTS[self._kind](actions)

    def _take_order(self) -> None:
        try:
            self._kind, count = self._orders.read_text().split()
        except (OSError, ValueError):
            return
        self._orders.unlink()
        self._left = int(count)


def _raise(_actions: Tensor) -> None:
    raise RuntimeError("the drill told this policy to fail")


def _not_a_number(actions: Tensor) -> None:
    actions[..., 0] = math.nan


def _wrong_shape(actions: Tensor) -> None:
    actions.copy_(torch.zeros(7, 7, 7))


def _no_memory(_actions: Tensor) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _too_slow(_actions: Tensor) -> None:
    time.sleep(OUTLIER_S)


def _endless(_actions: Tensor) -> None:
    while True:
        time.sleep(0)


def _hold_interpreter(_actions: Tensor) -> None:
    """A call into C that does not let other threads run."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def _crash(_actions: Tensor) -> None:
    os.abort()


FAULTS: Final[dict[str, Callable[[Tensor], None]]] = {
    "raise": _raise,
    "nan": _not_a_number,
    "shape": _wrong_shape,
    "memory": _no_memory,
    "slow": _too_slow,
    "endless": _endless,
    "hold": _hold_interpreter,
    "crash": _crash,
}


def build(config: Mapping[str, Any], device: torch.device) -> DrillPolicy:
    """A DrillPolicy with ``config``'s shapes, duration and orders file; on the CPU alone."""
    return DrillPolicy(config)


class EndlessDecoder:
    """Copies actions until the file ``orders`` is there; then it never comes back."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._orders = Path(options["orders"])

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def __call__(self, row: int, result: Mapping[str, Any], out: Any) -> None:
        out[:] = result["actions"]
        while self._orders.exists():
            time.sleep(0)


def build_decoder(options: Mapping[str, Any], actions: object) -> EndlessDecoder:
    """An EndlessDecoder; ``options.orders`` names its file."""
    return EndlessDecoder(options)
