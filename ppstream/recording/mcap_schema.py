"""Schema of a run's recording: the messages, their topics, and the schemas viewers read.

Arrays are flat and numbers plain, since viewers show no nested arrays. Instants named ``stamp`` or
``window_end`` are the robot's clock; ``received_ns`` and a message's log time are rank 0's.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ppstream.core.errors import ConfigError

METADATA: Final = "ppstream"  # name of the record that says whose recording it is,
GOES_ON: Final = "ppstream.goes_on"  # and of that at the end of a part behind which there is one
VERSION: Final = 1
SAMPLES: Final = "samples"
WINDOWS: Final = "windows"
ACTIONS: Final = "actions"
RESETS: Final = "resets"
EVENTS_TOPIC: Final = "/events"
REPORTS_TOPIC: Final = "/reports"
CAMERAS: Final = "cameras"
ENVELOPES_TOPIC: Final = "/envelopes"


class SampleBatch(msgspec.Struct, frozen=True):
    """Consecutive samples of one stream, in the order in which rank 0 received them."""

    first: int  # number of the first one in its stream: a gap here was lost by the recorder
    dim: int
    stamps_ns: list[int]
    received_ns: list[int]
    values: list[float | None]  # [n * dim]; null: not finite
    newest: list[float | None]  # [dim], the last sample again, for plots


class Time(msgspec.Struct, frozen=True):
    """An instant of the robot's clock, as viewers want it."""

    sec: int
    nsec: int


class JointState(msgspec.Struct, frozen=True):
    """The position of one joint, in the viewers' own schema."""

    name: str
    position: float | None  # null: not finite


class JointBatch(SampleBatch, frozen=True):
    """Samples of joints; of the newest one the names, too, in the viewers' own schema."""

    timestamp: Time
    joints: list[JointState]


class WindowHeader(msgspec.Struct, frozen=True):
    """A window as stage A cut it; what it holds are the samples that had come until then."""

    epoch: int
    seq: int
    phase: str
    session: int
    session_epoch: int
    window_end_ns: int
    expires_ns: int
    samples: dict[str, int]  # received before it was cut, by stream


class Chunk(msgspec.Struct, frozen=True):
    """An action chunk as it was handed to the robot's connection, or why it was not."""

    epoch: int
    seq: int
    session: int
    session_epoch: int
    window_end_ns: int
    start_ns: int
    dt_ns: int
    expires_ns: int
    horizon: int
    actions: list[float]  # [horizon * actions]
    dropped: str  # empty: it was sent


class Reset(msgspec.Struct, frozen=True):
    """The robot's history was emptied: a new episode, a new session, or a clock that jumped."""

    reason: str
    samples: dict[str, int]  # received before, by stream


class Event(msgspec.Struct, frozen=True):
    """A phase, an epoch cut, a fault, or an envelope that was dropped."""

    name: str
    text: str
    fields: dict[str, Any]


class Report(msgspec.Struct, frozen=True):
    """Durations that a robot measured of an action chunk, in its own clock."""

    session: int
    epoch: int
    seq: int
    age_ns: int
    executed: int


class EnvelopeAges(msgspec.Struct, frozen=True):
    """Ages and times of an envelope that was emitted or dropped; a live view alone has it."""

    epoch: int
    seq: int
    phase: str
    dropped: str  # empty: it was emitted
    age_ns: int | None  # from the arrival of the newest sample used to the emitted chunk
    input_age_ns: dict[str, Any]  # by stream: from its newest sample to the window's end
    a_ns: int | None  # stages A and B
    b_ns: int | None


class RawImage(msgspec.Struct, frozen=True):
    """A frame of a camera, in the viewers' own schema."""

    timestamp: Time
    frame_id: str
    width: int
    height: int
    encoding: str
    step: int  # bytes of a row of pixels
    data: bytes


class CompressedImage(msgspec.Struct, frozen=True):
    """A frame of a camera as JPEG, in the viewers' own schema; a recording alone has it."""

    timestamp: Time
    frame_id: str
    data: bytes
    format: str


Image = RawImage | CompressedImage
Body = (
    SampleBatch | JointBatch | WindowHeader | Chunk | Reset | Event | Report | EnvelopeAges | Image
)

#: Schemas that viewers know by name: a message has their fields, and may have more.
FOXGLOVE: Final[dict[type[Body], str]] = {
    JointBatch: "foxglove.JointStates",
    RawImage: "foxglove.RawImage",
    CompressedImage: "foxglove.CompressedImage",
}


def topic(robot: str, kind: str, stream: str = "") -> str:
    """Returns the topic of a robot's messages: ``/arm/samples/joints``, ``/arm/windows``."""
    return f"/{robot}/{kind}/{stream}".rstrip("/")


def parse_topic(name: str) -> tuple[str, str, str] | None:
    """Robot, kind and stream of a topic, or None: it is of no robot."""
    for kind in (SAMPLES, CAMERAS, WINDOWS, ACTIONS, RESETS):
        robot, found, stream = f"{name}/".partition(f"/{kind}/")
        if found and (bool(stream) == (kind in (SAMPLES, CAMERAS))):
            return robot.removeprefix("/"), kind, stream.removesuffix("/")
    return None


def schema_name(message: type[Body]) -> str:
    return FOXGLOVE.get(message, f"ppstream.{message.__name__}")


def json_schema(message: type[msgspec.Struct]) -> bytes:
    """The JSON schema of a message, in the plain form that viewers understand."""
    _, parts = msgspec.json.schema_components((message,), ref_template="{name}")
    return msgspec.json.encode(_plain(parts[message.__name__], parts))


def need_mcap() -> None:
    """Raises ConfigError unless recordings can be written and read here."""
    try:
        import mcap  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            ["MCAP needs a package that is not installed: pip install 'ppstream[record]'"]
        ) from error


def _plain(schema: Any, parts: dict[str, Any]) -> Any:
    """Without alternatives and references: a value that may be null keeps its other type."""
    if isinstance(schema, list):
        return [_plain(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(parts[schema["$ref"]], parts)
    if "anyOf" in schema:
        return next(_plain(item, parts) for item in schema["anyOf"] if item != {"type": "null"})
    return {key: _plain(value, parts) for key, value in schema.items()}
