"""A transformer policy of the size of ACT: history and camera patches in, an action chunk out.

An encoder over all tokens, a decoder with one query per action of the chunk. With cameras it has
two parts: ``backbones`` turns frames into ``features``, ``transformer`` does the rest. Without
trained weights it is a load of the right size and shape, the same for the same seed, and its
actions mean nothing: never let a robot execute them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ppstream import TensorSpec, block
from ppstream.config.schema import Count
from ppstream_stages.building import (
    DTYPES,
    NetworkPart,
    PartNetwork,
    Patches,
    options_of,
    parts_from,
)
from ppstream_stages.tensor_parallel import Plan, check_divides, plan_of, regroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# B=row T=step of the window D=value S=stream N=tokens Q=queries F=feature H=horizon n=frames

PATCH: Final = 16  # pixels, both ways
FEED_FORWARD: Final = 3200  # at a width of 512, as ACT has it
WIDTH: Final = 512
HEAD: Final = 64  # features


class CameraInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A camera stream as the policy reads it."""

    name: str
    height: Annotated[int, Meta(ge=PATCH)]
    width: Annotated[int, Meta(ge=PATCH)]
    frames: Count = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of its frames in the envelope

    @property
    def tokens(self) -> int:
        """Patches of all its frames."""
        return int(self.frames * (self.height // PATCH) * (self.width // PATCH))


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``."""

    steps: Count  # of the window
    dim: Count  # values of the group, all its streams together
    streams: Count  # of the group
    horizon: Count
    action_dim: Count
    group: str = "state"
    cameras: tuple[CameraInput, ...] = ()
    width: Annotated[int, Meta(ge=64, multiple_of=64)] = WIDTH
    encoder_blocks: Count = 4
    decoder_blocks: Count = 4
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # that it computes in
    seed: int = 0
    weights: str | None = None  # .safetensors

    @property
    def features(self) -> TensorSpec:
        """Tensor that the backbones make of all cameras."""
        tokens = sum(camera.tokens for camera in self.cameras)
        return TensorSpec("features", (tokens, self.width), self.dtype)


def feed_forward(width: int) -> int:
    """Features inside a feed-forward layer."""
    return FEED_FORWARD * width // WIDTH


class Attention(nn.Module):
    """Heads of 64 features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.ask = nn.Linear(width, width)
        self.offer = nn.Linear(width, 2 * width)
        self.join = nn.Linear(width, width)

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """``[B, Q, F]`` over ``[B, N, F]`` to ``[B, Q, F]``."""
        rows = queries.shape[0]  # ``len`` would make a constant of it when the network is exported
        q = self.ask(queries).view(rows, -1, self.heads, HEAD).transpose(1, 2)
        k, v = self.offer(tokens).view(rows, -1, 2, self.heads, HEAD).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.join(seen.transpose(1, 2).flatten(2))
        return joined

    def shard_plan(self, ranks: int) -> Plan:
        """Whole heads on each rank."""
        regroup(self.offer, 2, ranks)
        self.heads //= ranks
        return plan_of(("ask", "offer"), ("join",))


class AttentionBlock(nn.Module):
    """Pre-norm self-attention, attention to ``tokens`` in a decoder, and a feed-forward layer."""

    def __init__(self, width: int, *, is_decoder: bool) -> None:
        super().__init__()
        self.norm_self = nn.LayerNorm(width)
        self.attend = Attention(width)
        self.norm_cross = nn.LayerNorm(width) if is_decoder else None
        self.look = Attention(width) if is_decoder else None
        self.norm_feed = nn.LayerNorm(width)
        hidden = feed_forward(width)
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        normed = self.norm_self(x)
        x = x + self.attend(normed, normed)
        if self.look is not None and self.norm_cross is not None and tokens is not None:
            x = x + self.look(self.norm_cross(x), tokens)
        fed: Tensor = self.narrow(gelu(self.widen(self.norm_feed(x))))
        return x + fed

    def shard_plan(self, ranks: int) -> Plan:
        """The feed-forward layer; attention has a plan of its own."""
        return plan_of(("widen",), ("narrow",))


class Weights(nn.Module):
    """The weights of all parts, named as in a file, in the order in which they are drawn."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.width
        self.embed = nn.Linear(options.dim, width)
        self.patches = nn.ModuleList(Patches(width, PATCH) for _ in options.cameras)
        tokens = options.steps + sum(camera.tokens for camera in options.cameras)
        self.place = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.queries = nn.Parameter(torch.randn(options.horizon, width) * 0.02)
        self.encoder = nn.ModuleList(
            AttentionBlock(width, is_decoder=False) for _ in range(options.encoder_blocks)
        )
        self.decoder = nn.ModuleList(
            AttentionBlock(width, is_decoder=True) for _ in range(options.decoder_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, options.action_dim)


class Backbones(PartNetwork):
    """The part ``backbones``: every camera's patches to tokens."""

    def __init__(self, options: Options, weights: Weights) -> None:
        super().__init__()
        self.inputs = tuple(
            TensorSpec(f"{c.name}.frames", (c.frames, 3, c.height, c.width), c.dtype)
            for c in options.cameras
        )
        self.outputs = (options.features,)
        self.patches = weights.patches

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """``[B, n, 3, H, W]`` per camera to ``[B, N, F]``."""
        features, seen = out["features"], []
        for patch, spec in zip(self.patches, self.inputs, strict=True):
            images = inputs[spec.name].to(features.dtype)
            tokens = patch(images.flatten(0, 1))  # [B * n, N / n, F]
            seen.append(tokens.reshape(images.shape[0], -1, tokens.shape[-1]))
        features.copy_(torch.cat(seen, dim=1))


class Transformer(PartNetwork):
    """The part ``transformer``: tokens of the history and of every camera to actions in (-1, 1)."""

    shards = True

    def __init__(self, options: Options, weights: Weights) -> None:
        super().__init__()
        group = options.group
        self.inputs = (
            TensorSpec(f"{group}.values", (options.steps, options.dim)),
            TensorSpec(f"{group}.valid", (options.steps, options.streams), "bool"),
        )
        if options.cameras:
            self.inputs += (options.features,)
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        self.embed, self.place, self.queries = weights.embed, weights.place, weights.queries
        self.encoder, self.decoder = weights.encoder, weights.decoder
        self.norm, self.head = weights.norm, weights.head

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Writes ``actions``; a step with any stream invalid is seen as zeros."""
        values, valid, *features = (inputs[spec.name] for spec in self.inputs)
        trusted = values * valid.all(dim=2, keepdim=True)
        with block("embed"):
            history = self.embed(trusted.to(self.place.dtype))
            tokens = torch.cat([history, *features], dim=1) + self.place
        with block("encoder"):
            for layer in self.encoder:
                tokens = layer(tokens)
        with block("decoder"):
            x = self.queries.expand(values.shape[0], -1, -1)
            for layer in self.decoder:
                x = layer(x, tokens)
        with block("head"):
            out["actions"].copy_(torch.tanh(self.head(self.norm(x))))


def draw(options: Options, weights: Mapping[str, Tensor]) -> None:
    """Fills some of the weights that the seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        drawn = Weights(options).state_dict()
    for name, weight in weights.items():
        weight.copy_(drawn[name])


def build(
    config: Mapping[str, Any], device: torch.device, mesh: DeviceMesh | None = None
) -> list[NetworkPart]:
    """The parts of the policy with the given ``Options``, in order; without weights yet.

    Encoder and decoder are sharded over ``mesh``, by heads and by features of feed-forward layers.

    Raises:
        ConfigError: an option is missing, unknown or not allowed, the weights do not fit, or the
            mesh does not divide the heads.
    """
    options = options_of(config, Options)
    check_divides(mesh, {"heads": options.width // HEAD, "features": feed_forward(options.width)})
    with torch.device("meta"):
        weights = Weights(options)
        networks: dict[str, PartNetwork] = {"transformer": Transformer(options, weights)}
        if options.cameras:
            networks = {"backbones": Backbones(options, weights), **networks}
    dtype = DTYPES[options.dtype]
    draws = partial(draw, options)
    return parts_from(networks, dtype, draws, options.weights, device, mesh=mesh)
