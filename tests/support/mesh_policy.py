"""A small policy sharded over a mesh by hand, with faults of one rank, at once or once told to.

Without DTensor, whose first use takes a second; ``ppstream_stages.act`` is sharded by it.

``fault`` is one of ``weights``, ``breaks``, ``all raise``, which every rank does on
some windows, and ``slow`` and ``raises``, which begin when the file ``trigger`` exists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppstream import TensorSpec

FAULTY_RANK: Final = "2"
WIDTH: Final = 12


class Meshed:
    """Two layers, and state unless ``stateless``: how often it was called in a row's episode."""

    name = "meshed"

    def __init__(self, options: Mapping[str, Any], device: torch.device, mesh: Any) -> None:
        self.inputs = (TensorSpec("state.values", (options["steps"], options["dim"])),)
        self.outputs = (TensorSpec("actions", (options["horizon"], options["action_dim"])),)
        self._device, self._mesh = device, mesh
        self._fault = options.get("fault", "")
        self._is_faulty = os.environ.get("RANK") == FAULTY_RANK
        self._trigger = options.get("trigger", "")
        self.stateless = bool(options.get("stateless"))
        self._calls: Tensor | None = None
        generator = torch.Generator().manual_seed(3)
        count = options["horizon"] * options["action_dim"]
        self._net = nn.Sequential(nn.Linear(options["dim"], WIDTH), nn.Linear(WIDTH, count))
        for weight in self._net.parameters():
            weight.requires_grad_(requires_grad=False)
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
        self._net.to(device)

    def load(self) -> None:
        """Takes this rank's features of the middle."""
        self._mine = slice(None)
        if self._mesh is not None:
            first = WIDTH // self._mesh.size() * self._mesh.get_local_rank()
            self._mine = slice(first, first + WIDTH // self._mesh.size())
            self._ranks = self._mesh.get_group()
        self._shift = torch.zeros(1, device=self._device)
        if self._fault == "weights" and self._is_faulty:
            self._shift += 0.5

    def state_dict(self) -> dict[str, Tensor]:
        """What a mesh compares."""
        return {**self._net.state_dict(), "shift": self._shift}

    def reset(self, rows: Tensor) -> None:
        """Counts the calls of these rows anew."""
        if self._calls is not None:
            self._calls.masked_fill_(rows, 0)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        values = window["state.values"][:, -1]
        if self._fault == "breaks":
            if self._is_faulty:
                print("a break of one rank alone", flush=True)
        elif self._fault == "all raise":
            if float(values[0, 0]) > 1.5:
                raise ValueError("no rank of the mesh likes this one")
        elif self._fault and os.path.exists(self._trigger):
            self.fail()
        if self._calls is None:
            self._calls = torch.zeros(len(values), device=self._device)
        if not self.stateless:
            self._calls = self._calls + 1
        made = torch.tanh(self._computed(values) + self._shift) * 0.9
        out["actions"].copy_(made.view_as(out["actions"]) + self._calls.view(-1, 1, 1) * 1e-4)

    def _computed(self, values: Tensor) -> Tensor:
        into, out_of = self._net
        middle = nn.functional.linear(values, into.weight[self._mine], into.bias[self._mine])
        made = nn.functional.linear(middle, out_of.weight[:, self._mine])
        if self._mesh is not None:
            dist.all_reduce(made, group=self._ranks)
        return made + out_of.bias

    def fail(self) -> None:
        """As it was told to, from now on."""
        if self._is_faulty and self._fault == "slow":
            time.sleep(60)
        if self._is_faulty and self._fault == "raises":
            raise ValueError("one rank of the mesh does not like this one")


def build(options: Mapping[str, Any], device: torch.device, mesh: Any = None) -> Meshed:
    return Meshed(options, device, mesh)


def build_alone(options: Mapping[str, Any], device: torch.device) -> Meshed:
    """Takes no mesh."""
    return Meshed(options, device, None)
