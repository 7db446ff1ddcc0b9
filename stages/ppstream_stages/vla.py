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
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from ppstream import ConfigError, TensorSpec
from ppstream.config.schema import Count
from ppstream_stages.building import (
    DTYPES,
    NetworkPart,
    PartNetwork,
    options_of,
    parts_from,
)
from ppstream_stages.instruction_table import InstructionTable
from ppstream_stages.tensor_parallel import check_divides
from ppstream_stages.vla_network import (
    ACTION_WIDTH,
    Expert,
    ImageModel,
    LanguageModel,
    NetworkForm,
    VlaSizes,
    layers_seen,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# B=row T=step of the window D=value S=stream V=camera N=tokens F=feature H=horizon A=action

WEIGHT_SPREAD: Final = 0.02  # standard deviation of weights that are drawn
FORM: Final = NetworkForm()


class Options(VlaSizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``; ``dtype`` is that of its frames, too."""

    steps: Count  # of the window
    dim: Annotated[int, Meta(ge=1, le=ACTION_WIDTH)]  # values of the group, all streams together
    streams: Count  # of the group
    action_dim: Annotated[int, Meta(ge=1, le=ACTION_WIDTH)]
    group: str = "state"
    instructions: bool = False  # as policy.instructions: reads the texts that robots send
    vocabulary: Annotated[int, Meta(ge=2)] = 4096  # words that it can tell apart, with instructions
    seed: int = 0
    weights: str | None = None  # .safetensors


class Vision(PartNetwork):
    """The part ``vision``."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        frames = (1, 3, options.image_side, options.image_side)
        self.inputs = tuple(
            TensorSpec(f"{camera}.frames", frames, options.dtype) for camera in options.cameras
        )
        self.outputs = (options.image_tokens,)
        self.prefix = ImageModel(options, FORM)

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Looks at the frames of all cameras at once."""
        frames = torch.cat([inputs[spec.name] for spec in self.inputs], dim=1)
        out["image_tokens"].copy_(self.prefix(frames))


class Words(LanguageModel):
    """Layers of the language model; with the first ones the tokens of the text."""

    def __init__(self, options: Options, layers: range) -> None:
        super().__init__(options, layers, FORM)
        width = options.language.width
        if layers.start == 0:
            self.text = nn.Parameter(torch.empty(options.text_tokens, width))
            if options.instructions:
                self.words = nn.Parameter(torch.empty(options.vocabulary, width))


class Language(PartNetwork):
    """One of the parts ``language_i``; ``number`` counts from 1."""

    shards = True

    def __init__(self, options: Options, number: int) -> None:
        super().__init__()
        layers = options.language_parts[number - 1]
        before = options.image_tokens if number == 1 else options.hidden(number - 1)
        self.inputs: tuple[TensorSpec, ...] = (before,)
        self.outputs = (options.kv(number),)
        if layers.stop < options.layers:
            self.outputs += (options.hidden(number),)
        self.is_first = number == 1
        self.prefix = Words(options, layers)

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

    def __init__(self, options: Options) -> None:
        super().__init__(options, 1)
        self.inputs += (TensorSpec("instruction_id", (), "int64"),)
        self.ids = InstructionTable(options.text_tokens)
        self.count, self.vocabulary = options.text_tokens, options.vocabulary

    def start(self) -> None:
        """No text has a word yet, and number 0 never has."""
        self.ids.start()

    def text(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """``[B, N, F]``: places, and the words that each row's instruction has there."""
        ids = self.ids.of(inputs["instruction_id"])
        return self.prefix.text + embedding(ids, self.prefix.words)

    def instruct(self, number: int, text: str) -> None:
        """Keeps the words of a text; launches no kernel and does not wait for the GPU.

        Raises:
            ValueError: there are too many words or texts.
        """
        self.ids.check(number)
        self.ids.keep(number, token_ids(text, self.count, self.vocabulary))


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
            *options.all_kv,
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
        layers, count = layers_seen(seen), self.options.denoising_steps
        for step in self.steps:
            when = actions.new_full((), step / count)
            actions = actions - self.expert(state, actions, when, layers) / count
        if self.is_last:
            actions = torch.tanh(actions[:, :, : self.options.action_dim].float())
        out[self.outputs[0].name].copy_(actions)


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


def build(
    config: Mapping[str, Any], device: torch.device, mesh: DeviceMesh | None = None
) -> list[NetworkPart]:
    """The parts of the policy with the given ``Options``, in order; without weights yet.

    The layers of the language model are sharded over ``mesh``, by heads and by features of
    feed-forward layers; every rank has the image encoder and the expert.

    Raises:
        ConfigError: an option is missing, unknown or not allowed, the weights do not fit, or the
            mesh does not divide the heads.
    """
    options = options_of(config, Options)
    check_divides(mesh, {"heads": options.heads, "features": options.language.feed_forward})
    if problems := _problems(options):
        raise ConfigError(problems)
    with torch.device("meta"):
        expert = Expert(options, FORM)
        networks: dict[str, PartNetwork] = {"vision": Vision(options)}
        for number in range(1, len(options.language_parts) + 1):
            networks[f"language_{number}"] = Language(options, number)
        if options.instructions:
            networks["language_1"] = InstructedLanguage(options)
        for number in range(1, len(options.denoising_parts) + 1):
            networks[f"denoise_{number}"] = Denoise(options, number, expert)
    dtype, draws = DTYPES[options.dtype], partial(draw, options.seed)
    return parts_from(networks, dtype, draws, options.weights, device, mesh=mesh)


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
