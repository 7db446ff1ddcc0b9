"""A vision-language-action policy of the shape and size of π0, in parts that ranks can share.

An image encoder looks at every camera, a language model reads the images' tokens and a text, and an
action expert attends to the language model's keys and values while it turns noise into actions in
a few denoising steps. Some 2.7 billion parameters and thousands of kernels a call at full size;
``Options`` makes it as small as a test needs, and says how fine the parts are.

``vision``      frames of all cameras to ``image_tokens``; its weights are ``prefix.``: ``patches``,
                ``place``, ``image_layers.N``, ``norm``, ``project``
``language_i``  ``image_tokens`` or ``hidden_<i-1>`` to ``hidden_i``, which the last part leaves
                out, and ``kv_i [2, layers, 1, tokens, head]``; ``prefix.language_layers.N``, of the
                first one also ``prefix.text`` and, with ``instructions``, ``prefix.words``
``denoise_i``   ``noisy_<i-1>``, the state and every ``kv`` to ``noisy_i`` or, the last one, to
                ``actions``; ``expert.``, which all of them on one rank share

Weights are drawn from the seed by their names, so how the parts are grouped and placed does not
matter. Such a policy is a load of the right size and shape, and its actions mean nothing: never let
a robot execute them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Final, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, pad, scaled_dot_product_attention, silu

from ppstream import ConfigError, TensorSpec
from ppstream.config.schema import Count
from ppstream_stages.building import (
    DTYPES,
    NetworkPart,
    PartNetwork,
    options_of,
    parts_from,
)

# B=row T=step of the window D=value S=stream V=camera N=tokens F=feature H=horizon A=action L=layer

ACTION_WIDTH: Final = 32  # of the state and of one action inside; more dimensions stay unused
WEIGHT_SPREAD: Final = 0.02  # standard deviation of weights that are drawn
TEXTS_MAX: Final = 1024  # instructions of one run


class ImageEncoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the image encoder."""

    layers: Count = 27
    width: Count = 1152
    heads: Count = 16
    feed_forward: Count = 4304
    patch: Count = 14  # pixels, both ways


class TransformerSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    language: TransformerSizes = TransformerSizes(width=2048, feed_forward=16384)
    expert: TransformerSizes = TransformerSizes(width=1024, feed_forward=4096)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # that it computes in, and of its frames
    instructions: bool = False  # as policy.instructions: reads the texts that robots send
    vocabulary: Annotated[int, Meta(ge=2)] = 4096  # words that it can tell apart, with instructions
    language_layers_per_part: Count = 6
    denoising_steps_per_part: Count = 2
    seed: int = 0
    weights: str | None = None  # .safetensors

    @property
    def patches(self) -> int:
        """Patches of one image, a token each."""
        return int((self.image_side // self.image.patch) ** 2)

    @property
    def tokens(self) -> int:
        """That the language model reads: of all images and of the text."""
        return len(self.cameras) * self.patches + self.text_tokens

    @property
    def language_parts(self) -> list[range]:
        """Layers of each language part."""
        return _pieces(self.layers, self.language_layers_per_part)

    @property
    def denoising_parts(self) -> list[range]:
        """Steps of each denoising part."""
        return _pieces(self.denoising_steps, self.denoising_steps_per_part)


def _pieces(count: int, size: int) -> list[range]:
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


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

    def __init__(self, sizes: TransformerSizes, heads: int, head_width: int) -> None:
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


class ImageModel(nn.Module):
    """Images to tokens of the language model's width."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        image = options.image
        self.patches = nn.Conv2d(3, image.width, image.patch, image.patch)
        self.place = nn.Parameter(torch.empty(options.patches, image.width))
        self.image_layers = nn.ModuleList(ImageLayer(image) for _ in range(image.layers))
        self.norm = nn.LayerNorm(image.width)
        self.project = nn.Linear(image.width, options.language.width)

    def forward(self, frames: Tensor) -> Tensor:
        """``[B, V, 3, side, side]`` to ``[B, N, F]``."""
        x = self.patches(frames.flatten(0, 1)).flatten(2).transpose(1, 2) + self.place
        for layer in self.image_layers:
            x = layer(x)
        tokens: Tensor = self.project(self.norm(x))
        return tokens.reshape(frames.shape[0], -1, tokens.shape[-1])


class LanguageModel(nn.Module):
    """Some layers of the language model; with the first ones the tokens of the text."""

    def __init__(self, options: Options, layers: range) -> None:
        super().__init__()
        width = options.language.width
        if layers.start == 0:
            self.text = nn.Parameter(torch.empty(options.text_tokens, width))
            if options.instructions:
                self.words = nn.Parameter(torch.empty(options.vocabulary, width))
        self.language_layers = nn.ModuleDict(
            {
                str(depth): DecoderLayer(options.language, options.heads, options.head_width)
                for depth in layers
            }
        )
        self.last = str(options.layers - 1)

    def forward(self, x: Tensor, keys_values: Tensor) -> Tensor:
        """``[B, N, F]`` to the same; fills ``[B, 2, L, 1, N, head]``."""
        for index, (depth, layer) in enumerate(self.language_layers.items()):
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.heads_of(x)
            keys_values[:, 0, index].copy_(k)
            keys_values[:, 1, index].copy_(v)
            if depth != self.last:  # nobody reads the last one's tokens
                x = layer.attend(x, q, k, v)
        return x


class Expert(nn.Module):
    """Change of noisy actions, in sight of the language model's keys and values."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.expert.width
        self.state = nn.Linear(ACTION_WIDTH, width)
        self.action_in = nn.Linear(ACTION_WIDTH, width)
        self.mix = nn.Linear(2 * width, width)
        self.blend = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            DecoderLayer(options.expert, options.heads, options.head_width)
            for _ in range(options.layers)
        )
        self.action_out = nn.Linear(width, ACTION_WIDTH)

    def forward(
        self, state: Tensor, actions: Tensor, time: float, seen: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The velocity of ``actions [B, H, 32]``.

        Args:
            state: ``[B, 32]``.
            actions: noisy.
            time: of denoising, from 0 to 1.
            seen: keys and values of each layer, ``[B, 1, N, head]``.
        """
        embedded = self.action_in(actions)
        when = torch.full_like(embedded, time)
        embedded = self.blend(silu(self.mix(torch.cat([embedded, when], -1))))
        x = torch.cat([self.state(state).unsqueeze(1), embedded], 1)
        for layer, (keys, values) in zip(self.layers, seen, strict=True):
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.heads_of(x)
            x = layer.attend(x, q, torch.cat([keys, k], 2), torch.cat([values, v], 2))
        velocity: Tensor = self.action_out(x[:, 1:])
        return velocity


class Vision(PartNetwork):
    """The part ``vision``."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        frames = (1, 3, options.image_side, options.image_side)
        self.inputs = tuple(
            TensorSpec(f"{camera}.frames", frames, options.dtype) for camera in options.cameras
        )
        self.outputs = (image_tokens(options),)
        self.prefix = ImageModel(options)

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Looks at the frames of all cameras at once."""
        frames = torch.cat([inputs[spec.name] for spec in self.inputs], dim=1)
        out["image_tokens"].copy_(self.prefix(frames))


class Language(PartNetwork):
    """One of the parts ``language_i``; ``number`` counts from 1."""

    def __init__(self, options: Options, number: int) -> None:
        super().__init__()
        layers, dtype = options.language_parts[number - 1], options.dtype
        hidden = TensorSpec(f"hidden_{number}", (options.tokens, options.language.width), dtype)
        before = TensorSpec(f"hidden_{number - 1}", hidden.shape, dtype)
        self.inputs: tuple[TensorSpec, ...] = (image_tokens(options) if number == 1 else before,)
        self.outputs = (kv_of(options, number),)
        if layers.stop < options.layers:
            self.outputs += (hidden,)
        self.is_first = number == 1
        self.prefix = LanguageModel(options, layers)

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Reads tokens; writes keys, values and, but for the last part, tokens."""
        keys_values, *hidden = (out[spec.name] for spec in self.outputs)
        x = inputs[self.inputs[0].name]
        if self.is_first:
            x = torch.cat([x, self.text(inputs).expand(x.shape[0], -1, -1)], dim=1)
        x = self.prefix(x, keys_values)
        for tensor in hidden:
            tensor.copy_(x)

    def text(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """``[N, F]``, or with a leading B."""
        return self.prefix.text


class InstructedLanguage(Language):
    """The part ``language_1`` of a policy that takes texts."""

    ids: Tensor

    def __init__(self, options: Options) -> None:
        super().__init__(options, 1)
        self.inputs += (TensorSpec("instruction_id", (), "int64"),)
        shape = (TEXTS_MAX + 1, options.text_tokens)
        self.register_buffer("ids", torch.empty(shape, dtype=torch.int64), persistent=False)
        self.vocabulary = options.vocabulary
        self.kept = torch.empty(0)

    def start(self) -> None:
        """No text has a word yet, and number 0 never has."""
        self.ids.zero_()
        is_gpu = self.ids.is_cuda
        self.kept = torch.zeros(self.ids.shape, dtype=torch.int64, device="cpu", pin_memory=is_gpu)

    def text(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """``[B, N, F]``: places, and the words that each row's instruction has there."""
        ids = self.ids.index_select(0, inputs["instruction_id"])
        return self.prefix.text + embedding(ids, self.prefix.words)

    def instruct(self, number: int, text: str) -> None:
        """Keeps the words of a text; launches no kernel and does not wait for the GPU.

        Raises:
            ValueError: there are too many words or texts.
        """
        if not 0 < number <= TEXTS_MAX:
            raise ValueError(f"text {number}: {TEXTS_MAX} texts are the limit of one run")
        ids = token_ids(text, self.ids.shape[1], self.vocabulary)
        self.kept[number].copy_(torch.tensor(ids))
        self.ids[number].copy_(self.kept[number], non_blocking=True)


class Denoise(PartNetwork):
    """One of the parts ``denoise_i``; ``number`` counts from 1."""

    noise: Tensor

    def __init__(self, options: Options, number: int, expert: Expert) -> None:
        super().__init__()
        group, self.options, self.expert = options.group, options, expert
        self.steps = options.denoising_parts[number - 1]
        noisy = (options.horizon, ACTION_WIDTH)
        self.inputs = (
            TensorSpec(f"{group}.values", (options.steps, options.dim)),
            TensorSpec(f"{group}.valid", (options.steps, options.streams), "bool"),
            *(kv_of(options, part) for part in range(1, len(options.language_parts) + 1)),
        )
        if number == 1:
            self.register_buffer("noise", torch.empty(noisy), persistent=False)
        else:
            self.inputs += (TensorSpec(f"noisy_{number - 1}", noisy, options.dtype),)
        self.outputs = (TensorSpec(f"noisy_{number}", noisy, options.dtype),)
        if self.is_last:
            self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)

    @property
    def is_last(self) -> bool:
        return self.steps.stop == self.options.denoising_steps

    def start(self) -> None:
        """Draws the noise that the first step starts from."""
        if self.steps.start == 0:
            generator = torch.Generator().manual_seed(self.options.seed)
            self.noise.copy_(torch.randn(self.noise.shape, generator=generator))

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Some steps; a state with any stream invalid is seen as zeros, ``actions`` in (-1, 1)."""
        values, valid, *seen = (inputs[spec.name] for spec in self.inputs)
        actions = self.noise.expand(len(values), -1, -1) if self.steps.start == 0 else seen.pop()
        trusted = values[:, -1] * valid[:, -1].all(dim=1, keepdim=True)
        state = pad(trusted, (0, ACTION_WIDTH - trusted.shape[1])).to(actions.dtype)
        layers = [(kv[:, 0, index], kv[:, 1, index]) for kv in seen for index in range(kv.shape[2])]
        count = self.options.denoising_steps
        for step in self.steps:
            actions = actions - self.expert(state, actions, step / count, layers) / count
        if self.is_last:
            actions = torch.tanh(actions[:, :, : self.options.action_dim].float())
        out[self.outputs[0].name].copy_(actions)


def image_tokens(options: Options) -> TensorSpec:
    """Tokens of all cameras."""
    shape = (len(options.cameras) * options.patches, options.language.width)
    return TensorSpec("image_tokens", shape, options.dtype)


def kv_of(options: Options, number: int) -> TensorSpec:
    """Keys and values of the layers of ``language_<number>``."""
    layers = len(options.language_parts[number - 1])
    shape = (2, layers, 1, options.tokens, options.head_width)
    return TensorSpec(f"kv_{number}", shape, options.dtype)


def token_ids(text: str, count: int, vocabulary: int) -> list[int]:
    """``count`` numbers below ``vocabulary``: a hash of each word's bytes, then zeros.

    Raises:
        ValueError: there are more words.
    """
    words = text.split()
    if len(words) > count:
        raise ValueError(
            f"the text has {len(words)} words, at most {count} fit (policy.options.text_tokens)"
        )
    ids = [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in words]
    return ids + [0] * (count - len(words))


def draw(seed: int, weights: Mapping[str, Tensor]) -> None:
    """Fills each weight from ``seed`` and its name, where it lies; scales of norms become 1."""
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            weight.zero_()
        elif module.rpartition(".")[2].startswith("norm"):
            weight.fill_(1)
        else:
            number = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7], "little")
            generator = torch.Generator(weight.device).manual_seed(number)
            weight.normal_(0.0, WEIGHT_SPREAD, generator=generator)


def build(config: Mapping[str, Any], device: torch.device) -> list[NetworkPart]:
    """The parts of the policy with the given ``Options``, in order; without weights yet.

    Raises:
        ConfigError: an option is missing, unknown or not allowed, or the weights do not fit.
    """
    options = options_of(config, Options)
    if problems := _problems(options):
        raise ConfigError(problems)
    with torch.device("meta"):
        expert = Expert(options)
        networks: dict[str, PartNetwork] = {"vision": Vision(options)}
        for number in range(1, len(options.language_parts) + 1):
            networks[f"language_{number}"] = Language(options, number)
        if options.instructions:
            networks["language_1"] = InstructedLanguage(options)
        for number in range(1, len(options.denoising_parts) + 1):
            networks[f"denoise_{number}"] = Denoise(options, number, expert)
    dtype, draws = DTYPES[options.dtype], partial(draw, options.seed)
    return parts_from(networks, dtype, draws, options.weights, device)


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
