"""The contract between a robot and the pipeline, compared before anything moves.

Pure: a Hello and the configuration in, the difference out. Names, sizes, dtypes and the order of
actions must be equal; the order in which streams are declared is the robot's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppstream.config import PipelineConfig, StreamConfig
from ppstream.messages import WIRE_MAJOR, WIRE_MINOR, Hello, StreamDeclaration


def objection(config: PipelineConfig, hello: Hello) -> tuple[str | None, list[str]]:
    """Why this robot can never be admitted (``version``, ``contract``), and what to change.

    One line for each difference, with expected and got; None and no line when all agrees.
    """
    if hello.major != WIRE_MAJOR:
        return "version", [other_version(hello.major, hello.minor)]
    lines = [
        *_streams(config.streams, hello.streams),
        *_actions(config.actions.names, hello.actions),
    ]
    return ("contract" if lines else None), lines


def other_version(major: int, minor: int) -> str:
    """The line that tells a robot of another major version what to do."""
    return (
        f"wire version: expected {WIRE_MAJOR}.{WIRE_MINOR}, got {major}.{minor}; install the same"
        " major version of ppstream on both sides"
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
