"""The default decoder: a policy's normalised output in the units of ``[actions]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.pipeline.action_limits import Array

if TYPE_CHECKING:
    from ppstream.config.schema import ActionConfig


OPTIONS: Final = ("offset", "scale")


class CopyDecoder:
    """``offset + scale * actions`` of the result's row (``ppstream.Decoder``); keeps no state.

    Turns a policy's normalised output into the units of ``[actions]``: for mean and standard
    deviation ``offset = mean, scale = std``; for a range ``min..max`` that the policy sees as
    ``-1..1``, ``offset = (min + max) / 2, scale = (max - min) / 2``.
    """

    def __init__(self, offset: Array | None = None, scale: Array | None = None) -> None:
        self._offset = offset
        self._scale = scale

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def __call__(self, row: int, result: Mapping[str, Array], actions: Array) -> None:
        """Write the policy's ``actions [horizon, action_dim]`` into ``actions``."""
        actions[...] = result["actions"]
        if self._scale is not None:
            actions *= self._scale
        if self._offset is not None:
            actions += self._offset


def build(options: Mapping[str, Any], actions: ActionConfig) -> CopyDecoder:
    """The default decoder; options ``offset`` and ``scale``, one number per action each.

    Raises:
        ConfigError: an option is unknown, or not finite numbers for each action.
    """
    problems = [
        f"decode.options.{name}: the default decoder knows {' and '.join(OPTIONS)} only"
        for name in sorted(set(options) - set(OPTIONS))
    ]
    arrays: dict[str, Array] = {}
    for name in OPTIONS:
        if name in options:
            values = _numbers(options[name], len(actions.names))
            if values is None:
                problems.append(
                    f"decode.options.{name}: got {options[name]!r}, want {len(actions.names)} "
                    "finite numbers: one for each name of actions.names"
                )
            else:
                arrays[name] = values
    if problems:
        raise ConfigError(problems)
    return CopyDecoder(arrays.get("offset"), arrays.get("scale"))


def _numbers(given: Any, n: int) -> Array | None:
    try:
        values = np.asarray(given, dtype=np.float32)
    except (TypeError, ValueError):
        return None
    return values if values.shape == (n,) and np.isfinite(values).all() else None
