"""Records of robots on rank 0: one per open session, and the counts of all of them.

Plain records; ``server.py`` decides. A session's record has the offset between the robot's clock
and rank 0's with its uncertainty, for traces alone: rank 0 asks, the robot answers with a reading
of its clock, and half the round trip bounds the error. No sample, lease or action is judged by it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ppstream.ingest.executed_prefix import commitment
from ppstream.observe.statistics import SessionStatistics
from ppstream.wire.robot_messages import Samples, in_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.ingest.ring import SensorRing
    from ppstream.ingest.rows import RowInput
    from ppstream.wire.message_memory import LargeMessage
    from ppstream.wire.robot_messages import Hello, Prefix

RAW: Final = "raw"
ANY_STAMP: Final = b"\xff" * 8  # no session's id has so many of these bytes
NO_BYTES: Final = -1  # no raw sample has this size: an encoded stream's frames are looked at apart
READINGS: Final = 16  # the best of so many counts, so that drift is followed


class Offset(NamedTuple):
    """Robot's clock minus rank 0's, exact to plus or minus ``uncertainty_ns``."""

    offset_ns: int
    uncertainty_ns: int


class OffsetEstimate:
    """The least uncertain of one robot's last readings."""

    def __init__(self) -> None:
        self._readings: deque[Offset] = deque(maxlen=READINGS)

    def add(self, asked_ns: int, robot_ns: int, heard_ns: int) -> Offset | None:
        """One answer: its request and receipt by rank 0's clock, and the time on the robot's clock.

        Returns:
            The best estimate now; None when the answer cannot be one: it came before the question.
        """
        round_trip_ns = heard_ns - asked_ns
        if round_trip_ns < 0:
            return None
        half_ns = (round_trip_ns + 1) // 2
        self._readings.append(Offset(robot_ns - asked_ns - half_ns, half_ns))
        return min(self._readings, key=lambda reading: reading.uncertainty_ns)


class RawFrame(NamedTuple):
    """A raw frame of a camera in its sender's memory."""

    stream: SessionStream
    stamp: bytes  # int64, of the robot's clock
    offset: int  # of its pixels


class SessionStream:
    """Destination of one declared stream's samples, and the bytes of one, unless encoded.

    ``samples_left`` may still come before the next second begins.
    """

    __slots__ = (
        "_around_stamp",
        "_samples_per_s",
        "head_bytes",
        "is_encoded",
        "ring",
        "sample_bytes",
        "samples_left",
    )

    def __init__(self, ring: SensorRing, encoding: str, samples_per_s: int) -> None:
        self.ring = ring
        self._samples_per_s = samples_per_s
        self.refill()
        self.is_encoded = encoding != RAW
        size = ring.stream.dim * np.dtype(ring.stream.dtype).itemsize
        self.sample_bytes = NO_BYTES if self.is_encoded else size
        self._around_stamp = b"", b""  # in a message of one raw frame, whose pixels come behind
        self.head_bytes = 0  # of such a message, before its pixels

    def serve(self, session: int, index: int) -> None:
        """Takes frames of the session that declared this stream as its ``index``-th."""
        if self.ring.stream.image is not None and not self.is_encoded:
            frame = memoryview(bytes(self.sample_bytes))
            head, _ = in_parts(Samples(session, index, memoryview(ANY_STAMP), frame))
            before, _, behind = head.partition(ANY_STAMP)
            self._around_stamp, self.head_bytes = (before, behind), len(head)

    def frame_in(self, head: bytes, size: int) -> RawFrame | None:
        """The raw frame of this stream that a message of ``size`` bytes is; None: it is another.

        ``head`` is its beginning, at least ``head_bytes`` of it.
        """
        if not (end := self.head_bytes) or size != end + self.sample_bytes:
            return None
        before, behind = self._around_stamp
        if not head.startswith(before) or not head.startswith(behind, end - len(behind)):
            return None
        return RawFrame(self, head[len(before) : end - len(behind)], end)

    def refill(self) -> None:
        """A second is over."""
        self.samples_left = self._samples_per_s


@dataclass(slots=True)
class Session:
    """One robot's session. It is serving once its row is open: samples and actions may flow.

    ``frames_left`` may still come before the next second begins, and ``changes_left`` resets and
    the like behind those; ``wish`` is the newest instruction, kept until the row is open.
    """

    id: int
    peer: bytes  # the socket's name of the connection
    place: int  # index of the row
    row: RowInput
    hello: Hello
    streams: list[SessionStream]  # as Hello declared them
    heard_ns: int
    frames_left: int
    changes_left: int
    wish: tuple[int, str] = (0, "")  # conditioning_epoch, text
    degraded: dict[str, str] = field(default_factory=dict)  # why, by stream that degrades the run
    offset: OffsetEstimate = field(default_factory=OffsetEstimate)
    episode: int = 0
    is_serving: bool = False
    cameras: Sequence[SessionStream] = ()  # whose raw frames may come
    head_bytes: int = 0  # the most that such a frame's message has before the pixels

    def serve(self) -> None:
        """Take the row over."""
        self.is_serving = True
        for index, stream in enumerate(self.streams):
            stream.serve(self.id, index)
        self.cameras = [stream for stream in self.streams if stream.head_bytes]
        self.head_bytes = max((stream.head_bytes for stream in self.cameras), default=0)
        self.row.open(self.id, is_real_time=self.hello.real_time)
        self.row.robot = self.hello.robot
        self.row.session_epoch = self.episode  # a robot may reset while it waits for *ready*

    def frame_in(self, message: LargeMessage) -> RawFrame | None:
        """The raw frame that ``message`` is; None: it is another message."""
        head, size = message.head(self.head_bytes), len(message)
        for camera in self.cameras:
            if frame := camera.frame_in(head, size):
                return frame
        return None

    def begin_episode(self) -> None:
        self.episode += 1
        if self.is_serving:
            self.row.new_episode()

    def commit(self, prefix: Prefix) -> None:
        """Takes what the robot executes next, for the next window; not of an earlier episode."""
        if self.is_serving and prefix.session_epoch == self.row.session_epoch:
            self.row.commitment = commitment(prefix, len(self.hello.actions))

    def end(self) -> None:
        """Free the row."""
        if self.is_serving:
            self.is_serving = False
            self.row.close()


@dataclass(slots=True)
class SessionCounts:
    """The running counts. Chunks are counted by the thread that emits, all else by the owner."""

    opened: int = 0
    frames_handled: int = 0
    samples_early: int = 0
    resets: int = 0
    instructions: int = 0
    images_decoded: int = 0
    image_decode_ns: int = 0
    reports_lost: int = 0
    chunks_sent: int = 0
    closed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    frames_dropped: Counter[str] = field(default_factory=Counter)
    chunks_dropped: Counter[str] = field(default_factory=Counter)
    connections_refused: dict[str, int] = field(default_factory=dict)

    def statistics(self, sessions_open: int) -> SessionStatistics:
        """A copy; from any thread."""
        dropped = dict(self.frames_dropped)
        return SessionStatistics(
            open=sessions_open,
            opened=self.opened,
            closed=dict(self.closed),
            refused=dict(self.refused),
            frames_received=self.frames_handled + sum(dropped.values()),
            frames_handled=self.frames_handled,
            frames_dropped=dropped,
            connections_refused=self.connections_refused,
            samples_early=self.samples_early,
            resets=self.resets,
            instructions=self.instructions,
            images_decoded=self.images_decoded,
            image_decode_ns=self.image_decode_ns,
            reports_lost=self.reports_lost,
            chunks_sent=self.chunks_sent,
            chunks_dropped=dict(self.chunks_dropped),
        )
