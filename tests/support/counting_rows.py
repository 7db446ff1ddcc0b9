"""A policy of any rows for a GPU: tells a row's newest value back, and its calls since the reset.

``options.kernels`` small kernels come before: with a thousand stage B is queued once its envelope
was seen, and so knows who is there. In two parts each of them has so many, and actions also tell
with how many rows either was called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from many_kernels import Kernels
from torch import Tensor

from ppstream.core.specs import TensorSpec

CALLS_MAX = 1000.0  # that an action within -1 and 1 tells of
ROWS_MAX = 10.0  # likewise


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


class _Part:
    """Of any rows, behind its kernels."""

    any_rows = True

    def __init__(self, options: Mapping[str, Any], device: torch.device) -> None:
        self._options, self._device = options, device

    def load(self) -> None:
        self._kernels = Kernels(int(self._options["kernels"]), self._device)


class Counting(_Part):
    """Newest value of each row, its calls since the reset, and how many rows this call has."""

    name = "counting"
    inputs = (TensorSpec("state.values", (64, 270)),)
    outputs = (TensorSpec("told", (3,)),)

    def load(self) -> None:
        super().load()
        self._calls = torch.zeros(int(self._options["rows"]), device=self._device)

    def reset(self, rows: Tensor) -> None:
        self._calls.masked_fill_(rows, 0)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._kernels.queue()
        values, told = window["state.values"], out["told"]
        calls = self._calls[: len(values)]
        calls += 1
        told[:, 0] = values[:, -1, 0]
        told[:, 1] = calls / CALLS_MAX
        told[:, 2] = len(values) / ROWS_MAX


class Telling(_Part):
    """What it is told, and how many rows this call has, as actions."""

    name = "telling"
    inputs = (TensorSpec("told", (3,)),)
    outputs = (TensorSpec("actions", (16, 7)),)

    def reset(self, rows: Tensor) -> None:
        """Nothing is kept."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._kernels.queue()
        actions = out["actions"].zero_()
        actions[:, :, :3] = window["told"][:, None]
        actions[:, :, 3] = len(actions) / ROWS_MAX


def build(options: Mapping[str, Any], device: torch.device) -> Policy:
    return Policy(options, device)


def build_parts(options: Mapping[str, Any], device: torch.device) -> tuple[Counting, Telling]:
    return Counting(options, device), Telling(options, device)
