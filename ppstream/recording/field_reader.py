"""FieldReader: messages of other systems to tracks, by the topics and fields a configuration names.

``recorded = { topic = "/imu/data", fields = ["angular_velocity.x", "orientation.w"] }`` of a stream
says where its values are; a field that is an array gives all of them. Nothing is repaired: gaps,
repeats, disorder and stamps that come twice stay. What an object is, is the file's reader's matter.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError
from ppstream.recording.recording import Track

if TYPE_CHECKING:
    from ppstream.config.schema import StreamConfig

STAMPS: Final = ("header.stamp",)
SECONDS: Final = ("sec", "seconds")  # of a stamp; the second is protobuf's
NANOSECONDS: Final = ("nanosec", "nsec", "nanos")  # ROS's, JSON's and protobuf's
_STEP: Final = re.compile(r"[^.\[\]]+")  # of a path: pose.position.x, gyro_rad[0]


class FieldReader:
    """Collects the declared streams from messages, in the order in which they were logged.

    Args:
        path: of the file, for what is said of it.
        streams: their ``recorded`` say what is wanted; several may read one topic.

    Raises:
        ConfigError: a stream does not say where it is recorded.
    """

    def __init__(self, path: Path, streams: Sequence[StreamConfig]) -> None:
        self._path = path
        missing = [
            f"streams: {s.name!r} does not say where {path} has it; give it recorded = "
            '{ topic = "...", fields = ["..."] }'
            for s in streams
            if s.recorded is None and s.image is None
        ]
        missing += [
            f"streams: {s.name!r} is a camera, and does not say where {path} has it; give it "
            f'recorded = {{ topic = "/{s.name}/image_raw" }}'
            for s in streams
            if s.image is not None
        ]
        if missing:
            raise ConfigError(missing)
        self._wanted = [_Wanted(stream) for stream in streams]
        self.topics = {wanted.topic for wanted in self._wanted}

    def add(self, topic: str, message: object, at_ns: int) -> None:
        """One message and when it was logged.

        Raises:
            ConfigError: it lacks a field, or a field holds no numbers.
        """
        for wanted in self._wanted:
            if wanted.topic == topic:
                try:
                    wanted.add(message, at_ns)
                except (LookupError, AttributeError, TypeError, ValueError) as error:
                    raise ConfigError(
                        [f"{self._path}: stream {wanted.name!r} in {topic}: {_text_of(error)}"]
                    ) from error

    def tracks(self, topics: Iterable[str]) -> dict[str, Track]:
        """Returns what was collected.

        Args:
            topics: all that the file has, to say so when one is missing.

        Raises:
            ConfigError: a topic has no message.
        """
        there = ", ".join(sorted(topics)) or "nothing"
        empty = [
            f"{self._path}: no message of {wanted.topic!r}, want one of {there}"
            for wanted in self._wanted
            if not wanted.stamps
        ]
        if empty:
            raise ConfigError(empty)
        return {wanted.name: wanted.track() for wanted in self._wanted}


class _Wanted:
    """One stream: where its values are, and what was found."""

    def __init__(self, stream: StreamConfig) -> None:
        assert stream.recorded is not None
        self.name, self.topic = stream.name, stream.recorded.topic
        self._fields = [_steps(field) for field in stream.recorded.fields]
        self._stamp = stream.recorded.stamp
        self.stamps, self._arrivals, self._values = array("q"), array("q"), array("d")
        self._dim = 0

    def add(self, message: object, at_ns: int) -> None:
        values: list[float] = []
        for field in self._fields:
            found = follow(message, field)
            if type(found) is float:  # as most are; numpy takes ten times as long
                values.append(found)
            else:
                values += np.atleast_1d(np.asarray(found, np.float64)).ravel().tolist()
        if self.stamps and len(values) != self._dim:
            raise ValueError(f"{len(values)} values, {self._dim} before")
        self.stamps.append(stamp_of(message, self._stamp, at_ns))
        self._arrivals.append(at_ns)
        self._values.extend(values)
        self._dim = len(values)

    def track(self) -> Track:
        stamps_ns, arrivals_ns = (np.frombuffer(t, np.int64) for t in (self.stamps, self._arrivals))
        values = np.frombuffer(self._values, np.float64)
        return Track(stamps_ns, values.reshape(len(stamps_ns), self._dim), arrivals_ns)


def stamp_of(message: object, field: str | None, at_ns: int, usual: Sequence[str] = STAMPS) -> int:
    """A message's time.

    Args:
        message: decoded.
        field: that has it; None: the first of the usual ones that the message has.
        at_ns: when it was logged, for messages with none of them.
        usual: fields.
    """
    if field is not None:
        return nanoseconds(follow(message, _steps(field)))
    for one in usual:
        steps = _steps(one)
        try:
            stamp = follow(message, steps)
        except (LookupError, AttributeError, TypeError):
            continue
        if _has(message, steps[0]):
            return nanoseconds(stamp)
    return at_ns


def _has(message: object, field: str) -> bool:
    """False where protobuf makes up a part that the message lacks."""
    try:
        return bool(getattr(message, "HasField", lambda _: True)(field))
    except ValueError:  # a number, which is always there
        return True


def need_streams(path: Path, streams: Sequence[StreamConfig]) -> None:
    """Raises ConfigError where no stream is declared."""
    if not streams:
        raise ConfigError([f"{path}: no stream declares where it is recorded"])


def follow(message: object, steps: Sequence[str]) -> Any:
    """Follows a path through attributes, keys and indices."""
    for step in steps:
        if type(message) is dict or isinstance(message, Mapping):  # the first is quicker
            message = message[step]
        elif step.isdigit():
            message = message[int(step)]  # type: ignore[index]
        else:
            message = getattr(message, step)
    return message


def nanoseconds(stamp: Any) -> int:
    """A stamp as ROS has it (seconds and nanoseconds), or nanoseconds as they are."""
    if isinstance(stamp, int | np.integer):
        return int(stamp)
    seconds, rest = (_part(stamp, names) for names in (SECONDS, NANOSECONDS))
    if seconds is None or rest is None:
        raise TypeError(f"no stamp: {stamp!r}; want integer nanoseconds, or sec and nanosec")
    return int(seconds) * NS_PER_S + int(rest)


def _part(stamp: Any, names: Sequence[str]) -> Any:
    """The first of these fields that a stamp has, else None."""
    get = stamp.get if isinstance(stamp, Mapping) else partial(getattr, stamp)
    return next((found for name in names if (found := get(name, None)) is not None), None)


@cache
def _steps(path: str) -> tuple[str, ...]:
    return tuple(_STEP.findall(path))


def _text_of(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, LookupError) else str(error)
