"""Real-time chunking: a chunk that goes on from what the robot executes while it is being made.

Published by Black, Galliker and Levine in 2025. The first actions of a chunk will have been
executed when it comes, and are as the robot executes them; further ones may turn away from that
more and more, and behind ``execution_horizon`` they are free. A flow is guided by gradients
(``guided``); a diffusion's sample is joined with a prefix that is as noisy, in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import e, inf
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from ppstream import TensorSpec
from ppstream.config.field_types import Count, Positive

# B=row P=step of the prefix H=horizon A=action

VALUES: Final = "executed_prefix"
DELAY: Final = "delay_steps"


class ChunkingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``policy.options.rtc``."""

    execution_horizon: Count  # steps that count; as actions.prefix_steps
    schedule: Literal["linear", "exp", "ones", "zeros"] = "linear"  # behind the delay
    max_guidance: Positive = 10.0  # of a flow

    def inputs(self, action_dim: int) -> tuple[TensorSpec, ...]:
        """The two tensors of a window that it takes."""
        prefix = TensorSpec(VALUES, (self.execution_horizon, action_dim))
        return prefix, TensorSpec(DELAY, (), "int64")

    def weights(self, window: Mapping[str, Tensor], horizon: int) -> Tensor:
        """Share of the prefix in each step, from 0 to 1, ``[B, H, 1]`` float32.

        All 0 for a row of which nothing is known: no action but zeros, and no delay.
        """
        prefix, delay = window[VALUES], window[DELAY].unsqueeze(1)
        begin = delay.clamp(max=self.execution_horizon)
        steps = torch.arange(horizon, device=prefix.device)
        if self.schedule == "ones":
            falling = torch.ones(horizon, device=prefix.device)
        elif self.schedule == "zeros":
            falling = torch.zeros(horizon, device=prefix.device)
        else:
            falling = 1 - (steps - begin + 1) / (self.execution_horizon - begin + 1)
            if self.schedule == "exp":
                falling = falling * torch.expm1(falling) / (e - 1)
        bound = torch.where(steps < begin, 1.0, falling) * (steps < self.execution_horizon)
        is_known = (delay > 0) | (prefix != 0).flatten(1).any(1, keepdim=True)
        return (bound * is_known).unsqueeze(-1)

    def guidance(self, time: float) -> float:
        """Strength of the guidance of a flow at ``time``, from 1 (noise) to 0 (actions)."""
        spread = (time**2 + (1 - time) ** 2) / time**2
        return min(time / (1 - time) * spread if time < 1 else inf, self.max_guidance)


def whole_chunk(prefix: Tensor, horizon: int, width: int) -> Tensor:
    """``[B, P, A]`` with zeros behind, ``[B, H, width]``; what is beyond them is cut off."""
    _, steps, values = prefix.shape
    return pad(prefix[:, :horizon], (0, width - values, 0, max(horizon - steps, 0)))


def guided(
    velocity: Tensor, actions: Tensor, time: float, chunk: Tensor, weights: Tensor, strength: float
) -> Tensor:
    """The velocity of a flow, changed so that it leads closer to the prefix.

    As LeRobot does it, what the change of noisy actions does to the velocity is left out, so that
    no gradient is needed.

    Args:
        velocity: of noisy ``actions``, ``[B, H, A]``.
        actions: noisy.
        time: from 1 (noise) to 0 (actions).
        chunk: clean actions that are wanted, as ``actions``.
        weights: of each step, ``[B, H, 1]``.
        strength: of the change, as ``ChunkingOptions.guidance``.
    """
    clean = actions - time * velocity
    return velocity - strength * (chunk - clean) * weights
