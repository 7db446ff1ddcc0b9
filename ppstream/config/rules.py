"""Rules between values of a configuration: ``problems`` lists every disagreement.

``warnings`` has what can be used, but is seldom meant. The bounds of a single value stand in
``schema.py``. Nothing here changes a configuration, imports user code; of files it only asks
whether they exist, but reads groups' statistics.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from ppstream.config.action_rules import action_rule_problems
from ppstream.config.device_rules import device_problems
from ppstream.config.gateway_rules import gateway_problems, listen_address, listen_of
from ppstream.config.named_files import unreadable_file, unwritable_folder
from ppstream.config.schema import (
    CHANNELS,
    PipelineConfig,
    StreamConfig,
)
from ppstream.config.window_ranges import range_problems
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.errors import counted
from ppstream.wire.endpoints import (
    endpoint_problem,
    folder_problem,
    is_local,
    tcp_address,
    unix_path,
)
from ppstream.wire.fields import MAX_SAMPLE_BYTES

SHORTEST_NS: Final = 1  # clocks and stamps count whole nanoseconds
LONGEST_NS: Final = 365 * 24 * 3600 * NS_PER_S  # added to any stamp of the wire it fits 64 bits
#: By the end of a setting's name.
UNITS_NS: Final = {"_ms": NS_PER_MS, "_s": NS_PER_S}
PORT_MAX: Final = 65535
LOOPBACK_TOO: Final = ("127.0.0.1", "localhost", "0.0.0.0")  # a port there is one of loopback
RING_SAMPLES_MAX: Final = 1 << 22  # a longer ring is a mistyped rate or window
STREAMS_MAX: Final = 256  # the wire numbers streams with one byte
ACTIONS_MAX: Final = 1024
HEARTBEATS_PER_FROZEN: Final = 3  # so that one late heartbeat kills nobody
ROUNDED: Final = 1 - 1e-3  # a period that is written in whole microseconds is still one
RECORDING_SUFFIXES: Final = (".npz", ".npy", ".mcap", ".ulg", ".bag")
RECORD_SUFFIX: Final = ".mcap"
ACTIONS_SUFFIX: Final = ".npz"
WEIGHTS_SUFFIXES: Final = (".safetensors", ".onnx")
_PICKLE: Final = "a pickle or TorchScript: reading it can run code"
#: Why other formats of weights are refused.
CODE_IN_WEIGHTS: Final = {
    ".pt2": "an exported program or AOTInductor package: torch.export.load unpickles, AOTI is code",
    ".so": "an AOTInductor library: it is code",
    **dict.fromkeys((".bin", ".ckpt", ".pkl", ".pt", ".pth", ".ts"), _PICKLE),
}


class UnsoundError(Exception):
    """A rule asks for a table that is wrong by itself."""


class PartialConfig(PipelineConfig, frozen=True):
    """A configuration whose wrong tables are UNSET; whoever asks for one gets ``UnsoundError``."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is msgspec.UNSET:
            raise UnsoundError(name)
        return value


def problems(config: PipelineConfig) -> list[str]:
    """Every disagreement in ``config``, each ``path: got ..., want ...``; empty: it can be used.

    Of a ``PartialConfig`` these are the disagreements between its sound tables.
    """
    durations = list(_time_problems(config))
    rules = [
        *(() if durations else (_stream_problems,)),  # which reckon with them
        range_problems,
        _action_problems,
        _pacing_problems,
        _rare_window_problems,
        _source_problems,
        _record_problems,
        _weights_problems,
        _service_problems,
        _limit_problems,
        _batch_problems,
        device_problems,
        gateway_problems,
    ]
    return durations + [line for rule in rules for line in _until_unsound(rule(config))]


def nearest_there(path: Path) -> Path:
    """Returns ``path`` if it is there, else the nearest folder above it that is."""
    return next(each for each in (path, *path.parents) if os.access(each, os.F_OK))


def _until_unsound(lines: Iterator[str]) -> Iterator[str]:
    with suppress(UnsoundError):
        yield from lines


def rank_problems(
    config: PipelineConfig, world_size: int, beside_rank0: int | None = None
) -> list[str]:
    """Disagreements between ``config`` and the number of ranks.

    Args:
        config: in itself sound.
        world_size: ranks in all.
        beside_rank0: ranks on the host of rank 0, itself counted; None: nobody knows.
    """
    port = config.metrics.port
    most = PORT_MAX - world_size + 1
    if port is not None and port > most:
        return [
            f"metrics.port: got {port}, want {most} at most with {world_size} ranks: rank r "
            "listens at port + r"
        ]
    return list(_port_problems(config, beside_rank0 or 1))


def _port_problems(config: PipelineConfig, ranks: int) -> Iterator[str]:
    """Ports of loopback that two listeners on the host of the first ``ranks`` would share."""
    first = config.metrics.port
    taken = {first + rank: f"metrics of rank {rank}" for rank in range(ranks)} if first else {}
    ports = [("view.port", config.view.port)]
    for index, gateway in enumerate(config.gateway):
        address = listen_address(listen_of(gateway))
        if address is not None and address[0] in LOOPBACK_TOO:
            ports.append((f"gateway[{index}].listen", address[1]))
    address = tcp_address(config.service.endpoint or "")
    if address is not None and address[0] in LOOPBACK_TOO:
        ports.append(("service.endpoint", address[1]))
    for path, port in ports:
        if port in taken:
            yield f"{path}: got port {port}, which {taken[port]} has; want another, or 0"
        elif port:
            taken[port] = path


def _time_problems(config: PipelineConfig) -> Iterator[str]:
    for name in config.__struct_fields__:
        with suppress(UnsoundError):
            yield from _duration_problems(name, getattr(config, name))


def _duration_problems(path: str, part: object) -> Iterator[str]:
    """Durations and rates that are no whole nanoseconds, or longer than anything lasts."""
    if isinstance(part, tuple):
        for index, item in enumerate(part):
            yield from _duration_problems(f"{path}[{index}]", item)
    if not isinstance(part, msgspec.Struct):
        return
    for name in part.__struct_fields__:
        value, at = getattr(part, name), f"{path}.{name}"
        unit_ns = next((ns for end, ns in UNITS_NS.items() if name.endswith(end)), None)
        if isinstance(value, msgspec.Struct | tuple):
            yield from _duration_problems(at, value)
        elif not isinstance(value, float) or not value:
            continue
        elif unit_ns and not SHORTEST_NS <= value * unit_ns <= LONGEST_NS:
            least, most = SHORTEST_NS / unit_ns, LONGEST_NS / unit_ns
            yield f"{at}: got {value:g}, want {least:g} (1 ns) to {most:g} (a year)"
        elif name.endswith("_hz") and not SHORTEST_NS <= NS_PER_S / value <= LONGEST_NS:
            least, most = NS_PER_S / LONGEST_NS, NS_PER_S / SHORTEST_NS
            yield f"{at}: got {value:g}, want {least:.1g} (one a year) to {most:g} (1 ns apart)"


def _stream_problems(config: PipelineConfig) -> Iterator[str]:
    if not 1 <= len(config.streams) <= STREAMS_MAX:
        yield f"streams: got {len(config.streams)} of them, want 1 to {STREAMS_MAX}"
    yield from _repeated("streams", [stream.name for stream in config.streams])
    marked = [stream.name for stream in config.streams if stream.reference]
    if len(marked) > 1:
        yield f"streams: got reference = true on {', '.join(marked)}, want it on one at most"
    cameras = {camera.name for camera in config.cameras}
    for index, stream in enumerate(config.streams):
        path = f"streams[{index}]"
        yield from _shape_problems(path, stream)
        if stream.image is None and stream.group in cameras:
            yield (
                f"{path}.group: got {stream.group!r}, want another name: stream {stream.group!r} "
                f"is a camera, which has tensors {stream.group}.valid and {stream.group}.age_s, too"
            )
        if stream.interpolation == "slerp" and stream.dim != 4:
            yield f"{path}.dim: got {stream.dim}, want 4: slerp interpolates quaternions"
        yield from _rate_problems(path, stream, config)


def _rate_problems(path: str, stream: StreamConfig, config: PipelineConfig) -> Iterator[str]:
    rate_hz, request_hz = stream.rate_hz, stream.max_request_hz
    if (rate_hz is None) == (request_hz is None):
        got = "missing" if rate_hz is None else f"got {rate_hz:g} beside max_request_hz"
        yield (
            f"{path}.rate_hz: {got}, want either rate_hz, of a sensor that sends by itself, or "
            "max_request_hz, of a robot that sends on request"
        )
        return
    if rate_hz is not None and stream.max_gap_ms < (period_ms := 1000 / rate_hz):
        yield (
            f"{path}.max_gap_ms: got {stream.max_gap_ms:g}, want at least the {period_ms:g} ms "
            f"between two samples at rate_hz = {rate_hz:g}"
        )
    samples = config.ring_samples(stream)
    if samples > RING_SAMPLES_MAX:
        name = "rate_hz" if request_hz is None else "max_request_hz"
        yield (
            f"{path}.{name}: got {stream.most_hz:g}, which needs a ring of {samples} samples; "
            f"want {RING_SAMPLES_MAX} at most (window.steps x dt_ms, max_gap_ms and max_age_ms "
            "lengthen it, too)"
        )


def _shape_problems(path: str, stream: StreamConfig) -> Iterator[str]:
    image = stream.image
    if image is None:
        if stream.dim < 1:
            yield f"{path}.dim: missing, want the number of values per sample"
        if stream.dtype == "uint8":
            yield f"{path}.dtype: got uint8 without image, want float32 or float64"
        if stream.recorded is not None and not stream.recorded.fields:
            yield f"{path}.recorded.fields: missing, want the fields with its values"
        if stream.joints and len(stream.joints) != stream.dim:
            got = counted(len(stream.joints), "name")
            yield f"{path}.joints: got {got}, want {stream.dim}: one per value"
        elif (size := stream.dim * (8 if stream.dtype == "float64" else 4)) > MAX_SAMPLE_BYTES:
            yield (
                f"{path}.dim: got {stream.dim} {stream.dtype}, {size} bytes a sample, "
                f"want {MAX_SAMPLE_BYTES} at most"
            )
        yield from _repeated(f"{path}.joints", list(stream.joints))
        return
    if stream.joints:
        got = counted(len(stream.joints), "name")
        yield f"{path}.joints: got {got}, want none: a camera has no joints"
    frame = image.height * image.width * CHANNELS
    if (stream.dim, stream.dtype) != (frame, "uint8"):
        yield (
            f"{path}.dim: got {stream.dim} {stream.dtype}, want it left out: a frame of "
            f"{image.height} x {image.width} has {frame} uint8"
        )
    if image.resize is not None and len(image.resize) != 2:
        yield f"{path}.image.resize: got {list(image.resize)}, want height and width"
    for name, numbers in (("mean", image.mean), ("std", image.std)):
        if len(numbers) != CHANNELS:
            got = counted(len(numbers), "number")
            yield f"{path}.image.{name}: got {got}, want one per channel, 3"
    if frame > MAX_SAMPLE_BYTES:
        yield (
            f"{path}.image: got {frame} bytes a frame, "
            f"want {MAX_SAMPLE_BYTES} at most; send smaller frames"
        )


def _action_problems(config: PipelineConfig) -> Iterator[str]:
    actions = config.actions
    if not 1 <= len(actions.names) <= ACTIONS_MAX:
        yield f"actions.names: got {len(actions.names)} of them, want 1 to {ACTIONS_MAX}"
    yield from _repeated("actions.names", list(actions.names))
    for path, limits in (("actions.low", actions.low), ("actions.high", actions.high)):
        if len(limits) != len(actions.names):
            got = counted(len(limits), "limit")
            yield f"{path}: got {got}, want {len(actions.names)}: one for each name"
    yield from action_rule_problems(actions)
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
    if kind != "tick" and shape.tick_hz is not None:
        yield (
            f"pipeline.tick_hz: got {shape.tick_hz:g} with pacing = {shape.pacing!r}, want "
            "pacing = 'tick', or tick_hz left out"
        )
    gather_ms, lease_ms = shape.gather_ms, config.actions.lease_ms
    if kind == "rows" and (gather_ms is None or gather_ms >= lease_ms):
        got = "missing" if gather_ms is None else f"got {gather_ms:g}"
        yield (
            f"pipeline.gather_ms: {got}, want a number above 0 and below actions.lease_ms = "
            f"{lease_ms:g} because pacing = 'rows'"
        )
    if kind != "rows" and gather_ms is not None:
        yield (
            f"pipeline.gather_ms: got {gather_ms:g} with pacing = {shape.pacing!r}, want pacing = "
            "'rows', or gather_ms left out"
        )
    if shape.windows == "scheduled" and config.service.recording is None:
        yield (
            "pipeline.windows: got 'scheduled' without service.recording, "
            "want a recording: a schedule follows a recording's time"
        )


def _rare_window_problems(config: PipelineConfig) -> Iterator[str]:
    """Windows so seldom that a chunk's lease is over before the next one comes: robots hold."""
    lease_ms = config.actions.lease_ms
    for path, rate_hz in chunk_rates(config):
        if (period_ms := 1000 / rate_hz) * ROUNDED > lease_ms:
            yield (
                f"{path}: got {rate_hz:g}, a chunk every {period_ms:g} ms with pacing = "
                f"{config.pipeline.pacing!r}, want at most actions.lease_ms = {lease_ms:g} between "
                "two: raise the rate or the lease"
            )


def chunk_rates(config: PipelineConfig) -> Iterator[tuple[str, float]]:
    """Yields the rates, each with its path, of which none lets chunks come more often.

    Whatever starts windows, they end at samples of the reference stream. Of a recording none
    count: it is served instead of robots, so that none holds.
    """
    shape = config.pipeline
    if config.service.recording is not None or not config.streams:
        return
    kind, _, name = shape.pacing.partition(":")
    for index, stream in enumerate(config.streams):
        if stream.rate_hz is not None and stream.name in (name, config.reference.name):
            yield f"streams[{index}].rate_hz", stream.rate_hz
    if kind == "tick" and shape.tick_hz is not None:
        yield "pipeline.tick_hz", shape.tick_hz


def _source_problems(config: PipelineConfig) -> Iterator[str]:
    bringup, service = config.bringup, config.service
    yield from _recording_problems("bringup.recording", bringup.recording)
    yield from _recording_problems("service.recording", service.recording)
    if bringup.source == "recording" and bringup.recording is None:
        yield "bringup.recording: missing, want a file because bringup.source = 'recording'"
    if bringup.source == "synthetic" and bringup.recording is not None:
        yield (
            "bringup.recording: got one beside bringup.source = 'synthetic', which would not play "
            "it; want source = 'recording', or recording = none"
        )
    if service.recording is not None and config.demo is not None:
        yield "service.recording: got one beside a demo robot, want demo = none or no recording"
    if service.actions_file is not None and service.recording is None:
        yield "service.actions_file: got a file without service.recording, want both or neither"
    if (name := service.actions_file) is not None:  # written when the recording was played
        if Path(name).suffix != ACTIONS_SUFFIX:
            yield f"service.actions_file: got {name!r}, want a {ACTIONS_SUFFIX} file"
        yield from unwritable_folder("service.actions_file", name)


def _record_problems(config: PipelineConfig) -> Iterator[str]:
    name = config.record.file
    if name is None:
        return
    if Path(name).suffix != RECORD_SUFFIX and not Path(name).is_fifo():
        yield f"record.file: got {name!r}, want a {RECORD_SUFFIX} file or a named pipe"
    yield from unwritable_folder("record.file", name)


def _recording_problems(path: str, name: str | None) -> Iterator[str]:
    if name is None:
        return
    if os.path.isdir(name):  # a ROS 2 bag; no error where a folder above is shut
        return
    yield from unreadable_file(path, name)
    if Path(name).suffix not in RECORDING_SUFFIXES:
        yield f"{path}: got {name!r}, want a file ending in {' or '.join(RECORDING_SUFFIXES)}"


def _weights_problems(config: PipelineConfig) -> Iterator[str]:
    weights = config.policy.weights
    if weights is None:
        return
    yield from unreadable_file("policy.weights", weights)
    suffix = Path(weights).suffix
    if suffix not in WEIGHTS_SUFFIXES:
        why = CODE_IN_WEIGHTS.get(suffix, "which may hold code")
        yield (
            f"policy.weights: got {weights!r}, {why}; "
            f"want a {' or '.join(WEIGHTS_SUFFIXES)} file: it holds no code"
        )


def _service_problems(config: PipelineConfig) -> Iterator[str]:
    service = config.service
    endpoint = service.endpoint
    if endpoint is None:
        if config.demo is not None:
            yield "service.endpoint: got none, want an address because demo.robot connects to it"
        return
    if problem := endpoint_problem(endpoint):
        yield f"service.endpoint: {problem}"
        return
    path = unix_path(endpoint)
    is_unix = path is not None
    if path and (problem := folder_problem(Path(path), is_shared=bool(service.allowed_uids))):
        yield f"service.endpoint: {problem}"
    if service.allowed_uids and not is_unix:
        yield f"service.allowed_uids: got some with {endpoint!r}, want a unix:// endpoint or none"
    others = [uid for uid in service.allowed_uids if uid != os.geteuid()]
    if others and "{uid}" in endpoint and path is not None:
        yield (
            f"service.allowed_uids: got {others[0]} with {endpoint!r}, where each process fills in "
            f"its own user for {{uid}}; want a path that is the same for all, as unix://{path}"
        )
    given = [key for key in (service.secret_key, service.allowed_keys) if key is not None]
    if len(given) == 1:
        yield "service.secret_key: got it or allowed_keys alone, want both or neither"
    if not given and not is_local(endpoint):
        yield (
            f"service.endpoint: got {endpoint!r}, which other hosts can reach, want secret_key "
            "and allowed_keys of ppstream keys with it, or tcp://127.0.0.1:PORT"
        )
    if given and is_unix:
        yield f"service.secret_key: got one with {endpoint!r}, want a tcp:// endpoint or no keys"
    if given and config.demo is not None:
        yield "service.secret_key: got one beside a demo robot, which has none; want demo = none"


def _limit_problems(config: PipelineConfig) -> Iterator[str]:
    live = config.liveness
    if live.heartbeat_ms * HEARTBEATS_PER_FROZEN >= live.frozen_ms:
        yield (
            f"liveness.heartbeat_ms: got {live.heartbeat_ms:g}, want less than a third of "
            f"frozen_ms = {live.frozen_ms:g}"
        )
    if live.watchdog_s * 1000 <= live.frozen_ms:
        yield (
            f"liveness.watchdog_s: got {live.watchdog_s:g}, want more than frozen_ms = "
            f"{live.frozen_ms:g}: a peer's silence must be noticed first"
        )
    if live.start_s < live.watchdog_s:
        yield (
            f"liveness.start_s: got {live.start_s:g}, want at least watchdog_s = "
            f"{live.watchdog_s:g}: first calls take longer than later ones"
        )
    root = Path(config.log.root)
    there = nearest_there(root)
    if not there.is_dir():
        where = "which is" if there == root else f"which is below {there},"
        yield f"log.root: got {config.log.root!r}, {where} a file; want a folder"


def _batch_problems(config: PipelineConfig) -> Iterator[str]:
    batch = config.batch
    sizes = batch.sizes
    if not isinstance(sizes, str) and (
        not sizes or list(sizes) != sorted(set(sizes)) or sizes[-1] > batch.rows
    ):
        yield (
            f"batch.sizes: got {list(sizes)}, want one or more that increase, up to batch.rows = "
            f"{batch.rows}"
        )


def _repeated(path: str, names: list[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{path}: got {name!r} {count} times, want each name once"
