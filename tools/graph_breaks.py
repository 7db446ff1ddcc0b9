"""Finds the graph breaks of a policy under torch.compile: one line for each, for CI of a policy.

    python tools/graph_breaks.py MODULE:BUILD [--config FILE] [--set PATH=VALUE] [--backend NAME]

Builds the policy of the configuration, compiles each part, and calls it twice on zeros. Exit code 0
says that no more graphs broke than ``policy.graph_breaks_max`` allows and that the second call
compiled nothing; 1 that the policy is refused; 2 that it could not be built or called.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from ppstream.config import load
from ppstream.core.errors import ConfigError
from ppstream.cuda import startup
from ppstream.policy.compatibility import build_parts
from ppstream.policy.compiled import break_lines, compiled, compiled_parts
from ppstream.policy.host_staged import zeros
from ppstream.policy.parts import PRESENT, name_of
from ppstream.policy.parts import load as load_parts
from ppstream.policy.protocol import Policy, refused

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.policy.compiled import CompiledPart

OK, REFUSED, UNUSABLE = 0, 1, 2
CALLS: Final = 2


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        load.make_importable(args.config)
        config = load.read(args.config, [*args.overrides, f"policy.target={args.target}"])
        parts = [_called(part, config, args.backend) for part in _built(config)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return UNUSABLE
    for line in break_lines(parts):
        print(line)
    late = [
        f"part {part.name!r}: compiled again: {why}" for part in parts for why in part.recompiles
    ]
    for line in late:
        print(line)
    for part in parts:
        counts = ", ".join(f"{count} {what}" for what, count in part.counts.items())
        print(f"part {part.name!r}: {counts}", file=sys.stderr)
    broken = sum(len(part.breaks) for part in parts)
    return REFUSED if broken > config.policy.graph_breaks_max or late else OK


def _built(config: PipelineConfig) -> Sequence[Policy]:
    """The parts, loaded, where the configuration places the policy."""
    device = torch.device(config.placement.policy[0])
    if device.type == "cuda":
        startup.start(device)
    torch.set_grad_enabled(False)
    parts = build_parts(config, device)
    load_parts(parts, config.policy.target)
    return parts


def _called(part: Policy, config: PipelineConfig, backend: str) -> CompiledPart:
    """Calls one part on zeros with every row present; returns what the compiler did.

    Raises:
        ConfigError: the part raised; its traceback is printed.
    """
    rows, device = config.batch.rows, torch.device(config.placement.policy[0])
    inputs, out = (zeros(specs, rows, device) for specs in (part.inputs, part.outputs))
    everyone = torch.ones(rows, dtype=torch.bool, device=device)
    if PRESENT in inputs:
        inputs[PRESENT].copy_(everyone)
    call = compiled(part, backend)
    try:
        call.reset(everyone)
        for _ in range(CALLS):
            call(inputs, out)
    except BaseException as error:  # noqa: BLE001 - user code
        raise refused(error, f"part {name_of(part)!r}") from None
    (found,) = compiled_parts(call)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Graph breaks of a policy under torch.compile, one line for each."
    )
    parser.add_argument("target", metavar="MODULE:BUILD", help="as policy.target")
    parser.add_argument("--config", default=load.DEFAULT, help=load.NAMES)
    load.add_override_argument(parser)
    parser.add_argument(
        "--backend",
        default="inductor",
        help="of torch.compile; eager only traces, and counts no kernels (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
