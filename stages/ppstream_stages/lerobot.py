"""A policy that LeRobot trained, from its local folder: ACT, Diffusion or π0, without LeRobot.

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
from ppstream_stages.building import DTYPES, NetworkPart, options_of, parts_from, shapes_in
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
    Scale,
)
from ppstream_stages.lerobot_pi0 import EMPTY_CAMERA, Choices, Pi0Sizes, Texts, networks_of
from ppstream_stages.lerobot_pi0_names import sources_of
from ppstream_stages.real_time_chunking import ChunkingOptions
from ppstream_stages.text_tokens import tokenizer_at

AnySizes = ActSizes | DiffusionSizes | Pi0Sizes

CONFIG: Final = "config.json"
PROCESSORS: Final = ("policy_preprocessor.json", "policy_postprocessor.json")
FILE_MAX: Final = 1_000_000  # bytes of a JSON file
NORMALISERS: Final = ("normalizer_processor", "unnormalizer_processor")
#: Steps before and behind the policy; the others have nothing to do here.
STEPS: Final = (
    {"rename_observations_processor", "to_batch_processor", "device_processor", NORMALISERS[0]},
    {"device_processor", NORMALISERS[1]},
)
#: Further steps of π0; ``Texts`` does what the first two do.
PI0_STEPS: Final = (
    {"pi0_new_line_processor", "tokenizer_processor", "relative_actions_processor"},
    {"absolute_actions_processor"},
)
#: Statistics that a mode needs: mean and deviation, or the ends of what becomes -1 to 1.
MODES: Final = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
IDENTITY: Final = "IDENTITY"
#: How finely π0 is cut.
PI0_CUT: Final = ("language_layers_per_part", "denoising_steps_per_part")
KINDS: Final[Mapping[str, type[AnySizes]]] = {
    "act": ActSizes,
    "diffusion": DiffusionSizes,
    "pi0": Pi0Sizes,
}
#: Options that only some kinds of policies take.
TAKEN_BY: Final = {
    "noise": ("diffusion", "pi0"),
    "seed": ("diffusion", "pi0"),
    "rtc": ("diffusion", "pi0"),
    **dict.fromkeys(
        ("tokenizer", "task", "instructions", "dtype", *PI0_CUT),
        ("pi0",),
    ),
}
#: What other kinds of policies would need.
LACKING: Final = {
    "smolvla": "its language model, whose sizes the folder does not name",
    "pi05": "the state as text for its tokenizer, and norms that the time of denoising changes",
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
    def seen(self) -> PolicyFeatures:
        """Without cameras that no robot has."""
        inputs = self.input_features.items()
        kept = {key: one for key, one in inputs if not key.startswith(EMPTY_CAMERA)}
        return PolicyFeatures(kept, self.output_features)

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
    noise: Literal["fixed", "fresh"] | None = None  # of Diffusion and π0; None: fixed
    seed: int | None = None  # of fixed noise; None: 0
    rtc: ChunkingOptions | None = None  # of Diffusion and π0: goes on from the executed prefix
    tokenizer: str | None = None  # of π0: a local folder with tokenizer.json, or that file
    task: str | None = None  # of π0: text for robots that send none; None: an empty one
    instructions: bool | None = None  # of π0, as policy.instructions
    dtype: Literal["float32", "bfloat16"] | None = None  # of π0; None: as the folder says
    language_layers_per_part: Count | None = None  # of π0, as in vla; None: 6
    denoising_steps_per_part: Count | None = None  # 2


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
    taken = _option_problems(kind, features, sizes, options)
    found += (f"policy.options.{text}" for text in taken)
    scales: dict[str, Scale] = {}
    keys = _names(features, options)
    for index, name in enumerate(PROCESSORS):
        path = weights.with_name(name)
        problems = _fold(path, _allowed(sizes, index), keys, scales)
        found += (f"policy.weights: {path}: {text}" for text in problems)
    texts, lacking = _texts(sizes, options)
    if found or lacking:
        raise ConfigError(found + lacking)
    horizon = options.horizon or sizes.horizons[0]
    (action_dim,) = features.output_features[ACTION].shape
    seed = None if options.noise == "fresh" else options.seed or 0
    known = _reads(features, sizes, options), horizon, action_dim, scales
    if isinstance(sizes, Pi0Sizes):
        cut = {name: size for name in PI0_CUT if (size := getattr(options, name)) is not None}
        assert texts is not None
        choices = Choices(*known, seed, options.dtype, cut, texts, options.rtc)
        return _pi0(sizes, choices, weights, device)
    with torch.device("meta"):
        network: LeRobotNetwork
        if isinstance(sizes, ActSizes):
            network = ActNetwork(sizes, *known)
        else:
            network = DiffusionNetwork(sizes, *known, seed, options.rtc)
    return parts_from({kind: network}, torch.float32, _nothing, weights, device, network.unused)


def _pi0(
    sizes: Pi0Sizes, choices: Choices, weights: Path, device: torch.device
) -> list[NetworkPart]:
    with torch.device("meta"):
        networks, dtype = networks_of(sizes, choices)
    wanted = {name for one in networks.values() for name, _ in one.named_parameters()}
    sources, unused = sources_of(wanted, shapes_in(weights))
    return parts_from(networks, DTYPES[dtype], _nothing, weights, device, unused, sources)


def _allowed(sizes: AnySizes, index: int) -> dict[str, dict[str, Any]]:
    """Steps of a processor, and settings that they must have: of ``PROCESSORS[index]``."""
    found: dict[str, dict[str, Any]] = {name: {} for name in STEPS[index]}
    if isinstance(sizes, Pi0Sizes):
        found |= {name: {} for name in PI0_STEPS[index]}
        for name in ("relative_actions_processor", "absolute_actions_processor"):
            if name in found:
                found[name] = {"enabled": False}
        if "tokenizer_processor" in found:
            most = sizes.tokenizer_max_length
            found["tokenizer_processor"] = {"padding_side": "right", "max_length": most}
    return found


def _texts(sizes: AnySizes, options: Options) -> tuple[Texts | None, list[str]]:
    """Returns the way from texts to tokens, for a policy that reads them; and what is wrong."""
    if not isinstance(sizes, Pi0Sizes):
        return None, []
    if options.tokenizer is None:
        text = "got none, want a local folder with the tokenizer.json of PaliGemma: π0 reads texts"
        return None, [f"policy.options.tokenizer: {text}"]
    try:
        tokens_of = tokenizer_at(options.tokenizer)
    except ConfigError as error:
        return None, list(error.problems)
    return Texts(tokens_of, options.task or "", bool(options.instructions)), []


def _nothing(weights: Mapping[str, Tensor]) -> None:
    """Draws none: there is always a file."""


def _config(path: Path) -> tuple[str, PolicyFeatures, AnySizes]:
    """Kind, tensors and sizes of a policy from its ``config.json``."""
    try:
        kind = _read(path, PolicyKind).type
        if kind in KINDS:
            return kind, _read(path, PolicyFeatures).seen, _read(path, KINDS[kind])
        lacks = f"; it would need {LACKING[kind]}" if kind in LACKING else ""
        reason = f"got a policy {kind!r}, want {' or '.join(map(repr, KINDS))}{lacks}"
    except ConfigError as error:
        reason = str(error)
    raise ConfigError([f"policy.weights: {path}: {reason}"])


def _problems(features: PolicyFeatures, sizes: AnySizes) -> Iterator[str]:
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
    elif sizes.widest_action is not None:
        (values,) = features.output_features[ACTION].shape
        if values > sizes.widest_action:
            yield f"{ACTION}: got {values} values, want at most {sizes.widest_action}"


def _option_problems(
    kind: str, features: PolicyFeatures, sizes: AnySizes, options: Options
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
    for name, kinds in TAKEN_BY.items():
        if kind not in kinds and (got := getattr(options, name)) is not None:
            got = msgspec.to_builtins(got)
            yield f"{name}: got {got!r}, which is for {' and '.join(kinds)} alone"
    if options.noise == "fresh" and options.seed is not None and kind in TAKEN_BY["seed"]:
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


def _reads(features: PolicyFeatures, sizes: AnySizes, options: Options) -> Reads:
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
    allowed: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
    scales: dict[str, Scale],
) -> Iterator[str]:
    """Adds the scale by name of a tensor, as a processor normalises; yields problems."""
    try:
        steps = _read(path, Processor).steps
    except ConfigError as error:
        yield str(error)
        return
    for index, step in enumerate(steps):
        label = f"step {index} ({step.registry_name or step.importable})"
        settings = allowed.get(step.registry_name or "")
        if settings is None:
            yield f"{label} is not known here; want {', '.join(sorted(allowed))}"
            continue
        for name, wanted in settings.items():
            if (got := step.config.get(name, wanted)) != wanted:
                yield f"{label}: {name}: got {got!r}, want {wanted!r}"
        if step.config.get("float_dtype") not in (None, "float32"):
            yield f"{label}: float_dtype: got {step.config['float_dtype']!r}, want float32"
        elif step.registry_name in NORMALISERS:
            is_input = step.registry_name == NORMALISERS[0]
            of_it = {key: name for key, name in names.items() if (key != ACTION) == is_input}
            yield from (f"{label}: {text}" for text in _fold_step(path, step, of_it, scales))


def _fold_step(
    path: Path,
    step: ProcessorStep,
    names: Mapping[str, str],
    scales: dict[str, Scale],
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
) -> Scale | str | None:
    """Scale of a key; None: it stays as it is; a text: a problem."""
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
        # an action that never moved has no spread, and its prefix is normalised, too
        return Scale(low, high + normaliser.eps if is_input else high.clamp(min=normaliser.eps))
    # a value that never moved becomes -1: half of eps beside it is lost in its float32
    half = torch.where(high == low, normaliser.eps, high - low) / 2
    return Scale(low, half, offset=-1.0)


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
