"""The robot's wire: what a robot and rank 0 say to each other, one message at a time.

Every struct is array-like with an integer tag: new fields are appended with defaults and skipped by
older readers, nothing is renamed or removed; golden bytes of every minor version stand under
``tests/golden``. Robot clocks stamp samples; no instant of one clock is compared with another's: a
chunk's ``Provenance`` holds durations only, each measured by one clock.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Protocol, final

import msgspec
from msgspec import Meta

from ppstream.wire.fields import (
    MAX_AXES,
    MAX_DETAILS,
    MAX_DIM,
    MAX_INSTRUCTION,
    Count,
    FaultText,
    Id,
    Instant,
    InstructionText,
    Message,
    Name,
    Ns,
    Span,
    Text,
    encoder,
)

NO_BYTES: Final = b"\xc4\0"  # MessagePack of a binary without bytes
BIN_16: Final = struct.Struct(">BH")  # before a binary of 256 bytes and more: its kind and length
BIN_32: Final = struct.Struct(">BI")  # ... of 64 KiB and more
PARTS_BYTES: Final = 4096  # of values that are not copied to be sent: a camera's, not a joint's

Axes = Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_DIM)], ...], Meta(max_length=MAX_AXES)]

# ---- robot -> rank 0 ------------------------------------------------------------------------


class Provenance(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Parts of a chunk's age that rank 0 knows when it emits it; in nanoseconds.

    ``input_age_ns``: by stream, from the newest sample used to the window's end, both stamped by
    the robot; a stream without a sample is missing. The others follow one another on rank 0's way,
    from the arrival of the newest reference sample to the emit; their sum is ``server_ns``.
    """

    input_age_ns: dict[str, int]
    wait_a_ns: int  # for a credit and for stage A
    a_ns: int  # stage A, to the commit of the envelope
    links_ns: int  # both ways together: only their sum can be measured without a common clock
    wait_b_ns: int  # in D_in, on the policy rank
    b_ns: int  # stage B
    wait_c_ns: int  # in D_out
    c_ns: int  # stage C, to the emit

    @property
    def server_ns(self) -> int:
        """From the newest reference sample's arrival to the emit."""
        stages_ns = self.a_ns + self.b_ns + self.c_ns
        return stages_ns + self.wait_a_ns + self.links_ns + self.wait_b_ns + self.wait_c_ns


class StreamDeclaration(Message, frozen=True):
    """A stream that the robot announces.

    ``encoding`` (since 1.1) is ``raw``, or ``jpeg`` for a camera: then each message holds one
    frame, and ``values`` its JPEG file. ``dim`` and ``dtype`` are always those of a raw sample,
    as is ``shape`` (since 1.2, not in all), where the robot has stated one.
    """

    name: Name
    dim: Annotated[int, Meta(ge=1, le=MAX_DIM)]
    dtype: Name
    encoding: Name = "raw"
    shape: Axes = ()


@final
class Hello(Message, frozen=True, tag=1):
    """A robot asks for a session.

    ``resumes`` is the session the same robot held before its connection broke (0: none): the new
    one takes its place at once. Without ``real_time`` stamps may run faster than the clock: a
    recording. ``instruction`` (since 1.1) is the text in force, as ``Instruct`` would say it.
    """

    major: int
    minor: int
    robot: Name
    streams: Annotated[tuple[StreamDeclaration, ...], Meta(max_length=256)]
    actions: Annotated[tuple[Name, ...], Meta(max_length=1024)]
    resumes: Id = 0
    real_time: bool = True
    instruction: InstructionText = ""
    conditioning_epoch: Id = 0


class HelloVersion(Message, frozen=True, tag=1):
    """The part of Hello that every version has: read when the rest cannot be."""

    major: int
    minor: int


class Samples(Message, frozen=True, tag=2):
    """Consecutive samples of one stream: ``stamps`` int64[n], ``values`` dtype[n, dim], raw."""

    session: Id
    stream: Annotated[int, Meta(ge=0, le=255)]  # index into Hello.streams
    stamps: memoryview
    values: memoryview


def in_parts(message: Samples) -> tuple[bytes, memoryview]:
    """Encode ``message`` without a copy of its values: they follow the bytes returned first.

    Both together are what the encoder writes for ``PARTS_BYTES`` of values and more.
    """
    empty = encoder.encode(msgspec.structs.replace(message, values=memoryview(b"")))
    size = message.values.nbytes
    head = BIN_16.pack(0xC5, size) if size < 1 << 16 else BIN_32.pack(0xC6, size)
    return empty[: -len(NO_BYTES)] + head, message.values


class ChunkReport(Message, frozen=True, tag=3):
    """Fate of an action chunk on the robot, in durations of the robot's clock."""

    session: Id
    epoch: Count
    seq: Count
    age_ns: Count  # window end to execution of its first action (or to receipt when not executed)
    executed: Count  # actions of the chunk executed; 0: superseded, late or expired
    oldest_ns: Count = 0  # window end to execution of its last action: the oldest one executed
    dispatch_ns: Count = 0  # receipt to execution of its first action


class ResetRequest(Message, frozen=True, tag=4):
    """The robot starts a new episode: results owed to the old one are dropped."""

    session: Id


class Bye(Message, frozen=True, tag=5):
    """The robot leaves."""

    session: Id


class Ping(Message, frozen=True, tag=6):
    """The robot is alive though it has no samples to send."""

    session: Id


class Instruct(Message, frozen=True, tag=7):
    """From now on the policy shall follow ``text`` (since 1.1; empty: none).

    ``conditioning_epoch`` counts the robot's instructions; one that does not grow is ignored.
    """

    session: Id
    conditioning_epoch: Id
    text: InstructionText


class ClockReading(Message, frozen=True, tag=8):
    """Reading of the robot's clock when a ClockQuestion arrived (since 1.1)."""

    session: Id
    asked_ns: Instant  # of the question
    robot_ns: Instant  # by the clock that stamps samples


class Prefix(Message, frozen=True, tag=9):
    """Actions that the robot executes from ``start_ns`` on unless a newer chunk comes (since 1.1).

    Sent after each chunk when ``Welcome.prefix_steps`` asks for it: the executed prefix and the
    measured delay of real-time chunking. Instants are the robot's clock.
    """

    session: Id
    session_epoch: Id
    start_ns: Instant
    dt_ns: Span
    expires_ns: Instant
    delay_ns: Count  # window end to receipt: the longest of the last few chunks
    actions: memoryview  # float32[n, len(actions of Hello)], little-endian; n of at least 1


class RobotState(Message, frozen=True, tag=10):
    """Counts of the robot since its session began (since 1.2), in durations of its clocks.

    Sent once a second at most, and when it begins to hold or a fault latches. What is under way
    when a session begins, a hold, a fault or a wait for a chunk, belongs to it in full.
    """

    session: Id
    holds: Count  # times it began to hold though the run was ready and it had executed actions
    held_ns: Count  # how long it held so, the hold under way included
    faults: Count
    fault: FaultText  # the newest, in the robot's words; empty: none
    chunk_gap_ns: Count  # longest time from one action chunk to the next while the run was ready


@final
class Describe(Message, frozen=True, tag=11):
    """A robot asks for the run's contract, with or without a session (since 1.2, not in all)."""

    major: int
    minor: int


FromRobot = (
    Hello
    | Samples
    | ChunkReport
    | ResetRequest
    | Bye
    | Ping
    | Instruct
    | ClockReading
    | Prefix
    | RobotState
    | Describe
)
#: Messages behind which both sides take another state of the session for true.
CHANGES: Final = frozenset(kind.__struct_config__.tag for kind in (ResetRequest, Bye, Instruct))
CHANGE_BYTES_MAX: Final = 8 * MAX_INSTRUCTION  # a character has four at most


def is_change(body: bytes | memoryview) -> bool:
    """True when ``body`` begins as one of ``CHANGES``, and may be one: it is not decoded."""
    is_short_array = 1 < len(body) <= CHANGE_BYTES_MAX and body[0] >> 4 == 0x9  # up to 15 fields
    return is_short_array and body[1] in CHANGES


# ---- rank 0 -> robot ------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag=17):
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
    discrete: tuple[Id, ...] = ()  # actions that are switched: neither interpolated nor blended
    max_age_ns: Annotated[int, Meta(ge=0)] = 0  # no older action is executed; 0: the lease alone
    prefix_steps: Annotated[int, Meta(ge=0)] = 0  # above 0: send Prefix after each chunk
    #: of each stream as declared, at most; empty: no limit
    samples_per_s: tuple[Annotated[int, Meta(ge=1, le=2**53)], ...] = ()


class Refused(Message, frozen=True, tag=18):
    """No session, and why; ``details`` lists expected and got."""

    reason: Name  # version | contract | name_in_use | full | draining
    details: Annotated[tuple[Text, ...], Meta(max_length=MAX_DETAILS)]


class Phase(Message, frozen=True, tag=19):
    """The run changed its phase; the robot holds unless it is one of ``core.phases.SERVING``.

    ``details`` (since 1.2, not in all): a line for each stream of this robot that degrades the run.
    """

    phase: Name
    details: Annotated[tuple[Text, ...], Meta(max_length=MAX_DETAILS)] = ()


class ActionChunk(Message, frozen=True, tag=20):
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
    provenance: Provenance | None = None  # only when the run is configured to send it


class Emitter(Protocol):
    """Takes finished action chunks. Called from the thread that decodes; must not block."""

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        """Hand over; returns why it could not be, or None.

        The memory of ``chunk.actions`` is overwritten once this has returned.
        """


class Lost(Message, frozen=True, tag=21):
    """The session named does not exist (any more): say Hello again."""

    session: Id


class ClockQuestion(Message, frozen=True, tag=22):
    """Request for the robot's clock, for traces only; sent to robots that speak 1.1 or later."""

    session: Id
    asked_ns: Ns  # rank 0's clock, for it alone


class Conditioned(Message, frozen=True, tag=23):
    """The policy follows this instruction from the next window on (since 1.1).

    With ``fault`` it could not take the text in, and follows the one before.
    """

    session: Id
    conditioning_epoch: Id
    fault: Text = ""


class StreamDescription(Message, frozen=True):
    """A stream that every robot declares: a sample is ``dtype[*shape]``.

    ``encodings`` are those that a robot may declare.
    """

    name: Name
    shape: Annotated[Axes, Meta(min_length=1)]
    dtype: Name
    encodings: Annotated[tuple[Name, ...], Meta(max_length=16)] = ("raw",)


class Described(Message, frozen=True, tag=24):
    """The run's contract, in any phase: what a Hello has to declare, and what its chunks will be.

    Limits and leases of single robots are for ``Welcome`` to tell.
    """

    major: int
    minor: int
    phase: Name
    streams: Annotated[tuple[StreamDescription, ...], Meta(max_length=256)]
    reference: Name  # the stream whose newest sample ends a window
    actions: Annotated[tuple[Name, ...], Meta(max_length=1024)]
    horizon: Annotated[int, Meta(ge=1)]
    dt_ns: Span
    lease_ns: Span
    max_age_ns: Annotated[int, Meta(ge=0)] = 0  # as in Welcome


ToRobot = Welcome | Refused | Phase | ActionChunk | Lost | ClockQuestion | Conditioned | Described


from_robot: Final[msgspec.msgpack.Decoder[FromRobot]] = msgspec.msgpack.Decoder(FromRobot)
to_robot: Final[msgspec.msgpack.Decoder[ToRobot]] = msgspec.msgpack.Decoder(ToRobot)
hello_version: Final = msgspec.msgpack.Decoder(HelloVersion)
