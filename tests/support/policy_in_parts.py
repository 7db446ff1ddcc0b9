"""A policy in three parts whose every tensor matters: state by row, values carried past a place."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ppstream import TensorSpec

TELLING_S: Final = 0.003  # that a telling part takes
CALL: Final = 1e-4  # an action that stands for one call: limits are 1


class _Part:
    """Calls ``work(inputs, out)``, and raises on windows that end in a row's ``fails`` values."""

    def __init__(self, name: str, inputs: Any, outputs: Any, options: Mapping[str, Any]) -> None:
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self._fails = options.get("fails") == name
        self._texts: dict[int, str] = {}

    def reset(self, rows: Tensor) -> None:
        """Nothing is kept."""

    def refuse(self, values: Tensor) -> None:
        assert not torch.is_grad_enabled()
        if self._fails and float(values[0, -1, 0]) > 1.5:
            raise ValueError(f"{self.name} refuses what is above 1.5")


class First(_Part):
    """Window to its mean and its newest step; no Python thread runs in ``first_s`` of a call."""

    first_s = 0.0

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        if self.first_s:
            ctypes.PyDLL(None).usleep(round(self.first_s * 1e6))
            self.first_s = 0.0
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
    first = First("first", (values,), (mean, newest), options)
    first.first_s = options.get("first_s", 0.0)
    return [
        first,
        middle,
        Last("last", (total, newest, values), (actions,), options),
    ]


class Telling:
    """Adds to a trail how often it was called since a row's reset, and whether it knows its text.

    Told ``raise NAME`` it raises, if that is its name, when it first sees a row that has that text.
    """

    def __init__(self, name: str, place: int, inputs: Any, output: TensorSpec) -> None:
        self.name, self.inputs, self.outputs = name, inputs, (output,)
        self._place = place
        self._texts = {0}
        self._raises = -1
        self._calls: Tensor | None = None

    def reset(self, rows: Tensor) -> None:
        """A row's calls are counted anew."""
        if self._calls is not None:
            self._calls[rows] = 0

    def instruct(self, number: int, text: str) -> None:
        """Knows it from now on."""
        self._texts.add(number)
        if text == f"raise {self.name}":
            self._raises = number

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        time.sleep(TELLING_S)
        texts = window["instruction_id"].tolist()
        if self._raises in texts:
            self._raises = -1
            raise ValueError(f"{self.name} was told to raise")
        trail = next((window[spec.name] for spec in self.inputs if "trail" in spec.name), None)
        mine = out[self.outputs[0].name]
        mine.zero_() if trail is None else mine.copy_(trail)
        if self._calls is None:
            self._calls = torch.zeros(len(texts))
        self._calls += 1
        mine[:, self._place, 0] = self._calls * CALL
        mine[:, self._place, 1] = torch.tensor([float(text in self._texts) for text in texts])


def build_telling(options: Mapping[str, Any], device: torch.device) -> list[Telling]:
    """Four parts; actions are the trail ``[4, 2]``: a row for each part, calls and text."""
    text = TensorSpec("instruction_id", (), "int64")
    trails = [TensorSpec(f"trail_{k}", (4, 2)) for k in range(1, 4)]
    edges = [(text,), *((text, trail) for trail in trails)]
    made = [*trails, TensorSpec("actions", (4, 2))]
    return [Telling(f"part_{k}", k, edges[k], made[k]) for k in range(4)]
