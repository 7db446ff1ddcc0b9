"""The run's side of the contract with robots: what it describes, whom it refuses, how it welcomes.

Pure: the configuration and a robot's message in, the answer out; ``wire/contract.py`` compares.
Rank 0 serves robots of its own minor version of the wire and of the one before; so it is upgraded
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ppstream.config.schema import CHANNELS, PipelineConfig, RobotLimits, StreamConfig
from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import MAX_TEXT
from ppstream.sessions.table import frames_per_second
from ppstream.wire.contract import differences
from ppstream.wire.fields import DECODE_ERRORS, MAX_DETAILS, WIRE_MAJOR, WIRE_MINOR
from ppstream.wire.robot_messages import (
    Described,
    Hello,
    Refused,
    StreamDescription,
    Welcome,
    hello_version,
)
from ppstream.wire.unix_socket import PACKET_BYTES_MAX

MINORS_SERVED: Final = (WIRE_MINOR - 1, WIRE_MINOR)
ENCODINGS: Final = ("raw", "jpeg")
TEXT_HEAD_BYTES: Final = 3  # of a text on the wire, before at most 64 KiB
REFUSED_BYTES_MAX: Final = PACKET_BYTES_MAX - 512  # of its lines; the rest, and how many are left


def rejection_reason(config: PipelineConfig, hello: Hello) -> tuple[str | None, list[str]]:
    """Returns why this robot can never be admitted (``version``, ``contract``), and what to change.

    One line for each difference, with expected and got; None and no line when all agrees.
    """
    if line := version_problem(hello.major, hello.minor):
        return "version", [line]
    lines = differences(description(config), hello.streams, hello.actions)
    return ("contract" if lines else None), lines


def refusal(reason: str, details: Sequence[str]) -> Refused:
    """Makes the message that says why; its details are cut to what one packet takes.

    A stranger may ask for many, and what takes more would wait in rank 0's memory.
    """
    told: list[str] = []
    left = REFUSED_BYTES_MAX
    for line in details:
        text = line[:MAX_TEXT]
        left -= len(text.encode()) + TEXT_HEAD_BYTES
        if left < 0:
            break
        told.append(text)
    if len(told) < len(details) or len(told) > MAX_DETAILS:
        del told[MAX_DETAILS - 1 :]
        told.append(f"and {len(details) - len(told)} more")
    return Refused(reason, tuple(told))


def foreign_version(body: bytes | memoryview) -> str | None:
    """Words the refusal of a Hello that cannot be read because of its version; else None."""
    try:
        version = hello_version.decode(body)
    except DECODE_ERRORS:
        return None
    return version_problem(version.major, version.minor)


def version_problem(major: int, minor: int) -> str | None:
    """Returns the reason why a robot of this version of the wire is not served; None: it is."""
    if major == WIRE_MAJOR and minor in MINORS_SERVED:
        return None
    served = " or ".join(f"{WIRE_MAJOR}.{one}" for one in MINORS_SERVED if one >= 0)
    is_robot_newer = (major, minor) > (WIRE_MAJOR, WIRE_MINOR)
    older = "rank 0" if is_robot_newer else "the robot"
    return f"wire version: expected {served}, got {major}.{minor}; upgrade ppstream on {older}"


def description(config: PipelineConfig, phase: str = "starting") -> Described:
    """Makes the message that tells a robot of the contract."""
    actions = config.actions
    return Described(
        major=WIRE_MAJOR,
        minor=WIRE_MINOR,
        phase=phase,
        streams=tuple(map(_stream, config.streams)),
        reference=config.reference.name,
        actions=actions.names,
        horizon=actions.horizon,
        dt_ns=round(actions.dt_ms * NS_PER_MS),
        lease_ns=round(actions.lease_ms * NS_PER_MS),
        max_age_ns=round((actions.max_age_ms or 0) * NS_PER_MS),
    )


def _stream(stream: StreamConfig) -> StreamDescription:
    image = stream.image
    shape = (stream.dim,) if image is None else (image.height, image.width, CHANNELS)
    encodings = ENCODINGS[: 1 if image is None else len(ENCODINGS)]
    return StreamDescription(stream.name, shape, stream.dtype, encodings)


def welcome(
    config: PipelineConfig, hello: Hello, session: int, phase: str, silence_ns: int
) -> Welcome:
    """Makes the message that tells an admitted robot of the run."""
    actions = config.actions
    own = actions.robots.get(hello.robot, RobotLimits())
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
        samples_per_s=_samples_per_s(config, hello) if config.batch.rows > 1 else (),
    )


def _samples_per_s(config: PipelineConfig, hello: Hello) -> tuple[int, ...]:
    """Of each stream, by its own limit and that of frames, if each sample comes alone.

    Of an observation's other frames one reports its chunk, and one says what follows that.
    """
    frames = len(hello.streams) + (2 if config.actions.prefix_steps else 1)
    observations = frames_per_second(config) // frames
    limits = {stream.name: config.samples_per_second(stream) for stream in config.streams}
    return tuple(min(limits[stream.name], observations) for stream in hello.streams)
