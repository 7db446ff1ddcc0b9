"""The network of LeRobot's Diffusion, with the names that its weights have in a LeRobot folder.

The last observations condition a U-Net over the horizon, which turns noise into actions in the
steps of a schedule. The steps are fixed when the network is made; the conditions of all steps are
computed at once, before the first. Normalisation is part of the network. Nothing of LeRobot is
imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from math import log
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, relu

from ppstream_stages.lerobot_network import (
    DEPTHS,
    ENVIRONMENT,
    STATE,
    VISUAL,
    Backbone,
    ConfigFeature,
    FrozenNorm,
    LeRobotNetwork,
    Reads,
    Scale,
    Sizes,
    grid_of,
)
from ppstream_stages.noise_schedule import BETAS, KINDS, PREDICTIONS, NoiseSchedule
from ppstream_stages.real_time_chunking import VALUES, ChunkingOptions, whole_chunk

# B=row T=step of the window D=value n=frames C=channels F=feature H=horizon A=action
# K=step of the schedule V=camera P=point of a frame

GROUP_CHANNELS: Final = 16  # of a frame's features that one group norm joins
LAST_GROUPS: Final = 8  # of the last block, whatever n_groups is
TIME_BASE: Final = 10000
#: First convolution, the norm behind it, and the layers of an encoder.
ENCODER_NAMES: Final = ("0", "1", "4", "5", "6", "7")


class DiffusionSizes(Sizes, frozen=True, kw_only=True):
    """Sizes in ``config.json`` of Diffusion."""

    n_obs_steps: int = 2
    horizon: int = 16
    n_action_steps: int = 8
    vision_backbone: str = "resnet18"
    resize_shape: tuple[int, int] | None = None
    crop_ratio: float = 1.0
    crop_shape: tuple[int, int] | None = None
    use_group_norm: bool = True
    spatial_softmax_num_keypoints: int = 32
    use_separate_rgb_encoder_per_camera: bool = False
    down_dims: tuple[int, ...] = (512, 1024, 2048)
    kernel_size: int = 5
    n_groups: int = 8
    diffusion_step_embed_dim: int = 128
    use_film_scale_modulation: bool = True
    noise_scheduler_type: str = "DDPM"
    num_train_timesteps: int = 100
    beta_schedule: str = "squaredcos_cap_v2"
    beta_start: float = 0.0001
    beta_end: float = 0.02
    prediction_type: str = "epsilon"
    clip_sample: bool = True
    clip_sample_range: float = 1.0
    num_inference_steps: int | None = None
    compile_model: bool = False  # then the weights have other names

    @property
    def horizons(self) -> tuple[int, int]:
        """As ``Sizes``: from the newest observation on."""
        return self.n_action_steps, self.horizon - self.n_obs_steps + 1

    @property
    def steps(self) -> int:
        """Steps of the schedule in one call."""
        given = self.num_inference_steps
        return self.num_train_timesteps if given is None else given

    @property
    def crop(self) -> tuple[int, int] | None:
        """Height and width of the middle of a frame that is seen; None: all of it."""
        if self.resize_shape is None:
            return self.crop_shape
        if self.crop_ratio >= 1:
            return None
        height, width = (int(size * self.crop_ratio) for size in self.resize_shape)
        return height, width

    def problems(self, features: Mapping[str, ConfigFeature]) -> Iterator[str]:
        """As ``Sizes``."""
        yield from self.differing(
            noise_scheduler_type=KINDS,
            beta_schedule=BETAS,
            prediction_type=PREDICTIONS,
            compile_model=[False],
        )
        shapes = {one.shape for one in features.values() if one.type == VISUAL}
        if STATE not in features:
            yield f"input_features: got no {STATE}, which Diffusion reads"
        if not shapes and ENVIRONMENT not in features:
            yield f"input_features: got no camera and no {ENVIRONMENT}, want one"
        if shapes:
            yield from self.differing(vision_backbone=[*DEPTHS])
            yield from self._frame_problems(shapes)
        yield from self._size_problems()

    def _frame_problems(self, shapes: set[tuple[int, ...]]) -> Iterator[str]:
        if len(shapes) > 1:
            listed = ", ".join(str(list(shape)) for shape in sorted(shapes))
            yield f"input_features: got cameras of {listed}, want one shape"
        if self.resize_shape is not None and min(self.resize_shape) < 1:
            yield f"resize_shape: got {list(self.resize_shape)}, want at least 1"
        whole = self.resize_shape or min(shape[1:] for shape in shapes)
        crop = self.crop
        if crop is not None and not all(1 <= a <= b for a, b in zip(crop, whole, strict=False)):
            yield f"crop_shape: got {list(crop)}, want at most {list(whole)} and at least 1"
        if (points := self.spatial_softmax_num_keypoints) < 1:
            yield f"spatial_softmax_num_keypoints: got {points}, want 1 or more"

    def _size_problems(self) -> Iterator[str]:
        dims, groups, width = self.down_dims, self.n_groups, self.diffusion_step_embed_dim
        if min(dims, default=0) < 1 or groups < 1 or any(dim % groups for dim in dims):
            yield f"down_dims: got {list(dims)}, want multiples of n_groups = {groups}"
        elif dims[0] % LAST_GROUPS:
            yield f"down_dims: got {dims[0]} first, want a multiple of {LAST_GROUPS}"
        if self.horizon < 1 or self.horizon % 2 ** len(dims):
            yield f"horizon: got {self.horizon}, want a multiple of {2 ** len(dims)}"
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            yield f"kernel_size: got {self.kernel_size}, want an odd number"
        if width < 4 or width % 2:
            yield f"diffusion_step_embed_dim: got {width}, want an even number of at least 4"
        kept, most = self.horizons
        if self.n_obs_steps < 1 or not 1 <= kept <= most:
            given = f"got {self.n_obs_steps} and {kept} of horizon {self.horizon}"
            yield f"n_obs_steps, n_action_steps: {given}, want n_action_steps at most {most}"
        if not 1 <= self.steps <= self.num_train_timesteps:
            at_most = f"at most num_train_timesteps = {self.num_train_timesteps}"
            yield f"num_inference_steps: got {self.steps}, want 1 or more and {at_most}"
        if self.beta_schedule == "linear" and not 0 < self.beta_start <= self.beta_end < 1:
            given = f"got {self.beta_start} and {self.beta_end}"
            yield f"beta_start, beta_end: {given}, want rising numbers between 0 and 1"
        if self.clip_sample and self.clip_sample_range <= 0:
            yield f"clip_sample_range: got {self.clip_sample_range}, want more than 0"

    def schedule(self) -> NoiseSchedule:
        """The steps from noise to actions."""
        return NoiseSchedule(
            kind=self.noise_scheduler_type,
            betas=self.beta_schedule,
            ends=(self.beta_start, self.beta_end),
            train_steps=self.num_train_timesteps,
            steps=self.steps,
            predicts=self.prediction_type,
            limit=self.clip_sample_range if self.clip_sample else None,
        )


class SpatialSoftmax(nn.Module):
    """Mean positions of a frame's features, each from -1 to 1: x, then y."""

    def __init__(self, channels: int, points: int, cells: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, points, 1)
        self.pos_grid = nn.Parameter(torch.empty(cells, 2))

    def forward(self, features: Tensor) -> Tensor:
        """``[B, C, H, W]`` to ``[B, 2 P]``."""
        attention = self.nets(features).flatten(2).softmax(-1)
        places: Tensor = attention @ self.pos_grid
        return places.flatten(1)


class FrameEncoder(nn.Module):
    """Frames to features: resizes, cuts out the middle, and locates points."""

    def __init__(self, sizes: DiffusionSizes, shape: tuple[int, ...]) -> None:
        super().__init__()
        points = sizes.spatial_softmax_num_keypoints
        norm = _group_norm if sizes.use_group_norm else FrozenNorm
        self.backbone = Backbone(DEPTHS[sizes.vision_backbone], norm, ENCODER_NAMES)
        height, width = grid_of(*(sizes.crop or sizes.resize_shape or shape[1:]))
        self.pool = SpatialSoftmax(self.backbone.channels, points, height * width)
        self.out = nn.Linear(2 * points, 2 * points)
        self.resize, self.crop = sizes.resize_shape, sizes.crop

    def forward(self, frames: Tensor) -> Tensor:
        """``[B, 3, H, W]`` to ``[B, F]``."""
        if self.resize is not None and frames.shape[2:] != self.resize:
            frames = interpolate(
                frames, self.resize, mode="bilinear", align_corners=False, antialias=True
            )
        if self.crop is not None:
            height, width = self.crop
            top, left = (
                round((a - b) / 2) for a, b in zip(frames.shape[2:], self.crop, strict=True)
            )
            frames = frames[:, :, top : top + height, left : left + width]
        return relu(self.out(self.pool(self.backbone(frames))))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // GROUP_CHANNELS, channels)


class ConvolutionBlock(nn.Module):
    """A convolution over the horizon that keeps its length, its norm, and Mish."""

    def __init__(self, given: int, channels: int, kernel: int, groups: int) -> None:
        super().__init__()
        convolution = nn.Conv1d(given, channels, kernel, padding=kernel // 2)
        self.block = nn.Sequential(convolution, nn.GroupNorm(groups, channels), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        """``[B, given, H]`` to ``[B, C, H]``."""
        made: Tensor = self.block(x)
        return made


class FilmBlock(nn.Module):
    """A residual block of two convolutions; between them a condition scales and shifts."""

    def __init__(self, sizes: DiffusionSizes, given: int, channels: int, condition: int) -> None:
        super().__init__()
        block = partial(ConvolutionBlock, kernel=sizes.kernel_size, groups=sizes.n_groups)
        self.has_scale, self.channels = sizes.use_film_scale_modulation, channels
        self.conv1, self.conv2 = block(given, channels), block(channels, channels)
        width = 2 * channels if self.has_scale else channels
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, width))
        is_same = given == channels
        self.residual_conv = nn.Identity() if is_same else nn.Conv1d(given, channels, 1)

    def forward(self, x: Tensor, film: Tensor) -> Tensor:
        """``[B, given, H]`` to ``[B, C, H]``; ``film [B, 2 C]`` is of ``cond_encoder``."""
        made, film = self.conv1(x), film.unsqueeze(-1)
        if self.has_scale:
            made = film[:, : self.channels] * made + film[:, self.channels :]
        else:
            made = made + film
        joined: Tensor = self.conv2(made) + self.residual_conv(x)
        return joined


class Level(nn.ModuleList):
    """Two blocks at one resolution of the horizon, and the convolution that changes it."""

    def forward(self, x: Tensor, films: Iterator[Tensor]) -> Tensor:
        """``[B, given, H]`` to ``[B, C, H]``, before that convolution."""
        first, second, _ = self
        made: Tensor = second(first(x, next(films)), next(films))
        return made


class ConditionalUnet(nn.Module):
    """From noisy actions to their noise, or to the clean actions, as the schedule predicts.

    Args:
        sizes: of it.
        action_dim: values of an action.
        observed: values of all observations together.
    """

    def __init__(self, sizes: DiffusionSizes, action_dim: int, observed: int) -> None:
        super().__init__()
        dims, wave = sizes.down_dims, sizes.diffusion_step_embed_dim
        self.diffusion_step_encoder = nn.Sequential(
            nn.Identity(), nn.Linear(wave, 4 * wave), nn.Mish(), nn.Linear(4 * wave, wave)
        )

        def blocks(given: int, channels: int) -> list[nn.Module]:
            make = partial(FilmBlock, sizes, condition=wave + observed)
            return [make(given, channels), make(channels, channels)]

        self.down_modules = nn.ModuleList()
        for index, (given, channels) in enumerate(pairwise((action_dim, *dims))):
            is_last = index == len(dims) - 1
            shorter = nn.Identity() if is_last else nn.Conv1d(channels, channels, 3, 2, 1)
            self.down_modules.append(Level([*blocks(given, channels), shorter]))
        self.mid_modules = nn.ModuleList(blocks(dims[-1], dims[-1]))
        self.up_modules = nn.ModuleList()
        for given, channels in pairwise(reversed(dims)):
            longer = nn.ConvTranspose1d(channels, channels, 4, 2, 1)
            self.up_modules.append(Level([*blocks(2 * given, channels), longer]))
        last = ConvolutionBlock(dims[0], dims[0], sizes.kernel_size, LAST_GROUPS)
        self.final_conv = nn.Sequential(last, nn.Conv1d(dims[0], action_dim, 1))

    def films(self, waves: Tensor, observed: Tensor) -> list[Tensor]:
        """Scales and biases of each block, in order, by its conditions: ``[K, B, 2 C]``.

        Without scale modulation they are biases alone, ``[K, B, C]``.

        Args:
            waves: of each step's time, ``[K, F]``.
            observed: values of all observations, ``[B, D]``.
        """
        times = self.diffusion_step_encoder(waves).unsqueeze(1).expand(-1, observed.shape[0], -1)
        seen = observed.expand(waves.shape[0], -1, -1)
        conditions = torch.cat([times, seen], -1)
        return [block.cond_encoder(conditions) for block in self._blocks()]

    def _blocks(self) -> Iterator[Any]:
        for level in self.down_modules:
            yield from list(level.children())[:2]
        yield from self.mid_modules
        for level in self.up_modules:
            yield from list(level.children())[:2]

    def forward(self, actions: Tensor, films: Iterable[Tensor]) -> Tensor:
        """``[B, H, A]`` to the same; ``films`` are each block's, of one step."""
        of_block, x = iter(films), actions.transpose(1, 2)
        skipped: list[Tensor] = []
        for level in self.down_modules:
            assert isinstance(level, Level)
            skipped.append(level(x, of_block))
            x = level[-1](skipped[-1])
        for block in self.mid_modules:
            x = block(x, next(of_block))
        for level in self.up_modules:
            assert isinstance(level, Level)
            x = level[-1](level(torch.cat([x, skipped.pop()], 1), of_block))
        predicted: Tensor = self.final_conv(x)
        return predicted.transpose(1, 2)


class DiffusionWeights(nn.Module):
    """Everything under ``diffusion.``."""

    def __init__(self, sizes: DiffusionSizes, reads: Reads, action_dim: int) -> None:
        super().__init__()
        numbers = [one for one in (reads.state, reads.environment) if one is not None]
        observed = sum(size for _, size in numbers)
        shapes = [shape for _, shape in reads.cameras]
        if shapes:
            observed += len(shapes) * 2 * sizes.spatial_softmax_num_keypoints
            if sizes.use_separate_rgb_encoder_per_camera:
                self.rgb_encoder: nn.Module = nn.ModuleList(
                    FrameEncoder(sizes, shape) for shape in shapes
                )
            else:
                self.rgb_encoder = FrameEncoder(sizes, shapes[0])
        self.unet = ConditionalUnet(sizes, action_dim, observed * sizes.n_obs_steps)

    def frame_features(self, frames: list[Tensor]) -> Tensor:
        """Each camera's ``[B, T, 3, H, W]`` to ``[B, T, F]``, the features of all cameras."""
        rows = frames[0].shape[:2]
        encoder = self.rgb_encoder
        if isinstance(encoder, nn.ModuleList):
            seen = [one(frame.flatten(0, 1)) for one, frame in zip(encoder, frames, strict=True)]
            return torch.cat(seen, -1).reshape(*rows, -1)
        features: Tensor = encoder(torch.stack(frames, 2).flatten(0, 2))
        return features.reshape(*rows, -1)


class DiffusionNetwork(LeRobotNetwork):
    """From the last observations of a window to an action chunk.

    With a seed, each row and each call uses the same noise, drawn on the CPU: an equal window gives
    equal actions, bit for bit on one device with one number of rows. It is the noise that LeRobot
    draws for one row on a CPU after ``torch.manual_seed(seed)``. Without a seed, each row and call
    draws its own noise from the device's default generator.

    Args:
        sizes: of the network.
        reads: as ``LeRobotNetwork``, with the other three.
        horizon: steps of the chunk that are kept, from the newest observation on.
        action_dim: values of an action.
        scales: by name of a tensor.
        seed: of the noise; None: fresh noise in each call.
        chunking: how a chunk goes on from the executed prefix; None: it does not.
    """

    waves: Tensor  # [K, F]
    noise: Tensor  # [draws, H, A]

    def __init__(
        self,
        sizes: DiffusionSizes,
        reads: Reads,
        horizon: int,
        action_dim: int,
        scales: Mapping[str, Scale],
        seed: int | None,
        chunking: ChunkingOptions | None = None,
    ) -> None:
        super().__init__(reads, horizon, action_dim, scales)
        self.chunking = chunking
        if chunking is not None:
            self.inputs += chunking.inputs(action_dim)
        self.diffusion = DiffusionWeights(sizes, reads, action_dim)
        norms = (name for name, one in self.named_modules() if isinstance(one, FrozenNorm))
        self.unused = tuple(f"{name}.num_batches_tracked" for name in norms)
        self.schedule, self._seed = sizes.schedule(), seed
        self._shape, self._first = (sizes.horizon, action_dim), sizes.n_obs_steps - 1
        self._observations = sizes.n_obs_steps
        waves = len(self.schedule.steps), sizes.diffusion_step_embed_dim
        self.register_buffer("waves", torch.empty(waves), persistent=False)
        drawn = 0 if seed is None else self.schedule.draws
        self.register_buffer("noise", torch.empty(drawn, *self._shape), persistent=False)

    def start(self) -> None:
        """Fills what is no weight: times of the steps, and noise of the seed."""
        super().start()
        half = self.waves.shape[1] // 2
        rates = torch.exp(torch.arange(half) * -(log(TIME_BASE) / (half - 1)))
        times = torch.tensor([step.time for step in self.schedule.steps])
        angles = times.unsqueeze(1) * rates
        self.waves.copy_(torch.cat([angles.sin(), angles.cos()], -1))
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed)
            for noise in self.noise:
                noise.copy_(torch.randn(self._shape, generator=generator))

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Writes ``actions``."""
        unet, schedule = self.diffusion.unet, self.schedule
        observed = self._observed(inputs)
        noise = self._noise(observed.shape[0])
        films = unet.films(self.waves, observed)
        first = actions = next(noise)
        executed = self._executed(inputs)
        for index, step in enumerate(schedule.steps):
            predicted = unet(actions, (film[index] for film in films))
            actions = schedule.next_of(step, actions, predicted)
            if step.fresh is not None:
                actions = actions + step.fresh * next(noise)
            if executed is not None:
                signal, spread = schedule.shares_behind(index)
                chunk, weights = executed
                actions = torch.lerp(actions, signal * chunk + spread * first, weights)
        self.write(actions[:, self._first : self._first + self.horizon], out)

    def _executed(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """The chunk to go on from, ``[B, H, A]``, and how much each step is bound to it."""
        if self.chunking is None:
            return None
        steps, width = self._shape
        steps -= self._first  # those before the newest observation are free
        prefix = self.normalised("actions", inputs[VALUES])
        known = whole_chunk(prefix, steps, width), self.chunking.weights(inputs, steps)
        chunk, weights = (pad(one, (0, 0, self._first, 0)) for one in known)
        return chunk, weights

    def _observed(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """``[B, D]``: of each step the state, the frames' features, and the environment."""
        reads, count = self.reads, self._observations

        def numbers(known: tuple[str, int] | None) -> list[Tensor]:
            return (
                [] if known is None else [self.normalised(known[0], inputs[known[0]][:, -count:])]
            )

        seen = numbers(reads.state)
        if reads.cameras:
            frames = [self._frames(inputs, stream) for stream, _ in reads.cameras]
            seen.append(self.diffusion.frame_features(frames))
        return torch.cat([*seen, *numbers(reads.environment)], -1).flatten(1)

    def _frames(self, inputs: Mapping[str, Tensor], stream: str) -> Tensor:
        """``[B, n, 3, H, W]``; a missing frame is replaced by the next one, as LeRobot pads."""
        name = f"{stream}.frames"
        frames = list(inputs[name].unbind(1))
        if len(frames) > 1:
            is_missing = ~inputs[f"{stream}.valid"] & (inputs[f"{stream}.age_s"] == 0)
            for index in range(len(frames) - 2, -1, -1):
                missing = is_missing[:, index, None, None, None]
                frames[index] = torch.where(missing, frames[index + 1], frames[index])
        return self.normalised(name, torch.stack(frames, 1))

    def _noise(self, rows: int) -> Iterator[Tensor]:
        """Yields ``[B, H, A]``, as often as the schedule draws."""
        for index in range(self.schedule.draws):
            if self._seed is None:
                yield torch.randn(rows, *self._shape, device=self.waves.device)
            else:
                yield self.noise[index].expand(rows, -1, -1)
