"""Rules of ``[actions]`` alone: limits, switched actions, robots' own limits, and a chunk's size.

Pure. The number of actions and what else stands in a configuration are no matter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import pack, unpack
from typing import Final

from ppstream.config.schema import ActionConfig, RobotLimits
from ppstream.core.errors import counted
from ppstream.wire.message_socket import MAX_FRAME_BYTES

FLOAT32_MAX: Final = 3.4028235e38  # beyond it a limit of actions, which are float32, is infinite
ACTION_BYTES: Final = 4  # float32
CHUNK_SPARE_BYTES: Final = 1 << 16  # of a message: its header, and the ages of 256 streams
CHUNK_BYTES_MAX: Final = MAX_FRAME_BYTES - CHUNK_SPARE_BYTES


def action_rule_problems(actions: ActionConfig) -> Iterator[str]:
    """Every disagreement, each ``path: got ..., want ...``."""
    for path in ("velocity", "acceleration"):
        limits = getattr(actions, path)
        if limits and len(limits) != len(actions.names):
            got = counted(len(limits), "limit")
            yield (
                f"actions.{path}: got {got}, want {len(actions.names)}: one for "
                "each name (inf: no limit), or none at all"
            )
    yield from _limit_problems(actions)
    yield from _size_problems(actions)
    yield from _switch_problems(actions)
    for robot, limits in actions.robots.items():
        yield from _robot_problems(actions, f"actions.robots.{robot}", limits)
    age_ms = actions.max_age_ms
    if age_ms is not None and not actions.dt_ms < age_ms <= actions.lease_ms:
        yield (
            f"actions.max_age_ms: got {age_ms:g}, want more than actions.dt_ms = "
            f"{actions.dt_ms:g} and at most actions.lease_ms = {actions.lease_ms:g}"
        )


def _limit_problems(actions: ActionConfig) -> Iterator[str]:
    for name, low, high in zip(actions.names, actions.low, actions.high, strict=False):
        if not low < high:
            yield f"actions.low: got {low:g} for {name!r}, want it below its high, {high:g}"
        elif low < -FLOAT32_MAX:
            yield f"actions.low: got {low:g} for {name!r}, want at least -{FLOAT32_MAX:g} (float32)"
        elif high > FLOAT32_MAX:
            yield f"actions.high: got {high:g} for {name!r}, want at most {FLOAT32_MAX:g} (float32)"
        elif not _float32(low) < _float32(high):
            yield (
                f"actions.low: got {low!r} for {name!r}, want it below its high, {high!r}, as "
                f"float32, too: both are {_float32(low):g}"
            )


def _float32(value: float) -> float:
    """The value as actions have it; beyond float32 as it is."""
    if abs(value) > FLOAT32_MAX:
        return value
    rounded: float = unpack("f", pack("f", value))[0]
    return rounded


def _size_problems(actions: ActionConfig) -> Iterator[str]:
    size = actions.horizon * len(actions.names) * ACTION_BYTES
    if size > CHUNK_BYTES_MAX:
        yield (
            f"actions.horizon: got {actions.horizon} x {len(actions.names)} actions, {size} bytes "
            f"a chunk, want {CHUNK_BYTES_MAX} at most: a chunk is one message"
        )


def _switch_problems(actions: ActionConfig) -> Iterator[str]:
    ranges = dict(zip(actions.names, zip(actions.low, actions.high, strict=False), strict=False))
    for name, values in actions.discrete.items():
        path = f"actions.discrete.{name}"
        if name not in actions.names:
            yield f"{path}: got {name!r}, want one of {', '.join(actions.names)}"
        elif len(set(values)) < 2:
            yield f"{path}: got {list(values)}, want two different values at least"
        elif name in ranges and not all(ranges[name][0] <= v <= ranges[name][1] for v in values):
            low, high = ranges[name]
            yield f"{path}: got {list(values)}, want all of them from {low:g} to {high:g}"


def _robot_problems(actions: ActionConfig, path: str, limits: RobotLimits) -> Iterator[str]:
    for name in ("low", "high", "velocity", "acceleration"):
        own, common = getattr(limits, name), getattr(actions, name)
        if own and len(own) != len(actions.names):
            got = counted(len(own), "limit")
            yield f"{path}.{name}: got {got}, want {len(actions.names)}, or none"
        elif any(
            (one < limit if name == "low" else one > limit)
            for one, limit in zip(own, common, strict=False)
        ):
            yield f"{path}.{name}: got {list(own)}, want none wider than {list(common)}"
    pairs = zip(limits.low or actions.low, limits.high or actions.high, strict=False)
    if not all(_float32(low) < _float32(high) for low, high in pairs):
        yield f"{path}.low: got {list(limits.low)}, want each below its high"
