"""Does the policy fit? Its specs against the windows and actions of the configuration.

The policy rank, rank 0, the inline twin and ``--check`` ask here, so that a policy that does not
fit is one configuration error with every reason, and never a surprise in a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, cast

from ppstream.core.errors import ConfigError
from ppstream.core.specs import TensorSpec
from ppstream.policy.protocol import call_target, refused
from ppstream.policy.unwritten import UINT8_BYTES

if TYPE_CHECKING:
    import torch

    from ppstream.config.schema import PipelineConfig
    from ppstream.policy.protocol import Decoder, Policy

ACTIONS: Final = "actions"


def build_policy(config: PipelineConfig, device: torch.device) -> Policy:
    """The policy that ``config`` names, on ``device``.

    Its ``build`` gets the options and, under ``weights``, the path of the weights or None.

    Raises:
        ConfigError: as ``stage.call_target``; it made no policy, or one that takes no instructions
            though the configuration wants them taken.
    """
    target, path = config.policy.target, "policy.target"
    given = {**config.policy.options, "weights": config.policy.weights}, device
    made = call_target(path, target, "build(options, device)", lambda maker: maker(*given))
    try:
        lacks = list(_lacks(made, ("reset",), ("inputs", "outputs")))
        takes_texts = callable(getattr(made, "instruct", None))
    except BaseException as error:  # noqa: BLE001 - user code: a property may raise
        raise refused(error, f"{path}: {target}") from None
    if lacks:
        raise ConfigError([_made(path, target, made, "a policy", lacks)])
    if config.policy.instructions and not takes_texts:
        raise ConfigError(
            [f"policy.instructions: got true, but {target} has no method instruct(number, text)"]
        )
    return cast("Policy", made)


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


def _lacks(made: Any, methods: Sequence[str], specs: Sequence[str] = ()) -> Iterator[str]:
    """Yields what an object lacks to be called as a stage."""
    if not callable(made):
        yield "__call__"
    yield from (f"{name}()" for name in methods if not callable(getattr(made, name, None)))
    for name in specs:
        found = getattr(made, name, None)
        if not isinstance(found, tuple | list) or any(type(s) is not TensorSpec for s in found):
            yield f"{name}, a tuple of TensorSpec"


def _made(path: str, target: str, made: object, what: str, lacks: Sequence[str]) -> str:
    kind = "None" if made is None else f"a {type(made).__name__}"
    return f"{path}: {target} returned {kind}, want {what}: it has no {'; no '.join(lacks)}"


def policy_problems(
    config: PipelineConfig,
    offered: Sequence[TensorSpec],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> list[str]:
    """Every way in which a policy's specs do not fit ``config``; empty when it fits.

    Args:
        config: names the policy and says what its actions are.
        offered: tensors of an envelope, as a cutter's ``inputs``.
        inputs: what the policy reads.
        outputs: what the policy writes.
    """
    found = [*_input_problems(offered, inputs), *_output_problems(config, outputs)]
    return [f"policy.target: {config.policy.target} {text}" for text in found]


def _input_problems(offered: Sequence[TensorSpec], asked: Sequence[TensorSpec]) -> Iterator[str]:
    by_name = {spec.name: spec for spec in offered}
    for spec in asked:
        if spec.name not in by_name:
            close = get_close_matches(spec.name, by_name, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(by_name)}"
            yield f"reads {spec.name!r}, which no window has ({hint})"
        elif spec != by_name[spec.name]:
            yield (
                f"reads {_shape_text(spec)}, but streams and window make it "
                f"{_shape_text(by_name[spec.name])}"
            )


def _output_problems(config: PipelineConfig, outputs: Sequence[TensorSpec]) -> Iterator[str]:
    names = [spec.name for spec in outputs]
    if len(set(names)) != len(names):
        yield f"names an output twice: {', '.join(names)}"
    for spec in outputs:
        if spec.dtype == "uint8" and spec.bytes_for(1) % UINT8_BYTES:
            yield (
                f"writes {_shape_text(spec)}, {spec.bytes_for(1)} bytes of a row; to be told from "
                f"what a call did not write, uint8 outputs have a multiple of {UINT8_BYTES}: pad "
                "it, or make it bool or int32"
            )
    wanted = TensorSpec(ACTIONS, (config.actions.horizon, len(config.actions.names)))
    if wanted not in outputs:
        given = [_shape_text(spec) for spec in outputs if spec.name == ACTIONS]
        yield (
            f"writes {given[0] if given else 'no ' + ACTIONS}, but actions.horizon and "
            f"actions.names want {_shape_text(wanted)}"
        )


def _shape_text(spec: TensorSpec) -> str:
    return f"{spec.name} {list(spec.shape)} {spec.dtype}"
