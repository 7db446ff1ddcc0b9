"""What the rules of ``[actions]`` must agree on: rates, switched actions, single robots, ages.

A part of ``rules.py``, which knows the names and limits themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppstream.config.schema import ActionConfig, RobotLimits


def action_rule_problems(actions: ActionConfig) -> Iterator[str]:
    """Every disagreement, each ``path: got ..., want ...``."""
    for path in ("velocity", "acceleration"):
        limits = getattr(actions, path)
        if limits and len(limits) != len(actions.names):
            yield (
                f"actions.{path}: got {len(limits)} limits, want {len(actions.names)}: one for "
                "each name (inf: no limit), or none at all"
            )
    yield from _switch_problems(actions)
    for robot, limits in actions.robots.items():
        yield from _robot_problems(actions, f"actions.robots.{robot}", limits)
    age_ms = actions.max_age_ms
    if age_ms is not None and not actions.dt_ms < age_ms <= actions.lease_ms:
        yield (
            f"actions.max_age_ms: got {age_ms:g}, want more than actions.dt_ms = "
            f"{actions.dt_ms:g} and at most actions.lease_ms = {actions.lease_ms:g}"
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
            yield f"{path}.{name}: got {len(own)} limits, want {len(actions.names)}, or none"
        elif any(
            (one < limit if name == "low" else one > limit)
            for one, limit in zip(own, common, strict=False)
        ):
            yield f"{path}.{name}: got {list(own)}, want none wider than {list(common)}"
    pairs = zip(limits.low or actions.low, limits.high or actions.high, strict=False)
    if not all(low < high for low, high in pairs):
        yield f"{path}.low: got {list(limits.low)}, want each below its high"
