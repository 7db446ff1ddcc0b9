"""The pieces that the networks of LeRobot's policies share: inputs, normalisation, image encoder.

Weights have the names that they have in a LeRobot folder. Nothing of LeRobot is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from ppstream import TensorSpec
from ppstream_stages.building import PartNetwork

# B=row T=step of the window n=frames C=channels H W

STATE: Final = "observation.state"
ENVIRONMENT: Final = "observation.environment_state"
ACTION: Final = "action"
VISUAL: Final = "VISUAL"
DEPTHS: Final = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
SHRINKS: Final = 32  # pixels of a frame for each one behind the residual network, both ways
BATCH_NORM_EPS: Final = 1e-5
#: First convolution, the norm behind it, and the layers of a residual network.
LAYERS: Final = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")

Norm = Callable[[int], nn.Module]


class ConfigFeature(msgspec.Struct, frozen=True):
    """A tensor in ``config.json``."""

    type: str
    shape: tuple[int, ...]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Part of ``config.json`` that one kind of policy has, as far as acting needs it."""

    n_obs_steps: int = 1

    @property
    def horizons(self) -> tuple[int, int]:
        """Steps of a chunk that LeRobot keeps, and those that there are."""
        raise NotImplementedError

    @property
    def widest_action(self) -> int | None:
        """Values that an action may have; None: any number."""
        return None

    def problems(self, features: Mapping[str, ConfigFeature]) -> Iterator[str]:
        """Yields what the network does not do; ``features`` are its inputs."""
        raise NotImplementedError

    def differing(self, **wanted: Sequence[object]) -> Iterator[str]:
        """Yields a text for each setting that has none of the values ``wanted``."""
        for name, values in wanted.items():
            if (got := getattr(self, name)) not in values:
                yield f"{name}: got {got!r}, want {' or '.join(map(repr, values))}"


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of a window that the network takes: names, and shapes of one step or frame."""

    steps: int
    state: tuple[str, int] | None
    environment: tuple[str, int] | None
    cameras: tuple[tuple[str, tuple[int, ...]], ...]  # names without ``.frames``
    frames: int = 1  # of every camera

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors of the window, in order; several frames with what tells which are missing."""
        numbers = [one for one in (self.state, self.environment) if one is not None]
        specs = [TensorSpec(name, (self.steps, size)) for name, size in numbers]
        for name, shape in self.cameras:
            specs.append(TensorSpec(f"{name}.frames", (self.frames, *shape)))
            if self.frames > 1:
                specs.append(TensorSpec(f"{name}.valid", (self.frames,), "bool"))
                specs.append(TensorSpec(f"{name}.age_s", (self.frames,)))
        return tuple(specs)


class Scale(NamedTuple):
    """``(x - shift) / spread + offset``; an offset keeps a value at a bound exact.

    ``shift`` has a number for each value or, of shape ``[C, 1, 1]``, for each channel; ``spread``
    is as ``shift``.
    """

    shift: Tensor
    spread: Tensor
    offset: float = 0.0


class Normalization(nn.Module):
    """A ``Scale`` and back, with numbers that are no weights."""

    shift: Tensor
    spread: Tensor

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self._offset = scale.offset
        self._known = {"shift": scale.shift, "spread": scale.spread}
        for name, numbers in self._known.items():
            self.register_buffer(name, torch.empty(numbers.shape), persistent=False)

    def start(self) -> None:
        """Fills the buffers."""
        for name, numbers in self._known.items():
            self.get_buffer(name).copy_(numbers)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` as the network takes it."""
        found = (x - self.shift) / self.spread
        return found + self._offset if self._offset else found

    def inverse(self, x: Tensor) -> Tensor:
        """The inverse, of what the network gives."""
        return (x - self._offset if self._offset else x) * self.spread + self.shift


class Scales(nn.Module):
    """Normalisation of several tensors by their names; one that is not known stays as it is.

    Args:
        known: by name.
    """

    def __init__(self, known: Mapping[str, Scale]) -> None:
        super().__init__()
        self.each = nn.ModuleList(map(Normalization, known.values()))
        self._places = {name: index for index, name in enumerate(known)}

    def start(self) -> None:
        """Fills the numbers."""
        for scale in self.each:
            assert isinstance(scale, Normalization)
            scale.start()

    def normalised(self, name: str, x: Tensor) -> Tensor:
        """``x`` of the tensor ``name`` as the network takes it."""
        scale = self._of(name)
        return x if scale is None else scale(x)

    def restored(self, name: str, x: Tensor) -> Tensor:
        """The inverse of ``normalised``."""
        scale = self._of(name)
        return x if scale is None else scale.inverse(x)

    def _of(self, name: str) -> Normalization | None:
        if name not in self._places:
            return None
        scale = self.each[self._places[name]]
        assert isinstance(scale, Normalization)
        return scale


class LeRobotNetwork(PartNetwork):
    """Takes tensors of a window, normalised, and writes ``actions`` in the units of the robot.

    Args:
        reads: the tensors that it takes.
        horizon: steps of the chunk that are kept.
        action_dim: values of an action.
        scales: by name of an input, and ``actions``; one without is identity.
    """

    needs_samples = True  # it pads the frames before the first, and knows of no other hole
    plain_frames = True  # with the numbers of the folder
    #: Beginnings of names in a folder's file that only training needs.
    unused: tuple[str, ...] = ()

    def __init__(
        self,
        reads: Reads,
        horizon: int,
        action_dim: int,
        scales: Mapping[str, Scale],
    ) -> None:
        super().__init__()
        self.inputs = reads.specs
        self.outputs = (TensorSpec("actions", (horizon, action_dim)),)
        self.scales = Scales(scales)
        self.reads, self.horizon = reads, horizon

    def start(self) -> None:
        """Fills the numbers of the normalisation, and what is made of weights."""
        self.scales.start()
        for module in self.modules():
            if isinstance(module, Backbone):
                module.start()

    def normalised(self, name: str, x: Tensor) -> Tensor:
        """``x`` of the input ``name`` as the network takes it."""
        return self.scales.normalised(name, x)

    def write(self, chunk: Tensor, out: Mapping[str, Tensor]) -> None:
        """Writes ``chunk [B, horizon, action_dim]`` as it leaves the network."""
        out["actions"].copy_(self.scales.restored("actions", chunk))


class FrozenNorm(nn.Module):
    """Batch normalisation by numbers that training left."""

    slope: Tensor
    offset: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias, self.running_mean, self.running_var = (
            nn.Parameter(torch.empty(channels)) for _ in range(4)
        )
        for name in ("slope", "offset"):
            self.register_buffer(name, torch.empty(channels, 1, 1), persistent=False)

    def start(self) -> None:
        """Makes one factor and one summand of the four numbers."""
        with torch.no_grad():
            slope = self.weight * (self.running_var + BATCH_NORM_EPS).rsqrt()
            offset = self.bias - self.running_mean * slope
            self.slope.copy_(slope.view(-1, 1, 1))
            self.offset.copy_(offset.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` to the same."""
        return torch.addcmul(self.offset, x, self.slope)


class ResidualBlock(nn.Module):
    """Two convolutions and what goes around them."""

    def __init__(self, given: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, channels, 3, stride, 1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = norm(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or given != channels:
            shorter = nn.Conv2d(given, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shorter, norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]``; with a stride half as high and wide."""
        around = x if self.downsample is None else self.downsample(x)
        made = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        joined: Tensor = made + around
        return relu(joined)


class Backbone(nn.Module):
    """A residual network without its head.

    Args:
        depths: blocks of each layer.
        norm: makes the norm behind a convolution, given its channels.
        names: of the first convolution, the norm behind it, and the four layers.
    """

    def __init__(
        self, depths: Sequence[int], norm: Norm = FrozenNorm, names: Sequence[str] = LAYERS
    ) -> None:
        super().__init__()
        first, behind, *self.names = names
        self.begin = first, behind
        self.add_module(first, nn.Conv2d(3, 64, 7, 2, 3, bias=False))
        self.add_module(behind, norm(64))
        given = 64
        for index, (name, depth) in enumerate(zip(self.names, depths, strict=True)):
            channels, stride = 64 << index, 1 if index == 0 else 2
            blocks = [ResidualBlock(given, channels, stride, norm)]
            blocks += [ResidualBlock(channels, channels, 1, norm) for _ in range(depth - 1)]
            self.add_module(name, nn.Sequential(*blocks))
            given = channels
        self.channels = given

    def start(self) -> None:
        """Has pixels lie behind one another, channels last, as tensor cores read them.

        It takes a norm that does not put them back.
        """
        frozen = [module for module in self.modules() if isinstance(module, FrozenNorm)]
        for norm in frozen:
            norm.start()
        for module in self.modules() if frozen else ():
            if isinstance(module, nn.Conv2d):
                weight = module.weight
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, frames: Tensor) -> Tensor:
        """``[B, 3, H, W]`` to ``[B, C, H / 32, W / 32]``, rounded up."""
        x = frames
        for name in self.begin:
            x = self.get_submodule(name)(x)
        x = max_pool2d(relu(x), 3, 2, 1)
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


def grid_of(height: int, width: int) -> tuple[int, int]:
    """Height and width behind the residual network."""
    return ceil(height / SHRINKS), ceil(width / SHRINKS)
