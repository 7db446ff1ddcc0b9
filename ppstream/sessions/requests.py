"""SessionRequests: what robots say beside samples: reports, resets, instructions, clocks, JPEG.

Each has its own file; here they meet the sessions they belong to, and the run's log.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from ppstream.core.clock import NS_PER_S, Clock, now_ns
from ppstream.core.errors import printable
from ppstream.ingest.sample_ledger import CLOSED, SHAPE
from ppstream.sessions.instructions import Instructions
from ppstream.sessions.jpeg_decoder import EncodedFrame, FrameDecoder, decoder_problem
from ppstream.wire.fields import MAX_NAME, fault_text
from ppstream.wire.robot_messages import (
    ChunkReport,
    ClockQuestion,
    ClockReading,
    Conditioned,
    Hello,
    Instruct,
    Ping,
    Prefix,
    ResetRequest,
    RobotState,
    Samples,
    ToRobot,
)

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.sessions.session import Session, SessionCounts, SessionStream
    from ppstream.sessions.table import SessionTable

MAX_REPORTS: Final = 4096  # waiting for the log
STATES_PER_S: Final = 20  # of each robot, into the log; one that behaves sends ten at most
STAMP_BYTES: Final = 8
NO_INSTRUCTIONS: Final = "this run takes none: policy.instructions is false"


Note: TypeAlias = ChunkReport | ResetRequest | Ping | Instruct | ClockReading | Prefix | RobotState


class NamedRobotState(RobotState, frozen=True):
    """A robot's account of itself, with the name that its session gave."""

    robot: str = ""


#: What robots say of themselves, for the log.
Told: TypeAlias = ChunkReport | RobotState
#: Takes a numbered text to the policy, and says what came of it.
Teach: TypeAlias = Callable[[int, str, Callable[[int, str], None]], None]


#: Writes an event of that name, with fields, to the run's log.
LogEvent: TypeAlias = Callable[..., None]


class SessionRequests:
    """For the thread that owns the rows.

    Args:
        config: says whether instructions are wanted, and how often clocks are asked.
        table: the open sessions.
        counts: of all sessions.
        send: takes an answer to a robot.
        wake: asks for ``take`` soon; from any thread.
    """

    def __init__(
        self,
        config: PipelineConfig,
        table: SessionTable,
        counts: SessionCounts,
        send: Callable[[bytes, ToRobot], object],
        wake: Callable[[], None],
    ) -> None:
        self.reports: deque[Told] = deque(maxlen=MAX_REPORTS)
        self._states: Counter[int] = Counter()  # by session, of this second
        self.clock: Clock = now_ns
        self._teach: Teach = _ignore
        self._log_event: LogEvent = _nowhere
        self.instructions = (
            Instructions(self._send_instruction) if config.policy.instructions else None
        )
        probe_s = config.service.clock_probe_s
        self._probe_ns = None if probe_s is None else round(probe_s * NS_PER_S)
        self._probe_due_ns = 0
        self._table = table
        self._counts = counts
        self._send = send
        self._cameras = FrameDecoder(wake)

    def attach(self, instruct: Teach, log_event: LogEvent) -> None:
        """Sets where texts go, which function gets their fate, and where the log is."""
        self._teach, self._log_event = instruct, log_event

    def problem(self, hello: Hello) -> str | None:
        """Returns the reason why what the robot declares cannot be served here."""
        is_jpeg = any(stream.encoding == "jpeg" for stream in hello.streams)
        return decoder_problem() if is_jpeg else None

    def begin(self, session: Session) -> None:
        """The session's row is open, and is served once the policy has answered its text, if any.

        A robot that resumes its session on a rank 0 that was started anew is not moved without what
        it has asked for; a text that cannot be followed leaves the row without one, as ever.
        """
        self._request_instruction(session)
        if self.instructions is not None:
            session.row.awaits_text = self.instructions.is_open(session.id)

    def end(self, session: Session, reason: str) -> None:
        """The session is over, for the log; ``heard_ns`` is when its robot last said something."""
        name, heard_ns = printable(session.hello.robot, MAX_NAME), session.heard_ns
        found = {"robot": name, "reason": reason, "heard_ns": heard_ns}
        self._log_event("robot_left", session=session.id, **found)

    def note(self, session: Session, message: Note) -> None:
        """Whatever a robot says that is neither hello nor samples nor goodbye."""
        if isinstance(message, ChunkReport):
            self._report(message)
        elif isinstance(message, RobotState):
            self._state(message, session.hello.robot)
        elif isinstance(message, Prefix):
            session.commit(message)
        elif isinstance(message, ResetRequest):
            self._counts.resets += 1
            session.begin_episode()
        elif isinstance(message, Instruct):
            self.instruct(session, message)
        elif isinstance(message, ClockReading):
            self.reading(session, message)

    def _report(self, told: Told) -> None:
        self._counts.reports_lost += len(self.reports) == MAX_REPORTS
        self.reports.append(told)

    def _state(self, state: RobotState, robot: str) -> None:
        """For the log, unless it floods; it counts on, so the next one makes up for one lost."""
        self._states[state.session] += 1
        if self._states[state.session] > STATES_PER_S:
            self._counts.reports_lost += 1
            return
        found = msgspec.structs.asdict(state) | {"fault": fault_text(state.fault)}
        self._report(NamedRobotState(**found, robot=printable(robot, MAX_NAME)))

    def instruct(self, session: Session, message: Instruct) -> None:
        """A new instruction; one that is not newer than the last is ignored."""
        epoch = message.conditioning_epoch
        if self.instructions is None:
            self._send(session.peer, Conditioned(session.id, epoch, NO_INSTRUCTIONS))
        elif epoch > session.wish[0]:
            session.wish = epoch, message.text
            if session.is_serving:
                self._request_instruction(session)

    def reading(self, session: Session, message: ClockReading) -> None:
        """Makes a record of a robot's clock; the time of day is asked now, not at arrival."""
        estimate = session.offset.add(message.asked_ns, message.robot_ns, self.clock())
        if estimate is not None:
            self._log_event("robot_clock", session=session.id, **estimate._asdict())

    def frame(self, session: Session, stream: SessionStream, message: Samples, now_ns: int) -> None:
        """One camera frame to decode; an older one that still waits is dropped for it."""
        if len(message.stamps) != STAMP_BYTES or not len(message.values):
            stream.ring.refuse(SHAPE, 1)
            return
        stamp_ns = int.from_bytes(message.stamps, "little", signed=True)
        jpeg = bytes(message.values)
        frame = EncodedFrame(session, session.episode, stream, stamp_ns, jpeg, now_ns)
        if not self._cameras.submit(frame):
            stream.ring.refuse("superseded", 1)

    def drain(self) -> int:
        """Put decoded frames into their rings, and tell what became of instructions.

        Returns:
            How many samples the rings accepted.
        """
        taken = 0
        for frame, values, decode_ns in self._cameras.drain() if self._cameras.done else ():
            ring, session = frame.stream.ring, frame.session
            self._counts.images_decoded += values is not None
            self._counts.image_decode_ns += decode_ns
            if not session.is_serving or session.episode != frame.episode:
                ring.refuse(CLOSED, 1)  # its robot left or began anew meanwhile
            elif values is None:
                ring.refuse("jpeg", 1)
            else:
                taken += ring.append(np.array((frame.stamp_ns,)), values, frame.rx_ns)
        if self.instructions is not None:
            self._apply_changes(self.instructions)
        return taken

    def each_second(self, now_ns: int) -> None:
        """Let robots tell anew how they fare, and ask what their clocks show when it is time to."""
        self._states.clear()
        if self._probe_ns is None or now_ns < self._probe_due_ns:
            return
        self._probe_due_ns = now_ns + self._probe_ns
        for session in self._table.all():
            self._send(session.peer, ClockQuestion(session.id, self.clock()))

    def close(self) -> None:
        self._cameras.close()

    def _request_instruction(self, session: Session) -> None:
        epoch, text = session.wish
        if self.instructions is not None and epoch:
            self.instructions.request(session.row, epoch, text)
            self._apply_changes(self.instructions)

    def _apply_changes(self, instructions: Instructions) -> None:
        for change in instructions.pop_changes():
            self._counts.instructions += not change.fault
            self._log_event("instruction", **change._asdict())
            session = self._table.by_id(change.session)
            if session is not None:
                answer = Conditioned(change.session, change.conditioning_epoch, change.fault)
                self._send(session.peer, answer)

    def _send_instruction(self, number: int, text: str) -> None:
        assert self.instructions is not None
        self._teach(number, text, self.instructions.confirm)


def _ignore(number: int, text: str, done: Callable[[int, str], None]) -> None:
    done(number, "there is no policy")


def _nowhere(name: str, **fields: object) -> None:
    pass
