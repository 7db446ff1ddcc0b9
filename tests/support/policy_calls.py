"""Calls of policies on made-up windows, and what they name as blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ppstream import TensorSpec
from ppstream.observe.attribution import (
    Attribution,
    set_block_opener,
)
from ppstream.observe.log_writer import TimestampLog

ROWS = 2


def actions_of(parts: Sequence[Any], valid_share: float, seed: int = 0, **given: Tensor) -> Tensor:
    """``actions`` of ``parts`` on random inputs, of which so many are valid.

    ``given`` inputs replace them.
    """
    for part in parts:
        part.load()
    generator = torch.Generator().manual_seed(seed)
    made = {spec.name for part in parts for spec in part.outputs}
    window = {
        spec.name: torch.rand(ROWS, *spec.shape, generator=generator) < valid_share
        if spec.dtype == "bool"
        else torch.rand(ROWS, *spec.shape, generator=generator)
        for part in parts
        for spec in part.inputs
        if spec.name not in made
    }
    return in_a_row(parts, window | given)["actions"]


def in_a_row(
    parts: Sequence[Any], window: Mapping[str, Tensor], rows: int = ROWS
) -> dict[str, Tensor]:
    """Everything that loaded ``parts`` write, each given what it names alone."""
    tensors = dict(window)
    for part in parts:
        out = {spec.name: _unwritten(spec, rows) for spec in part.outputs}
        part({spec.name: tensors[spec.name] for spec in part.inputs}, out)
        tensors.update(out)
    return {name: tensor for name, tensor in tensors.items() if name not in window}


def _unwritten(spec: TensorSpec, rows: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    filling = torch.nan if dtype.is_floating_point else -1
    return torch.full((rows, *spec.shape), filling, dtype=dtype)


def blocks_of(call: Callable[[], object]) -> list[str]:
    """Names of the blocks that ``call`` opens, in order."""
    opened: list[str] = []

    def opener(name: str) -> Any:
        opened.append(name)
        return nullcontext()

    set_block_opener(opener)
    try:
        call()
    finally:
        set_block_opener(None)
    return opened


class OnlyLabelled(Attribution):
    """Rank 0's where the policy rank is in the same process, which has one opener of blocks."""

    def __init__(self, log: TimestampLog, settle: Callable[[], None]) -> None:
        super().__init__(log, settle)
        self.log = log

    def start(self) -> None:
        self.log.mode = "attribution"

    def stop(self) -> None:
        self.log.mode = "throughput"
