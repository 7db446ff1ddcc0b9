"""A gateway for clients of GR00T as their dataset describes its robot: TOML from ``modality.json``.

That file names the parts of the state, the action and the cameras. ``meta/info.json`` of the same
dataset adds rates, sizes and the actions' names. What a run asks of its user (limits, lease,
horizon, policy) neither knows.
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
TASK: Final = "task_description"  # of several annotations the one that robots send
UNFIT: Final = re.compile(r"[^A-Za-z0-9_/-]")  # in a name
NAME_CHARACTERS: Final = 64

T = TypeVar("T")


class _Part(msgspec.Struct):
    start: int
    end: int


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

    Of a file it is the gateway alone, of a dataset's folder the streams and the actions, too.

    Raises:
        ConfigError: there is none, or it is not of that form.
    """
    path = Path(place)
    if path.is_dir():
        modality = _read(path / "meta" / MODALITY, _Modality)
        info = _read(path / "meta" / INFO, _Info)
        return _text(place, _streams(place, modality, info) | _gateway(modality))
    modality = _read(path, _Modality)
    numbers = ", ".join(f"{key} {part.end - part.start}" for key, part in modality.state.items())
    return f"# Numbers of the streams: {numbers}\n" + _text(place, _gateway(modality))


def _text(place: str, table: Mapping[str, Any]) -> str:
    return f"# For clients of GR00T, from {place}\n" + "\n".join(table_lines(table))


def _gateway(modality: _Modality) -> dict[str, Any]:
    keys = {_name(key): f"state.{key}" for key in modality.state}
    keys |= {_camera(key, modality): f"video.{key}" for key in modality.video}
    annotations = [f"annotation.{key}" for key in modality.annotation]
    if told := [key for key in annotations if TASK in key] or annotations:
        keys[PROMPT] = told[0]
    parts = {key: [part.start, part.end] for key, part in modality.action.items()}
    gateway = [{"wire": "groot", "map": keys, "action_keys": parts}]
    return ({"policy": {"instructions": True}} if told else {}) | {"gateway": gateway}


def _streams(place: str, modality: _Modality, info: _Info) -> dict[str, Any]:
    """Rates, sizes and names of a run.

    Raises:
        ConfigError: the two files disagree.
    """
    dt_ms = 1e3 / info.fps
    streams: list[dict[str, Any]] = [
        {"name": _name(key), "dim": part.end - part.start, "rate_hz": info.fps}
        for key, part in modality.state.items()
    ]
    for key, camera in modality.video.items():
        feature = info.features.get(camera.original_key or f"observation.images.{key}")
        if feature is None or len(feature.shape) != 3:
            raise ConfigError([f"{place}: {INFO} has no frames for the camera {key!r}"])
        channels_last = feature.shape[-1] == CHANNELS
        height, width = feature.shape[:2] if channels_last else feature.shape[1:]
        image = {"height": height, "width": width}
        streams.append({"name": _camera(key, modality), "rate_hz": info.fps, "image": image})
    action = info.features.get("action")
    total = max(part.end for part in modality.action.values())
    names = action.names if action is not None else None
    if not isinstance(names, list) or len(names) != total:
        names = [f"a{index}" for index in range(total)]
    return {
        "streams": streams,
        "window": {"steps": 1, "dt_ms": dt_ms},
        "actions": {"names": [_name(one) for one in names], "dt_ms": dt_ms},
    }


def _camera(key: str, modality: _Modality) -> str:
    """Name of a camera's stream, which no part of the state may have."""
    return _name(f"{key}_camera" if key in modality.state else key)


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
