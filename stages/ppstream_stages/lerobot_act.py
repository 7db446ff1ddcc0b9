"""The network of LeRobot's ACT, with the names that its weights have in a LeRobot folder.

A residual network turns every camera's frame into tokens; an encoder reads them beside the state,
and a decoder makes one action of each query. What training alone needs, ``UNUSED`` names.
Normalisation is part of the network. Nothing of LeRobot is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, pi
from typing import Final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, max_pool2d, relu

from ppstream import TensorSpec
from ppstream_stages.building import PartNetwork

# B=row T=step of the window D=value N=tokens F=feature H=horizon n=frames

UNUSED: Final = ("model.vae_encoder",)
DEPTHS: Final = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"relu": relu, "gelu": gelu}
SHRINKS: Final = 32  # pixels of a frame for each one behind the residual network, both ways
BATCH_NORM_EPS: Final = 1e-5
PLACE_EPS: Final = 1e-6
PLACE_BASE: Final = 10000.0


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in ``config.json``, of the network."""

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


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of a window that the network takes: names, and shapes of one step or frame."""

    steps: int
    state: tuple[str, int] | None
    environment: tuple[str, int] | None
    cameras: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors of the window, in order."""
        numbers = [one for one in (self.state, self.environment) if one is not None]
        return (
            *(TensorSpec(name, (self.steps, size)) for name, size in numbers),
            *(TensorSpec(name, (1, *shape)) for name, shape in self.cameras),
        )


class Scale(nn.Module):
    """``(x - shift) / spread`` and back, with numbers that are no weights.

    Args:
        shift: a number for each value or, of shape ``[C, 1, 1]``, for each channel.
        spread: as ``shift``.
    """

    shift: Tensor
    spread: Tensor

    def __init__(self, shift: Tensor, spread: Tensor) -> None:
        super().__init__()
        self._known = {"shift": shift, "spread": spread}
        for name, numbers in self._known.items():
            self.register_buffer(name, torch.empty(numbers.shape), persistent=False)

    def start(self) -> None:
        """Fills the buffers."""
        for name, numbers in self._known.items():
            self.get_buffer(name).copy_(numbers)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` as the network takes it."""
        return (x - self.shift) / self.spread

    def back(self, x: Tensor) -> Tensor:
        """The inverse, of what the network gives."""
        return x * self.spread + self.shift


class Places(nn.Module):
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


class FrozenNorm(nn.Module):
    """Batch normalisation by numbers that training left."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias, self.running_mean, self.running_var = (
            nn.Parameter(torch.empty(channels)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` to the same."""
        slope = self.weight * (self.running_var + BATCH_NORM_EPS).rsqrt()
        offset = self.bias - self.running_mean * slope
        return x * slope.view(-1, 1, 1) + offset.view(-1, 1, 1)


class ResidualBlock(nn.Module):
    """Two convolutions and what goes around them."""

    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, channels, 3, stride, 1, bias=False)
        self.bn1 = FrozenNorm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = FrozenNorm(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or given != channels:
            shorter = nn.Conv2d(given, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shorter, FrozenNorm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]``; with a stride half as high and wide."""
        around = x if self.downsample is None else self.downsample(x)
        made = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        joined: Tensor = made + around
        return relu(joined)


class Backbone(nn.Module):
    """A residual network without its head."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = FrozenNorm(64)
        given = 64
        for index, depth in enumerate(depths):
            channels, stride = 64 << index, 1 if index == 0 else 2
            blocks = [ResidualBlock(given, channels, stride)]
            blocks += [ResidualBlock(channels, channels, 1) for _ in range(depth - 1)]
            self.add_module(f"layer{index + 1}", nn.Sequential(*blocks))
            given = channels
        self.channels = given

    def forward(self, frames: Tensor) -> Tensor:
        """``[B, 3, H, W]`` to ``[B, C, H / 32, W / 32]``, rounded up."""
        x = max_pool2d(relu(self.bn1(self.conv1(frames))), 3, 2, 1)
        for index in range(1, 5):
            x = self.get_submodule(f"layer{index}")(x)
        return x


class Layer(nn.Module):
    """Self-attention, in a decoder attention to the encoder's tokens, and a feed-forward layer."""

    def __init__(self, sizes: Sizes, *, is_decoder: bool) -> None:
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

    def __init__(self, sizes: Sizes, *, is_decoder: bool) -> None:
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


class Weights(nn.Module):
    """Everything under ``model.`` that acting needs."""

    def __init__(self, sizes: Sizes, reads: Reads, action_dim: int) -> None:
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


class ActNetwork(PartNetwork):
    """From the end of a window to an action chunk.

    Args:
        sizes: of the network.
        reads: what it takes.
        horizon: steps of the chunk that are kept.
        action_dim: values of an action.
        scales: by name of an input, and ``actions``: shift and spread; one without is identity.
    """

    def __init__(
        self,
        sizes: Sizes,
        reads: Reads,
        horizon: int,
        action_dim: int,
        scales: Mapping[str, tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__()
        self.inputs = reads.specs
        self.outputs = (TensorSpec("actions", (horizon, action_dim)),)
        self.model = Weights(sizes, reads, action_dim)
        self.scales = nn.ModuleList(Scale(*numbers) for numbers in scales.values())
        self._scale_of = dict(zip(scales, range(len(scales)), strict=True))
        self.places = nn.ModuleList(
            Places(ceil(shape[1] / SHRINKS), ceil(shape[2] / SHRINKS), sizes.dim_model)
            for _, shape in reads.cameras
        )
        self._reads, self._horizon = reads, horizon

    def start(self) -> None:
        """Fills what is no weight."""
        for module in (*self.scales, *self.places):
            assert isinstance(module, Scale | Places)
            module.start()

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Writes ``actions``."""
        model, reads = self.model, self._reads
        rows = inputs[self.inputs[0].name].shape[0]
        tokens = [model.encoder_latent_input_proj.bias.expand(rows, 1, -1)]  # of a latent of zeros
        if reads.state is not None:
            seen = self._newest(inputs, reads.state[0])
            tokens.append(model.encoder_robot_state_input_proj(seen).unsqueeze(1))
        if reads.environment is not None:
            seen = self._newest(inputs, reads.environment[0])
            tokens.append(model.encoder_env_state_input_proj(seen).unsqueeze(1))
        places = [model.encoder_1d_feature_pos_embed.weight]
        for (name, _), place in zip(reads.cameras, self.places, strict=True):
            assert isinstance(place, Places)
            features = model.backbone(self._newest(inputs, name))
            grid = model.encoder_img_feat_input_proj(features)
            tokens.append(grid.flatten(2).transpose(1, 2))
            places.append(place.table)
        where = torch.cat(places)
        encoded = model.encoder(torch.cat(tokens, 1), where)
        queries = model.decoder_pos_embed.weight
        blank = torch.zeros_like(queries).expand(rows, -1, -1)
        chunk = model.action_head(model.decoder(blank, queries, encoded, where))
        chunk = chunk[:, : self._horizon]
        scale = self._scale("actions")
        out["actions"].copy_(chunk if scale is None else scale.back(chunk))

    def _newest(self, inputs: Mapping[str, Tensor], name: str) -> Tensor:
        """The last step or frame, normalised."""
        scale, newest = self._scale(name), inputs[name][:, -1]
        return newest if scale is None else scale(newest)

    def _scale(self, name: str) -> Scale | None:
        if name not in self._scale_of:
            return None
        scale = self.scales[self._scale_of[name]]
        assert isinstance(scale, Scale)
        return scale
