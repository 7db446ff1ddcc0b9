"""Rules of ``[[gateway]]``: where it listens, whom it lets in, its map of an observation's keys.

``key_entries`` reads a map for the gateway, too; what a value must look like when a robot sends it
stands in ``gateway/key_map.py``.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from ppstream.config.named_files import unreadable_file
from ppstream.config.schema import GatewayConfig, PipelineConfig, StreamConfig
from ppstream.core.errors import counted
from ppstream.wire.endpoints import PORT_MAX, endpoint_problem, is_local

PROMPT: Final = "prompt"  # the entry of a map that is no stream
LAYOUTS: Final = ("auto", "hwc", "chw")  # of a camera's frames
ENTRY_KEYS: Final = ("key", "layout", "optional")
METADATA_KINDS: Final = (str, bool, int, float, list, Mapping)


class WireRules(NamedTuple):
    """Means of one wire, of those that a ``[[gateway]]`` can ask for."""

    library: str  # module that serves it
    extra: str  # of this package, which brings the library
    listen: str  # where its clients look first
    lacks: tuple[str, ...]  # settings that mean nothing on it
    abroad: tuple[str, ...]  # files wanted where other hosts reach it; none: they may not
    is_by_number: bool = False  # a key is of one number, or one frame
    is_shared: bool = False  # several processes can serve its connections


WIRES: Final = {
    "openpi": WireRules(
        library="websockets",
        extra="gateway",
        listen="127.0.0.1:8000",
        lacks=("action_keys", "generation"),
        abroad=("api_key_file", "certfile", "keyfile"),
        is_shared=True,
    ),
    "groot": WireRules(
        library="zmq",
        extra="gateway",
        listen="127.0.0.1:5555",
        lacks=("metadata", "certfile", "keyfile", "processes"),
        abroad=("api_key_file",),
    ),
    "lerobot": WireRules(
        library="grpc",
        extra="gateway",
        listen="127.0.0.1:8080",
        lacks=(
            *("action_keys", "answer", "generation", "metadata"),
            *("api_key_file", "certfile", "keyfile", "processes"),
        ),
        abroad=(),
        is_by_number=True,
    ),
}

_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):(?P<port>\d{1,5})")


class KeyEntry(NamedTuple):
    """Place of a stream's values, or of the prompt, in an observation."""

    key: str | tuple[str, ...]  # "/" is part of a key, "." descends into a map; several: of one
    # number each
    layout: str = LAYOUTS[0]
    optional: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Each key, of one number if there are several."""
        return (self.key,) if isinstance(self.key, str) else self.key

    @property
    def name(self) -> str:
        """Its keys, for people."""
        return ", ".join(self.keys)


def key_entries(gateway: GatewayConfig) -> dict[str, KeyEntry]:
    """The map of a checked configuration, by stream and ``PROMPT``."""
    return {name: _entry(value) for name, value in gateway.map.items()}


def _entry(value: Any) -> KeyEntry:
    table = value if isinstance(value, Mapping) else {"key": value}
    key = table["key"]
    return KeyEntry(**{**table, "key": key if isinstance(key, str) else tuple(key)})


def listen_address(listen: str) -> tuple[str, int] | None:
    """Host and port of ADDRESS:PORT; None: it is none."""
    match = _LISTEN.fullmatch(listen)
    if match is None or int(match["port"]) > PORT_MAX:
        return None
    return match["host"].strip("[]"), int(match["port"])


def listen_of(gateway: GatewayConfig) -> str:
    """ADDRESS:PORT at which a gateway listens."""
    return gateway.listen or WIRES[gateway.wire].listen


def missing_libraries(config: PipelineConfig) -> list[str]:
    """Lists, of each wire that is asked for, the library that is not installed."""
    wires = dict.fromkeys(gateway.wire for gateway in config.gateway)
    return [
        f"gateway: wire = {wire!r} needs {WIRES[wire].library}: "
        f"pip install 'ppstream[{WIRES[wire].extra}]'"
        for wire in wires
        if find_spec(WIRES[wire].library) is None
    ]


def rank0_endpoint(config: PipelineConfig, gateway: GatewayConfig) -> str | None:
    """Address of rank 0 as the gateway reaches it."""
    return gateway.endpoint or config.service.endpoint


def gateway_problems(config: PipelineConfig) -> Iterator[str]:
    """Every disagreement, each ``path: got ..., want ...``."""
    listens = Counter(listen_of(one) for one in config.gateway)
    for index, gateway in enumerate(config.gateway):
        path = f"gateway[{index}]"
        listen = listen_of(gateway)
        if listens[listen] > 1 and not listen.endswith(":0"):
            yield f"{path}.listen: got {listen!r} twice, want each address once"
        yield from _wire_problems(path, gateway)
        yield from _listen_problems(path, gateway)
        yield from _rank0_problems(path, config, gateway)
        yield from _map_problems(f"{path}.map", config, gateway)
        yield from _metadata_problems(f"{path}.metadata", gateway.metadata)
        if gateway.wire == "groot":
            yield from _groot_problems(path, config, gateway)


def _wire_problems(path: str, gateway: GatewayConfig) -> Iterator[str]:
    defaults = GatewayConfig(wire=gateway.wire, map={})
    for name in WIRES[gateway.wire].lacks:
        value = getattr(gateway, name)
        if value != getattr(defaults, name):
            yield f"{path}.{name}: got {value!r}, want none: wire {gateway.wire!r} has none"


def _listen_problems(path: str, gateway: GatewayConfig) -> Iterator[str]:
    listen, abroad = listen_of(gateway), WIRES[gateway.wire].abroad
    address = listen_address(listen)
    if address is None:
        yield f"{path}.listen: got {listen!r}, want ADDRESS:PORT, such as 127.0.0.1:8000"
    elif not is_loopback(address[0]):
        if not abroad:
            yield (
                f"{path}.listen: got {listen!r}, want an address of loopback: wire "
                f"{gateway.wire!r} asks nobody who they are; other hosts come through a tunnel"
            )
        for name in abroad:
            if getattr(gateway, name) is None:
                yield (
                    f"{path}.{name}: missing, want a file because other hosts can reach "
                    f"listen = {listen!r}; or listen at 127.0.0.1, behind what encrypts"
                )
    if (gateway.certfile is None) != (gateway.keyfile is None):
        yield f"{path}.certfile: got it or keyfile alone, want both or neither"
    for name in ("api_key_file", "certfile", "keyfile", "secret_key", "server_key"):
        file = getattr(gateway, name)
        if file is not None:
            yield from unreadable_file(f"{path}.{name}", file)


def is_loopback(host: str) -> bool:
    """True when only this host reaches it; a name other than localhost may stand for anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _rank0_problems(path: str, config: PipelineConfig, gateway: GatewayConfig) -> Iterator[str]:
    service, endpoint = config.service, rank0_endpoint(config, gateway)
    if service.recording is not None:
        yield f"{path}: got one beside service.recording, want robots or a recording"
    if endpoint is None:
        yield "service.endpoint: got none, want an address because a gateway connects to it"
        return
    if gateway.endpoint is not None and (problem := endpoint_problem(gateway.endpoint)):
        yield f"{path}.endpoint: {problem}"
        return
    has_keys = [gateway.secret_key is not None, gateway.server_key is not None]
    if has_keys[0] != has_keys[1]:
        yield f"{path}.secret_key: got it or server_key alone, want both or neither"
    needs_keys = service.secret_key is not None or not is_local(endpoint)
    if needs_keys and not all(has_keys):
        yield f"{path}.secret_key: missing, want it and server_key: {endpoint} serves none without"


def _map_problems(path: str, config: PipelineConfig, gateway: GatewayConfig) -> Iterator[str]:
    streams = {stream.name: stream for stream in config.streams}
    if not streams:
        return  # a rule of streams says so
    if PROMPT in streams:
        yield f"{path}: got a stream named {PROMPT!r}, want another name: it is the instruction's"
    for name, stream in streams.items():
        if name not in gateway.map:
            yield f"{path}.{name}: missing, want the key of stream {name!r} ({_want(stream)})"
    for name, value in gateway.map.items():
        if name in streams:
            yield from _entry_problems(f"{path}.{name}", value, streams[name], config)
            if WIRES[gateway.wire].is_by_number:
                yield from _number_problems(f"{path}.{name}", value, streams[name])
        elif name != PROMPT:
            known = ", ".join([*streams, PROMPT])
            yield f"{path}.{name}: got no stream's name, want one of {known}"
        elif not isinstance(value, str) or not value:
            yield f"{path}.{name}: got {value!r}, want the key of the instruction"
        elif not config.policy.instructions:
            yield (
                f"{path}.{name}: got {value!r} with policy.instructions = false, want true, or no "
                "prompt: nobody would follow it"
            )
    pacing, _, paced_by = config.pipeline.pacing.partition(":")
    if gateway.answer == "exact" and pacing == "sample" and paced_by not in ("", _ends(config)):
        yield (
            f"{path.removesuffix('.map')}.answer: got 'exact' with pipeline.pacing = "
            f"'sample:{paced_by}', want 'sample': {_ends(config)} would come behind the window"
        )


def _groot_problems(path: str, config: PipelineConfig, gateway: GatewayConfig) -> Iterator[str]:
    """Disagreements of what GR00T alone has: named parts of the action, and keys by modality."""
    names = config.actions.names
    taken: Counter[int] = Counter()
    for key, (first, end) in gateway.action_keys.items():
        if first < end <= len(names):
            taken.update(range(first, end))
        else:
            yield (
                f"{path}.action_keys.{key}: got [{first}, {end}], want a part of the "
                f"{len(names)} actions, such as [0, {len(names)}]"
            )
    for index, name in enumerate(names):
        if taken[index] != 1:
            yield (
                f"{path}.action_keys: got action {name!r} ({index}) {taken[index]} times, want it "
                f"in one key, such as {{ arm = [0, {len(names)}] }}"
            )
    for stream in config.streams:
        entry = gateway.map.get(stream.name)
        text = entry.get("key") if isinstance(entry, Mapping) else entry
        prefix = "state." if stream.image is None else "video."
        if text and not (isinstance(text, str) and text.startswith(prefix)):
            yield f"{path}.map.{stream.name}: got {text!r}, want {prefix}NAME, as GR00T has it"


def _entry_problems(
    path: str, value: Any, stream: StreamConfig, config: PipelineConfig
) -> Iterator[str]:
    if isinstance(value, str | list | tuple):
        value = {"key": value}
    if not isinstance(value, Mapping):
        yield f"{path}: got {value!r}, want a key, or {{ key, layout, optional }}"
        return
    for name in value:
        if name not in ENTRY_KEYS:
            yield f"{path}.{name}: unknown key (known: {', '.join(ENTRY_KEYS)})"
    key, layout, optional = (value.get(name) for name in ENTRY_KEYS)
    if isinstance(key, list | tuple):
        yield from _keys_problems(f"{path}.key", key, stream)
    elif not isinstance(key, str) or not key:
        yield f"{path}.key: got {key!r}, want text, such as observation/joint_position"
    if layout is not None and layout not in LAYOUTS:
        yield f"{path}.layout: got {layout!r}, want one of {', '.join(LAYOUTS)}"
    if layout is not None and stream.image is None:
        yield f"{path}.layout: got one of a stream without image, want none"
    if optional is not None and not isinstance(optional, bool):
        yield f"{path}.optional: got {optional!r}, want true or false"
    if optional is True and stream.name == _ends(config):
        yield f"{path}.optional: got true, want false: this stream's stamp ends the window"


def _number_problems(path: str, value: Any, stream: StreamConfig) -> Iterator[str]:
    key = value.get("key") if isinstance(value, Mapping) else value
    if isinstance(key, str) and stream.image is None and stream.dim > 1:
        yield f"{path}: got {key!r}, want a list of {stream.dim} keys: each is of one number"


def _keys_problems(
    path: str, keys: list[Any] | tuple[Any, ...], stream: StreamConfig
) -> Iterator[str]:
    if stream.image is not None:
        yield f"{path}: got a list, want one key: a frame is one value"
    elif not all(isinstance(key, str) and key for key in keys):
        yield f"{path}: got {list(keys)!r}, want texts"
    elif len(keys) != stream.dim:
        yield f"{path}: got {counted(len(keys), 'key')}, want {stream.dim}: each is of one number"
    elif len(set(keys)) != len(keys):
        yield f"{path}: got {list(keys)!r}, want each key once"


def _ends(config: PipelineConfig) -> str:
    return config.reference.name


def _want(stream: StreamConfig) -> str:
    if stream.image is not None:
        return f"frames of {stream.image.height} x {stream.image.width}"
    return f"{stream.dim} {stream.dtype}"


def _metadata_problems(path: str, value: Any) -> Iterator[str]:
    if not isinstance(value, METADATA_KINDS):
        yield f"{path}: got {value!r}, want text, numbers, truth values, lists and tables"
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _metadata_problems(f"{path}.{key}", one)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _metadata_problems(f"{path}[{index}]", one)
