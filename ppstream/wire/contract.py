"""The contract between a robot and a run, compared: by rank 0, and by a client that asked for it.

Pure: what the run describes and what a robot declares in, the differences out. Names, sizes, dtypes
and the order of actions must be equal, and a camera's shape where the robot states one; the order
in which streams are declared is the robot's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ppstream.wire.robot_messages import Described, StreamDeclaration, StreamDescription


def differences(
    run: Described, streams: Sequence[StreamDeclaration], actions: Sequence[str]
) -> list[str]:
    """Lists what a robot has to change, one line each with expected and got; none: all agrees."""
    return [*_streams(run.streams, streams), *_actions(run.actions, actions)]


def _streams(expected: Sequence[StreamDescription], got: Sequence[StreamDeclaration]) -> list[str]:
    names = [stream.name for stream in got]
    repeated = sorted({name for name in names if names.count(name) > 1})
    lines = [f"stream {name!r}: declared twice" for name in repeated]
    declared = {stream.name: stream for stream in got}
    for stream in expected:
        dim = prod(stream.shape)
        wanted = f"stream {stream.name!r}: expected {[*stream.shape]} {stream.dtype}"
        robot = declared.pop(stream.name, None)
        if robot is None:
            lines.append(f"{wanted}, got none")
        elif (robot.dim, robot.dtype) != (dim, stream.dtype) or _is_turned(robot, stream):
            lines.append(f"{wanted}, got {[*robot.shape] or [robot.dim]} {robot.dtype}")
        elif robot.encoding not in stream.encodings:
            known = " or ".join(stream.encodings)
            lines.append(f"stream {stream.name!r}: expected {known}, got {robot.encoding}")
    lines += [f"stream {name!r}: the pipeline has none of this name" for name in declared]
    return lines


def _is_turned(robot: StreamDeclaration, stream: StreamDescription) -> bool:
    """True when a camera's axes are other ones: as many values, which the run would scramble."""
    return len(stream.shape) > 1 and bool(robot.shape) and robot.shape != stream.shape


def _actions(expected: Sequence[str], got: Sequence[str]) -> list[str]:
    if len(expected) != len(got):
        return [f"actions: expected {len(expected)}: {list(expected)}, got {len(got)}: {list(got)}"]
    return [
        f"action {index}: expected {wanted!r}, got {name!r}"
        for index, (wanted, name) in enumerate(zip(expected, got, strict=True))
        if wanted != name
    ]
