"""A policy that LeRobot trained, from its local folder: ACT or Diffusion, without LeRobot.

``policy.weights`` names the folder's ``model.safetensors``; ``config.json`` and the processors'
files lie beside it. What they say is checked before a rank starts. Of the processors' steps those
of ``STEPS`` are known; their normalisation becomes part of the network. Nothing is looked for
elsewhere, and no name in a file is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppstream import ConfigError
from ppstream.config.field_types import Count
from ppstream_stages.building import NetworkPart, options_of, parts_from
from ppstream_stages.lerobot_act import ActNetwork, ActSizes
from ppstream_stages.lerobot_diffusion import DiffusionNetwork, DiffusionSizes
from ppstream_stages.lerobot_network import (
    ACTION,
    ENVIRONMENT,
    STATE,
    VISUAL,
    ConfigFeature,
    LeRobotNetwork,
    Reads,
)

CONFIG: Final = "config.json"
PROCESSORS: Final = ("policy_preprocessor.json", "policy_postprocessor.json")
FILE_MAX: Final = 1_000_000  # bytes of a JSON file
NORMALISERS: Final = ("normalizer_processor", "unnormalizer_processor")
#: Steps before and behind the policy; the others have nothing to do here.
STEPS: Final = (
    {"rename_observations_processor", "to_batch_processor", "device_processor", NORMALISERS[0]},
    {"device_processor", NORMALISERS[1]},
)
#: Statistics that a mode needs: mean and deviation, or the ends of what becomes -1 to 1.
MODES: Final = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
IDENTITY: Final = "IDENTITY"
KINDS: Final[Mapping[str, type[ActSizes | DiffusionSizes]]] = {
    "act": ActSizes,
    "diffusion": DiffusionSizes,
}
#: What other kinds of policies would need.
LACKING: Final = {
    "smolvla": "its language model and tokenizer",
    "pi0": "its language model and tokenizer",
    "pi05": "its language model, and the state as text for its tokenizer",
}

Content = TypeVar("Content")


class PolicyKind(msgspec.Struct, frozen=True):
    """The part of ``config.json`` that says how to read the others."""

    type: str


class PolicyFeatures(msgspec.Struct, frozen=True):
    """The part of ``config.json`` that every policy of ``KINDS`` has."""

    input_features: dict[str, ConfigFeature]
    output_features: dict[str, ConfigFeature]

    @property
    def cameras(self) -> list[str]:
        """Keys of the cameras, in order."""
        return [key for key, one in self.input_features.items() if one.type == VISUAL]


class ProcessorStep(msgspec.Struct, frozen=True):
    """A step of a processor."""

    registry_name: str | None = None
    config: dict[str, Any] = {}
    state_file: str | None = None
    importable: str | None = msgspec.field(default=None, name="class")


class Processor(msgspec.Struct, frozen=True):
    """``policy_preprocessor.json`` or ``policy_postprocessor.json``."""

    steps: tuple[ProcessorStep, ...]


class Normaliser(msgspec.Struct, frozen=True):
    """Configuration of a step that normalises."""

    norm_map: dict[str, str]
    features: dict[str, ConfigFeature]
    eps: float = 1e-8
    normalize_observation_keys: tuple[str, ...] | None = None


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``."""

    steps: Count | None = None  # of the window; None: those that the policy reads, the last ones
    horizon: Count | None = None  # of the chunk; None: what LeRobot keeps
    group: str = "state"  # streams in the order of observation.state
    environment: str = "environment"  # group for observation.environment_state
    cameras: dict[str, str] = {}  # stream = key; others are named as the end of their key
    weights: str | None = None  # model.safetensors of the folder
    noise: Literal["fixed", "fresh"] | None = None  # of Diffusion; None: fixed
    seed: int | None = None  # of fixed noise; None: 0


def build(config: Mapping[str, Any], device: torch.device) -> list[NetworkPart]:
    """The policy of a LeRobot folder; without weights yet.

    Raises:
        ConfigError: an option is not allowed, or the folder holds something else; every reason.
    """
    options = options_of(config, Options)
    if options.weights is None:
        raise ConfigError(["policy.weights: got none, want model.safetensors of a LeRobot folder"])
    weights = Path(options.weights)
    path = weights.with_name(CONFIG)
    kind, features, sizes = _config(path)
    found = [f"policy.weights: {path}: {text}" for text in _problems(features, sizes)]
    found += (f"policy.options.{text}" for text in _option_problems(features, sizes, options))
    scales: dict[str, tuple[Tensor, Tensor]] = {}
    keys = _names(features, options)
    for name, allowed in zip(PROCESSORS, STEPS, strict=True):
        path = weights.with_name(name)
        found += (f"policy.weights: {path}: {text}" for text in _fold(path, allowed, keys, scales))
    if found:
        raise ConfigError(found)
    horizon = options.horizon or sizes.horizons[0]
    (action_dim,) = features.output_features[ACTION].shape
    reads = _reads(features, sizes, options)
    with torch.device("meta"):
        network: LeRobotNetwork
        if isinstance(sizes, ActSizes):
            network = ActNetwork(sizes, reads, horizon, action_dim, scales)
        else:
            seed = None if options.noise == "fresh" else options.seed or 0
            network = DiffusionNetwork(sizes, reads, horizon, action_dim, scales, seed)
    networks = {kind: network}
    return parts_from(networks, torch.float32, _nothing, weights, device, network.unused)


def _nothing(weights: Mapping[str, Tensor]) -> None:
    """Draws none: there is always a file."""


def _config(path: Path) -> tuple[str, PolicyFeatures, ActSizes | DiffusionSizes]:
    """Kind, tensors and sizes of a policy from its ``config.json``."""
    try:
        kind = _read(path, PolicyKind).type
        if kind in KINDS:
            return kind, _read(path, PolicyFeatures), _read(path, KINDS[kind])
        lacks = f"; it would need {LACKING[kind]}" if kind in LACKING else ""
        reason = f"got a policy {kind!r}, want {' or '.join(map(repr, KINDS))}{lacks}"
    except ConfigError as error:
        reason = str(error)
    raise ConfigError([f"policy.weights: {path}: {reason}"])


def _problems(features: PolicyFeatures, sizes: ActSizes | DiffusionSizes) -> Iterator[str]:
    """Yields what this network does not do."""
    yield from sizes.problems(features.input_features)
    for key, one in features.input_features.items():
        is_number = len(one.shape) == 1 and (key, one.type) in (
            (STATE, "STATE"),
            (ENVIRONMENT, "ENV"),
        )
        is_frame = one.type == VISUAL and len(one.shape) == 3 and one.shape[0] == 3
        if not (is_number or is_frame) or min(one.shape) < 1:
            yield f"input_features: got {key} {one.type} {list(one.shape)}, which no window has"
    found = {key: len(one.shape) for key, one in features.output_features.items()}
    if found != {ACTION: 1}:
        yield f"output_features: got {', '.join(found) or 'none'}, want one row of {ACTION!r}"


def _option_problems(
    features: PolicyFeatures, sizes: ActSizes | DiffusionSizes, options: Options
) -> Iterator[str]:
    for stream, key in options.cameras.items():
        if key not in features.cameras:
            listed = ", ".join(features.cameras) or "no camera"
            yield f"cameras.{stream}: got {key!r}, the policy reads {listed}"
    names = list(_names(features, options).values())
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"cameras: {name!r} would be read for two keys; want a stream for each"
    _, most = sizes.horizons
    if options.horizon is not None and options.horizon > most:
        yield f"horizon: got {options.horizon}, the policy makes {most} steps"
    if options.steps is not None and options.steps < sizes.n_obs_steps:
        yield f"steps: got {options.steps}, the policy reads {sizes.n_obs_steps}"
    if isinstance(sizes, ActSizes):
        for name in ("noise", "seed"):
            if getattr(options, name) is not None:
                yield f"{name}: got {getattr(options, name)!r}, but ACT draws no noise"
    elif options.noise == "fresh" and options.seed is not None:
        yield f"seed: got {options.seed}, but fresh noise has none; want noise = 'fixed'"


def _names(features: PolicyFeatures, options: Options) -> dict[str, str]:
    """Tensors of window and result by LeRobot's keys."""
    streams = {key: stream for stream, key in options.cameras.items()}
    found = {ACTION: "actions"}
    for key, one in features.input_features.items():
        if one.type == VISUAL:
            found[key] = f"{streams.get(key, key.rpartition('.')[2])}.frames"
        else:
            group = options.group if key == STATE else options.environment
            found[key] = f"{group}.values"
    return found


def _reads(features: PolicyFeatures, sizes: ActSizes | DiffusionSizes, options: Options) -> Reads:
    names, shapes = _names(features, options), features.input_features

    def numbers(key: str) -> tuple[str, int] | None:
        return (names[key], shapes[key].shape[0]) if key in shapes else None

    return Reads(
        steps=options.steps or sizes.n_obs_steps,
        state=numbers(STATE),
        environment=numbers(ENVIRONMENT),
        cameras=tuple(
            (names[key].removesuffix(".frames"), shapes[key].shape) for key in features.cameras
        ),
        frames=sizes.n_obs_steps,
    )


def _fold(
    path: Path,
    allowed: set[str],
    names: Mapping[str, str],
    scales: dict[str, tuple[Tensor, Tensor]],
) -> Iterator[str]:
    """Adds shift and spread by name of a tensor, as a processor normalises; yields problems."""
    try:
        steps = _read(path, Processor).steps
    except ConfigError as error:
        yield str(error)
        return
    for index, step in enumerate(steps):
        label = f"step {index} ({step.registry_name or step.importable})"
        if step.registry_name not in allowed:
            yield f"{label} is not known here; want {', '.join(sorted(allowed))}"
        elif step.config.get("float_dtype") not in (None, "float32"):
            yield f"{label}: float_dtype: got {step.config['float_dtype']!r}, want float32"
        elif step.registry_name in NORMALISERS:
            is_input = step.registry_name == NORMALISERS[0]
            of_it = {key: name for key, name in names.items() if (key != ACTION) == is_input}
            yield from (f"{label}: {text}" for text in _fold_step(path, step, of_it, scales))


def _fold_step(
    path: Path,
    step: ProcessorStep,
    names: Mapping[str, str],
    scales: dict[str, tuple[Tensor, Tensor]],
) -> Iterator[str]:
    """As ``_fold``, of a step that normalises ``names`` by their keys."""
    try:
        normaliser = msgspec.convert(step.config, Normaliser)
    except msgspec.ValidationError as error:
        yield str(error)
        return
    stats, problem = _stats(path, step.state_file)
    if problem:
        yield problem
        return
    for key, name in names.items():
        if key in normaliser.features:
            made = _scale(normaliser, key, stats, is_input=key != ACTION)
            if isinstance(made, str):
                yield f"{key}: {made}"
            elif made is not None:
                scales[name] = made


def _scale(
    normaliser: Normaliser, key: str, stats: Mapping[str, Tensor], *, is_input: bool
) -> tuple[Tensor, Tensor] | str | None:
    """Shift and spread of a key; None: it stays as it is; a text: a problem."""
    feature = normaliser.features[key]
    mode = normaliser.norm_map.get(feature.type, IDENTITY)
    chosen = normaliser.normalize_observation_keys
    has_none = not any(name.rpartition(".")[0] == key for name in stats)
    if mode == IDENTITY or has_none or (is_input and chosen is not None and key not in chosen):
        return None
    if mode not in MODES:
        return f"got {mode!r}, want {', '.join(MODES)} or {IDENTITY}"
    low, high = (stats.get(f"{key}.{statistic}") for statistic in MODES[mode])
    if low is None or high is None:
        return f"{mode} needs {' and '.join(MODES[mode])}, which its state file lacks"
    shape = (feature.shape[0], 1, 1) if len(feature.shape) == 3 else feature.shape
    if low.numel() != shape[0] or high.numel() != shape[0]:
        return f"got {low.numel()} and {high.numel()} numbers, want {shape[0]}"
    low, high = (one.float().reshape(shape) for one in (low, high))
    if mode == "MEAN_STD":
        return low, high + normaliser.eps if is_input else high
    half = torch.where(high == low, normaliser.eps, high - low) / 2
    return low + half, half


def _stats(path: Path, name: str | None) -> tuple[dict[str, Tensor], str]:
    """Numbers of a state file beside ``path``, and a problem or ''."""
    if name is None:
        return {}, ""
    if Path(name).name != name:
        return {}, f"state_file: got {name!r}, want a file of this folder"
    try:
        with safe_open(path.with_name(name), "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, ""  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as error:
        return {}, f"{name} cannot be read: {error}"


def _read(path: Path, kind: type[Content]) -> Content:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(FILE_MAX), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([str(reason)]) from error
