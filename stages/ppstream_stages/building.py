"""Common parts of building a policy: its options, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors.torch import load_file
from torch import nn

from ppstream import ConfigError

Options = TypeVar("Options")


def options_of(config: Mapping[str, Any], kind: type[Options]) -> Options:
    """``[policy.options]`` as ``kind``.

    Raises:
        ConfigError: one is missing, unknown or not allowed.
    """
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ConfigError([f"policy.options: {error}"]) from error


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Load ``network``'s weights from a safetensors file.

    Raises:
        ConfigError: they cannot be read, or do not fit.
    """
    try:
        network.load_state_dict(load_file(path))
    except (OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError([f"policy.weights: {path} does not fit this policy: {text}"]) from error
