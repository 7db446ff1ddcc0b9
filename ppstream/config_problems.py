"""What the values of a configuration must agree on: ``problems`` lists every disagreement.

The bounds of a single value stand in ``config.py``. Nothing here changes a configuration, imports
user code or opens a file; it only asks whether named files exist.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ppstream.config import PipelineConfig

RING_SAMPLES_MAX: Final = 1 << 22  # a longer ring is a mistyped rate or window
STREAMS_MAX: Final = 256  # the wire numbers streams with one byte
ACTIONS_MAX: Final = 1024
HEARTBEATS_PER_FROZEN: Final = 3  # so that one late heartbeat kills nobody
IPC_PATH_MAX_BYTES: Final = 107  # sun_path of a UNIX socket, without its closing zero
RECORDING_SUFFIXES: Final = (".npz", ".npy")
WEIGHTS_SUFFIX: Final = ".safetensors"

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):(?P<port>\d{1,5}|\*)")


def problems(config: PipelineConfig) -> list[str]:
    """Every disagreement in ``config``, each ``path: got ..., want ...``; empty: it can be used."""
    return [
        *_stream_problems(config),
        *_action_problems(config),
        *_pacing_problems(config),
        *_source_problems(config),
        *_weights_problems(config),
        *_service_problems(config),
        *_limit_problems(config),
    ]


def _stream_problems(config: PipelineConfig) -> Iterator[str]:
    if not 1 <= len(config.streams) <= STREAMS_MAX:
        yield f"streams: got {len(config.streams)} of them, want 1 to {STREAMS_MAX}"
    yield from _repeated("streams", [stream.name for stream in config.streams])
    marked = [stream.name for stream in config.streams if stream.reference]
    if len(marked) > 1:
        yield f"streams: got reference = true on {', '.join(marked)}, want it on one at most"
    for index, stream in enumerate(config.streams):
        path = f"streams[{index}]"
        if stream.interpolation == "slerp" and stream.dim != 4:
            yield f"{path}.dim: got {stream.dim}, want 4: slerp interpolates quaternions"
        period_ms = 1000 / stream.rate_hz
        if stream.max_gap_ms < period_ms:
            yield (
                f"{path}.max_gap_ms: got {stream.max_gap_ms:g}, want at least the {period_ms:g} ms "
                f"between two samples at rate_hz = {stream.rate_hz:g}"
            )
        samples = config.ring_samples(stream)
        if samples > RING_SAMPLES_MAX:
            yield (
                f"{path}.rate_hz: got {stream.rate_hz:g}, which needs a ring of {samples} samples; "
                f"want {RING_SAMPLES_MAX} at most (window.steps x dt_ms, max_gap_ms and max_age_ms "
                "lengthen it, too)"
            )


def _action_problems(config: PipelineConfig) -> Iterator[str]:
    actions = config.actions
    if not 1 <= len(actions.names) <= ACTIONS_MAX:
        yield f"actions.names: got {len(actions.names)} of them, want 1 to {ACTIONS_MAX}"
    yield from _repeated("actions.names", list(actions.names))
    for path, limits in (("actions.low", actions.low), ("actions.high", actions.high)):
        if len(limits) != len(actions.names):
            yield f"{path}: got {len(limits)} limits, want {len(actions.names)}: one for each name"
    for name, low, high in zip(actions.names, actions.low, actions.high, strict=False):
        if not low < high:
            yield f"actions.low: got {low:g} for {name!r}, want it below its high, {high:g}"
    # The first action is due dt_ms after the window's end: it would be expired before its time.
    if actions.lease_ms <= actions.dt_ms:
        yield (
            f"actions.lease_ms: got {actions.lease_ms:g}, want more than "
            f"actions.dt_ms = {actions.dt_ms:g}"
        )


def _pacing_problems(config: PipelineConfig) -> Iterator[str]:
    shape = config.pipeline
    kind, _, stream = shape.pacing.partition(":")
    names = [stream.name for stream in config.streams]
    if stream and stream not in names:
        yield f"pipeline.pacing: got stream {stream!r}, want one of {', '.join(names)}"
    if kind == "tick" and shape.tick_hz is None:
        yield "pipeline.tick_hz: missing, want a number above 0 because pacing = 'tick'"
    if shape.windows == "scheduled" and config.service.recording is None:
        yield (
            "pipeline.windows: got 'scheduled' without service.recording, "
            "want a recording: a schedule follows a recording's time"
        )


def _source_problems(config: PipelineConfig) -> Iterator[str]:
    bringup, service = config.bringup, config.service
    yield from _recording_problems("bringup.recording", bringup.recording)
    yield from _recording_problems("service.recording", service.recording)
    if bringup.source == "recording" and bringup.recording is None:
        yield "bringup.recording: missing, want a file because bringup.source = 'recording'"
    if service.recording is not None and config.demo is not None:
        yield "service.recording: got one beside a demo robot, want demo = none or no recording"
    if service.actions_file is not None and service.recording is None:
        yield "service.actions_file: got a file without service.recording, want both or neither"


def _recording_problems(path: str, name: str | None) -> Iterator[str]:
    if name is None:
        return
    yield from _missing_file(path, name)
    if Path(name).suffix not in RECORDING_SUFFIXES:
        yield f"{path}: got {name!r}, want a {' or '.join(RECORDING_SUFFIXES)} file"


def _weights_problems(config: PipelineConfig) -> Iterator[str]:
    weights = config.policy.weights
    if weights is None:
        return
    yield from _missing_file("policy.weights", weights)
    if Path(weights).suffix != WEIGHTS_SUFFIX:
        # Other formats of weights can carry code that runs while they are read.
        yield f"policy.weights: got {weights!r}, want a {WEIGHTS_SUFFIX} file: it holds no code"


def _service_problems(config: PipelineConfig) -> Iterator[str]:
    endpoint = config.service.endpoint
    if endpoint is None:
        if config.demo is not None:
            yield "service.endpoint: got none, want an address because demo.robot connects to it"
        return
    if endpoint.startswith("ipc://"):
        length = len(endpoint.removeprefix("ipc://").encode())
        if not 1 <= length <= IPC_PATH_MAX_BYTES:
            yield f"service.endpoint: got {length} bytes of path, want 1 to {IPC_PATH_MAX_BYTES}"
        return
    match = _TCP.fullmatch(endpoint)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        yield f"service.endpoint: got {endpoint!r}, want 'tcp://ADDRESS:PORT' or 'ipc://PATH'"


def _limit_problems(config: PipelineConfig) -> Iterator[str]:
    live = config.liveness
    if live.heartbeat_ms * HEARTBEATS_PER_FROZEN >= live.frozen_ms:
        yield (
            f"liveness.heartbeat_ms: got {live.heartbeat_ms:g}, want less than a third of "
            f"frozen_ms = {live.frozen_ms:g}"
        )
    root = Path(config.log.root)
    if root.exists() and not root.is_dir():
        yield f"log.root: got {config.log.root!r}, which is a file; want a folder"


def _repeated(path: str, names: list[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{path}: got {name!r} {count} times, want each name once"


def _missing_file(path: str, name: str) -> Iterator[str]:
    if not Path(name).is_file():
        yield f"{path}: got {name!r}, which is not there; want a file"
