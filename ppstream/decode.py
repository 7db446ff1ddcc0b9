"""The default decoder, which copies the policy's actions, and the limits every decoder is held to.

Stage C calls ``enforce`` behind any decoder: no user code can pass a limit or emit a NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppstream.errors import ConfigError

if TYPE_CHECKING:
    from ppstream.config import ActionConfig

Array = np.ndarray[Any, Any]


class Enforced(NamedTuple):
    """What ``enforce`` found: how many values it clipped, and whether all were finite."""

    clipped: int
    finite: bool


class CopyDecoder:
    """Copies the result's ``actions`` of a row (``ppstream.Decoder``); keeps no state."""

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def __call__(self, row: int, result: Mapping[str, Array], actions: Array) -> None:
        """Write the policy's ``actions [horizon, action_dim]`` into ``actions``."""
        actions[...] = result["actions"]


def build(options: Mapping[str, Any], actions: ActionConfig) -> CopyDecoder:
    """The default decoder.

    Raises:
        ConfigError: there are options; it has none.
    """
    if options:
        raise ConfigError([f"decode.options: the default decoder has none, got {sorted(options)}"])
    return CopyDecoder()


def enforce(actions: Array, low: Array, high: Array) -> Enforced:
    """Clip ``actions [horizon, action_dim]`` in place into ``[low, high]`` (``[action_dim]`` each).

    Not finite: nothing is clipped, ``actions`` stay as they are and must not be executed.
    """
    if not np.isfinite(actions).all():
        return Enforced(0, finite=False)
    outside = (actions < low) | (actions > high)
    clipped = int(np.count_nonzero(outside))
    if clipped:
        np.clip(actions, low, high, out=actions)
    return Enforced(clipped, finite=True)
