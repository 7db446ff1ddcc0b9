"""RobotSession: what a robot must say to hold a session, and what the server said about it.

A state machine without a socket or a clock: ``due`` gives the next message, ``take`` an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.durations import Durations
from ppstream.core.errors import MAX_TEXT, SpecError, printable
from ppstream.core.phases import SERVING
from ppstream.core.quantiles import Quantiles
from ppstream.robot.sample_rates import SampleRates
from ppstream.wire.fields import MAX_INSTRUCTION, MAX_NAME, WIRE_MAJOR, WIRE_MINOR, encoder
from ppstream.wire.robot_messages import (
    ActionChunk,
    Conditioned,
    Hello,
    Instruct,
    Lost,
    Phase,
    Ping,
    Refused,
    StreamDeclaration,
    Welcome,
    from_robot,
)

logger = logging.getLogger("ppstream")

RETRY_NS: Final = (50 * NS_PER_MS, 2 * NS_PER_S)  # between Hellos: at first, and at most
STUCK_NS: Final = NS_PER_S  # unable to send for this long: the connection is gone
PINGS_PER_SILENCE: Final = 4  # keep well inside the server's limit
DETAILS_SHOWN: Final = 4  # of a refusal, in the log
CONNECTING: Final = "connecting"
HOPELESS: Final = frozenset({"version", "contract"})  # asking again does not help
UNSENDABLE: Final = (msgspec.ValidationError, UnicodeEncodeError)  # too long, or not UTF-8


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """State of a client that reconnects.

    ``attempts``: Hellos since it lost its session; 0 while it has one. ``pause_ns``: the present
    pause between two of them. ``refusal``: the last answer, if it was one. ``outage``: from
    noticing a loss to the new session, over all losses.
    """

    attempts: int
    pause_ns: int
    refusal: str | None
    outage: Quantiles


class RobotSession:
    """Identity of this robot, and the session it holds (``session`` 0: none).

    The phase survives the loss of a session: what a robot may still execute is for the lease of its
    actions to say.

    Raises:
        SpecError: a name is empty, too long for the wire or not UTF-8.
    """

    def __init__(
        self,
        robot: str,
        streams: tuple[StreamDeclaration, ...],
        actions: tuple[str, ...],
        *,
        real_time: bool = True,
        on_open: Callable[[Welcome], None] | None = None,
    ) -> None:
        self.conditioned: Conditioned | None = None  # what the server last said of an instruction
        self._hello = Hello(WIRE_MAJOR, WIRE_MINOR, robot, (), (), real_time=real_time)
        self.declare(streams, actions)
        self.real_time = real_time
        self.session = 0
        self.session_epoch = 0
        self.phase = CONNECTING
        self.degraded: tuple[str, ...] = ()  # why, of each stream of this robot that it is for
        self.welcome: Welcome | None = None
        self.refused: Refused | None = None
        self.rates = SampleRates({})  # of observations that are asked for
        self.opened = 0
        self._on_open = on_open
        self._attempts = 0  # since it holds no session
        self._reaches = True  # the last Hello could be handed over
        self._lost_ns: int | None = None
        self._outages = Durations()
        self._resumes = 0
        self._retry_ns = self._refused_ns = RETRY_NS[0]  # behind no answer, and behind a refusal
        self._hello_ns = 0  # when the next Hello is due
        self._pause_ns = RETRY_NS[0]  # before that
        self._spoke_ns = 0  # when something was last sent in this session
        self._stuck_ns = 0  # since when nothing could be sent; 0: it could
        self._told = set[str]()  # refusals that were logged since a session was held
        self._is_told = True  # the server knows the newest instruction
        self._tell_ns = 0  # else: when it is told
        self._ping_ns = NS_PER_S

    def declare(self, streams: tuple[StreamDeclaration, ...], actions: tuple[str, ...]) -> None:
        """From the next Hello on these are the robot's. Raises SpecError as the constructor."""
        hello = msgspec.structs.replace(self._hello, streams=streams, actions=actions)
        try:
            from_robot.decode(encoder.encode(hello))
        except UNSENDABLE as error:
            raise SpecError(
                f"{hello} cannot be sent: {error}; names have 1 to {MAX_NAME} characters"
            ) from error
        self._hello = hello

    @property
    def executable(self) -> bool:
        return self.phase in SERVING

    @property
    def phase_text(self) -> str:
        """The phase, and why, where streams of this robot degrade the run."""
        if not self.degraded:
            return self.phase
        first, *others = self.degraded
        more = f"; and {len(others)} more" if others else ""
        return f"{self.phase} ({printable(first, MAX_TEXT)}{more})"

    @property
    def run_text(self) -> str:
        """As ``run_text``, of this session."""
        return run_text(self.phase_text, is_reached=self.session != 0 and not self._stuck_ns)

    @property
    def is_hopeless(self) -> bool:
        """The last answer was a refusal that no waiting will change."""
        return self.refused is not None and self.refused.reason in HOPELESS

    @property
    def is_unheard(self) -> bool:
        """There was a session, and nobody takes the Hello for the next one."""
        return not (self.session or self._reaches) and self.opened > 0

    def reconnecting(self) -> Reconnecting:
        """Describes how a lost session is got back, and how long it took."""
        refusal = None if self.session or self.refused is None else self.refused.reason
        return Reconnecting(self._attempts, self._pause_ns, refusal, self._outages.quantiles())

    @property
    def due_ns(self) -> int:
        """When the next message falls due, unless samples are sent before."""
        if not self.session:
            return self._hello_ns
        return self._spoke_ns + self._ping_ns if self._is_told else self._tell_ns

    def due(self, now_ns: int) -> Hello | Instruct | Ping | None:
        """The message to send now, if any."""
        if now_ns < self.due_ns:
            return None
        hello = self._hello
        if not self.session:
            return msgspec.structs.replace(hello, resumes=self._resumes)
        if not self._is_told:
            return Instruct(self.session, hello.conditioning_epoch, hello.instruction)
        return Ping(self.session)

    def was_sent(self, now_ns: int, *, sent: bool) -> None:
        """Notes that what ``due`` gave was handed over, or that there is no connection to take it.

        A connection that broke took its session along, since the server knows the next one by
        another address; but a full one looks the same, so it is given some time.
        """
        if self.session and sent:
            self._is_told = True
            self.on_sent(now_ns)
            return
        if self.session:
            self._stuck_ns = self._stuck_ns or now_ns
            self._tell_ns = now_ns + RETRY_NS[0]
            self._spoke_ns = self._tell_ns - self._ping_ns
            if now_ns - self._stuck_ns >= STUCK_NS:
                self.on_lost(now_ns)
            return
        self._attempts += 1
        self._reaches = sent
        self._pause_ns = self._retry_ns
        self._hello_ns = now_ns + self._pause_ns
        self._retry_ns = min(2 * self._retry_ns, RETRY_NS[1]) if sent else RETRY_NS[0]

    def on_sent(self, now_ns: int) -> None:
        """Something was sent, from any thread: it says as much as a ping."""
        self._spoke_ns = now_ns
        self._stuck_ns = 0

    def doubt(self) -> None:
        """Something could not be sent, from any thread: ask at once whether anybody is there."""
        if not self._stuck_ns:
            self._spoke_ns = -self._ping_ns

    def instruct(self, text: str) -> Instruct:
        """From now on ``text`` is the instruction, in this and later sessions.

        What is returned must be sent at once, or the session given up.
        """
        epoch = self._hello.conditioning_epoch + 1
        message = Instruct(self.session, epoch, text)
        try:
            from_robot.decode(encoder.encode(message))
        except UNSENDABLE as error:
            reason = f"{len(text)} characters, want at most {MAX_INSTRUCTION}"
            if len(text) <= MAX_INSTRUCTION:
                reason = f"a character that is none: {error}"
            raise SpecError(f"an instruction of {reason}") from error
        self._hello = msgspec.structs.replace(
            self._hello, instruction=text, conditioning_epoch=epoch
        )
        self._is_told = True
        return message

    def on_answer(
        self, answer: Welcome | Refused | Phase | Lost | Conditioned, now_ns: int
    ) -> bool:
        """Take what the server says; True: a new session is open."""
        if isinstance(answer, Welcome):
            return self._open(answer, now_ns)
        if isinstance(answer, Phase):
            self._change_phase(answer)
        elif isinstance(answer, Refused):
            self.refused = answer
            if self.opened and answer.reason not in self._told:  # else who connects is told
                self._told.add(answer.reason)
                why = "; ".join((answer.reason, *answer.details[:DETAILS_SHOWN]))
                logger.warning("no new session: %s", printable(why, MAX_TEXT))
            if (due_ns := now_ns + self._refused_ns) > self._hello_ns:
                self._hello_ns, self._pause_ns = due_ns, self._refused_ns
            self._refused_ns = min(2 * self._refused_ns, RETRY_NS[1])
        elif isinstance(answer, Conditioned):
            self.conditioned = answer
        elif answer.session == self.session:
            self.on_lost(now_ns)
        return False

    def on_lost(self, now_ns: int) -> None:
        """The session is gone: ask for a new one at once."""
        if self.session:
            logger.info("session %x is lost: asking for a new one", self.session)
            self._resumes, self.session = self.session, 0
            self._lost_ns = now_ns
            self._retry_ns = self._refused_ns = RETRY_NS[0]
            self._hello_ns = now_ns

    def moved(self, now_ns: int) -> None:
        """Another server is to be asked from now on, at once.

        Pauses behind refusals go on growing: the others may be full, too.
        """
        self.refused = None
        self._retry_ns = RETRY_NS[0]
        self._hello_ns = now_ns

    def reject(self, chunk: ActionChunk) -> str | None:
        """Returns the reason why a chunk is not for this robot as it is now, or None.

        ``session``: of another one, or none is held; ``episode``: from before a reset; ``lease``:
        it claims more time than the server granted when the session opened.
        """
        if self.welcome is None or not self.session or chunk.session != self.session:
            return "session"
        if chunk.session_epoch != self.session_epoch:
            return "episode"
        return "lease" if chunk.expires_ns - chunk.window_end_ns > self.welcome.lease_ns else None

    def _change_phase(self, told: Phase) -> None:
        self.phase = told.phase
        for line in told.details:
            if line not in self.degraded:
                logger.warning("the run is degraded: %s", printable(line, MAX_TEXT))
        self.degraded = told.details

    def _open(self, welcome: Welcome, now_ns: int) -> bool:
        self.phase = welcome.phase
        if welcome.session == self.session:  # the answer to a Hello that was sent twice
            return False
        self.session, self.session_epoch = welcome.session, 0
        self.welcome, self.refused = welcome, None
        self.degraded = ()
        self._told.clear()
        names = (stream.name for stream in self._hello.streams)
        self.rates = SampleRates(dict(zip(names, welcome.samples_per_s, strict=False)))
        self.conditioned = None
        self.opened += 1
        logger.info("session %x is open, the run is %s", self.session, self.phase)
        self._retry_ns = self._refused_ns = RETRY_NS[0]
        self._reaches = True
        self._ping_ns = welcome.silence_ns // PINGS_PER_SILENCE
        self._attempts = 0
        if self._lost_ns is not None:
            self._outages.add(now_ns - self._lost_ns)
            self._lost_ns = None
        self.on_sent(now_ns)
        # The Hello that was answered may be older than the instruction; who knows it ignores it.
        self._is_told, self._tell_ns = not self._hello.conditioning_epoch, now_ns
        if self._on_open is not None:
            self._on_open(welcome)
        return True


def run_text(phase: str, *, is_reached: bool) -> str:
    """Words for a phase, which is an old one where nothing can be sent any more."""
    if is_reached:
        return f"the run is {phase}"
    return f"the run was {phase} when it was last heard, and cannot be reached now"
