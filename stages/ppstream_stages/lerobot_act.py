"""The network of LeRobot's ACT, with the names that its weights have in a LeRobot folder.

A residual network turns every camera's frame into tokens; an encoder reads them beside the state,
and a decoder makes one action of each query. Normalisation is part of the network. Nothing of
LeRobot is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import pi
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from ppstream_stages.lerobot_network import (
    DEPTHS,
    VISUAL,
    Backbone,
    ConfigFeature,
    LeRobotNetwork,
    Reads,
    Scale,
    Sizes,
    grid_of,
)

# B=row T=step of the window D=value N=tokens F=feature H=horizon n=frames

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"relu": relu, "gelu": gelu}
PLACE_EPS: Final = 1e-6
PLACE_BASE: Final = 10000.0


class ActSizes(Sizes, frozen=True, kw_only=True):
    """Sizes in ``config.json`` of ACT."""

    chunk_size: int
    vision_backbone: str = "resnet18"
    replace_final_stride_with_dilation: bool | int = False
    pre_norm: bool = False
    dim_model: int = 512
    n_heads: int = 8
    dim_feedforward: int = 3200
    feedforward_activation: str = "relu"
    n_encoder_layers: int = 4
    n_decoder_layers: int = 1
    latent_dim: int = 32

    @property
    def horizons(self) -> tuple[int, int]:
        """As ``Sizes``."""
        return self.chunk_size, self.chunk_size

    def problems(self, features: Mapping[str, ConfigFeature]) -> Iterator[str]:
        """As ``Sizes``."""
        yield from self.differing(
            n_obs_steps=[1],
            replace_final_stride_with_dilation=[False],
            feedforward_activation=[*ACTIVATIONS],
        )
        if any(one.type == VISUAL for one in features.values()):
            yield from self.differing(vision_backbone=[*DEPTHS])
        if self.chunk_size < 1 or self.n_heads < 1 or self.dim_model % (2 * self.n_heads):
            yield "chunk_size, n_heads, dim_model: want sizes of a network"


class SineEncoding(nn.Module):
    """Waves that tell a camera's tokens apart, rows first: ``table [N, F]``."""

    table: Tensor

    def __init__(self, height: int, width: int, features: int) -> None:
        super().__init__()
        self._shape = height, width, features
        self.register_buffer("table", torch.empty(height * width, features), persistent=False)

    def start(self) -> None:
        """Fills the table."""
        height, width, features = self._shape
        down, right = (_waves(size, features // 2) for size in (height, width))
        rows = down[:, None].expand(-1, width, -1)
        columns = right[None].expand(height, -1, -1)
        self.table.copy_(torch.cat([rows, columns], -1).flatten(0, 1))


def _waves(size: int, features: int) -> Tensor:
    """``[size, features]``: sines at even features, cosines at odd ones."""
    index = torch.arange(features, dtype=torch.float32)
    place = torch.arange(1, size + 1, dtype=torch.float32) / (size + PLACE_EPS) * 2 * pi
    angles = place[:, None] / PLACE_BASE ** (2 * (index // 2) / features)
    return torch.where(index % 2 == 0, angles.sin(), angles.cos())


class Layer(nn.Module):
    """Self-attention, in a decoder attention to the encoder's tokens, and a feed-forward layer."""

    def __init__(self, sizes: ActSizes, *, is_decoder: bool) -> None:
        super().__init__()
        width, heads = sizes.dim_model, sizes.n_heads
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        if is_decoder:
            self.multihead_attn = nn.MultiheadAttention(width, heads, batch_first=True)
            self.norm3 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, sizes.dim_feedforward)
        self.linear2 = nn.Linear(sizes.dim_feedforward, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.activation = sizes.feedforward_activation
        self.is_pre, self.is_decoder = sizes.pre_norm, is_decoder

    def forward(
        self, x: Tensor, place: Tensor, seen: Tensor | None = None, seen_place: Tensor | None = None
    ) -> Tensor:
        """``[B, N, F]`` with places ``[N, F]``; ``seen`` are the encoder's tokens and places."""

        def attend(x: Tensor) -> Tensor:
            asking = x + place
            return _attention(self.self_attn, asking, asking, x)

        def look(x: Tensor) -> Tensor:
            assert seen is not None
            assert seen_place is not None
            return _attention(self.multihead_attn, x + place, seen + seen_place, seen)

        def feed(x: Tensor) -> Tensor:
            fed: Tensor = self.linear2(ACTIVATIONS[self.activation](self.linear1(x)))
            return fed

        if not self.is_decoder:
            return self._around(self.norm2, feed, self._around(self.norm1, attend, x))
        x = self._around(self.norm1, attend, x)
        return self._around(self.norm3, feed, self._around(self.norm2, look, x))

    def _around(self, norm: nn.Module, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``work`` with ``x`` added; the norm stands before or behind."""
        normed: Tensor = x + work(norm(x)) if self.is_pre else norm(x + work(x))
        return normed


def _attention(
    module: nn.MultiheadAttention, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    found: Tensor = module(queries, keys, values, need_weights=False)[0]
    return found


class Stack(nn.Module):
    """Layers in a row, and a norm where there is one."""

    def __init__(self, sizes: ActSizes, *, is_decoder: bool) -> None:
        super().__init__()
        count = sizes.n_decoder_layers if is_decoder else sizes.n_encoder_layers
        self.layers = nn.ModuleList(Layer(sizes, is_decoder=is_decoder) for _ in range(count))
        has_norm = is_decoder or sizes.pre_norm
        self.norm = nn.LayerNorm(sizes.dim_model) if has_norm else nn.Identity()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """As ``Layer``."""
        for layer in self.layers:
            x = layer(x, *others)
        normed: Tensor = self.norm(x)
        return normed


class LeRobotWeights(nn.Module):
    """Everything under ``model.`` that acting needs."""

    def __init__(self, sizes: ActSizes, reads: Reads, action_dim: int) -> None:
        super().__init__()
        width = sizes.dim_model
        if reads.cameras:
            self.backbone = Backbone(DEPTHS[sizes.vision_backbone])
            self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.channels, width, 1)
        self.encoder, self.decoder = (Stack(sizes, is_decoder=is_it) for is_it in (False, True))
        self.encoder_latent_input_proj = nn.Linear(sizes.latent_dim, width)
        if reads.state is not None:
            self.encoder_robot_state_input_proj = nn.Linear(reads.state[1], width)
        if reads.environment is not None:
            self.encoder_env_state_input_proj = nn.Linear(reads.environment[1], width)
        tokens = 1 + (reads.state is not None) + (reads.environment is not None)
        self.encoder_1d_feature_pos_embed = nn.Embedding(tokens, width)
        self.decoder_pos_embed = nn.Embedding(sizes.chunk_size, width)
        self.action_head = nn.Linear(width, action_dim)


class ActNetwork(LeRobotNetwork):
    """From the end of a window to an action chunk.

    Args:
        sizes: of the network.
        reads: as ``LeRobotNetwork``, with the other three.
        horizon: steps of the chunk that are kept.
        action_dim: values of an action.
        scales: by name of a tensor.
    """

    unused = ("model.vae_encoder",)

    def __init__(
        self,
        sizes: ActSizes,
        reads: Reads,
        horizon: int,
        action_dim: int,
        scales: Mapping[str, Scale],
    ) -> None:
        super().__init__(reads, horizon, action_dim, scales)
        self.model = LeRobotWeights(sizes, reads, action_dim)
        self.places = nn.ModuleList(
            SineEncoding(*grid_of(*shape[1:]), sizes.dim_model) for _, shape in reads.cameras
        )

    def start(self) -> None:
        """Fills what is no weight."""
        super().start()
        for place in self.places:
            assert isinstance(place, SineEncoding)
            place.start()

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Writes ``actions``."""
        model, reads = self.model, self.reads
        rows = inputs[self.inputs[0].name].shape[0]
        tokens = [model.encoder_latent_input_proj.bias.expand(rows, 1, -1)]  # of a latent of zeros
        if reads.state is not None:
            seen = self._newest(inputs, reads.state[0])
            tokens.append(model.encoder_robot_state_input_proj(seen).unsqueeze(1))
        if reads.environment is not None:
            seen = self._newest(inputs, reads.environment[0])
            tokens.append(model.encoder_env_state_input_proj(seen).unsqueeze(1))
        places = [model.encoder_1d_feature_pos_embed.weight]
        for (stream, _), place in zip(reads.cameras, self.places, strict=True):
            assert isinstance(place, SineEncoding)
            features = model.backbone(self._newest(inputs, f"{stream}.frames"))
            grid = model.encoder_img_feat_input_proj(features)
            tokens.append(grid.flatten(2).transpose(1, 2))
            places.append(place.table)
        where = torch.cat(places)
        encoded = model.encoder(torch.cat(tokens, 1), where)
        queries = model.decoder_pos_embed.weight
        blank = torch.zeros_like(queries).expand(rows, -1, -1)
        chunk = model.action_head(model.decoder(blank, queries, encoded, where))
        self.write(chunk[:, : self.horizon], out)

    def _newest(self, inputs: Mapping[str, Tensor], name: str) -> Tensor:
        """The last step or frame, normalised."""
        return self.normalised(name, inputs[name][:, -1])
