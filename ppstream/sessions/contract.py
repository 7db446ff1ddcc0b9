"""The contract between a robot and the pipeline, compared before anything moves.

Pure: a Hello and the configuration in, the difference out. Names, sizes, dtypes and the order of
actions must be equal; the order in which streams are declared is the robot's own. Rank 0 serves
robots of its own minor version of the wire and of the one before; so it is upgraded first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ppstream.config.schema import PipelineConfig, RobotLimits, StreamConfig
from ppstream.core.clock import NS_PER_MS
from ppstream.wire.fields import DECODE_ERRORS, WIRE_MAJOR, WIRE_MINOR
from ppstream.wire.robot_messages import Hello, StreamDeclaration, Welcome, hello_version

MINORS_SERVED: Final = (WIRE_MINOR - 1, WIRE_MINOR)
ENCODINGS: Final = ("raw", "jpeg")


def rejection_reason(config: PipelineConfig, hello: Hello) -> tuple[str | None, list[str]]:
    """Returns why this robot can never be admitted (``version``, ``contract``), and what to change.

    One line for each difference, with expected and got; None and no line when all agrees.
    """
    if line := _version_line(hello.major, hello.minor):
        return "version", [line]
    lines = [
        *_streams(config.streams, hello.streams),
        *_actions(config.actions.names, hello.actions),
    ]
    return ("contract" if lines else None), lines


def foreign_version(body: bytes | memoryview) -> str | None:
    """Words the refusal of a Hello that cannot be read because of its version; else None."""
    try:
        version = hello_version.decode(body)
    except DECODE_ERRORS:
        return None
    return _version_line(version.major, version.minor)


def _version_line(major: int, minor: int) -> str | None:
    if major == WIRE_MAJOR and minor in MINORS_SERVED:
        return None
    served = " or ".join(f"{WIRE_MAJOR}.{one}" for one in MINORS_SERVED if one >= 0)
    is_robot_newer = (major, minor) > (WIRE_MAJOR, WIRE_MINOR)
    older = "rank 0" if is_robot_newer else "the robot"
    return f"wire version: expected {served}, got {major}.{minor}; upgrade ppstream on {older}"


def welcome(
    config: PipelineConfig, robot: str, session: int, phase: str, silence_ns: int
) -> Welcome:
    """Makes the message that tells an admitted robot of the run."""
    actions = config.actions
    own = actions.robots.get(robot, RobotLimits())
    return Welcome(
        major=WIRE_MAJOR,
        minor=WIRE_MINOR,
        session=session,
        phase=phase,
        silence_ns=silence_ns,
        lease_ns=round(actions.lease_ms * NS_PER_MS),
        horizon=actions.horizon,
        dt_ns=round(actions.dt_ms * NS_PER_MS),
        low=own.low or actions.low,
        high=own.high or actions.high,
        discrete=tuple(i for i, name in enumerate(actions.names) if name in actions.discrete),
        max_age_ns=round((actions.max_age_ms or 0) * NS_PER_MS),
        prefix_steps=actions.prefix_steps,
    )


def _streams(expected: Sequence[StreamConfig], got: Sequence[StreamDeclaration]) -> list[str]:
    names = [stream.name for stream in got]
    repeated = sorted({name for name in names if names.count(name) > 1})
    lines = [f"stream {name!r}: declared twice" for name in repeated]
    declared = {stream.name: stream for stream in got}
    for stream in expected:
        wanted = f"[{stream.dim}] {stream.dtype}"
        robot = declared.pop(stream.name, None)
        if robot is None:
            lines.append(f"stream {stream.name!r}: expected {wanted}, got none")
        elif (robot.dim, robot.dtype) != (stream.dim, stream.dtype):
            lines.append(
                f"stream {stream.name!r}: expected {wanted}, got [{robot.dim}] {robot.dtype}"
            )
        elif robot.encoding not in ENCODINGS[: 2 if stream.image is not None else 1]:
            lines.append(
                f"stream {stream.name!r}: expected raw{' or jpeg' * (stream.image is not None)}, "
                f"got {robot.encoding}"
            )
    lines += [f"stream {name!r}: the pipeline has none of this name" for name in declared]
    return lines


def _actions(expected: Sequence[str], got: Sequence[str]) -> list[str]:
    if len(expected) != len(got):
        return [f"actions: expected {len(expected)}: {list(expected)}, got {len(got)}: {list(got)}"]
    return [
        f"action {index}: expected {wanted!r}, got {name!r}"
        for index, (wanted, name) in enumerate(zip(expected, got, strict=True))
        if wanted != name
    ]
