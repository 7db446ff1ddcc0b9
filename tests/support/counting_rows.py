"""A policy of any rows for a GPU: tells a row's newest value back, and its calls since the reset.

``options.kernels`` small kernels come before: with a thousand stage B is queued once its envelope
was seen, and so knows who is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from many_kernels import Kernels
from torch import Tensor

from ppstream.core.specs import TensorSpec

CALLS_MAX = 1000.0  # that an action within -1 and 1 tells of


class Policy:
    """Remembers how often each row was there."""

    any_rows = True

    def __init__(self, options: Mapping[str, Any], device: torch.device) -> None:
        self.inputs = (TensorSpec("state.values", (64, 270)),)
        self.outputs = (TensorSpec("actions", (16, 7)),)
        self._kernels = Kernels(int(options["kernels"]), device)
        self.calls = torch.zeros(int(options["rows"]), device=device)

    def reset(self, rows: Tensor) -> None:
        self.calls.masked_fill_(rows, 0)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._kernels.queue()
        values = window["state.values"]
        calls = self.calls[: len(values)]
        calls += 1
        actions = out["actions"].zero_()
        actions[:, :, 0] = values[:, -1:, 0]
        actions[:, :, 1] = calls[:, None] / CALLS_MAX


def build(options: Mapping[str, Any], device: torch.device) -> Policy:
    return Policy(options, device)
