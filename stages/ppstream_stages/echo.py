"""A policy without work: its actions are the newest values of its input, bit for bit.

For identity tests: whatever the pipeline changes on the way shows in the actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ppstream import TensorSpec
from ppstream.config.schema import Count
from ppstream_stages.building import options_of

if TYPE_CHECKING:
    from torch import Tensor

# B=row T=step of the window D=value H=horizon


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``: the group to echo, its window's steps and values, the chunk's shape."""

    steps: Count
    dim: Count
    horizon: Count
    action_dim: Count
    group: str = "state"
    weights: None = None  # it has nothing to load


class EchoPolicy:
    """``actions[b, h, a] = values[b, T - 1 - h % T, a % D]``: step 0 is the newest."""

    stateless = True
    any_rows = True

    def __init__(self, options: Options, device: torch.device) -> None:
        self.inputs = (TensorSpec(f"{options.group}.values", (options.steps, options.dim)),)
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        newest_first = options.steps - 1 - torch.arange(options.horizon) % options.steps
        self._from_steps = newest_first.to(device)
        self._from_values = (torch.arange(options.action_dim) % options.dim).to(device)

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        picked_BHD = window[self.inputs[0].name].index_select(1, self._from_steps)
        out["actions"].copy_(picked_BHD.index_select(2, self._from_values))


def build(config: Mapping[str, Any], device: torch.device) -> EchoPolicy:
    """An echo for envelopes on ``device``, with the given ``Options``.

    Raises:
        ConfigError: an option is missing, unknown or not allowed.
    """
    options = options_of(config, Options)
    return EchoPolicy(options, device)
