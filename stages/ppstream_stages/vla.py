"""A vision-language-action policy of the shape and size of π0: images and text in, a chunk out.

An image encoder looks at every camera, a language model reads the images' tokens and a text, and an
action expert attends to the language model's keys and values while it turns noise into actions in
a few denoising steps. Some 2.7 billion parameters and thousands of kernels a call at full size;
``Options`` makes it as small as a test needs. Without trained weights it is a load of the right
size and shape, the same for the same seed, and its actions mean nothing: never let a robot execute
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from ppstream import ConfigError, TensorSpec, block
from ppstream.config.schema import Count
from ppstream_stages.building import load_weights, options_of

# B=row T=step of the window D=value S=stream V=camera N=tokens F=feature H=horizon A=action

ACTION_WIDTH: Final = 32  # of the state and of one action inside; more dimensions stay unused
WEIGHT_SPREAD: Final = 0.02  # standard deviation of weights that are drawn
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ImageEncoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the image encoder."""

    layers: Count = 27
    width: Count = 1152
    heads: Count = 16
    feed_forward: Count = 4304
    patch: Count = 14  # pixels, both ways


class Decoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the language model or of the action expert; both have the same heads and depth."""

    width: Count
    feed_forward: Count


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``; the sizes are π0's unless they are given."""

    steps: Count  # of the window
    dim: Annotated[int, Meta(ge=1, le=ACTION_WIDTH)]  # values of the group, all streams together
    streams: Count  # of the group
    horizon: Count
    action_dim: Annotated[int, Meta(ge=1, le=ACTION_WIDTH)]
    cameras: Annotated[tuple[str, ...], Meta(min_length=1)]
    group: str = "state"
    image_side: Count = 224  # pixels of every camera, both ways
    text_tokens: Count = 48
    denoising_steps: Count = 10
    layers: Count = 18  # of the language model and of the action expert
    heads: Count = 8  # with one head of keys and values
    head_width: Count = 256
    image: ImageEncoder = ImageEncoder()
    language: Decoder = Decoder(width=2048, feed_forward=16384)
    expert: Decoder = Decoder(width=1024, feed_forward=4096)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # that it computes in, and of its frames
    seed: int = 0
    weights: str | None = None  # .safetensors


class ImageLayer(nn.Module):
    """Pre-norm self-attention over the patches of one image, and a feed-forward layer."""

    def __init__(self, sizes: ImageEncoder) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.widen = nn.Linear(width, sizes.feed_forward)
        self.narrow = nn.Linear(sizes.feed_forward, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[B * V, N, F]`` to the same."""
        images, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(images, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.join(seen.reshape(images, tokens, width))
        fed: Tensor = self.narrow(gelu(self.widen(self.norm_feed(x)), approximate="tanh"))
        return x + fed


class DecoderLayer(nn.Module):
    """Pre-norm attention with one head of keys and values, and a gated feed-forward layer."""

    def __init__(self, sizes: Decoder, heads: int, head_width: int) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.head_width = heads, head_width
        self.norm_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2) * head_width, bias=False)
        self.join = nn.Linear(heads * head_width, width, bias=False)
        self.norm_feed = nn.RMSNorm(width)
        self.widen = nn.Linear(width, 2 * sizes.feed_forward, bias=False)
        self.narrow = nn.Linear(sizes.feed_forward, width, bias=False)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, N, F]`` to queries ``[B, heads, N, head]``, keys and values ``[B, 1, N, head]``."""
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(rows, tokens, -1, self.head_width)
        qkv = qkv.transpose(1, 2)
        return qkv[:, : self.heads], qkv[:, -2:-1], qkv[:, -1:]

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends with queries ``q`` of ``x`` to the keys and values of all that it sees."""
        rows, tokens, _ = x.shape
        shape = (-1, self.heads, -1, -1)
        seen = scaled_dot_product_attention(q, k.expand(shape), v.expand(shape)).transpose(1, 2)
        x = x + self.join(seen.reshape(rows, tokens, -1))
        gate, value = self.widen(self.norm_feed(x)).chunk(2, -1)
        fed: Tensor = self.narrow(gelu(gate, approximate="tanh") * value)
        return x + fed


class Prefix(nn.Module):
    """Images and text to the language model's keys and values."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        image, width = options.image, options.language.width
        patches = (options.image_side // image.patch) ** 2
        self.patches = nn.Conv2d(3, image.width, image.patch, image.patch)
        self.place = nn.Parameter(torch.empty(patches, image.width))
        self.image_layers = nn.ModuleList(ImageLayer(image) for _ in range(image.layers))
        self.norm = nn.LayerNorm(image.width)
        self.project = nn.Linear(image.width, width)
        self.text = nn.Parameter(torch.empty(options.text_tokens, width))
        self.language_layers = nn.ModuleList(
            DecoderLayer(options.language, options.heads, options.head_width)
            for _ in range(options.layers)
        )

    def forward(self, frames: Tensor, keys: Tensor, values: Tensor) -> None:
        """``[B, V, 3, side, side]``; fills ``[layers, B, 1, N, head]``, keys and values."""
        rows = frames.shape[0]
        with block("image encoder"):
            x = self.patches(frames.flatten(0, 1)).flatten(2).transpose(1, 2) + self.place
            for layer in self.image_layers:
                x = layer(x)
            seen = self.project(self.norm(x)).reshape(rows, -1, self.text.shape[1])
        with block("language"):
            x = torch.cat([seen, self.text.expand(rows, -1, -1)], dim=1)
            for depth, layer in enumerate(self.language_layers):
                assert isinstance(layer, DecoderLayer)
                q, k, v = layer.heads_of(x)
                keys[depth].copy_(k)
                values[depth].copy_(v)
                if depth < len(self.language_layers) - 1:  # nobody reads the last one's tokens
                    x = layer.attend(x, q, k, v)


class Expert(nn.Module):
    """Noise to actions in a few steps, in sight of the language model's keys and values."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.expert.width
        self.steps = options.denoising_steps
        self.state = nn.Linear(ACTION_WIDTH, width)
        self.action_in = nn.Linear(ACTION_WIDTH, width)
        self.mix = nn.Linear(2 * width, width)
        self.blend = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            DecoderLayer(options.expert, options.heads, options.head_width)
            for _ in range(options.layers)
        )
        self.action_out = nn.Linear(width, ACTION_WIDTH)

    def forward(self, state: Tensor, noise: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """State ``[B, 32]`` and noise ``[B, H, 32]`` to actions ``[B, H, 32]``."""
        actions = noise
        with block("expert"):
            for step in range(self.steps):
                actions = actions - self._velocity(state, actions, step, keys, values) / self.steps
        return actions

    def _velocity(
        self, state: Tensor, actions: Tensor, step: int, keys: Tensor, values: Tensor
    ) -> Tensor:
        embedded = self.action_in(actions)
        when = torch.full_like(embedded, step / self.steps)
        embedded = self.blend(silu(self.mix(torch.cat([embedded, when], -1))))
        x = torch.cat([self.state(state).unsqueeze(1), embedded], 1)
        for depth, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.heads_of(x)
            k, v = torch.cat([keys[depth], k], 2), torch.cat([values[depth], v], 2)
            x = layer.attend(x, q, k, v)
        velocity: Tensor = self.action_out(x[:, 1:])
        return velocity


class Network(nn.Module):
    """The whole policy's weights; their names in a ``.safetensors`` file are its own."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.prefix = Prefix(options)
        self.expert = Expert(options)

    def draw(self, seed: int) -> None:
        """Fills every weight from ``seed``, where it lies; scales of norms become 1."""
        device = next(self.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        for module in self.modules():
            is_norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
            for name, weight in module.named_parameters(recurse=False):
                if is_norm or name == "bias":
                    nn.init.constant_(weight, float(is_norm and name == "weight"))
                else:
                    nn.init.normal_(weight, 0.0, WEIGHT_SPREAD, generator)


class VlaPolicy:
    """The policy as the runtime knows it (``ppstream.Policy``)."""

    stateless = True  # between calls

    def __init__(self, options: Options, network: Network, device: torch.device) -> None:
        group, side = options.group, options.image_side
        self._cameras = [f"{camera}.frames" for camera in options.cameras]
        self.inputs = (
            TensorSpec(f"{group}.values", (options.steps, options.dim)),
            TensorSpec(f"{group}.valid", (options.steps, options.streams), "bool"),
            *(TensorSpec(name, (1, 3, side, side), options.dtype) for name in self._cameras),
        )
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        self._options, self._network = options, network
        self._dtype = DTYPES[options.dtype]
        generator = torch.Generator().manual_seed(options.seed)
        noise = torch.randn(options.horizon, ACTION_WIDTH, generator=generator)
        self._noise = noise.to(device, self._dtype)
        patches = (side // options.image.patch) ** 2
        self._tokens = len(options.cameras) * patches + options.text_tokens
        self._memory: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget: the window is all it knows."""

    @torch.inference_mode()
    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Writes ``actions``, in (-1, 1); a state with any stream invalid is seen as zeros."""
        group = self._options.group
        newest, valid = window[f"{group}.values"][:, -1], window[f"{group}.valid"][:, -1]
        rows, dim = newest.shape
        state, keys, values = self._buffers(rows)
        state[:, :dim].copy_(newest * valid.all(dim=1, keepdim=True))
        frames = torch.cat([window[name] for name in self._cameras], dim=1).to(self._dtype)
        self._network.prefix(frames, keys, values)
        noise = self._noise.expand(rows, -1, -1)
        actions = self._network.expert(state, noise, keys, values)
        action_dim = self._options.action_dim
        out["actions"].copy_(torch.tanh(actions[:, :, :action_dim].float()))

    def _buffers(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """State, keys and values of a batch; made once."""
        if rows not in self._memory:
            options, like = self._options, self._noise
            shape = (options.layers, rows, 1, self._tokens, options.head_width)
            state = like.new_zeros(rows, ACTION_WIDTH)
            self._memory[rows] = state, like.new_zeros(shape), like.new_zeros(shape)
        return self._memory[rows]


def build(config: Mapping[str, Any], device: torch.device) -> VlaPolicy:
    """Builds the policy with the given ``Options``; weights are drawn on ``device``, or loaded.

    Raises:
        ConfigError: an option is missing, unknown or not allowed, or the weights do not fit.
    """
    options = options_of(config, Options)
    if problems := _problems(options):
        raise ConfigError(problems)
    with torch.device("meta"):
        network = Network(options)
    network = network.to(DTYPES[options.dtype]).to_empty(device=device).eval()
    if options.weights is None:
        network.draw(options.seed)
    else:
        load_weights(network, options.weights)
    return VlaPolicy(options, network, device)


def _problems(options: Options) -> list[str]:
    found = []
    if options.image_side % options.image.patch:
        found.append(
            f"policy.options.image_side: got {options.image_side}, want a multiple of image.patch "
            f"= {options.image.patch}"
        )
    if options.image.width % options.image.heads:
        found.append(
            f"policy.options.image.width: got {options.image.width}, want a multiple of "
            f"image.heads = {options.image.heads}"
        )
    return found
