"""KeyMap: which key of a foreign robot's observation is which stream, and in which form.

Plain data in, samples ``[dim]`` out, in the streams' dtypes; it knows no wire and sends nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ppstream.config.gateway_rules import LAYOUTS, PROMPT, KeyEntry, key_entries
from ppstream.config.schema import CHANNELS, GatewayConfig, PipelineConfig, StreamConfig
from ppstream.core.errors import SpecError

Array: TypeAlias = np.ndarray[Any, Any]

NUMBERS: Final = "biuf"  # kinds of dtype that a stream of numbers takes
NUMBER_KINDS: Final = (bool, int, float, np.ndarray, np.generic)  # that may hold one
WHITE: Final = 255.0  # of a channel that is sent as 0 to 1
LARGEST_F32: Final = float(np.finfo(np.float32).max)


class ObservationError(SpecError):
    """An observation is not what the map says; the message has every difference, a line each."""


class Form(NamedTuple):
    """Form of the value at a key."""

    key: str
    stream: str
    optional: bool
    shapes: tuple[tuple[int, int, int], ...] | None  # of a frame; None: numbers


class KeyMap:
    """Map of one gateway: finds and converts the samples of an observation."""

    def __init__(self, config: PipelineConfig, gateway: GatewayConfig) -> None:
        entries = key_entries(gateway)
        ends = config.reference.name
        self._streams = [
            _Mapped(stream, entries[stream.name], _shapes(stream, entries[stream.name]))
            for stream in config.streams
        ]
        self._sent = sorted(self._streams, key=lambda mapped: mapped.stream.name == ends)
        self._prompt = entries.get(PROMPT)

    def samples(self, observation: Mapping[str, Any]) -> dict[str, Array]:
        """The sample ``[dim]`` of each stream, the one that ends windows last.

        Raises:
            ObservationError: keys are missing, or values have another shape or kind.
        """
        found, problems = {}, []
        for mapped in self._sent:
            values = [_at(observation, key) for key in mapped.entry.keys]
            if mapped.entry.optional and all(value is None for value in values):
                continue
            try:
                found[mapped.stream.name] = mapped.sample(values)
            except ValueError as error:
                problems.append(f"{mapped.entry.name}: {error}, want {mapped.wanted()}")
        if problems:
            raise ObservationError("\n".join([*problems, f"got the keys {_shown(observation)}"]))
        return found

    def prompt(self, observation: Mapping[str, Any]) -> str | None:
        """The instruction; None: the map names none, or the robot sent none.

        Raises:
            ObservationError: it is no text.
        """
        value = None if self._prompt is None else _at(observation, self._prompt.name)
        if value is None or self._prompt is None:
            return None
        try:
            if isinstance(value, np.ndarray | np.generic):
                value = value.item()
            if isinstance(value, bytes):
                value = value.decode()
        except (ValueError, SystemError) as error:  # NumPy's, of code points that are none
            raise ObservationError(f"{self._prompt.name}: {error}, want one text") from error
        if not isinstance(value, str):
            raise ObservationError(f"{self._prompt.name}: got {_kind(value)}, want text")
        return value

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Key, stream and wanted form of each entry, for people."""
        for mapped in self._streams:
            optional = ", may be missing" * mapped.entry.optional
            yield mapped.entry.name, mapped.stream.name, mapped.wanted() + optional
        if self._prompt is not None:
            yield self._prompt.name, "the instruction", "text, may be missing"

    def forms(self) -> Iterator[Form]:
        """Each key, in a robot's own terms."""
        for mapped in self._streams:
            shapes = None if mapped.stream.image is None else tuple(mapped.shapes.values())
            for key in mapped.entry.keys:
                yield Form(key, mapped.stream.name, mapped.entry.optional, shapes)

    def example(self) -> dict[str, Any]:
        """An observation that fits, of zeros."""
        observation: dict[str, Any] = {}
        for mapped in self._streams:
            for key in mapped.entry.keys:
                _put(observation, key, mapped.example())
        if self._prompt is not None:
            _put(observation, self._prompt.name, "pick up the cup")
        return observation


class _Mapped(NamedTuple):
    stream: StreamConfig
    entry: KeyEntry
    shapes: dict[str, tuple[int, int, int]]  # of a frame that are taken, by layout

    def sample(self, values: Sequence[Any]) -> Array:
        """Raises ValueError: how ``values``, one of each key, differ."""
        return self._joined(values) if len(values) > 1 else self._whole(values[0])

    def _joined(self, values: Sequence[Any]) -> Array:
        missing = [k for k, value in zip(self.entry.keys, values, strict=True) if value is None]
        if missing:
            raise ValueError(f"{', '.join(missing)} is missing")
        numbers = [_number(value) for value in values]
        strange = [
            f"{key} {_kind(value) if number is None else number}"
            for key, value, number in zip(self.entry.keys, values, numbers, strict=True)
            if number is None or not math.isfinite(number)
        ]
        if strange:
            raise ValueError(f"got {', '.join(strange)}")
        return self._numbers(np.array(numbers, np.float64))

    def _whole(self, value: Any) -> Array:
        if value is None:
            raise ValueError("it is missing")
        array = np.asarray(value) if isinstance(value, bool | int | float | list) else value
        if not isinstance(array, np.ndarray | np.generic) or array.dtype.kind not in NUMBERS:
            raise ValueError(f"got {_kind(value)}")
        array = np.asarray(array)
        return self._numbers(array) if self.stream.image is None else self._frame(array)

    def wanted(self) -> str:
        """Words what a robot shall send."""
        if self.stream.image is None:
            if len(self.entry.keys) > 1:
                return "a number each"
            alone = " or a number" if self.stream.dim == 1 else ""
            return f"numbers [{self.stream.dim}]{alone}"
        shapes = " or ".join(str(list(shape)) for shape in self.shapes.values())
        return f"uint8, or floats from 0 to 1, {shapes}"

    def example(self) -> Array:
        if self.stream.image is None:
            return np.zeros(self.stream.dim if len(self.entry.keys) == 1 else ())
        return np.zeros(next(iter(self.shapes.values())), np.uint8)

    def _numbers(self, array: Array) -> Array:
        if array.size != self.stream.dim or array.ndim > 1:
            raise ValueError(f"got {array.dtype} {list(array.shape)}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError("got numbers that are not finite")
        is_wider = self.stream.dtype == "float32" and array.dtype != np.float32
        if is_wider and np.abs(array.astype(np.float64)).max() > LARGEST_F32:
            raise ValueError("got numbers that no float32 holds")
        return array.astype(self.stream.dtype).reshape(-1)

    def _frame(self, array: Array) -> Array:
        layouts = [name for name, shape in self.shapes.items() if array.shape == shape]
        is_float = array.dtype.kind == "f"
        if not layouts or not (is_float or array.dtype == np.uint8):
            raise ValueError(f"got {array.dtype} {list(array.shape)}")
        if is_float:
            if not (array.min() >= 0 and array.max() <= 1):  # also when there is a NaN
                raise ValueError("got floats outside 0 to 1")
            array = (WHITE * array).astype(np.uint8)
        if layouts[0] == "chw":
            array = array.transpose(1, 2, 0)
        return np.ascontiguousarray(array).reshape(-1)


def _shapes(stream: StreamConfig, entry: KeyEntry) -> dict[str, tuple[int, int, int]]:
    """Shapes of a frame that are taken, by layout; of numbers none."""
    image = stream.image
    if image is None:
        return {}
    shapes = {
        "hwc": (image.height, image.width, CHANNELS),
        "chw": (CHANNELS, image.height, image.width),
    }
    return shapes if entry.layout == LAYOUTS[0] else {entry.layout: shapes[entry.layout]}


def source_of(value: Any, depth: int = 0) -> str:
    """Python that makes ``value``: maps, texts, lists of them, and arrays of zeros."""
    if isinstance(value, Mapping):
        indent = "    " * (depth + 1)
        lines = [
            f"{indent}{json.dumps(key)}: {source_of(one, depth + 1)},\n"
            for key, one in value.items()
        ]
        return "{\n" + "".join(lines) + "    " * depth + "}"
    if isinstance(value, str | list):
        return json.dumps(value)
    return f"np.zeros({tuple(value.shape)}, np.{value.dtype})"


def _at(observation: Mapping[str, Any], key: str) -> Any:
    """Finds a key as it stands, or by its parts between dots; None: it is not there."""
    if key in observation:
        return observation[key]
    head, dot, rest = key.partition(".")
    below = observation.get(head)
    return _at(below, rest) if dot and isinstance(below, Mapping) else None


def _put(observation: dict[str, Any], key: str, value: Any) -> None:
    """Put a value where its key is looked for: literally, where another key is a part of it."""
    head, dot, rest = key.partition(".")
    if dot and isinstance(observation.setdefault(head, {}), dict):
        _put(observation[head], rest, value)
        return
    inner = observation.get(key)
    observation[key] = value
    if isinstance(inner, dict):
        observation.update({f"{key}.{name}": other for name, other in inner.items()})


def _number(value: Any) -> float | None:
    """The only number of ``value``; None: it is none."""
    array = np.asarray(value) if isinstance(value, NUMBER_KINDS) else None
    if array is None or array.size != 1 or array.dtype.kind not in NUMBERS:
        return None
    return float(array.item())


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _shown(observation: Mapping[str, Any], most: int = 16) -> str:
    names = [repr(str(key)[:64]) for key in observation]
    return ", ".join(names[:most]) + ", ..." * (len(names) > most) if names else "none"
