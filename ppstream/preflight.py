"""Does the policy fit? Its specs against the windows and actions of the configuration.

The policy rank, rank 0, the inline twin and ``--check`` ask here, so that a policy that does not
fit is one configuration error with every reason, and never a surprise in a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from ppstream.errors import ConfigError
from ppstream.specs import TensorSpec
from ppstream.stage import load
from ppstream.unwritten import UINT8_BYTES

if TYPE_CHECKING:
    import torch

    from ppstream.config import PipelineConfig
    from ppstream.stage import BuildPolicy, Policy

ACTIONS: Final = "actions"


def build_policy(config: PipelineConfig, device: torch.device) -> Policy:
    """The policy that ``config`` names, on ``device``.

    Its ``build`` gets the options and, under ``weights``, the path of the weights or None.

    Raises:
        ConfigError: there is no such object, or it takes no instructions though the configuration
            wants them taken. What ``build`` itself raises passes through.
    """
    build: BuildPolicy = load(config.policy.target)
    policy = build({**config.policy.options, "weights": config.policy.weights}, device)
    if config.policy.instructions and not callable(getattr(policy, "instruct", None)):
        raise ConfigError(
            [
                f"policy.instructions: got true, but {config.policy.target} has no method "
                "instruct(number, text)"
            ]
        )
    return policy


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
