"""An echo that takes instructions and follows none, for runs with ``policy.instructions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from ppstream_stages.echo import EchoPolicy, Options


class ToldEcho(EchoPolicy):
    """Its actions are the observation's values, whatever the text says."""

    def instruct(self, number: int, text: str) -> None:
        """Nothing changes."""


def build(config: Mapping[str, Any], device: torch.device) -> ToldEcho:
    """As ``ppstream_stages.echo:build``."""
    return ToldEcho(msgspec.convert(config, Options), device)
