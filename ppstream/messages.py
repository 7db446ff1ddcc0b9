"""What travels: the robot's wire and the control frames between ranks, as tagged structs.

Robot wire: one message per ZeroMQ frame. Control frames: length-prefixed on a socket of their own.
Every struct is array-like with an integer tag: new fields are appended with defaults, nothing is
renamed or removed, and the robot's wire skips fields that it does not know yet (ranks of one run
have one version: there an unknown field is an error). Robot clocks stamp samples; no instant of one
clock is compared with another's. Nothing here opens a socket.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

WIRE_MAJOR: Final = 1
WIRE_MINOR: Final = 0

MAX_NAME = 64
MAX_TEXT = 4096
MAX_DETAILS = 256  # lines of a refusal
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # fits the int64 of an envelope's rows
Ns = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Span = Annotated[int, Meta(gt=0, le=2**63 - 1)]  # a duration above zero
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base: array-like on the wire, tracked by nobody's garbage collector."""


class _Control(_Message, frozen=True, forbid_unknown_fields=True):
    """Base of the frames between ranks."""


# ---- robot -> rank 0 ------------------------------------------------------------------------


class StreamDeclaration(_Message, frozen=True):
    """What the robot says it will send under a name."""

    name: Name
    dim: Annotated[int, Meta(ge=1, le=65536)]
    dtype: Name


class Hello(_Message, frozen=True, tag=1):
    """A robot asks for a session.

    ``resumes`` is the session the same robot held before its connection broke (0: none): the new
    one takes its place at once. Without ``real_time`` stamps may run faster than the clock: a
    recording.
    """

    major: int
    minor: int
    robot: Name
    streams: Annotated[tuple[StreamDeclaration, ...], Meta(max_length=256)]
    actions: Annotated[tuple[Name, ...], Meta(max_length=1024)]
    resumes: Id = 0
    real_time: bool = True


class HelloVersion(_Message, frozen=True, tag=1):
    """The part of Hello that every version has: read when the rest cannot be."""

    major: int
    minor: int


class Samples(_Message, frozen=True, tag=2):
    """Consecutive samples of one stream: ``stamps`` int64[n], ``values`` dtype[n, dim], raw."""

    session: Id
    stream: Annotated[int, Meta(ge=0, le=255)]  # index into Hello.streams
    stamps: memoryview
    values: memoryview


class Report(_Message, frozen=True, tag=3):
    """What became of an action chunk on the robot, in durations of the robot's clock."""

    session: Id
    epoch: Id
    seq: Id
    age_ns: Ns  # window end to execution of its first action (or to receipt when not executed)
    executed: Id  # actions of the chunk executed; 0: superseded, late or expired


class Reset(_Message, frozen=True, tag=4):
    """The robot starts a new episode: results owed to the old one are dropped."""

    session: Id


class Bye(_Message, frozen=True, tag=5):
    """The robot leaves."""

    session: Id


class Ping(_Message, frozen=True, tag=6):
    """The robot is alive though it has no samples to send."""

    session: Id


FromRobot = Hello | Samples | Report | Reset | Bye | Ping


# ---- rank 0 -> robot ------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag=17):
    """The session is open. The robot holds until the phase is ``ready``.

    Its ``session_epoch`` is 0, and one more after each Reset. A robot that says nothing for
    ``silence_ns`` loses it.
    """

    major: int
    minor: int
    session: Id
    phase: Name
    silence_ns: Span
    lease_ns: Span
    horizon: Annotated[int, Meta(ge=1)]
    dt_ns: Span
    low: tuple[float, ...]
    high: tuple[float, ...]


class Refused(_Message, frozen=True, tag=18):
    """No session, and why; ``details`` lists expected and got."""

    reason: Name  # version | contract | name_in_use | full | draining
    details: Annotated[tuple[Text, ...], Meta(max_length=MAX_DETAILS)]


class Phase(_Message, frozen=True, tag=19):
    """The run changed its phase; the robot holds unless it is ``ready`` or ``degraded``."""

    phase: Name


class ActionChunk(_Message, frozen=True, tag=20):
    """Future actions of one robot, in that robot's clock.

    Step i is due at ``start_ns + i * dt_ns``; after ``expires_ns`` none may be executed.
    """

    session: Id
    session_epoch: Id
    epoch: Id
    seq: Id
    window_end_ns: Ns
    start_ns: Ns
    dt_ns: Span
    expires_ns: Ns
    horizon: Annotated[int, Meta(ge=1, le=65536)]
    actions: memoryview  # float32[horizon, len(actions of Hello)], little-endian


class Lost(_Message, frozen=True, tag=21):
    """The session named does not exist (any more): say Hello again."""

    session: Id


ToRobot = Welcome | Refused | Phase | ActionChunk | Lost


# ---- between ranks --------------------------------------------------------------------------


class RankHello(_Control, frozen=True, tag=1):
    """A policy rank introduces itself; rank 0 compares before any tensor moves."""

    major: int
    token: Name  # of this run, handed out by the launcher's store: strangers do not know it
    generation: int
    rank: int
    host: Name
    boot_id: Name
    pid: int
    facts: dict[str, dict[str, Any]]  # key class -> resolved key -> value


class RankWelcome(_Control, frozen=True, tag=2):
    """Rank 0 accepts: where the run's logs go."""

    run_id: Name
    run_dir: Text


class RankRefused(_Control, frozen=True, tag=3):
    """Rank 0 refuses: the difference, line by line."""

    difference: tuple[Text, ...]


class Ready(_Control, frozen=True, tag=4):
    """The sender has built everything it needs and holds its end of the link open."""

    facts: dict[str, Any] = {}


class Heartbeat(_Control, frozen=True, tag=5):
    """The sender's process is alive; ``progress`` counts what its loop has finished."""

    progress: int


class Bell(_Control, frozen=True, tag=6):
    """Doorbell: slot data of this index is complete (an envelope or a result, by direction)."""

    index: int


class PolicyFault(_Control, frozen=True, tag=7):
    """Why the result of ``index`` carries no actions; sent before its doorbell."""

    index: int
    kind: Name  # exception | shape | memory
    text: Text


class Measure(_Control, frozen=True, tag=8):
    """Time stage B alone, ``repeats`` times, on the last envelope received."""

    repeats: int


class Measured(_Control, frozen=True, tag=9):
    """Standalone durations of stage B."""

    durations_ns: tuple[int, ...]


class Drain(_Control, frozen=True, tag=10):
    """No envelope will follow: finish, answer Goodbye, leave."""

    reason: Text


class Goodbye(_Control, frozen=True, tag=11):
    """The sender leaves with this exit code."""

    code: int
    reason: Text


class PhaseChange(_Control, frozen=True, tag=12):
    """Rank 0 entered a phase."""

    phase: Name


Control = (
    RankHello
    | RankWelcome
    | RankRefused
    | Ready
    | Heartbeat
    | Bell
    | PolicyFault
    | Measure
    | Measured
    | Drain
    | Goodbye
    | PhaseChange
)

encoder: Final = msgspec.msgpack.Encoder()
from_robot: Final[msgspec.msgpack.Decoder[FromRobot]] = msgspec.msgpack.Decoder(FromRobot)
to_robot: Final[msgspec.msgpack.Decoder[ToRobot]] = msgspec.msgpack.Decoder(ToRobot)
hello_version: Final = msgspec.msgpack.Decoder(HelloVersion)
control: Final[msgspec.msgpack.Decoder[Control]] = msgspec.msgpack.Decoder(Control)

#: Everything a hostile frame can make a decoder raise.
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
