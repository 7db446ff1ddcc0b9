"""The parts of LeRobot's π0, cut as those of ``vla``, with the weights of a LeRobot folder.

``vision``      frames of all cameras to ``image_tokens``: fitted into a square, from -1 to 1
``language_i``  as in ``vla``; the first one has the words, and also makes ``text_length``
``denoise_i``   the last state and every ``kv`` to ``noisy_i`` or, the last one, to ``actions``

The language model sees the images and the words that are there; the expert's state sees those and
itself, and its actions see all. Normalisation is part of the first and the last parts. Nothing of
LeRobot is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import pi
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, interpolate, pad

from ppstream import ConfigError, TensorSpec
from ppstream_stages.building import DTYPES, PartNetwork
from ppstream_stages.instruction_table import InstructionTable
from ppstream_stages.lerobot_network import (
    ENVIRONMENT,
    STATE,
    VISUAL,
    ConfigFeature,
    Reads,
    Scale,
    Scales,
    Sizes,
)
from ppstream_stages.real_time_chunking import VALUES, ChunkingOptions, guided, whole_chunk
from ppstream_stages.vla_network import (
    Expert,
    ImageEncoder,
    ImageModel,
    LanguageModel,
    NetworkForm,
    TransformerSizes,
    Turn,
    VlaSizes,
    layers_seen,
    turn_of,
)

# B=row T=step of the window D=value V=camera N=tokens F=feature H=horizon A=action

VARIANTS: Final = {
    "gemma_2b": TransformerSizes(width=2048, feed_forward=16384),
    "gemma_300m": TransformerSizes(width=1024, feed_forward=4096),
}
#: Sizes that all variants have.
SHAPE: Final[dict[str, Any]] = {
    "layers": 18,
    "heads": 8,
    "head_width": 256,
    "image": ImageEncoder(),
    "vocabulary": 257152,
}
NORM_EPS: Final = 1e-6
LENGTH: Final = TensorSpec("text_length", (1,), "int64")
INSTRUCTION: Final = TensorSpec("instruction_id", (), "int64")
#: Beginning of a key for a camera that no robot has: LeRobot hides its tokens from all others.
EMPTY_CAMERA: Final = "observation.images.empty_camera_"


class Pi0Sizes(Sizes, frozen=True, kw_only=True):
    """Sizes in ``config.json`` of π0."""

    chunk_size: int = 50
    n_action_steps: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    num_inference_steps: int = 10
    min_period: float = 4e-3
    max_period: float = 4.0
    image_resolution: tuple[int, int] = (224, 224)
    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    dtype: str = "float32"
    tokenizer_max_length: int = 48
    use_relative_actions: bool = False

    @property
    def horizons(self) -> tuple[int, int]:
        """As ``Sizes``."""
        return self.n_action_steps, self.chunk_size

    @property
    def widest_action(self) -> int:
        """As ``Sizes``."""
        return self.max_action_dim

    def problems(self, features: Mapping[str, ConfigFeature]) -> Iterator[str]:
        """As ``Sizes``."""
        yield from self.differing(
            n_obs_steps=[1],
            paligemma_variant=[*VARIANTS],
            action_expert_variant=[*VARIANTS],
            dtype=[*DTYPES],
            use_relative_actions=[False],
        )
        if not any(one.type == VISUAL for one in features.values()):
            yield "input_features: got no camera, want one or more"
        if ENVIRONMENT in features:
            yield f"input_features: got {ENVIRONMENT}, which π0 does not read"
        if STATE not in features:
            yield f"input_features: got no {STATE}, which π0 reads"
        elif sum(features[STATE].shape) > self.max_state_dim:
            values = sum(features[STATE].shape)
            yield f"{STATE}: got {values} values, want at most max_state_dim = {self.max_state_dim}"
        height, width = self.image_resolution
        patch = SHAPE["image"].patch
        if height != width or height < 1 or height % patch:
            got = list(self.image_resolution)
            yield f"image_resolution: got {got}, want a square of a multiple of {patch}"
        for name in ("chunk_size", "num_inference_steps", "max_action_dim", "tokenizer_max_length"):
            if getattr(self, name) < 1:
                yield f"{name}: got {getattr(self, name)}, want 1 or more"
        if not 1 <= self.n_action_steps <= self.chunk_size:
            most = f"chunk_size = {self.chunk_size}"
            yield f"n_action_steps: got {self.n_action_steps}, want 1 or more and at most {most}"
        if not 0 < self.min_period < self.max_period:
            given = f"got {self.min_period} and {self.max_period}"
            yield f"min_period, max_period: {given}, want rising numbers above 0"

    def times(self) -> list[float]:
        """Of the denoising steps, in order."""
        count = self.num_inference_steps
        return [1.0 - step / count for step in range(count)]

    def waves(self, times: Sequence[float]) -> Tensor:
        """Sines and cosines of ``times``, ``[len(times), F]`` float32 on the CPU."""
        cpu = torch.device("cpu")
        half = VARIANTS[self.action_expert_variant].width // 2
        shares = torch.linspace(0.0, 1.0, half, dtype=torch.float64, device=cpu)
        periods = self.min_period * (self.max_period / self.min_period) ** shares
        known = torch.tensor(times, dtype=torch.float32, device=cpu).double()
        angles = known.unsqueeze(1) * (2 * pi / periods)
        return torch.cat([angles.sin(), angles.cos()], -1).float()


class Texts(NamedTuple):
    """The way from texts to tokens."""

    tokens_of: Callable[[str], list[int]]
    none: str  # for a robot that sent none
    has_instructions: bool  # as policy.instructions

    def row(self, text: str, most: int) -> list[int]:
        """Length, and ``most`` tokens of the text, on a line of its own; zeros behind.

        Raises:
            ValueError: there are more, or one that the policy has no word for.
        """
        ids = self.tokens_of(text if text.endswith("\n") else f"{text}\n")
        if len(ids) > most:
            raise ValueError(f"the text has {len(ids)} tokens, at most {most} fit")
        if ids and max(ids) >= SHAPE["vocabulary"]:
            raise ValueError(f"token {max(ids)} is none of the policy's {SHAPE['vocabulary']}")
        return [len(ids), *ids, *[0] * (most - len(ids))]


class Choices(NamedTuple):
    """Of the run, for a folder's policy."""

    reads: Reads
    horizon: int
    action_dim: int
    scales: Mapping[str, Scale]
    seed: int | None  # of the noise; None: fresh noise in each call
    dtype: str | None  # None: as the folder says
    cut: Mapping[str, int]  # fields of ``VlaSizes``
    texts: Texts
    chunking: ChunkingOptions | None


class OffsetNorm(nn.Module):
    """Divides by the root of the mean square, and multiplies by ``1 + weight``, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., F]`` to the same."""
        exact = x.float()
        shrunk = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + NORM_EPS)
        return (shrunk * (1 + self.weight.float())).to(x.dtype)


def fitted(frames: Tensor, side: int) -> Tensor:
    """``[B, 3, H, W]`` from 0 to 1, to ``[B, 3, side, side]`` from -1 to 1, its edges dark."""
    height, width = frames.shape[2:]
    if (height, width) != (side, side):
        ratio = max(width / side, height / side)
        inner = int(height / ratio), int(width / ratio)
        frames = interpolate(frames, inner, mode="bilinear", align_corners=False).clamp(0, 1)
        above, left = ((side - size) // 2 for size in inner)
        below, right = side - inner[0] - above, side - inner[1] - left
        frames = pad(frames, (left, right, above, below))
    return frames * 2 - 1


class Pi0Vision(PartNetwork):
    """The part ``vision``."""

    plain_frames = True

    def __init__(self, sizes: VlaSizes, form: NetworkForm, choices: Choices) -> None:
        super().__init__()
        self.inputs = tuple(spec for spec in choices.reads.specs if spec.name.endswith(".frames"))
        self.outputs = (sizes.image_tokens,)
        self.side = sizes.image_side
        self.prefix, self.scales = ImageModel(sizes, form), Scales(choices.scales)

    def cast(self, dtype: torch.dtype) -> None:
        """Keeps the numbers of the normalisation."""
        self.prefix.to(dtype)

    def start(self) -> None:
        """Fills the numbers of the normalisation."""
        self.scales.start()

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Looks at the newest frames of all cameras at once."""
        names = [spec.name for spec in self.inputs]
        frames = [self.scales.normalised(name, inputs[name][:, -1]) for name in names]
        seen = torch.stack([fitted(one, self.side) for one in frames], 1)
        out["image_tokens"].copy_(self.prefix(seen.to(self.prefix.place.dtype)))


class Pi0Words(LanguageModel):
    """The first layers of the language model, and what stands for each token."""

    def __init__(self, sizes: VlaSizes, layers: range, form: NetworkForm) -> None:
        super().__init__(sizes, layers, form)
        self.words = nn.Parameter(torch.empty(SHAPE["vocabulary"], sizes.language.width))

    def tokens(self, ids: Tensor) -> Tensor:
        """``[B, N]``, int64, to ``[B, N, F]``."""
        gain: float = self.words.shape[1] ** 0.5
        return embedding(ids, self.words) * gain


class Pi0Language(PartNetwork):
    """One of the parts ``language_i`` behind the first; ``number`` counts from 1."""

    def __init__(self, sizes: VlaSizes, form: NetworkForm, number: int) -> None:
        super().__init__()
        layers = sizes.language_parts[number - 1]
        self.outputs: tuple[TensorSpec, ...] = (sizes.kv(number),)
        if layers.stop < sizes.layers:
            self.outputs += (sizes.hidden(number),)
        self.inputs: tuple[TensorSpec, ...] = ()
        if number > 1:
            self.inputs = sizes.hidden(number - 1), LENGTH
        self.head_width, self.images = sizes.head_width, sizes.tokens - sizes.text_tokens
        self.prefix = (LanguageModel if number > 1 else Pi0Words)(sizes, layers, form)

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Reads tokens; writes keys, values and, but for the last part, tokens."""
        keys_values, *hidden = (out[spec.name] for spec in self.outputs if spec is not LENGTH)
        x, length = self.tokens(inputs)
        places = torch.arange(x.shape[1], device=x.device)
        sees = (places < self.images + length).view(-1, 1, 1, x.shape[1])
        x = self.prefix(x, keys_values, turn_of(places.unsqueeze(0), self.head_width), sees)
        for tensor in hidden:
            tensor.copy_(x)

    def tokens(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """``[B, N, F]``, and of each row how long the text is, ``[B, 1]``."""
        tokens, length = (inputs[spec.name] for spec in self.inputs)
        return tokens, length


class Pi0ReadingLanguage(Pi0Language):
    """The part ``language_1``: the tokens of the images, and of the text."""

    def __init__(self, sizes: VlaSizes, form: NetworkForm, texts: Texts) -> None:
        super().__init__(sizes, form, 1)
        self.inputs = (sizes.image_tokens, *((INSTRUCTION,) if texts.has_instructions else ()))
        self.outputs += (LENGTH,)
        self.table, self.texts = InstructionTable(1 + sizes.text_tokens), texts
        self.most = sizes.text_tokens

    def start(self) -> None:
        """No text but that for robots that sent none has tokens yet."""
        self.table.start(self.texts.row(self.texts.none, self.most))

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """As ``Pi0Language``; writes the length, too."""
        super().forward(inputs, out)
        out[LENGTH.name].copy_(self.rows(inputs)[:, :1])

    def tokens(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As ``Pi0Language``."""
        assert isinstance(self.prefix, Pi0Words)
        rows, images = self.rows(inputs), inputs[self.inputs[0].name]
        return torch.cat([images, self.prefix.tokens(rows[:, 1:])], 1), rows[:, :1]

    def rows(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Length and tokens of each row's text, ``[B, 1 + N]``."""
        if self.texts.has_instructions:
            return self.table.of(inputs[INSTRUCTION.name])
        return self.table.rows[:1].expand(len(inputs[self.inputs[0].name]), -1)


class Pi0InstructedLanguage(Pi0ReadingLanguage):
    """The part ``language_1`` of a policy that takes texts."""

    def instruct(self, number: int, text: str) -> None:
        """Keeps the tokens of a text; launches no kernel and does not wait for the GPU.

        Raises:
            ValueError: there are too many tokens or texts.
        """
        self.table.check(number)
        self.table.keep(number, self.texts.row(text, self.most))


class Pi0Denoise(PartNetwork):
    """One of the parts ``denoise_i``; ``number`` counts from 1."""

    noise: Tensor  # [H, A]; empty with fresh noise, and behind the first part
    waves: Tensor  # [steps of this part, F]

    def __init__(
        self, folder: Pi0Sizes, sizes: VlaSizes, choices: Choices, number: int, expert: Expert
    ) -> None:
        super().__init__()
        self.folder, self.sizes, self.choices = folder, sizes, choices
        self.expert, self.scales = expert, Scales(choices.scales)
        self.steps = sizes.denoising_parts[number - 1]
        noisy = folder.chunk_size, folder.max_action_dim
        numbers = tuple(spec for spec in choices.reads.specs if "frames" not in spec.name)
        (self.state,) = (spec.name for spec in numbers)
        self.inputs = *numbers, LENGTH, *sizes.all_kv
        if choices.chunking is not None:
            self.inputs += choices.chunking.inputs(choices.action_dim)
        drawn = noisy if number == 1 and choices.seed is not None else (0,)
        self.register_buffer("noise", torch.empty(drawn), persistent=False)
        shape = len(self.steps), sizes.expert.width
        self.register_buffer("waves", torch.empty(shape), persistent=False)
        self.before = f"noisy_{number - 1}"
        if number > 1:
            self.inputs += (TensorSpec(self.before, noisy),)
        self.outputs: tuple[TensorSpec, ...] = (TensorSpec(f"noisy_{number}", noisy),)
        if self.is_last:
            self.outputs = (TensorSpec("actions", (choices.horizon, choices.action_dim)),)

    @property
    def is_last(self) -> bool:
        return self.steps.stop == self.sizes.denoising_steps

    def cast(self, dtype: torch.dtype) -> None:
        """Keeps what is before and behind the expert's layers: the steps add up small changes."""
        for layer in (*self.expert.layers, self.expert.norm):
            layer.to(dtype)

    def start(self) -> None:
        """Fills times, numbers of the normalisation, and noise of the seed."""
        self.scales.start()
        times = self.folder.times()
        self.waves.copy_(self.folder.waves([times[step] for step in self.steps]))
        if self.noise.ndim == 2 and self.choices.seed is not None:
            generator = torch.Generator().manual_seed(self.choices.seed)
            self.noise.copy_(torch.randn(self.noise.shape, generator=generator))

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Some steps; the last part writes ``actions`` in the units of the robot."""
        values = self.scales.normalised(self.state, inputs[self.state][:, -1])
        state = pad(values, (0, self.folder.max_state_dim - values.shape[1]))
        actions = self._begin(inputs, len(values))
        seen = layers_seen([inputs[spec.name] for spec in self.sizes.all_kv])
        turn, sees = self._places(inputs[LENGTH.name])
        wanted = self._wanted(inputs)
        times, count = self.folder.times(), self.sizes.denoising_steps
        for wave, step in zip(self.waves, self.steps, strict=True):
            velocity = self.expert(state, actions, wave, seen, turn, sees)
            if wanted is not None:
                chunk, weights, chunking = wanted
                strength = chunking.guidance(times[step])
                velocity = guided(velocity, actions, times[step], chunk, weights, strength)
            actions = actions - velocity / count
        if self.is_last:
            kept = actions[:, : self.choices.horizon, : self.choices.action_dim]
            actions = self.scales.restored("actions", kept)
        out[self.outputs[0].name].copy_(actions)

    def _begin(self, inputs: Mapping[str, Tensor], rows: int) -> Tensor:
        """Noise, or what the part before left, ``[B, H, A]``."""
        if self.steps.start > 0:
            return inputs[self.before]
        if self.choices.seed is None:
            shape = rows, self.folder.chunk_size, self.folder.max_action_dim
            return torch.randn(shape, device=self.waves.device)
        return self.noise.expand(rows, -1, -1)

    def _places(self, length: Tensor) -> tuple[Turn, Tensor]:
        """The turn of state and actions, and what each of them sees."""
        before = self.sizes.tokens - self.sizes.text_tokens + length
        own = torch.arange(1 + self.folder.chunk_size, device=length.device)
        keys = torch.arange(self.sizes.tokens, device=length.device)
        shape = len(length), 1, len(own), -1
        words = (keys < before).view(len(length), 1, 1, -1).expand(shape)
        sees = (own.unsqueeze(1) > 0) | (own == 0)  # the state sees no action
        sees = torch.cat([words, sees.view(1, 1, len(own), -1).expand(shape)], -1)
        return turn_of(before + own, self.sizes.head_width), sees

    def _wanted(
        self, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, ChunkingOptions] | None:
        """The chunk to go on from, ``[B, H, A]``, and how much each step is bound to it."""
        chunking = self.choices.chunking
        if chunking is None:
            return None
        prefix = self.scales.normalised("actions", inputs[VALUES])
        chunk = whole_chunk(prefix, self.folder.chunk_size, self.folder.max_action_dim)
        return chunk, chunking.weights(inputs, self.folder.chunk_size), chunking


def networks_of(folder: Pi0Sizes, choices: Choices) -> tuple[dict[str, PartNetwork], str]:
    """The parts' networks by name, in order, and what they compute in; for the meta device.

    Raises:
        ConfigError: the text for robots that send none does not fit.
    """
    dtype = choices.dtype or folder.dtype
    shape: dict[str, Any] = {name: one for name, one in SHAPE.items() if name != "vocabulary"}
    sizes = VlaSizes(
        horizon=folder.chunk_size,
        cameras=tuple(name for name, _ in choices.reads.cameras),
        image_side=folder.image_resolution[0],
        text_tokens=folder.tokenizer_max_length,
        denoising_steps=folder.num_inference_steps,
        language=VARIANTS[folder.paligemma_variant],
        expert=VARIANTS[folder.action_expert_variant],
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        **shape | dict(choices.cut),
    )
    form = NetworkForm(
        norm=OffsetNorm,
        image_eps=NORM_EPS,
        has_last_norm=True,
        state_width=folder.max_state_dim,
        action_width=folder.max_action_dim,
    )
    texts = choices.texts
    try:
        texts.row(texts.none, sizes.text_tokens)
    except ValueError as error:
        raise ConfigError([f"policy.options.task: {error}"]) from error
    reading = Pi0InstructedLanguage if texts.has_instructions else Pi0ReadingLanguage
    networks: dict[str, PartNetwork] = {"vision": Pi0Vision(sizes, form, choices)}
    networks["language_1"] = reading(sizes, form, texts)
    for number in range(2, len(sizes.language_parts) + 1):
        networks[f"language_{number}"] = Pi0Language(sizes, form, number)
    expert = Expert(sizes, form)
    for number in range(1, len(sizes.denoising_parts) + 1):
        networks[f"denoise_{number}"] = Pi0Denoise(folder, sizes, choices, number, expert)
    return networks, dtype
