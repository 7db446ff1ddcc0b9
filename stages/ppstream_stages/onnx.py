"""A policy from an ONNX file: ONNX Runtime as stage B, and the ``policy.json`` beside the file.

``policy.json`` says what the file takes and gives, and which file it is about; ``ppstream export``
writes both. A tensor that the network takes as the window has it is read from the link's slot, and
so results are written; one with ``normalisation`` goes through memory of the policy. Operators on
the CPU run in as many threads as torch's, which never spin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from ppstream import ConfigError, TensorSpec
from ppstream.config.field_types import Positive
from ppstream.core.errors import SpecError
from ppstream_stages.building import options_of

# B=row D=value

SIDECAR: Final = "policy.json"
SIDECAR_MAX: Final = 1_000_000  # bytes
#: Numbers of ONNX's types, as a binding wants them.
ELEMENTS: Final = {
    "float32": 1,
    "uint8": 2,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}
NAMES: Final = {number: name for name, number in ELEMENTS.items()}
FRACTIONS: Final = ("float32", "float16", "bfloat16", "float64")
FRAMES: Final = ".frames"  # end of a camera's name: its channels come first
INSTALL: Final = "pip install 'ppstream[onnx]'"

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class TensorScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mean and deviation of a tensor, one for each value or, of frames, for each channel."""

    mean: tuple[float, ...]
    std: tuple[Positive, ...]


class PolicyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``policy.json``: what an ONNX file takes and gives, per row.

    Attributes:
        format: of this file.
        sha256: of the ONNX file.
        inputs: named as in the window; the file adds a leading dimension for the rows.
        outputs: with ``actions``.
        normalisation: by name; inputs become (x - mean) / std, outputs x * std + mean.
        needs_samples: as a policy's attribute: of every stream, whatever inputs there are.
        plain_frames: as a policy's attribute: the file normalises frames of 0..1 itself.
    """

    format: Literal[1] = 1
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    normalisation: dict[str, TensorScale] = {}
    needs_samples: bool = False
    plain_frames: bool = False


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``: none; ``policy.weights`` names the ONNX file."""

    weights: str | None = None


class OnnxPolicy:
    """As ``Policy``: one session of ONNX Runtime.

    Args:
        model: path of the ONNX file.
        about: read from its ``policy.json``, and checked.
        device: ``cpu``, or a GPU where ONNX Runtime has the CUDA execution provider.
    """

    stateless = True  # between calls
    any_rows = True

    def __init__(self, model: Path, about: PolicyFile, device: torch.device) -> None:
        self.inputs, self.outputs = about.inputs, about.outputs
        self.needs_samples, self.plain_frames = about.needs_samples, about.plain_frames
        self._model, self._about, self._device = model, about, device
        self._scales = {
            spec.name: _scale_tensors(spec, about.normalisation[spec.name], device)
            for spec in (*self.inputs, *self.outputs)
            if spec.name in about.normalisation
        }
        self._own: dict[str, Tensor] = {}  # memory of tensors that are not taken as they come
        self._session: Any = None
        self._stream = 0

    def load(self) -> None:
        """Reads the file once more, now to run it.

        Raises:
            ConfigError: it has changed, or ONNX Runtime cannot run it.
        """
        if self._device.type == "cpu":
            self._session = self._open({})

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget: the inputs are all it knows."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Writes every output in place."""
        session, how = self._ready()
        binding = session.io_binding()
        for spec in self.inputs:
            _bind(binding.bind_input, spec, self._given(spec, window[spec.name]))
        for spec in self.outputs:
            _bind(binding.bind_output, spec, self._made(spec, out[spec.name]))
        session.run_with_iobinding(binding, how)
        for spec in self.outputs:
            made = self._made(spec, out[spec.name])
            if made is not out[spec.name]:
                out[spec.name].copy_(self._scaled_back(spec, made))

    def _given(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """``tensor`` as the network takes it."""
        if spec.name in self._scales:
            mean, std = self._scales[spec.name]
            return self._memory(spec, tensor).copy_((tensor.float() - mean) / std)
        return tensor if tensor.is_contiguous() else self._memory(spec, tensor).copy_(tensor)

    def _made(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """Memory that the network writes for ``tensor``: its own where that fits."""
        is_own = spec.name not in self._scales and tensor.is_contiguous()
        return tensor if is_own else self._memory(spec, tensor)

    def _scaled_back(self, spec: TensorSpec, made: Tensor) -> Tensor:
        if spec.name not in self._scales:
            return made
        mean, std = self._scales[spec.name]
        return made.float() * std + mean

    def _memory(self, spec: TensorSpec, like: Tensor) -> Tensor:
        kept = self._own.get(spec.name)
        if kept is None or kept.shape != like.shape:
            kept = self._own[spec.name] = torch.empty(
                like.shape, dtype=like.dtype, device=like.device
            )
        return kept

    def _ready(self) -> tuple[Any, Any]:
        """The session, and how to run it: on a GPU on torch's stream, without waiting for it."""
        if self._device.type == "cpu":
            return self._session, None
        if _cuda.is_current_stream_capturing():
            raise RuntimeError(
                "ONNX Runtime cannot be recorded into a CUDA graph: it launches its kernels itself"
            )
        stream = int(_cuda.current_stream(self._device).cuda_stream)
        if self._session is None or stream != self._stream:
            self._session = None  # first, so that one at a time has its memory
            provided = {"device_id": self._device.index or 0, "user_compute_stream": str(stream)}
            self._session, self._stream = self._open(provided), stream
        import onnxruntime

        how = onnxruntime.RunOptions()
        how.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return self._session, how

    def _open(self, provided: Mapping[str, object]) -> Any:
        import onnxruntime

        content = self._model.read_bytes()
        if (found := hashlib.sha256(content).hexdigest()) != self._about.sha256:
            raise ConfigError([_other_file(self._model, found, self._about.sha256)])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        where = [("CUDAExecutionProvider", dict(provided))] if provided else []
        try:
            return onnxruntime.InferenceSession(
                content, options, providers=[*where, "CPUExecutionProvider"]
            )
        except Exception as error:  # its errors have no class in common
            reason = f"policy.weights: {self._model}: ONNX Runtime cannot run it: {_line(error)}"
            raise ConfigError([reason]) from error


def build(config: Mapping[str, Any], device: torch.device) -> OnnxPolicy:
    """The policy of the ONNX file that ``policy.weights`` names; nothing runs yet.

    Raises:
        ConfigError: a library is missing, or file and ``policy.json`` disagree; every difference.
    """
    options = options_of(config, Options)
    if options.weights is None:
        raise ConfigError(["policy.weights: got none, want an .onnx file"])
    if found := list(_missing(device)):
        raise ConfigError(found)
    model = Path(options.weights)
    about = read_policy_file(model.with_name(SIDECAR))
    if found := [f"policy.weights: {text}" for text in _differences(model, about)]:
        raise ConfigError(found)
    return OnnxPolicy(model, about, device)


def read_policy_file(path: Path) -> PolicyFile:
    """A ``policy.json``.

    Raises:
        ConfigError: it is not there, or is none.
    """
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(SIDECAR_MAX), type=PolicyFile)
    except OSError as error:
        reason = f"{error.strerror}; want it beside the .onnx file: ppstream export writes both"
    except (msgspec.DecodeError, SpecError) as error:
        reason = str(error)
    raise ConfigError([f"policy.weights: {path}: {reason}"])


def _missing(device: torch.device) -> Iterator[str]:
    """Yields what this interpreter lacks."""
    lacks = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    if lacks:
        yield f"policy.target: ppstream_stages.onnx needs {' and '.join(lacks)}: {INSTALL}"
    elif device.type != "cpu":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            yield (
                f"placement.policy: got {device}, but this ONNX Runtime has no CUDA execution "
                "provider: pip install onnxruntime-gpu instead of onnxruntime"
            )


def _differences(model: Path, about: PolicyFile) -> Iterator[str]:
    """Yields where the ONNX file is not what ``policy.json`` says."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        content = model.read_bytes()
    except OSError as error:
        yield f"{model}: {error.strerror}"
        return
    found = hashlib.sha256(content).hexdigest()
    if found != about.sha256:
        yield _other_file(model, found, about.sha256)
    try:
        graph = onnx.load_model_from_string(content).graph
    except DecodeError:
        yield f"{model}: it is not an ONNX file"
        return
    if any(tensor.data_location == tensor.EXTERNAL for tensor in graph.initializer):
        yield f"{model}: some of its weights are in other files; want all of them in this one"
    weights = {tensor.name for tensor in graph.initializer}
    read = [one for one in graph.input if one.name not in weights]
    yield from _tensor_differences("input", about.inputs, read)
    yield from _tensor_differences("output", about.outputs, graph.output)
    yield from _scale_problems(about)


def _tensor_differences(
    what: str, wanted: Sequence[TensorSpec], given: Sequence[Any]
) -> Iterator[str]:
    there = {one.name: one.type.tensor_type for one in given}
    for spec in wanted:
        if spec.name not in there:
            yield f"{SIDECAR} names {what} {spec.name!r}, which the model does not have"
            continue
        tensor = there.pop(spec.name)
        rows, *shape = [d.dim_value or d.dim_param or "?" for d in tensor.shape.dim] or [0]
        dtype = NAMES.get(tensor.elem_type, f"type {tensor.elem_type}")
        if (tuple(shape), dtype) != (spec.shape, spec.dtype):
            yield (
                f"{what} {spec.name}: the model has {shape} {dtype} a row, {SIDECAR} says "
                f"{list(spec.shape)} {spec.dtype}"
            )
        if isinstance(rows, int):
            yield f"{what} {spec.name}: the model has {rows} rows, want any number of them"
    for name in there:
        yield f"the model has {what} {name!r}, which {SIDECAR} does not name"


def _scale_problems(about: PolicyFile) -> Iterator[str]:
    specs = {spec.name: spec for spec in (*about.inputs, *about.outputs)}
    for name, scale in about.normalisation.items():
        spec = specs.get(name)
        if spec is None or len(spec.shape) < -_axis(name) or spec.dtype not in FRACTIONS:
            yield f"{SIDECAR}: normalisation.{name}: want an input or output of fractions"
            continue
        wanted = spec.shape[_axis(name)]
        for field in ("mean", "std"):
            if (got := len(getattr(scale, field))) != wanted:
                yield f"{SIDECAR}: normalisation.{name}.{field}: got {got} numbers, want {wanted}"


def _scale_tensors(
    spec: TensorSpec, scale: TensorScale, device: torch.device
) -> tuple[Tensor, Tensor]:
    shape = (-1, 1, 1) if _axis(spec.name) == -3 else (-1,)
    mean, std = (torch.tensor(numbers, device=device) for numbers in (scale.mean, scale.std))
    return mean.view(shape), std.view(shape)


def _axis(name: str) -> int:
    """Dimension that ``normalisation`` has a number for each of."""
    return -3 if name.endswith(FRAMES) else -1


def _bind(bind: Any, spec: TensorSpec, tensor: Tensor) -> None:
    location = tensor.device.type, tensor.device.index or 0
    bind(spec.name, *location, ELEMENTS[spec.dtype], tuple(tensor.shape), tensor.data_ptr())


def _other_file(model: Path, found: str, wanted: str) -> str:
    return f"{model}: its sha256 is {found[:12]}..., {SIDECAR} is about {wanted[:12]}..."


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
