"""Stage B of ``robot_view.py``: the demo's policy, made to take a fixed time by sleeping it out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from ppstream_stages.cartpole import policy as cartpole


class SlowPolicy(cartpole.CartPolePolicy):
    """Answers what the demo's policy answers, ``takes_s`` after it was asked."""

    takes_s = 0.025

    def __call__(self, window: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
        due_s = time.monotonic() + self.takes_s
        super().__call__(window, out)
        time.sleep(max(0.0, due_s - time.monotonic()))


def build(config: Mapping[str, Any], device: torch.device) -> SlowPolicy:
    """As the demo's ``build``; option ``takes_ms`` is the duration."""
    options = dict(config)
    takes_ms = float(options.pop("takes_ms", 25.0))
    policy = cartpole.build(options, device)
    policy.__class__ = SlowPolicy
    assert isinstance(policy, SlowPolicy)
    policy.takes_s = takes_ms / 1000
    return policy
