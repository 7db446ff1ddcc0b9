"""The policy: joint angles and frames in, a chunk of joint angles out. Put your network here.

``safetensors.torch.save_file(policy.head.state_dict(), FILE)`` is its ``policy.weights``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ppstream import TensorSpec
from ppstream_stages.building import load_weights


class ArmPolicy:
    """A small network with random weights, whose actions stay near the newest angles."""

    def __init__(self, options: Mapping[str, Any], device: torch.device) -> None:
        steps, self.joints, self.horizon = (options[k] for k in ("steps", "joints", "horizon"))
        self.cameras = dict(options["cameras"])  # height and width by name
        frames = [TensorSpec(f"{k}.frames", (1, 3, *size)) for k, size in self.cameras.items()]
        self.inputs = (TensorSpec("state.values", (steps, self.joints)), *frames)
        self.outputs = (TensorSpec("actions", (self.horizon, self.joints)),)
        torch.manual_seed(0)
        see = nn.Conv2d(3, 16, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        self.eye = nn.Sequential(*see).to(device)
        seen = steps * self.joints + 16 * 4 * 4 * len(self.cameras)
        move = nn.Linear(seen, 128), nn.ReLU(), nn.Linear(128, self.horizon * self.joints)
        self.head = nn.Sequential(*move).to(device)
        if options["weights"] is not None:  # policy.weights of the TOML, an absolute path
            load_weights(self.head, options["weights"])

    def reset(self, rows: Tensor) -> None:
        """Forget the rows (bool ``[B]``) whose episode begins: this network remembers nothing."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Angles ``[B, T, J]`` and frames ``[B, 1, 3, H, W]`` in; ``out`` is written in place."""
        angles = window["state.values"]
        seen = [self.eye(window[f"{name}.frames"][:, 0]) for name in self.cameras]
        moves = self.head(torch.cat([angles.flatten(1), *seen], dim=1))
        near = 0.05 * torch.tanh(moves).view(-1, self.horizon, self.joints)
        out["actions"].copy_(angles[:, -1:] + near)


def build(options: Mapping[str, Any], device: torch.device) -> ArmPolicy:
    """The policy that ``policy.target`` names; ``options`` are ``[policy.options]``."""
    return ArmPolicy(options, device)
