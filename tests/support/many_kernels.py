"""Stages of many small kernels that differ: what fills a driver's queue, as real policies do.

The policy takes ``options.kernels`` of them, and texts. The decoder only copies: building it has
rank 0's simulated stage A made of the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ppstream.core.specs import TensorSpec
from ppstream.cuda import busy_kernel
from ppstream.pipeline.decode import CopyDecoder

SIDE = 64


class Kernels:
    """``queue`` launches ``count`` of them on the current stream."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self.x = torch.ones(SIDE, SIDE, device=device)
        self.y, self.half = torch.empty_like(self.x), torch.empty_like(self.x, dtype=torch.float16)

    def queue(self) -> None:
        x, y, half = self.x, self.y, self.half
        steps = (
            lambda: torch.add(x, 1, out=y),
            lambda: torch.mul(y, 0.5, out=x),
            lambda: half.copy_(x),
            lambda: y.zero_(),
            lambda: torch.tanh(x, out=y),
            lambda: torch.mm(x, x, out=y),
            lambda: y.copy_(x),
            lambda: torch.clamp(y, 0, 1, out=x),
        )
        for number in range(self.count):
            steps[number % len(steps)]()


class Policy:
    """Acts as its newest sample says, behind many kernels."""

    stateless = True

    def __init__(self, options: Mapping[str, Any], device: torch.device) -> None:
        self.inputs = (TensorSpec("state.values", (64, 270)),)
        if options.get("instructions"):
            self.inputs += (TensorSpec("instruction_id", (), "int64"),)
        self.outputs = (TensorSpec("actions", (16, 7)),)
        self._kernels = Kernels(int(options["kernels"]), device)
        self._texts = torch.zeros(16, device=device)

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def instruct(self, number: int, text: str) -> None:
        self._texts[number % 16].fill_(len(text))

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._kernels.queue()
        newest = window["state.values"][:, -1:, :7]
        out["actions"].copy_(newest.clamp(-1, 1).expand(-1, 16, -1))


def build(options: Mapping[str, Any], device: torch.device) -> Policy:
    return Policy(options, device)


def build_decoder(options: Mapping[str, Any], actions: Any) -> CopyDecoder:
    def products(self: Any, count: int) -> None:
        if not hasattr(self, "kernels"):
            self.kernels = Kernels(0, torch.device("cuda", torch.cuda.current_device()))
        self.kernels.count = count
        self.kernels.queue()

    busy_kernel.GpuWork.queue_products = products  # type: ignore[method-assign]
    return CopyDecoder()
