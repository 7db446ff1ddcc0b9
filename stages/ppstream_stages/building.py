"""Building a policy: its options, its weights, and parts that are networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from ppstream import ConfigError, TensorSpec
from ppstream_stages.tensor_parallel import shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAMED_MAX: Final = 5  # weights in one sentence of an error
NO_SOURCES: Final[Mapping[str, Sequence[str]]] = {}
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Options = TypeVar("Options")
Fill = Callable[[Mapping[str, Tensor]], None]  # gives weights their values, in place, by name


def options_of(config: Mapping[str, Any], kind: type[Options]) -> Options:
    """``[policy.options]`` as ``kind``.

    Raises:
        ConfigError: one is missing, unknown or not allowed.
    """
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ConfigError([f"policy.options: {error}"]) from error


class Patches(nn.Conv2d):
    """Images to a token for each patch: a convolution whose stride is its kernel.

    It computes one matrix product: cuDNN's convolutions of three channels took 0.08 ms of an H200
    for any number of images up to eight.
    """

    def __init__(self, width: int, side: int) -> None:
        super().__init__(3, width, side, side)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, H, W]`` to ``[B, N, F]``, row by row of patches; what fills none is left out."""
        _, _, side, _ = self.weight.shape
        rows, columns = (size // side for size in images.shape[-2:])
        whole = images[..., : rows * side, : columns * side]
        cut = whole.reshape(-1, 3, rows, side, columns, side)
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return linear(patches, self.weight.flatten(1), self.bias)


class PartNetwork(nn.Module):
    """Network of one part; its weights have the names that a ``.safetensors`` file has."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    needs_samples = False  # of every stream, even where it reads which are missing
    plain_frames = False  # of 0..1: it normalises them itself
    shards = False  # over the ranks of a mesh, where it has one; shares no weights then

    def cast(self, dtype: torch.dtype) -> None:
        """Has it compute in ``dtype``; by default all of it."""
        self.to(dtype)

    def start(self) -> None:
        """Fills the buffers, once they lie on their device; by default there are none."""

    def forward(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Writes every output in place."""
        raise NotImplementedError


class NetworkPart:
    """One part of a policy: a network that has no weights until ``load``.

    A module that several networks share is loaded once, for all of them.

    Attributes:
        network: with its weights once it is loaded.
        weights: their shapes by name; parts may have weights in common.

    Args:
        name: unique within the policy.
        network: made on the meta device.
        dtype: that it computes in.
        fill: given the weights to fill, on their device.
        device: that it computes on.
        mesh: of the ranks that share it; None: one rank has all of it.
    """

    stateless = True  # between calls
    any_rows = True

    def __init__(
        self,
        name: str,
        network: PartNetwork,
        dtype: torch.dtype,
        fill: Fill,
        device: torch.device,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.name = name
        self.inputs, self.outputs = network.inputs, network.outputs
        network.cast(dtype)
        self.network = network.requires_grad_(requires_grad=False).eval()
        self._fill, self._device = fill, device
        self._mesh = mesh if network.shards else None
        self._is_sharded = False
        self.weights = {key: tuple(weight.shape) for key, weight in network.named_parameters()}
        self.needs_samples, self.plain_frames = network.needs_samples, network.plain_frames
        if hasattr(network, "instruct"):
            self.instruct = network.instruct

    @property
    def parameters(self) -> int:
        """Numbers that its weights have in all."""
        return sum(torch.Size(shape).numel() for shape in self.weights.values())

    @property
    def flops(self) -> int:
        """Floating-point operations of one call with one row, counted from the shapes."""
        network, meta = self.network, torch.device("meta")
        tensors = chain(network.named_parameters(), network.named_buffers())
        state = {name: torch.empty_like(tensor, device=meta) for name, tensor in tensors}
        given, out = (
            {
                spec.name: torch.empty(1, *spec.shape, dtype=_dtype(spec), device=meta)
                for spec in some
            }
            for some in (self.inputs, self.outputs)
        )
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            functional_call(network, state, (given, out))
        return int(counter.get_total_flops())

    def load(self) -> None:
        """Makes and fills whatever of it is not yet on its device."""
        fresh: dict[str, Tensor] = {}
        for path, module in self.network.named_modules():
            own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
            if any(tensor.is_meta for tensor in own):
                module.to_empty(device=self._device, recurse=False)
                fresh.update(module.named_parameters(path, recurse=False))
        self._fill(fresh)
        self.network.start()
        if self._mesh is not None:
            shard(self.network, self._mesh)
            self._mesh, self._is_sharded = None, True

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers by name, as they lie on this rank."""
        return {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget: the inputs are all it knows."""

    def __call__(self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Writes every output in place."""
        is_plain = self._is_sharded or torch.compiler.is_compiling()
        # DTensor plans a call anew each time in inference mode (100 x slower), and torch's compiler
        # fails there at views of weights and inputs.
        with torch.no_grad() if is_plain else torch.inference_mode():
            self.network(inputs, out)


def parts_from(
    networks: Mapping[str, PartNetwork],
    dtype: torch.dtype,
    draw: Fill,
    path: str | Path | None,
    device: torch.device,
    unused: tuple[str, ...] = (),
    sources: Mapping[str, Sequence[str]] = NO_SOURCES,
    mesh: DeviceMesh | None = None,
) -> list[NetworkPart]:
    """A part for each of ``networks``, in order; without weights yet.

    Args:
        networks: by the names of the parts, made on the meta device.
        dtype: that they compute in.
        draw: fills weights where there is no file.
        path: of a safetensors file with the weights of all.
        device: that they compute on.
        unused: beginnings of names that the file may have beside theirs.
        sources: by name of a weight those in the file, which are its rows one after the other;
            one that is left out has its own name there.
        mesh: of the ranks that share them.

    Raises:
        ConfigError: the file cannot be read, or does not fit.
    """
    fill = draw if path is None else partial(_read_weights, path, sources)
    parts = [NetworkPart(name, made, dtype, fill, device, mesh) for name, made in networks.items()]
    if path is not None:
        wanted = {name: shape for part in parts for name, shape in part.weights.items()}
        _check_weights(path, wanted, unused, sources)
    return parts


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Loads all of ``network``'s weights from a safetensors file.

    Raises:
        ConfigError: they cannot be read, or do not fit.
    """
    weights = network.state_dict()
    _check_weights(path, {name: tuple(weight.shape) for name, weight in weights.items()})
    _read_weights(path, NO_SOURCES, weights)


def shapes_in(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes in the header of a safetensors file, by name.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"policy.weights: {path} cannot be read: {error}"]) from error


def _check_weights(
    path: str | Path,
    wanted: Mapping[str, tuple[int, ...]],
    unused: tuple[str, ...] = (),
    sources: Mapping[str, Sequence[str]] = NO_SOURCES,
) -> None:
    """Compares names and shapes in the file's header alone."""
    found = {name: one for name, one in shapes_in(path).items() if not name.startswith(unused)}
    named = {name: sources.get(name, (name,)) for name in wanted}
    read = {name for several in named.values() for name in several}
    other = []
    for name, several in named.items():
        shapes = [found[one] for one in several if one in found]
        if len(shapes) == len(several) and _joined(shapes) != wanted[name]:
            got = ", ".join(f"{one} {list(found[one])}" for one in several)
            other.append(f"{got}, want {list(wanted[name])}{' together' * (len(several) > 1)}")
    texts = [
        *_listed("lacks", read - found.keys()),
        *_listed("has too many:", found.keys() - read),
        *_listed("has of other shapes:", other),
    ]
    if texts:
        problem = f"{path} does not fit this policy: it {'; it '.join(texts)}"
        raise ConfigError([f"policy.weights: {problem}"])


def _joined(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Shape of tensors one after the other; None: they do not fit together."""
    first, *others = shapes
    if not others:
        return first
    if not all(shapes) or any(shape[1:] != first[1:] for shape in others):
        return None
    return sum(shape[0] for shape in shapes), *first[1:]


def _listed(what: str, names: Iterable[str]) -> Iterator[str]:
    """Yields one text that names some of ``names``; nothing without any."""
    ordered = sorted(names)
    if ordered:
        more = f" and {len(ordered) - NAMED_MAX} more" if len(ordered) > NAMED_MAX else ""
        yield f"{what} {', '.join(ordered[:NAMED_MAX])}{more}"


def _read_weights(
    path: str | Path, sources: Mapping[str, Sequence[str]], weights: Mapping[str, Tensor]
) -> None:
    """Reads no others."""
    with safe_open(path, "pt") as file:
        for name, weight in weights.items():
            if name not in sources:
                weight.copy_(file.get_tensor(name))
                continue
            begin = 0
            for one in sources[name]:
                found = file.get_tensor(one)
                weight[begin : begin + len(found)].copy_(found)
                begin += len(found)


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype
