"""A policy in three parts whose every tensor matters: state by row, values carried past a place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ppstream import TensorSpec


class _Part:
    """Calls ``work(inputs, out)``, and raises on windows that end in a row's ``fails`` values."""

    def __init__(self, name: str, inputs: Any, outputs: Any, options: Mapping[str, Any]) -> None:
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self._fails = options.get("fails") == name
        self._texts: dict[int, str] = {}

    def reset(self, rows: Tensor) -> None:
        """Nothing is kept."""

    def refuse(self, values: Tensor) -> None:
        if self._fails and float(values[0, -1, 0]) > 1.5:
            raise ValueError(f"{self.name} refuses what is above 1.5")


class First(_Part):
    """Window to its mean and its newest step."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self.refuse(window["state.values"])
        out["mean"].copy_(window["state.values"].mean(1))
        out["newest"].copy_(window["state.values"][:, -1])


class Middle(_Part):
    """Adds up the means since the last reset of a row."""

    loaded = False
    lacks_weights = False

    def load(self) -> None:
        """Makes its weights, on the rank that runs it."""
        if self.lacks_weights:
            raise OSError("no weights for the middle")
        self.loaded = True
        self._sum: Tensor | None = None

    def reset(self, rows: Tensor) -> None:
        """Forgets the sum of the rows."""
        assert self.loaded
        if self._sum is not None:
            self._sum.masked_fill_(rows.unsqueeze(1), 0)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self.refuse(window["state.values"])
        if self._sum is None:
            self._sum = torch.zeros_like(window["mean"])
        self._sum += window["mean"]
        out["sum"].copy_(self._sum)


class Last(_Part):
    """Actions from all of them."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self.refuse(window["state.values"])
        steps = out["actions"].shape[1]
        dims = out["actions"].shape[2]
        mixed = window["sum"] * 1e-3 + window["newest"]
        newest = window["state.values"][:, -steps:, :dims]
        out["actions"].copy_(newest + mixed[:, None, :dims])


def build(options: Mapping[str, Any], device: torch.device) -> list[_Part]:
    """Its parts; ``fails`` names one that raises now and then, "load" has the middle's raise."""
    dim, steps = options["dim"], options["steps"]
    values = TensorSpec("state.values", (steps, dim))
    mean, newest, total = (TensorSpec(name, (dim,)) for name in ("mean", "newest", "sum"))
    actions = TensorSpec("actions", (options["horizon"], options["action_dim"]))
    middle = Middle("middle", (mean, values), (total,), options)
    middle.lacks_weights = options.get("fails") == "load"
    return [
        First("first", (values,), (mean, newest), options),
        middle,
        Last("last", (total, newest, values), (actions,), options),
    ]
