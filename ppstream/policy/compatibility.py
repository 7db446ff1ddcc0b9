"""Does the policy fit? Its specs against the windows and actions of the configuration.

The policy rank, rank 0, the inline twin and ``--check`` ask here, so that a policy that does not
fit is one configuration error with every reason, and never a surprise in a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, cast

from ppstream.core.errors import ConfigError, counted
from ppstream.core.specs import TensorSpec
from ppstream.policy.parts import PartSpecs, Place, cut
from ppstream.policy.protocol import call_target, refused
from ppstream.policy.unwritten import UINT8_BYTES

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ppstream.config.schema import PipelineConfig
    from ppstream.policy.protocol import Decoder, Policy

ACTIONS: Final = "actions"
BYTE_DTYPES: Final = ("uint8", "int8", "float8_e4m3fn")
NAME_MAX: Final = 64  # characters of a part's name, which stands in logs, tables and labels


def build_parts(
    config: PipelineConfig,
    device: torch.device,
    maker: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[Policy, ...]:
    """The parts of the policy that ``config`` names, on ``device``; a policy in one part is one.

    Its ``build`` gets the options and, under ``weights``, the path of the weights or None; with a
    ``maker`` that is the function, and the configuration only names it. On the ranks of a mesh it
    gets ``mesh``, of one dimension, too: elsewhere it builds the policy as one rank runs it.

    Raises:
        ConfigError: as ``stage.call_target``; it made no policy, or one that takes no instructions
            though the configuration wants them taken.
    """
    target, path = config.policy.target, "policy.target"
    given = {**config.policy.options, "weights": config.policy.weights}, device
    how = "build(options, device)"
    named: dict[str, Any] = {} if mesh is None else {"mesh": mesh}

    def call(build: Callable[..., Any]) -> Any:
        if config.placement.mesh > 1 and not _takes_mesh(build):
            raise ConfigError(
                [
                    f"placement.mesh: got {config.placement.mesh}, but {target} takes no mesh: "
                    "want 1, or a build(options, device, mesh=None) that shards the policy over it"
                ]
            )
        return build(*given, **named)

    made = call_target(path, target, how, call, found=maker)
    is_cut = isinstance(made, list | tuple)
    if is_cut and not made:
        raise ConfigError([f"{path}: {target} returned no part, want a policy, or its parts"])
    parts = tuple(made) if is_cut else (made,)
    try:
        found = [
            _made(path, target, part, "a part of a policy" if is_cut else "a policy", lacks)
            for part in parts
            if (lacks := list(_lacks(part, ("reset",), ("inputs", "outputs"), named=is_cut)))
        ]
        takes_texts = any(callable(getattr(part, "instruct", None)) for part in parts)
    except BaseException as error:  # noqa: BLE001 - user code: a property may raise
        raise refused(error, f"{path}: {target}") from None
    if found:
        raise ConfigError(found)
    if config.policy.instructions and not takes_texts:
        raise ConfigError(
            [f"policy.instructions: got true, but {target} has no method instruct(number, text)"]
        )
    return cast("tuple[Policy, ...]", parts)


def _takes_mesh(build: Callable[..., Any]) -> bool:
    try:
        found = signature(build).parameters
    except (TypeError, ValueError):  # a builtin has none
        return False
    return "mesh" in found or any(p.kind is p.VAR_KEYWORD for p in found.values())


def places_of(
    config: PipelineConfig,
    parts: Sequence[PartSpecs],
    window: Sequence[TensorSpec],
    *,
    inline: bool = False,
) -> tuple[Place, ...]:
    """Returns what each rank runs of the policy, and what travels between them.

    Args:
        config: says how many policy ranks there are, and where each part runs.
        parts: of the policy, in order.
        window: tensors of an envelope, as a cutter's ``inputs``.
        inline: one rank runs them all.

    Raises:
        ConfigError: the policy does not fit the configuration, or cannot be cut so; every reason.
    """
    found = policy_problems(config, window, parts)
    ranks = config.placement.places
    where = list(config.placement.cut) or ([1] * len(parts) if ranks == 1 else [])
    if not inline:
        found += _cut_problems(where, ranks, [part.name for part in parts])
        if config.placement.replicas > 1:
            found += _state_problems(config, where, parts)
    if found:
        raise ConfigError(found)
    return cut(parts, [1] * len(parts) if inline else where, window)


def check_parts(
    config: PipelineConfig, parts: Sequence[PartSpecs], window: Sequence[TensorSpec]
) -> None:
    """Refuses parts that no cut makes fit; for ``placement.parts = "auto"``.

    Raises:
        ConfigError: as ``places_of``; there are fewer parts than policy ranks.
    """
    found = policy_problems(config, window, parts)
    ranks, names = len(config.placement.policy), [part.name for part in parts]
    if len(parts) < ranks:
        found.append(_too_few_parts("'auto'", names, ranks))
    if found:
        raise ConfigError(found)


def other_parts(first: Sequence[PartSpecs], other: Sequence[PartSpecs], rank: int) -> str:
    """Words for a policy of which ``rank`` built other parts than rank 1."""
    names, others = (", ".join(part.name for part in parts) for parts in (first, other))
    found = f"({others}) than rank 1 ({names})"
    if names == others:
        unlike = (part.name for part, its in zip(first, other, strict=True) if part != its)
        found = f"than rank 1: {', '.join(unlike)} with other tensors"
    return f"policy.target: rank {rank} built other parts {found}; every rank needs the same ones"


def _too_few_parts(got: str, names: Sequence[str], ranks: int) -> str:
    return (
        f"placement.parts: got {got} for {counted(len(names), 'part')} ({', '.join(names)}) on "
        f"{ranks} policy ranks, want a part for each: cut the policy into more parts, or list "
        "fewer devices in placement.policy"
    )


def _cut_problems(where: Sequence[int], ranks: int, names: Sequence[str]) -> Iterator[str]:
    path, listed = "placement.parts", ", ".join(names)
    if len(names) < ranks:
        yield _too_few_parts(str(list(where) or "none"), names, ranks)
    elif len(where) != len(names):
        got = f"{len(where)} places" if where else "none"
        yield f"{path}: got {got}, want one for each of {len(names)} parts ({listed})"
    elif list(where) != sorted(where):
        yield f"{path}: got {list(where)}, want places that never decrease: {listed} run in order"
    elif wrong := sorted(set(range(1, ranks + 1)).symmetric_difference(set(where) - {0})):
        want = f"1 to {ranks}" if ranks > 1 else "1"
        found = [f"{k} has none" if k <= ranks else f"there is no place {k}" for k in wrong]
        yield (
            f"{path}: got {list(where)}, want a part at each place from {want}, one for each of "
            f"placement.policy, and at place 0 those of rank 0: {', '.join(found)}"
        )


def _state_problems(
    config: PipelineConfig, where: Sequence[int], parts: Sequence[PartSpecs]
) -> Iterator[str]:
    """Yields the parts that miss envelopes on replicas and may need them."""
    for place, part in zip(where, parts, strict=False):
        if place and not part.stateless:
            label = f"part {part.name!r} of " if len(parts) > 1 else ""
            yield (
                f"placement.replicas: got {config.placement.replicas} with "
                f"{label}{config.policy.target}, which does not say that it is stateless: each "
                "replica sees one envelope of so many, and a policy with a memory needs all of "
                "them; set stateless = True on a policy that keeps nothing from call to call, or "
                "placement.replicas = 1"
            )


def build_decoder(config: PipelineConfig) -> Decoder:
    """The decoder that ``config`` names.

    Raises:
        ConfigError: as ``stage.call_target``, or it made no decoder.
    """
    decode, path = config.decode, "decode.target"
    target, given = decode.target, (decode.options, config.actions)
    made = call_target(path, target, "build(options, actions)", lambda maker: maker(*given))
    if lacks := list(_lacks(made, ("reset",))):
        raise ConfigError([_made(path, target, made, "a decoder", lacks)])
    return cast("Decoder", made)


def _lacks(
    made: Any, methods: Sequence[str], specs: Sequence[str] = (), *, named: bool = False
) -> Iterator[str]:
    """Yields what an object lacks to be called as a stage."""
    if not callable(made):
        yield "__call__"
    if named and not isinstance(getattr(made, "name", None), str):
        yield "name"
    yield from (f"{name}()" for name in methods if not callable(getattr(made, name, None)))
    for name in specs:
        found = getattr(made, name, None)
        if not isinstance(found, tuple | list) or any(type(s) is not TensorSpec for s in found):
            yield f"{name}, a tuple of TensorSpec"


def _made(path: str, target: str, made: object, what: str, lacks: Sequence[str]) -> str:
    kind = "None" if made is None else f"a {type(made).__name__}"
    return f"{path}: {target} returned {kind}, want {what}: it has no {'; no '.join(lacks)}"


def policy_problems(
    config: PipelineConfig, window: Sequence[TensorSpec], parts: Sequence[PartSpecs]
) -> list[str]:
    """Every way in which a policy's specs do not fit ``config``; empty when it fits.

    Args:
        config: names the policy and says what its actions are.
        window: tensors of an envelope, as a cutter's ``inputs``.
        parts: of the policy, in order.
    """
    who = f"policy.target: {config.policy.target} "
    found: list[str] = []
    makers = dict.fromkeys((spec.name for spec in window), "streams and window make it")
    there = {spec.name: spec for spec in window}
    read = {spec.name for part in parts for spec in part.inputs}
    for index, part in enumerate(parts):
        label = f"part {part.name!r} " if len(parts) > 1 else ""
        later = {spec.name: p.name for p in parts[index + 1 :] for spec in p.outputs}
        texts = [*_input_problems(there, makers, part.inputs, later, is_cut=len(parts) > 1)]
        texts += _frames_problems(config, part)
        texts += _output_problems(part.outputs, there)
        is_last = part is parts[-1]
        if is_last:
            texts += _action_problems(config, part.outputs)
        texts += (
            f"writes {spec.name!r}, which no later part reads"
            for spec in part.outputs
            if not is_last and spec.name not in read
        )
        found += (f"{who}{label}{text}" for text in texts)
        there |= {spec.name: spec for spec in part.outputs}
        makers |= dict.fromkeys((s.name for s in part.outputs), f"part {part.name!r} writes")
    names = [part.name for part in parts]
    if len(set(names)) != len(names):
        found.append(f"{who}names a part twice: {', '.join(names)}")
    found += (
        f"{who}names a part {name[:NAME_MAX]!r}, want 1 to {NAME_MAX} printable characters"
        for name in names
        if not (0 < len(name) <= NAME_MAX and name.isprintable())
    )
    return found


def _frames_problems(config: PipelineConfig, part: PartSpecs) -> Iterator[str]:
    """Yields the cameras whose frames would be normalised twice."""
    read = {spec.name for spec in part.inputs if part.plain_frames}
    for stream in config.streams:
        image = stream.image
        if image is not None and f"{stream.name}.frames" in read and not image.is_plain:
            yield (
                f"normalises the frames of {stream.name} itself: streams.{stream.name}.image has "
                f"mean {list(image.mean)} and std {list(image.std)}, want neither"
            )


def _input_problems(
    there: Mapping[str, TensorSpec],
    makers: Mapping[str, str],
    asked: Sequence[TensorSpec],
    later: Mapping[str, str],
    *,
    is_cut: bool,
) -> Iterator[str]:
    for spec in asked:
        if spec.name not in there:
            close = get_close_matches(spec.name, there, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(there)}"
            if spec.name in later:
                hint = f"part {later[spec.name]!r} writes it, and runs later"
            nobody = "no window or earlier part" if is_cut else "no window"
            yield f"reads {spec.name!r}, which {nobody} has ({hint})"
        elif spec != there[spec.name]:
            yield (
                f"reads {_shape_text(spec)}, but {makers[spec.name]} "
                f"{_shape_text(there[spec.name])}"
            )


def _output_problems(
    outputs: Sequence[TensorSpec], there: Mapping[str, TensorSpec]
) -> Iterator[str]:
    names = [spec.name for spec in outputs]
    if len(set(names)) != len(names):
        yield f"names an output twice: {', '.join(names)}"
    for name in names:
        if name in there:
            yield f"writes {name!r}, which the window or an earlier part has"
    for spec in outputs:
        if spec.dtype in BYTE_DTYPES and spec.bytes_for(1) % UINT8_BYTES:
            yield (
                f"writes {_shape_text(spec)}, {spec.bytes_for(1)} bytes of a row; to be told from "
                f"what a call did not write, {spec.dtype} outputs have a multiple of "
                f"{UINT8_BYTES}: pad it, or make it bool or int32"
            )


def _action_problems(config: PipelineConfig, outputs: Sequence[TensorSpec]) -> Iterator[str]:
    wanted = TensorSpec(ACTIONS, (config.actions.horizon, len(config.actions.names)))
    if wanted not in outputs:
        given = [_shape_text(spec) for spec in outputs if spec.name == ACTIONS]
        yield (
            f"writes {given[0] if given else 'no ' + ACTIONS}, but actions.horizon and "
            f"actions.names want {_shape_text(wanted)}"
        )


def _shape_text(spec: TensorSpec) -> str:
    return f"{spec.name} {list(spec.shape)} {spec.dtype}"
