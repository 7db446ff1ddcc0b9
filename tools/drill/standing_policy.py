"""A policy that makes its rank's main thread stand: in its build, in its first call, or in a fork.

The work is another policy's, which ``policy.options.inner`` names as ``module:attr``; the rest of
the options are that one's.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ppstream.policy.protocol import load_target

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class StandingPolicy:
    """Calls ``inner``; the first call takes ``first_s`` longer."""

    def __init__(self, inner: Any, first_s: float) -> None:
        self.inputs, self.outputs = inner.inputs, inner.outputs
        self._inner = inner
        self._first_s = first_s

    def reset(self, rows: Tensor) -> None:
        self._inner.reset(rows)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        if self._first_s:
            print(f"the first call takes {self._first_s:g} s", flush=True)
            time.sleep(self._first_s)
            self._first_s = 0.0
        self._inner(window, out)


def build(options: Mapping[str, Any], device: torch.device) -> StandingPolicy:
    """After ``build_s`` seconds; with ``holds``, no other Python thread runs meanwhile."""
    rest = dict(options)
    build_s, first_s = rest.pop("build_s", 0.0), rest.pop("first_s", 0.0)
    holds, forks = rest.pop("holds", False), rest.pop("forks", False)
    inner = load_target(rest.pop("inner"))(rest, device)
    print(f"the build takes {build_s:g} s", flush=True)
    if holds:
        ctypes.PyDLL(None).usleep(round(build_s * 1e6))
    else:
        time.sleep(build_s)
    if forks and not os.fork():  # as a data loader's worker: it keeps every descriptor
        time.sleep(3600)
    return StandingPolicy(inner, first_s)
