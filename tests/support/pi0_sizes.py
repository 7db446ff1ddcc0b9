"""Sizes and weights of a small π0, the same for LeRobot and for us; it imports neither."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

TINY: Final = {
    "layers": 3,
    "heads": 2,
    "head_width": 8,
    "language": 24,
    "expert": 16,
    "feed_forward": 40,
    "image": 20,
    "image_layers": 2,
    "vocabulary": 40,
}
RESOLUTION: Final = 28  # two patches, both ways
CHUNK: Final = 8  # steps that it makes
PREFIX: Final = 6  # steps of an executed prefix
MOST: Final = 12  # tokens of a text
STATE_DIM: Final = 6
GAIN: Final = 0.5  # of a matrix
SEED: Final = 5  # of the noise
TEXTS: Final = ("fold it", "open", "pick a cup\n")
DELAYS: Final = (2, 0, 4)  # of a prefix


def drawn(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Weights by their names alone, of a size at which every one counts."""
    return {name: _weight(name, shape) for name, shape in shapes.items()}


def _weight(name: str, shape: Sequence[int]) -> Tensor:
    number = int.from_bytes(sha256(name.encode()).digest()[:7], "little")
    made = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    if len(shape) < 2:
        return made * 0.2 + (0.8 if "layer_norm" in name or "post_layernorm" in name else 0)
    return made * GAIN / prod(shape[1:]) ** 0.5


def shortened(shapes: Mapping[str, list[int]]) -> dict[str, list[Any]]:
    """One entry for the same weight of all layers: how many layers, or 0, and the shape."""
    found: dict[str, list[Any]] = {}
    for name, shape in shapes.items():
        short = re.sub(r"\.layers\.\d+\.", ".layers.*.", name)
        count, _ = found.get(short, (0, shape))
        found[short] = [count + ("*" in short), shape]
    return found


def expanded(short: Mapping[str, list[Any]]) -> dict[str, list[int]]:
    """The inverse of ``shortened``."""
    return {
        name.replace("*", str(depth)): shape
        for name, (count, shape) in short.items()
        for depth in range(max(count, 1))
    }
