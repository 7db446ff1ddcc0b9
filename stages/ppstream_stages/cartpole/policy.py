"""Stage B of the demo: a small causal transformer over the window, asked through eight views.

Each view hides part of the input (a sensor, or the older half of the history) and proposes an
action chunk of its own; stage C chooses among the proposals. No state is kept between calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ppstream import TensorSpec, block
from ppstream_stages.building import load_weights
from ppstream_stages.cartpole.layout import DIM, FORCE_MAX_N, HORIZON, STREAMS, WINDOW_STEPS

# B=row V=view T=step of the window D=value S=stream F=feature H=horizon N=4 numbers of the state

WEIGHTS: Final = Path(__file__).with_name("weights.safetensors")
WIDTH: Final = 96
HEADS: Final = 4
BLOCKS: Final = 4

#: What each view may see: one flag per stream, and how many of the newest steps.
VIEWS: Final = (
    ((True, True, True), WINDOW_STEPS),
    ((True, True, False), WINDOW_STEPS),
    ((True, False, True), WINDOW_STEPS),
    ((True, False, False), WINDOW_STEPS),
    ((True, True, True), WINDOW_STEPS // 2),
    ((True, True, False), WINDOW_STEPS // 2),
    ((True, False, True), WINDOW_STEPS // 2),
    ((True, False, False), WINDOW_STEPS // 2),
)
#: Typical size of each value, the scale of the features; of the state, the scale of its estimate.
VALUE_SCALE: Final = (0.1, 0.05, 0.5, 3.0, 1.0, 0.1, 0.01)
VALUE_CENTRE: Final = (0.0, 0.0, 0.0, 0.0, 9.81, 0.0, 0.45)
STATE_SCALE: Final = (0.1, 0.05, 0.3, 0.5)
FORCE_SCALE_N: Final = 5.0
AGE_SCALE_S: Final = 0.03


class Seen(NamedTuple):
    """Inputs that views see, as factors 0 and 1: ``values [V, T, D]``, ``streams [V, T, S]``."""

    values: Tensor
    streams: Tensor

    def to(self, device: torch.device) -> Seen:
        """The same on ``device``."""
        return Seen(self.values.to(device), self.streams.to(device))


def seen_by_views() -> Seen:
    """The masks of ``VIEWS``."""
    streams = torch.zeros(len(VIEWS), WINDOW_STEPS, len(STREAMS))
    for view, (seen, steps) in enumerate(VIEWS):
        streams[view, -steps:] = torch.tensor(seen, dtype=torch.float32)
    widths = torch.tensor([len(stream.fields) for stream in STREAMS])
    return Seen(streams.repeat_interleave(widths, dim=2), streams)


class CausalBlock(nn.Module):
    """Pre-norm causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)
        self.norm_feed = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[V, T, WIDTH]`` to the same shape."""
        views, steps, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(views, steps, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).reshape(views, steps, WIDTH))
        fed: Tensor = self.narrow(gelu(self.widen(self.norm_feed(x)), approximate="tanh"))
        return x + fed


class HistoryTransformer(nn.Module):
    """Features of a history to forces and a state estimate, at every step of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM + 2 * len(STREAMS), WIDTH)
        self.place = nn.Parameter(torch.zeros(WINDOW_STEPS, WIDTH))
        self.blocks = nn.Sequential(*(CausalBlock() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, HORIZON + len(STATE_SCALE))
        self.centre: Tensor
        self.scale: Tensor
        self.register_buffer("centre", torch.tensor(VALUE_CENTRE), persistent=False)
        self.register_buffer("scale", torch.tensor(VALUE_SCALE), persistent=False)

    def features(self, values: Tensor, valid: Tensor, age_s: Tensor, seen: Seen) -> Tensor:
        """Features ``[V, T, F]`` of windows ``[V or 1, T, D or S]``; what is not seen is zero."""
        trusted = valid * seen.streams
        scaled = (values - self.centre) / self.scale * seen.values
        return torch.cat((scaled, trusted, age_s / AGE_SCALE_S * trusted), dim=-1)

    def forward(self, features: Tensor, newest: int = 1) -> tuple[Tensor, Tensor]:
        """Forces ``[V, newest, H]`` and states ``[V, newest, 4]``, both in units of their scales.

        Args:
            features: ``[V, T, F]``.
            newest: how many of the last steps to answer for; training asks for many at once.
        """
        x = self.blocks(self.embed(features) + self.place)
        answer = self.head(self.norm(x[:, -newest:]))
        return answer[..., :HORIZON], answer[..., HORIZON:]


class CartPolePolicy:
    """The policy as the runtime knows it (``ppstream.Policy``)."""

    any_rows = True
    inputs = (
        TensorSpec("state.values", (WINDOW_STEPS, DIM)),
        TensorSpec("state.valid", (WINDOW_STEPS, len(STREAMS)), "bool"),
        TensorSpec("state.age_s", (WINDOW_STEPS, len(STREAMS))),
    )
    outputs = (
        TensorSpec("actions", (HORIZON, 1)),
        TensorSpec("proposals", (len(VIEWS), HORIZON, 1)),
        TensorSpec("state", (len(STATE_SCALE),)),
    )

    def __init__(self, network: HistoryTransformer, device: torch.device) -> None:
        self._network = network.to(device).eval()
        self._device = device
        self._seen = seen_by_views().to(device)
        self._state_scale = torch.tensor(STATE_SCALE, device=device)

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget: the window is all it knows."""

    @torch.no_grad()
    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Write the proposals of all views, their mean as ``actions``, and the mean state."""
        for row in range(window["state.values"].shape[0]):
            parts = (window[spec.name][row : row + 1].to(self._device) for spec in self.inputs)
            values, valid, age_s = parts
            with block("features"):
                features = self._network.features(values, valid, age_s, self._seen)
            with block("transformer"):
                forces, states = self._network(features)
            with block("proposals"):
                proposals = (forces[:, 0] * FORCE_SCALE_N).clamp_(-FORCE_MAX_N, FORCE_MAX_N)
                out["proposals"][row, :, :, 0] = proposals
                out["actions"][row, :, 0] = proposals.mean(dim=0)
                out["state"][row] = states[:, 0].mean(dim=0) * self._state_scale


def build(config: Mapping[str, Any], device: torch.device) -> CartPolePolicy:
    """The trained policy.

    Args:
        config: ``weights`` (path of a .safetensors file; the shipped one without) and ``threads``
            (CPU threads torch may use in this process; 1 without).
        device: where it computes.

    Raises:
        ConfigError: the weights do not fit the network.
    """
    torch.set_num_threads(int(config.get("threads", 1)))
    path = Path(config.get("weights") or WEIGHTS)
    network = HistoryTransformer()
    load_weights(network, path)
    return CartPolePolicy(network, device)
