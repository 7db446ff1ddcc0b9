"""Policies that only benchmarks need: one that reads heavy envelopes, one without any work.

Named in settings as ``bench_policies:build_reading`` and ``bench_policies:build_echo``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from ppstream.simulate import Delay
from ppstream.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


#: The session in ``rows`` of an envelope that no robot asked for.
NOBODY: Final = -1
BRING_UP_MS: Final = 20.0  # so long that the runtime around it is no part worth hiding


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``: what is read, and the shape of the actions."""

    group: str
    steps: int
    dim: int
    b_ms: float = 0.0
    horizon: int
    action_dim: int
    weights: None = None


class ReadingPolicy:
    """Copies ``<group>.values`` to its own memory, then sleeps; its actions are zeros."""

    def __init__(self, options: Options) -> None:
        self.inputs = (TensorSpec(f"{options.group}.values", (options.steps, options.dim)),)
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        self._own = torch.zeros((1, options.steps, options.dim))
        self._delay = Delay(options.b_ms)

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._own.copy_(window[self.inputs[0].name])
        self._delay.spend()
        out["actions"].zero_()


class EchoPolicy:
    """Its actions are the newest input values, at once; but bring-up's envelopes take 20 ms.

    Without any work there is nothing to overlap, and a gate that measures overlap among the
    runtime's own microseconds says so. Robots' envelopes never wait here.
    """

    def __init__(self, options: Options) -> None:
        self._values = f"{options.group}.values"
        values = TensorSpec(self._values, (options.steps, options.dim))
        self.inputs = (values, TensorSpec("rows", (4,), "int64"))
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        self._delay = Delay(BRING_UP_MS)
        self._width = options.action_dim
        self._is_serving = False

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        if not self._is_serving:  # looked at until the first robot's: then it costs nothing
            self._is_serving = int(window["rows"][0, 0]) != NOBODY
            if not self._is_serving:
                self._delay.spend()
        out["actions"].copy_(window[self._values][:, -1:, : self._width])


def build_reading(config: Mapping[str, Any], device: torch.device) -> ReadingPolicy:
    """A policy for one row, on the CPU whatever ``device`` says."""
    return ReadingPolicy(msgspec.convert(config, Options))


def build_echo(config: Mapping[str, Any], device: torch.device) -> EchoPolicy:
    """As ``build_reading``; ``action_dim`` must not exceed ``dim``."""
    return EchoPolicy(msgspec.convert(config, Options))
