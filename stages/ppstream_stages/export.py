"""``ppstream export``: writes the policy of a run as ``model.onnx`` and ``policy.json``.

For policies made of ``NetworkPart``, whose parts become one network. It is written with any number
of rows, run once by ONNX Runtime, and compared with torch.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from ppstream import ConfigError, PipelineConfig, Policy, TensorSpec
from ppstream.config import load
from ppstream.core.errors import ExitCode, counted
from ppstream.policy.compatibility import build_parts
from ppstream_stages.building import NetworkPart
from ppstream_stages.onnx import FRAMES, INSTALL, SIDECAR, OnnxPolicy, PolicyFile, TensorScale

MODEL: Final = "model.onnx"
LIBRARIES: Final = ("onnx", "onnxruntime", "onnxscript")
CPU: Final = torch.device("cpu")
ROWS: Final = 3  # of the example; no size of a network
ROWS_MAX: Final = 1024
DIFFERENCE_MAX: Final = 1e-4  # from torch, in float32


class Whole(nn.Module):
    """Parts in a row as one network, from the tensors of a window to those of a result."""

    def __init__(self, parts: Sequence[NetworkPart]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(part.network for part in parts)  # whose weights they are
        self.parts = [part.network for part in parts]
        self.inputs, self.outputs = inputs_of(parts), tuple(parts[-1].outputs)

    def forward(self, *window: Tensor) -> tuple[Tensor, ...]:
        """Tensors in the order of ``inputs`` to those of ``outputs``."""
        known = {spec.name: tensor for spec, tensor in zip(self.inputs, window, strict=True)}
        rows = window[0].shape[0]
        for network in self.parts:
            out = {
                spec.name: window[0].new_empty((rows, *spec.shape), dtype=_dtype(spec))
                for spec in network.outputs
            }
            network({spec.name: known[spec.name] for spec in network.inputs}, out)
            known |= out
        return tuple(known[spec.name] for spec in self.outputs)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and export; returns the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="ppstream: %(message)s", stream=sys.stderr)
    try:
        about, difference = export(load.load(args), args.out, scales_of(args.stats))
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        return int(ExitCode.CONFIG)
    size = (args.out / MODEL).stat().st_size
    print(f"{args.out / MODEL}: {size / 1e6:.1f} MB, sha256 {about.sha256}")
    inputs, outputs = len(about.inputs), len(about.outputs)
    print(f"{args.out / SIDECAR}: {counted(inputs, 'input')}, {counted(outputs, 'output')}")
    print(f"largest difference from torch on a random window: {difference:.1e}")
    return 0


def export(
    config: PipelineConfig, folder: Path, normalisation: Mapping[str, TensorScale]
) -> tuple[PolicyFile, float]:
    """Writes the policy of ``config`` into ``folder``, over what has these names there.

    Both files are written there once the model's outputs were compared with torch's.

    Args:
        config: names the policy.
        folder: is made where it is not there.
        normalisation: of what the network takes and gives, by name.

    Returns:
        ``policy.json``, and the largest difference of an output from torch.

    Raises:
        ConfigError: it cannot be written as ONNX, or differs too much from torch.
    """
    if lacks := [name for name in LIBRARIES if find_spec(name) is None]:
        raise ConfigError([f"ppstream export needs {', '.join(lacks)}: {INSTALL}"])
    parts = build_parts(config, CPU)
    if found := list(_problems(config.policy.target, parts)):
        raise ConfigError(found)
    networks = [part for part in parts if isinstance(part, NetworkPart)]
    specs = (*inputs_of(networks), *networks[-1].outputs)
    names = ", ".join(spec.name for spec in specs)
    if strange := normalisation.keys() - {spec.name for spec in specs}:
        raise ConfigError([f"--stats: got {', '.join(sorted(strange))}, want some of {names}"])
    plain = {spec.name for part in networks if part.plain_frames for spec in part.inputs}
    if twice := sorted(name for name in plain & normalisation.keys() if name.endswith(FRAMES)):
        raise ConfigError(
            [f"--stats: got {', '.join(twice)}, which the policy normalises itself; leave it out"]
        )
    for part in networks:
        part.load()
    whole = Whole(networks).eval()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".export-", dir=folder) as unproven:
            model, sidecar = Path(unproven, MODEL), Path(unproven, SIDECAR)
            _write(whole, model)
            about = PolicyFile(
                sha256=hashlib.sha256(model.read_bytes()).hexdigest(),
                inputs=whole.inputs,
                outputs=whole.outputs,
                normalisation=dict(normalisation),
                needs_samples=any(part.needs_samples for part in networks),
                plain_frames=any(part.plain_frames for part in networks),
            )
            sidecar.write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
            difference = _difference(whole, model, about)
            if not difference <= DIFFERENCE_MAX:
                reason = f"differs by {difference:.1e} from torch, limit {DIFFERENCE_MAX:.0e}"
                raise ConfigError([f"{folder / MODEL}: it {reason}; nothing was written"])
            for file in (model, sidecar):
                file.replace(folder / file.name)
    except OSError as error:
        raise ConfigError([f"--out: {folder}: {error.strerror}"]) from error
    return about, difference


def scales_of(path: Path | None) -> dict[str, TensorScale]:
    """``normalisation`` from a file such as ``{"state.values": {"mean": [..], "std": [..]}}``.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, TensorScale])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError([f"--stats: {path}: {error}"]) from error


def inputs_of(parts: Sequence[NetworkPart | Policy]) -> tuple[TensorSpec, ...]:
    """Everything that parts read and none of them writes, each once."""
    made = {spec.name for part in parts for spec in part.outputs}
    read = {spec.name: spec for part in parts for spec in part.inputs}
    return tuple(spec for name, spec in read.items() if name not in made)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream export",
        description="Write the policy of a run as ONNX, for ppstream_stages.onnx.",
    )
    load.add_arguments(parser, is_positional=True)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="gets both files")
    parser.add_argument(
        "--stats",
        type=Path,
        metavar="FILE",
        help='JSON with "mean" and "std" by name of an input or of actions: what the network was '
        "trained with, for policy.json",
    )
    return parser


def _problems(target: str, parts: Sequence[Policy]) -> Iterator[str]:
    """Yields why a policy cannot be written as ONNX."""
    for part in parts:
        if not isinstance(part, NetworkPart):
            yield (
                f"policy.target: {target} gave {type(part).__name__}, want parts that are "
                f"NetworkPart, as those of ppstream_stages.act:build; or {_by_hand(parts)}"
            )
            return
        elif hasattr(part, "instruct"):
            yield f"policy.target: {target}: part {part.name!r} keeps texts, which ONNX cannot"
        elif {weight.dtype for weight in part.network.parameters()} != {torch.float32}:
            yield (
                f"policy.options.dtype: part {part.name!r} does not compute in float32, which "
                "ONNX is compared in: --set policy.options.dtype=float32"
            )


def _by_hand(parts: Sequence[Policy]) -> str:
    """Words for the other way, which any policy has."""
    inputs, outputs = (
        msgspec.json.encode(specs).decode() for specs in (inputs_of(parts), parts[-1].outputs)
    )
    return (
        f"write {MODEL} with torch.onnx.export (tensors by these names, the first dimension any "
        f'number of rows, weights in the file) and beside it {SIDECAR}: {{"sha256": "of '
        f'{MODEL}", "inputs": {inputs}, "outputs": {outputs}}}; both are served by policy.target = '
        '"ppstream_stages.onnx:build" with policy.weights = the file'
    )


def _write(whole: Whole, path: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=ROWS_MAX)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # other libraries that it could use
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's, about itself
        program = torch.onnx.export(
            whole,
            _example(whole.inputs),
            dynamo=True,
            dynamic_shapes=(tuple({0: rows} for _ in whole.inputs),),
            input_names=[spec.name for spec in whole.inputs],
            output_names=[spec.name for spec in whole.outputs],
            verbose=False,
        )
    assert program is not None
    program.save(path, external_data=False)


def _difference(whole: Whole, model: Path, about: PolicyFile) -> float:
    """Largest difference of ONNX Runtime's outputs from torch's."""
    policy = OnnxPolicy(model, msgspec.structs.replace(about, normalisation={}), CPU)
    policy.load()
    window = _example(whole.inputs)
    out = {spec.name: torch.empty(ROWS, *spec.shape, dtype=_dtype(spec)) for spec in whole.outputs}
    policy({spec.name: one for spec, one in zip(whole.inputs, window, strict=True)}, out)
    with torch.inference_mode():
        made = whole(*window)
    pairs = zip(whole.outputs, made, strict=True)
    return max(float((out[spec.name] - tensor).abs().max()) for spec, tensor in pairs)


def _example(specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """A random window of ``ROWS`` rows."""
    found = (torch.rand(ROWS, *spec.shape).to(_dtype(spec)) for spec in specs)
    return tuple(found)


def _dtype(spec: TensorSpec) -> Any:
    return getattr(torch, spec.dtype)


if __name__ == "__main__":
    sys.exit(main())
