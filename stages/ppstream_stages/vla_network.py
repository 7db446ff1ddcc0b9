"""The networks that policies of the kind of π0 are made of: image encoder, language model, expert.

Their sizes are given, and a ``NetworkForm`` says in what else they differ. Parts, options and
weights stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from ppstream import TensorSpec
from ppstream.config.field_types import Count
from ppstream_stages.building import Patches
from ppstream_stages.tensor_parallel import Plan, plan_of, regroup, repeat_rows

# B=row V=camera N=tokens F=feature H=horizon A=action L=layer

ACTION_WIDTH: Final = 32  # of the state and of one action inside; more dimensions stay unused
ROTARY_BASE: Final = 10000.0

Turn = tuple[Tensor, Tensor]  # cosines and sines, [B, 1, N, head], or [1, 1, N, head] for all rows


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


class VlaSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, which are π0's unless they are given, and how finely the policy is cut."""

    horizon: Count
    cameras: Annotated[tuple[str, ...], Meta(min_length=1)]
    image_side: Count = 224  # pixels of every camera, both ways
    text_tokens: Count = 48
    denoising_steps: Count = 10
    layers: Count = 18  # of the language model and of the action expert
    heads: Count = 8  # with one head of keys and values
    head_width: Count = 256
    image: ImageEncoder = ImageEncoder()
    language: TransformerSizes = TransformerSizes(width=2048, feed_forward=16384)
    expert: TransformerSizes = TransformerSizes(width=1024, feed_forward=4096)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # that it computes in
    language_layers_per_part: Count = 6
    denoising_steps_per_part: Count = 2

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

    @property
    def image_tokens(self) -> TensorSpec:
        """Tokens of all cameras."""
        shape = (len(self.cameras) * self.patches, self.language.width)
        return TensorSpec("image_tokens", shape, self.dtype)

    def hidden(self, number: int) -> TensorSpec:
        """Tokens behind ``language_<number>``."""
        return TensorSpec(f"hidden_{number}", (self.tokens, self.language.width), self.dtype)

    def kv(self, number: int) -> TensorSpec:
        """Keys and values of the layers of ``language_<number>``."""
        layers = len(self.language_parts[number - 1])
        shape = (2, layers, 1, self.tokens, self.head_width)
        return TensorSpec(f"kv_{number}", shape, self.dtype)

    @property
    def all_kv(self) -> tuple[TensorSpec, ...]:
        """``kv`` of all language parts."""
        return tuple(self.kv(number + 1) for number in range(len(self.language_parts)))


def _pieces(count: int, size: int) -> list[range]:
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


class NetworkForm(NamedTuple):
    """Differences of such networks beside their sizes."""

    norm: Callable[[int], nn.Module] = nn.RMSNorm  # of the language model and the expert
    image_eps: float = 1e-5  # of the image encoder's norms
    has_last_norm: bool = False  # behind the expert's layers
    state_width: int = ACTION_WIDTH
    action_width: int = ACTION_WIDTH


class ImageLayer(nn.Module):
    """Pre-norm self-attention over the patches of one image, and a feed-forward layer."""

    def __init__(self, sizes: ImageEncoder, eps: float) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_attention = nn.LayerNorm(width, eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width, eps)
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

    def __init__(
        self,
        sizes: TransformerSizes,
        heads: int,
        head_width: int,
        norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.head_width = heads, head_width
        self.norm_attention = norm(width)
        self.qkv = nn.Linear(width, (heads + 2) * head_width, bias=False)
        self.join = nn.Linear(heads * head_width, width, bias=False)
        self.norm_feed = norm(width)
        self.widen = nn.Linear(width, 2 * sizes.feed_forward, bias=False)
        self.narrow = nn.Linear(sizes.feed_forward, width, bias=False)

    def heads_of(self, x: Tensor, turn: Turn | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, N, F]`` to queries ``[B, heads, N, head]``, keys and values ``[B, 1, N, head]``.

        With ``turn`` queries and keys are turned by their places.
        """
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(rows, tokens, -1, self.head_width)
        qkv = qkv.transpose(1, 2)
        if turn is not None:
            qkv = torch.cat([turned(qkv[:, :-1], turn), qkv[:, -1:]], 1)
        return qkv[:, : self.heads], qkv[:, -2:-1], qkv[:, -1:]

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None = None
    ) -> Tensor:
        """Attends with queries ``q`` of ``x`` to the keys and values of all that it sees.

        Without ``sees``, bool ``[B, 1, N or 1, M]`` for M keys, it sees all.
        """
        rows, tokens, _ = x.shape
        shape = (-1, self.heads, -1, -1)
        k, v = k.expand(shape), v.expand(shape)
        seen = scaled_dot_product_attention(q, k, v, sees).transpose(1, 2)
        x = x + self.join(seen.reshape(rows, tokens, -1))
        gate, value = self.widen(self.norm_feed(x)).chunk(2, -1)
        fed: Tensor = self.narrow(gelu(gate, approximate="tanh") * value)
        return x + fed

    def shard_plan(self, ranks: int) -> Plan:
        """Whole heads on each rank, which all have the one head of keys and values."""
        repeat_rows(self.qkv, self.heads * self.head_width, ranks)
        regroup(self.widen, 2, ranks)
        self.heads //= ranks
        return plan_of(("qkv", "widen"), ("join", "narrow"))


def turn_of(places: Tensor, width: int) -> Turn:
    """Cosines and sines of ``places [B, N]``, for heads of ``width``, in float32."""
    halves = torch.arange(0, width, 2, device=places.device).float() / width
    angles = places.float().unsqueeze(-1) / ROTARY_BASE**halves
    angles = torch.cat([angles, angles], -1).unsqueeze(1)
    return angles.cos(), angles.sin()


def turned(x: Tensor, turn: Turn) -> Tensor:
    """``[B, heads, N, head]`` by pairs of values, each with the one half a head further on."""
    cosines, sines = (one.to(x.dtype) for one in turn)
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines


class ImageModel(nn.Module):
    """Images to tokens of the language model's width."""

    def __init__(self, sizes: VlaSizes, form: NetworkForm) -> None:
        super().__init__()
        image, eps = sizes.image, form.image_eps
        self.patches = Patches(image.width, image.patch)
        self.place = nn.Parameter(torch.empty(sizes.patches, image.width))
        self.image_layers = nn.ModuleList(ImageLayer(image, eps) for _ in range(image.layers))
        self.norm = nn.LayerNorm(image.width, eps)
        self.project = nn.Linear(image.width, sizes.language.width)

    def forward(self, frames: Tensor) -> Tensor:
        """``[B, V, 3, side, side]`` to ``[B, N, F]``."""
        x = self.patches(frames.flatten(0, 1)) + self.place
        for layer in self.image_layers:
            x = layer(x)
        tokens: Tensor = self.project(self.norm(x))
        return tokens.reshape(frames.shape[0], -1, tokens.shape[-1])


class LanguageModel(nn.Module):
    """Some layers of the language model."""

    def __init__(self, sizes: VlaSizes, layers: range, form: NetworkForm) -> None:
        super().__init__()
        shape = sizes.language, sizes.heads, sizes.head_width
        self.language_layers = nn.ModuleDict(
            {str(depth): DecoderLayer(*shape, form.norm) for depth in layers}
        )
        self.last = str(sizes.layers - 1)

    def forward(
        self,
        x: Tensor,
        keys_values: Tensor,
        turn: Turn | None = None,
        sees: Tensor | None = None,
    ) -> Tensor:
        """``[B, N, F]`` to the same; fills ``[B, 2, L, 1, N, head]``."""
        for index, (depth, layer) in enumerate(self.language_layers.items()):
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.heads_of(x, turn)
            keys_values[:, 0, index].copy_(k)
            keys_values[:, 1, index].copy_(v)
            if depth != self.last:  # nobody reads the last one's tokens
                x = layer.attend(x, q, k, v, sees)
        return x


class Expert(nn.Module):
    """Change of noisy actions, in sight of the language model's keys and values."""

    def __init__(self, sizes: VlaSizes, form: NetworkForm) -> None:
        super().__init__()
        width = sizes.expert.width
        self.state = nn.Linear(form.state_width, width)
        self.action_in = nn.Linear(form.action_width, width)
        self.mix = nn.Linear(2 * width, width)
        self.blend = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            DecoderLayer(sizes.expert, sizes.heads, sizes.head_width, form.norm)
            for _ in range(sizes.layers)
        )
        self.norm = form.norm(width) if form.has_last_norm else nn.Identity()
        self.action_out = nn.Linear(width, form.action_width)

    def forward(
        self,
        state: Tensor,
        actions: Tensor,
        when: Tensor,
        seen: Sequence[tuple[Tensor, ...]],
        turn: Turn | None = None,
        sees: Tensor | None = None,
    ) -> Tensor:
        """The velocity of ``actions [B, H, A]``.

        Args:
            state: ``[B, D]``.
            actions: noisy.
            when: time of denoising, one number or ``[F]``.
            seen: keys and values of each layer, ``[B, 1, N, head]``.
            turn: of the state and the actions, ``1 + H`` tokens.
            sees: as ``DecoderLayer.attend``; the keys are those of ``seen`` and its own.
        """
        embedded = self.action_in(actions)
        together = torch.cat([embedded, when.to(embedded.dtype).expand_as(embedded)], -1)
        embedded = self.blend(silu(self.mix(together)))
        x = torch.cat([self.state(state).unsqueeze(1), embedded], 1)
        x = x.to(seen[0][0].dtype)
        for layer, (keys, values) in zip(self.layers, seen, strict=True):
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.heads_of(x, turn)
            x = layer.attend(x, q, torch.cat([keys, k], 2), torch.cat([values, v], 2), sees)
        velocity: Tensor = self.action_out(self.norm(x[:, 1:]).to(actions.dtype))
        return velocity


def layers_seen(keys_values: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Keys and values of each layer from those of each language part, ``[B, 2, L, 1, N, head]``."""
    return [layer.unbind(1) for kv in keys_values for layer in kv.unbind(2)]
