"""An echo that takes instructions and follows none, for runs with ``policy.instructions``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from ppstream_stages.echo import EchoPolicy, Options


class ToldEcho(EchoPolicy):
    """Its actions are the observation's values, whatever the text says."""

    def instruct(self, number: int, text: str) -> None:
        """Nothing changes; a text that names a folder takes from ``began`` in it to ``over``."""
        folder = Path(text)
        if folder.is_absolute():
            (folder / "began").touch()
            while not (folder / "over").exists():
                time.sleep(0.01)


def build(config: Mapping[str, Any], device: torch.device) -> ToldEcho:
    """As ``ppstream_stages.echo:build``."""
    return ToldEcho(msgspec.convert(config, Options), device)
