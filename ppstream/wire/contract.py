"""The contract between a robot and a run, compared: by rank 0, and by a client that asked for it.

Pure: what the run describes and what a robot declares in, the differences out. Names, sizes, dtypes
and the order of actions must be equal; the order in which streams are declared is the robot's own.
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
        wanted = f"stream {stream.name!r}: expected [{dim}] {stream.dtype}"
        robot = declared.pop(stream.name, None)
        if robot is None:
            lines.append(f"{wanted}, got none")
        elif (robot.dim, robot.dtype) != (dim, stream.dtype):
            lines.append(f"{wanted}, got [{robot.dim}] {robot.dtype}")
        elif robot.encoding not in stream.encodings:
            known = " or ".join(stream.encodings)
            lines.append(f"stream {stream.name!r}: expected {known}, got {robot.encoding}")
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
