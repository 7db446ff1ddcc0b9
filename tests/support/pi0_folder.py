"""A small π0 as LeRobot saved it, and what LeRobot made of observations: ``tests/golden/pi0``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
import torch
from pi0_sizes import CHUNK, DELAYS, SEED, TEXTS, TINY, drawn, expanded
from policy_calls import in_a_row
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppstream_stages import lerobot_pi0
from ppstream_stages.building import NetworkPart
from ppstream_stages.lerobot import build
from ppstream_stages.vla_network import ImageEncoder, TransformerSizes

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "pi0"
CPU: Final = torch.device("cpu")
NAMES: Final = {
    "observation.state": "state.values",
    "observation.images.front": "front.frames",
    "observation.images.wrist": "wrist.frames",
}


class Letters:
    """Stands in for the library ``tokenizers``: reads a file in which each letter is a token."""

    def __init__(self, known: dict[str, int]) -> None:
        self._known = known

    @classmethod
    def from_file(cls, path: str) -> Letters:
        return cls(json.loads(Path(path).read_text())["model"]["vocab"])

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode(self, text: str) -> Any:
        letters = (self._known[letter] for letter in text.replace(" ", "▁"))
        return SimpleNamespace(ids=[self._known["<bos>"], *letters])


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Has policies of π0 be of ``TINY``, and texts be read by letters."""
    feed_forward = TINY["feed_forward"]
    for name, width in (("gemma_2b", "language"), ("gemma_300m", "expert")):
        sizes = TransformerSizes(width=TINY[width], feed_forward=feed_forward)
        patch.setitem(lerobot_pi0.VARIANTS, name, sizes)
    image = ImageEncoder(
        layers=TINY["image_layers"],
        width=TINY["image"],
        heads=TINY["heads"],
        feed_forward=feed_forward,
    )
    patch.setitem(lerobot_pi0.SHAPE, "image", image)
    for name in ("layers", "heads", "head_width", "vocabulary"):
        patch.setitem(lerobot_pi0.SHAPE, name, TINY[name])
    library = ModuleType("tokenizers")
    vars(library)["Tokenizer"] = Letters
    patch.setitem(sys.modules, "tokenizers", library)


def weights() -> dict[str, Tensor]:
    """Those of the small policy, by LeRobot's names."""
    return drawn(expanded(json.loads((GOLDEN / "shapes.json").read_text())))


def saved(folder: Path) -> Path:
    """The folder, with its weights."""
    shutil.copytree(GOLDEN, folder)
    save_file(weights(), folder / "model.safetensors")
    return folder


def loaded(folder: Path, device: torch.device = CPU, **options: Any) -> list[NetworkPart]:
    """Its parts, which were told ``TEXTS`` as 1, 2, ..."""
    given = {"tokenizer": str(folder), "instructions": True, "seed": SEED, "horizon": CHUNK}
    given |= {"weights": str(folder / "model.safetensors")}
    parts = build(given | options, device)
    for part in parts:
        part.load()
        for number, text in enumerate(TEXTS):
            if hasattr(part, "instruct"):
                part.instruct(number + 1, text)
    return parts


def reference() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A window of a row for each text; and LeRobot's actions."""
    known = load_file(GOLDEN / "reference.safetensors")
    made = {key.removeprefix("action."): known.pop(key) for key in list(known) if "action." in key}
    window = {NAMES.get(key, key): tensor for key, tensor in known.items()}
    window |= {name: window[name].unsqueeze(1) for name in NAMES.values()}
    window["instruction_id"] = torch.arange(1, len(TEXTS) + 1)
    window["delay_steps"] = torch.tensor(DELAYS)
    return window, made


def actions_of(parts: list[NetworkPart], window: dict[str, Tensor]) -> Tensor:
    return in_a_row(parts, window, len(TEXTS))["actions"]
