"""A gateway for a robot as its dataset describes the robot: TOML for clients of GR00T or LeRobot.

GR00T's ``modality.json`` names the parts of the state, the action and the cameras. LeRobot's
``meta/info.json`` has rates, sizes and names: for clients of GR00T beside the other, for those of
LeRobot alone. What a run asks of its user (limits, lease, horizon, policy) neither knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from ppstream.config.field_types import Positive
from ppstream.config.gateway_rules import PROMPT
from ppstream.config.schema import CHANNELS
from ppstream.config.to_toml import table_lines
from ppstream.core.errors import ConfigError

MODALITY: Final = "modality.json"
INFO: Final = "info.json"
STATE: Final = "observation.state"
IMAGES: Final = "observation.images."
ACTION: Final = "action"
JOINTS: Final = "joints"  # the stream of all motors
TASK: Final = "task_description"  # of several annotations the one that robots send
UNFIT: Final = re.compile(r"[^A-Za-z0-9_/-]")  # in a name
NAME_CHARACTERS: Final = 64

T = TypeVar("T")


class _Part(msgspec.Struct):
    start: int
    end: int
    original_key: str = STATE


class _Camera(msgspec.Struct):
    original_key: str = ""


class _Modality(msgspec.Struct):
    state: dict[str, _Part]
    action: Annotated[dict[str, _Part], Meta(min_length=1)]
    video: dict[str, _Camera] = {}
    annotation: dict[str, Any] = {}


class _Feature(msgspec.Struct):
    shape: Annotated[list[int], Meta(min_length=1)]
    names: Any = None


class _Info(msgspec.Struct):
    fps: Positive
    features: dict[str, _Feature]


def run_of(place: str) -> str:
    """TOML for clients of the robot at ``place``: a ``modality.json``, or a LeRobot dataset.

    Of a file it is the gateway alone, of a dataset's folder the streams and the actions, too; a
    dataset without ``modality.json`` is for clients of LeRobot.

    Raises:
        ConfigError: there is none, or it is not of that form.
    """
    path = Path(place)
    if path.is_dir() and not (path / "meta" / MODALITY).exists():
        return _text(place, _lerobot(place, _read(path / "meta" / INFO, _Info)), "LeRobot")
    modality = _read(path / "meta" / MODALITY if path.is_dir() else path, _Modality)
    parts = modality.state.items()  # streams are concatenated as a dataset's vector is
    modality.state = dict(sorted(parts, key=lambda one: (one[1].original_key, one[1].start)))
    if path.is_dir():
        info = _read(path / "meta" / INFO, _Info)
        return _text(place, _streams(place, modality, info) | _gateway(place, modality))
    numbers = ", ".join(f"{key} {part.end - part.start}" for key, part in modality.state.items())
    return f"# Numbers of the streams: {numbers}\n" + _text(place, _gateway(place, modality))


def _text(place: str, table: Mapping[str, Any], whose: str = "GR00T") -> str:
    return f"# For clients of {whose}, from {place}\n" + "\n".join(table_lines(table))


def _lerobot(place: str, info: _Info) -> dict[str, Any]:
    """Streams, actions and gateway of LeRobot's own clients, which send a number by each motor.

    Raises:
        ConfigError: the dataset has no names of motors, or two would be the same.
    """
    motors = _names(info.features.get(STATE))
    if not motors:
        raise ConfigError([f"{place}: {INFO} has no names of {STATE}, want one of each motor"])
    cameras = [key.removeprefix(IMAGES) for key in info.features if key.startswith(IMAGES)]
    names = [(key, _name(f"{key}_camera" if key == JOINTS else key)) for key in cameras]
    keys = _unique(place, [("the motors", JOINTS), *names, ("task", PROMPT)])
    rate = {"max_request_hz": info.fps}  # a client sends as it needs actions, each step at most
    streams: list[dict[str, Any]] = [{"name": JOINTS, "dim": len(motors), **rate}]
    for key, name in names:
        streams.append(_frames(place, name, info, IMAGES + key) | rate)
    return {
        "streams": streams,
        "window": {"steps": 1, "dt_ms": 1e3 / info.fps},
        "actions": {
            "names": _actions(place, _names(info.features.get(ACTION)) or motors),
            "dt_ms": 1e3 / info.fps,
        },
        "policy": {"instructions": True},
        "gateway": [{"wire": "lerobot", "map": {**keys, JOINTS: motors}}],
    }


def _names(feature: _Feature | None) -> list[str]:
    """Names of the numbers of a feature, as datasets have them: in a list, or in a map of one."""
    if feature is None:
        return []
    names = feature.names
    if isinstance(names, dict) and len(names) == 1:
        (names,) = names.values()
    if not isinstance(names, list) or feature.shape != [len(names)]:
        return []
    return [str(one) for one in names]


def _frames(place: str, name: str, info: _Info, key: str) -> dict[str, Any]:
    """The stream of a camera.

    Raises:
        ConfigError: the dataset has no frames of it.
    """
    feature = info.features.get(key)
    if feature is None or len(feature.shape) != 3:
        raise ConfigError([f"{place}: {INFO} has no frames for the camera {name!r}, at {key}"])
    channels_last = feature.shape[-1] == CHANNELS
    height, width = feature.shape[:2] if channels_last else feature.shape[1:]
    return {"name": name, "image": {"height": height, "width": width}}


def _gateway(place: str, modality: _Modality) -> dict[str, Any]:
    """The gateway, and that the policy takes instructions, if the dataset has some.

    Raises:
        ConfigError: two parts would have one name.
    """
    names = [(f"state.{key}", _name(key)) for key in modality.state]
    names += [(f"video.{key}", _camera(key, modality)) for key in modality.video]
    annotations = [f"annotation.{key}" for key in modality.annotation]
    found = [key for key in annotations if TASK in key] or annotations
    keys = _unique(place, names + [(key, PROMPT) for key in found[:1]])
    parts = {key: [part.start, part.end] for key, part in modality.action.items()}
    gateway = [{"wire": "groot", "map": keys, "action_keys": parts}]
    return ({"policy": {"instructions": True}} if found else {}) | {"gateway": gateway}


def _streams(place: str, modality: _Modality, info: _Info) -> dict[str, Any]:
    """Rates, sizes and names of a run; a client sends as it needs actions, each step at most.

    Raises:
        ConfigError: the two files disagree, or two actions would have one name.
    """
    dt_ms = 1e3 / info.fps
    streams: list[dict[str, Any]] = [
        {"name": _name(key), "dim": part.end - part.start, "max_request_hz": info.fps}
        for key, part in modality.state.items()
    ]
    for key, camera in modality.video.items():
        name, place_of = _camera(key, modality), camera.original_key or f"{IMAGES}{key}"
        streams.append(_frames(place, name, info, place_of) | {"max_request_hz": info.fps})
    action = info.features.get(ACTION)
    total = max(part.end for part in modality.action.values())
    names = action.names if action is not None else None
    if not isinstance(names, list) or len(names) != total:
        names = [f"a{index}" for index in range(total)]
    return {
        "streams": streams,
        "window": {"steps": 1, "dt_ms": dt_ms},
        "actions": {"names": _actions(place, names), "dt_ms": dt_ms},
    }


def _camera(key: str, modality: _Modality) -> str:
    """Name of a camera's stream, which no part of the state may have."""
    is_taken = _name(key) in map(_name, modality.state)
    return _name(f"{key}_camera" if is_taken else key)


def _actions(place: str, names: list[Any]) -> list[str]:
    return list(_unique(place, [(str(one), _name(one)) for one in names]))


def _unique(place: str, names: list[tuple[str, str]]) -> dict[str, Any]:
    """Returns the key of each name, of pairs of both.

    Raises:
        ConfigError: two keys would have one name.
    """
    keys: dict[str, Any] = {}
    for key, name in names:
        if name in keys:
            both = f"{keys[name]!r} and {key!r} would both be called {name!r}"
            raise ConfigError([f"{place}: {both}, want a name each: rename one of them"])
        keys[name] = key
    return keys


def _name(text: Any) -> str:
    """``text`` as a stream or an action may be called."""
    return UNFIT.sub("_", str(text))[:NAME_CHARACTERS]


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(
            [f"{path}: {error.strerror}; want a dataset or its {MODALITY}"]
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError([f"{path}: {error}"]) from error
