"""The two policies of ``bench/workload.py``. Not a benchmark."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from ppstream.core.specs import TensorSpec

ACTIONS: Final = 7  # values of one


class WorkloadPolicy:
    """A network as the runtime calls it: float32 window in, actions out."""

    def __init__(self, network: nn.Module, steps: int, width: int, device: torch.device) -> None:
        self.inputs = (TensorSpec("state.values", (steps, width)),)
        self.outputs = (TensorSpec("actions", (steps, ACTIONS)),)
        self.network = network.to(device, torch.bfloat16).eval()

    def reset(self, rows: Tensor) -> None: ...

    @torch.inference_mode()
    def __call__(self, window: Any, out: Any) -> None:
        out["actions"].copy_(self.network(window["state.values"].bfloat16()))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, ACTIONS)
    )


def transformer(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(width, 512), encoder, nn.Linear(512, ACTIONS))
