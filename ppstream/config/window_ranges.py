"""Ranges of the values of a window, column by column: what groups in 8 bits are scaled by.

A stream's own ``low`` and ``high`` come first, then the statistics of its group: a JSON file like
LeRobot's ``meta/stats.json``, with lists ``min`` and ``max`` by a stream's or a group's name, with
or without ``observation.`` before it. Nothing here knows how a range becomes a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ppstream.core.errors import counted

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig, StreamConfig

PREFIX: Final = "observation."
NARROWEST: Final = 1e-30  # so that a scale is a normal float32
WIDEST: Final = 1e38
ALWAYS_ZERO: Final = (-1.0, 1.0)  # range of a column that was 0 throughout


class Ranges(NamedTuple):
    """Lowest and highest value of each column of a group."""

    low: list[float]
    high: list[float]


class _Statistics(msgspec.Struct):
    """Of one feature; other keys are of no account."""

    min: list[float] | None = None
    max: list[float] | None = None


def ranges_of(config: PipelineConfig, group: str) -> Ranges:
    """The ranges of a group in 8 bits.

    Raises:
        ValueError: they are missing or make no sense; ``range_problems`` says why.
    """
    ranges = Ranges([], [])
    for stream in config.groups[group]:
        found = _of_stream(config, group, stream)
        if isinstance(found, str):
            raise ValueError(found)
        ranges.low.extend(found.low)
        ranges.high.extend(found.high)
    return ranges


def range_problems(config: PipelineConfig) -> Iterator[str]:
    """Every disagreement about groups' types and ranges, each ``path: got ..., want ...``."""
    for name in config.window.groups:
        if name not in config.groups:
            known = ", ".join(config.groups) or "none: every stream is a camera"
            yield f"window.groups.{name}: got {name!r}, want a group of the streams: {known}"
    for index, stream in enumerate(config.streams):
        for key, limits in (("low", stream.low), ("high", stream.high)):
            if limits and len(limits) != stream.dim:
                got = counted(len(limits), "limit")
                yield (
                    f"streams[{index}].{key}: got {got}, want {stream.dim}: one per value, or none"
                )
    for group, streams in config.groups.items():
        for stream in streams if config.group_settings(group).is_scaled else ():
            found = _of_stream(config, group, stream)
            if isinstance(found, str):
                yield f"streams[{config.streams.index(stream)}].low: {found}"


def _of_stream(config: PipelineConfig, group: str, stream: StreamConfig) -> Ranges | str:
    """The stream's ranges, or what is wrong with them."""
    settings = config.group_settings(group)
    why = f"window.groups.{group}.dtype = {settings.dtype!r} needs the range of each value"
    if stream.low or stream.high:
        ranges = Ranges(list(stream.low), list(stream.high))
        if len(ranges.low) != len(ranges.high):
            got = counted(len(ranges.low), "limit")
            return f"got {got} beside {len(ranges.high)} of high, want both"
    elif settings.statistics is None:
        return (
            f"missing, want low and high of the {stream.dim} values of {stream.name!r}, or "
            f"window.groups.{group}.statistics: {why}"
        )
    else:
        found = _from_statistics(config, group, stream, settings.statistics)
        if isinstance(found, str):
            return f"missing, and window.groups.{group}.statistics {found}; {why}"
        ranges = found
    for low, high in zip(ranges.low, ranges.high, strict=True):
        got, largest = f"got {low:g} to {high:g} of {stream.name!r}", max(abs(low), abs(high))
        if not low < high:
            return f"{got}, want low below high, both finite"
        if largest > WIDEST:
            return f"{got}, want both from {-WIDEST:g} to {WIDEST:g}"
        if largest < NARROWEST:
            return f"{got}, want one of them {NARROWEST:g} or more away from 0"
    return ranges


def _from_statistics(
    config: PipelineConfig, group: str, stream: StreamConfig, file: str
) -> Ranges | str:
    try:
        features: dict[str, Any] = msgspec.json.decode(Path(file).read_bytes(), type=dict[str, Any])
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except msgspec.DecodeError as error:
        return f"{file} is no JSON table of features: {error}"
    streams = config.groups[group]
    left = sum(one.dim for one in streams[: streams.index(stream)])
    width = sum(one.dim for one in streams)
    of_stream, of_group = slice(0, stream.dim), slice(left, left + stream.dim)
    for name, columns, dim in ((stream.name, of_stream, stream.dim), (group, of_group, width)):
        for key in (name, PREFIX + name):
            if key in features:
                return _read_feature(features[key], columns, dim, f"{file}, {key!r},")
    return f"{file} has neither {stream.name!r} nor {PREFIX + group!r}"


def _read_feature(feature: Any, columns: slice, dim: int, where: str) -> Ranges | str:
    try:
        found = msgspec.convert(feature, _Statistics)
    except msgspec.ValidationError as error:
        return f"{where} holds no lists of numbers: {error}"
    if found.min is None or found.max is None or not len(found.min) == len(found.max) == dim:
        sizes = [0 if one is None else len(one) for one in (found.min, found.max)]
        return f"{where} has {sizes[0]} numbers of min and {sizes[1]} of max, want {dim} each"
    pairs = zip(found.min[columns], found.max[columns], strict=True)
    widened = [_widened(low, high) for low, high in pairs]
    return Ranges([low for low, _ in widened], [high for _, high in widened])


def _widened(low: float, high: float) -> tuple[float, float]:
    """A column that never changed still has a range: from 0, or ``ALWAYS_ZERO``."""
    if low != high or not math.isfinite(low):
        return low, high
    return (min(low, 0.0), max(low, 0.0)) if low else ALWAYS_ZERO
