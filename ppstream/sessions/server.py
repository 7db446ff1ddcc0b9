"""Sessions: robots on rank 0. One endpoint, one session per robot, one row per session.

It decodes what robots say, puts samples into their row's rings and sends action chunks back. A ring
judges the samples and the policy the actions; here only who may speak, how much, and for which row.
No frame that a stranger can send raises: each is counted with its reason.

Counts, reports and the room for the next message come behind what must leave, as everywhere
(``pipeline/loop.py``); what one ledger balances changes together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ppstream import native
from ppstream.core.clock import NS_PER_MS, NS_PER_S, Clock
from ppstream.core.clock import now_ns as clock_ns
from ppstream.core.errors import MAX_TEXT, ConfigError, ProtocolError
from ppstream.core.phases import ENDING, SERVING
from ppstream.ingest.sample_ledger import RATE
from ppstream.observe.statistics import SessionStatistics
from ppstream.sessions.contract import (
    description,
    foreign_version,
    refusal,
    rejection_reason,
    version_problem,
    welcome,
)
from ppstream.sessions.refused_connections import RefusedConnections
from ppstream.sessions.requests import SessionRequests
from ppstream.sessions.session import RawFrame, Session, SessionCounts, SessionStream
from ppstream.sessions.table import (
    DRAIN_FRAMES,
    DRAIN_NS,
    LONE_FRAMES,
    SILENCE_NS,
    STRANGER_FRAMES_PER_S,
    SessionTable,
    frame_bytes_max,
)
from ppstream.sessions.waiting import WaitingList
from ppstream.wire.fields import DECODE_ERRORS, encoder
from ppstream.wire.keys import server_keys
from ppstream.wire.message_memory import LargeMessage
from ppstream.wire.message_socket import Frame
from ppstream.wire.robot_messages import (
    NO_BYTES,
    ActionChunk,
    Bye,
    Describe,
    Hello,
    Lost,
    Phase,
    Samples,
    ToRobot,
    from_robot,
    is_change,
)
from ppstream.wire.transports import bind_server

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.rows import RowInput
    from ppstream.native.core import Line
    from ppstream.wire.message_socket import PacketSource

LOOK_NS: Final = 100 * NS_PER_MS  # who is alone is read in the usual way so often
LOST_PAUSE_NS: Final = 20 * NS_PER_MS  # between two answers to strangers: no amplifier of a flood


class _Alone(NamedTuple):
    """A robot with the only row: the core takes its samples, some packets in one call."""

    session: Session
    source: PacketSource
    lines: tuple[Line, ...]  # by stream


class Sessions:
    """A source of samples and a taker of action chunks, on one socket.

    ``drain``, ``set_phase`` and ``close`` belong to the thread that owns the rows; ``emit`` may be
    called from any one thread. Rows are opened when the phase first is one of ``SERVING``, so that
    bring-up may use them before, and have to be free then. Robots are admitted from the start. A
    row that becomes free goes to the robot that has waited longest; a robot that resumes its
    session keeps the row.

    Args:
        config: the run's configuration; ``service.endpoint`` must not be None.
        rows: one place per robot.
        clock: tells when a drain has lasted long enough.

    Raises:
        ConfigError: the endpoint cannot be bound, or a key file cannot be used.
    """

    exhausted: Final = False

    def __init__(
        self, config: PipelineConfig, rows: Sequence[RowInput], clock: Clock = clock_ns
    ) -> None:
        if config.service.endpoint is None:
            raise ConfigError(["service.endpoint: none is configured, so no robot can connect"])
        self._config = config
        self._clock = clock
        self._table = SessionTable(rows, config)
        self._waiting = WaitingList()
        keys = server_keys(config.service.secret_key, config.service.allowed_keys)
        self._socket = bind_server(
            config.service.endpoint, keys, frame_bytes_max(config), config.service.allowed_uids
        )
        self._phase = "starting"
        self._description = encoder.encode(description(config))  # until the phase changes
        self._lost_due_ns = 0
        self._second_ns = 0  # when the next one begins
        self._silent_ns = 0  # nobody can be silent for too long before
        self._patience_ns = 0  # until then whoever seems silent may only be unread; 0: nobody does
        self._strangers_left = STRANGER_FRAMES_PER_S
        self._counts = SessionCounts()
        self._refused_connections = RefusedConnections(config.service)
        self._alone: _Alone | None = None
        self._look_ns = 0  # when all connections are looked at, not that of ``_alone`` alone
        self.requests = SessionRequests(config, self._table, self._counts, self._send, self._wake)
        self.reports = self.requests.reports  # for the log
        self.fds: tuple[int, ...] = (self._socket.fd,)

    @property
    def endpoint(self) -> str:
        """Address that robots connect to, with the port that the system chose for ``:0``."""
        return self._socket.endpoint

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when ``fds`` will not tell of frames to drain."""
        self._socket.wake = wake

    def next_due_ns(self) -> int | None:
        """When the next silent robot is given up."""
        return self._table.next_silent_ns()

    def drain(self, now_ns: int) -> int:
        """Handle the frames that are there, for ``DRAIN_NS`` and one more reading at most.

        The socket takes from all connections in turn, so a robot is heard beside one that floods.

        Returns:
            How many samples the rings accepted.
        """
        if now_ns >= self._second_ns:
            self._begin_second(now_ns)
        taken = 0
        if self._alone is not None and now_ns < self._look_ns:
            taken, is_over = self._take_from(self._alone, now_ns)
            if is_over:
                return taken
        self._look_ns = now_ns + LOOK_NS
        begun_ns, rx_ns = self._clock(), now_ns
        while frames := self._socket.drain(DRAIN_FRAMES):
            taken += sum(self._handle(frame, rx_ns) for frame in frames)
            if not (self._socket.has_more or _took_long(frames)):
                break
            rx_ns = now_ns + self._clock() - begun_ns
            if rx_ns >= now_ns + DRAIN_NS:
                break
        taken += self.requests.drain()
        if self._socket.malformed:
            self._counts.frames_dropped["malformed"] = self._socket.malformed
        if now_ns >= self._silent_ns:
            self._close_silent(now_ns)
        return taken

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        """Send a chunk to the robot of ``row``; it is encoded before this returns.

        Returns:
            None, or why it was dropped, counted here, too: ``not_ready`` (outside a serving phase),
            ``no_session`` (the robot it answers has left), ``episode`` (it began a new one),
            ``undeliverable``.
        """
        session = self._table.by_row(row)
        reason = "undeliverable"
        if self._phase not in SERVING:
            reason = "not_ready"
        elif session is None or session.id != chunk.session:
            reason = "no_session"
        elif session.row.session_epoch != chunk.session_epoch:
            reason = "episode"
        elif self._socket.send(encoder.encode(chunk), session.peer):
            self._counts.chunks_sent += 1
            return None
        self._counts.chunks_dropped[reason] += 1
        return reason

    def set_phase(self, phase: str) -> None:
        """Tell all robots; the first serving phase opens the rows of those that are here."""
        self._phase = phase
        self._description = encoder.encode(description(self._config, phase))
        for session in self._table.all():
            if phase in SERVING and not session.is_serving:
                self._serve(session)
            self._send_phase(session)

    def set_degraded(self, row: int, stream: str, why: str) -> None:
        """Tell the robot of ``row`` why a stream of it degrades the run; empty: it does no more."""
        session = self._table.by_row(row)
        if session is None:
            return
        session.degraded.pop(stream, None)
        if why:
            session.degraded[stream] = why[:MAX_TEXT]
        if self._phase == "degraded":  # else the phase comes behind
            self._send_phase(session)

    def statistics(self) -> SessionStatistics:
        return self._counts.statistics(len(self._table))

    def close(self) -> None:
        """Free the rows and release the endpoint; what was sent has 0.2 s to leave."""
        for session in self._table.all():
            self._close(session, "ended")
        self.requests.close()
        self._socket.close()

    # ---- frames ------------------------------------------------------------------------------

    def _take_from(self, alone: _Alone, now_ns: int) -> tuple[int, bool]:
        """Take what a lone robot has sent, up to some frames of which one is no plain sample.

        Nothing limits how much that robot may send (``table.py``); behind ``DRAIN_NS`` it waits.

        Returns:
            How many samples; True: something was there, and woke this rank as far as is known.
        """
        session, source, lines = alone
        taken, is_over = 0, False
        begun_ns, rx_ns = self._clock(), now_ns
        while rx_ns < now_ns + DRAIN_NS:
            more, frames, others = native.receive(source.fileno(), lines, rx_ns, LONE_FRAMES)
            taken += more
            if frames:
                session.heard_ns = rx_ns
                self._counts.frames_handled += frames
            is_over = is_over or bool(frames or others)
            if not others:
                break
            found = source.messages(others)
            taken += sum(self._handle(frame, rx_ns) for frame in found)
            if self._alone is not alone or not _took_long(found):
                break
            rx_ns = now_ns + self._clock() - begun_ns
        return taken, is_over

    def _find_alone(self, session: Session) -> _Alone | None:
        """Returns the robot that has the only row if it sends packets, and no encoded stream."""
        source = self._socket.packets_of(session.peer)
        is_usual = self._config.batch.rows == 1 and not self._config.policy.instructions
        if not native.is_used or source is None or not is_usual:
            return None
        if any(stream.is_encoded for stream in session.streams):
            return None
        empty = memoryview(b"")
        lines = []
        for index, stream in enumerate(session.streams):
            whole = encoder.encode(Samples(session.id, index, empty, empty))
            lines.append(stream.ring.line(whole[: -2 * len(NO_BYTES)]))
        return _Alone(session, source, tuple(lines))

    def _handle(self, frame: Frame, now_ns: int) -> int:
        """Handle one frame; returns how many samples the rings accepted."""
        session = self._table.by_peer(frame.peer)
        if session is None:
            self._strangers_left = left = self._strangers_left - 1
        else:
            session.frames_left = left = session.frames_left - 1
        if left < 0 and (session is None or not self._may_change(session, frame, now_ns)):
            self._drop("rate")  # before it is read: a flood costs others no more than this
            return 0
        try:
            if (
                type(frame.message) is LargeMessage
                and session is not None
                and (found := session.frame_in(frame.message))
            ):
                return self._frame(session, found, frame.message, now_ns)
            body = frame.body
            message = from_robot.decode(body)
        except ProtocolError:  # nothing to read, or not all of it
            self._drop("undecodable")
            return 0
        except DECODE_ERRORS:
            self._drop("undecodable")
            if line := foreign_version(body):
                self._refuse(frame.peer, "version", [line])
            return 0
        if type(message) is Hello:  # a tenth of the time of isinstance, which samples pay, too
            self._counts.frames_handled += 1
            self._hello(frame.peer, message, now_ns)
            return 0
        if type(message) is Describe:
            self._counts.frames_handled += 1
            self._describe(frame.peer, message)
            return 0
        if session is None or session.id != message.session:
            self._drop("stranger")
            self._send_lost(frame.peer, message.session, now_ns)
            return 0
        session.heard_ns = now_ns
        if isinstance(message, Samples):
            if message.stream >= len(session.streams):
                self._drop("stream")
                return 0
            taken = self._samples(session, message, now_ns)
            self._counts.frames_handled += 1
            return taken
        self._counts.frames_handled += 1
        if isinstance(message, Bye):
            self._close(session, "bye")
            self._admit_waiting(now_ns)
        else:
            self.requests.note(session, message)
        return 0

    def _may_change(self, session: Session, frame: Frame, now_ns: int) -> bool:
        """True when a frame beyond the limit must be read: its sender counts on a reset, say.

        Such frames have a limit of their own. Beyond that the session ends, which its robot hears:
        dropped without a word, the two would not agree on the episode again.
        """
        if type(frame.message) is LargeMessage or not is_change(frame.body):
            return False
        session.changes_left -= 1
        if session.changes_left >= 0:
            return True
        self._close(session, "rate")
        self._send(session.peer, Lost(session.id))
        self._admit_waiting(now_ns)
        return False

    def _samples(self, session: Session, message: Samples, now_ns: int) -> int:
        stream = session.streams[message.stream]
        n, rest = divmod(len(message.stamps), 8)
        if not self._may_send(session, stream, n):
            return 0
        if rest or len(message.values) != n * stream.sample_bytes:
            if stream.is_encoded:
                self.requests.frame(session, stream, message, now_ns)
            else:
                stream.ring.refuse("shape", max(n, 1))
            return 0
        return stream.ring.append_message(message.stamps, message.values, now_ns)

    def _frame(self, session: Session, frame: RawFrame, message: LargeMessage, now_ns: int) -> int:
        """One frame of a camera, which is read into its place in the ring."""
        session.heard_ns = now_ns
        stream, stamp, offset = frame
        taken = 0
        if self._may_send(session, stream, 1):
            taken = stream.ring.append_frame(stamp, message, offset, now_ns)
        self._counts.frames_handled += 1
        return taken

    def _may_send(self, session: Session, stream: SessionStream, n: int) -> bool:
        """False when ``n`` samples come too early or are too many, which is counted."""
        if not session.is_serving:
            self._counts.samples_early += n
            return False
        if n > stream.samples_left:
            stream.ring.refuse(RATE, n)
            return False
        stream.samples_left -= n
        return True

    # ---- sessions ----------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: Hello, now_ns: int) -> None:
        known = self._table.by_peer(peer)
        if known is not None and known.hello == hello:
            known.heard_ns = now_ns
            self._welcome(known)  # it asked again before it heard the answer
            return
        reason, details = rejection_reason(self._config, hello)
        if reason is None and (problem := self.requests.problem(hello)):
            reason, details = "contract", [problem]
        if self._phase in ENDING:
            reason, details = "draining", [f"the run is {self._phase}"]
        if reason is None:
            for old in self._table.replaced_by(peer, hello):
                self._close(old, "resumed")
            reason, details = self._table.rejection_reason(hello)
            if reason is not None and (ahead := self._waiting.add(peer, hello, now_ns)):
                details[-1] += f"; robots that wait before this one: {ahead}"
        if reason is None:
            self._admit(peer, hello, now_ns)
        else:
            self._refuse(peer, reason, details)
        self._admit_waiting(now_ns)  # the row of a session that this Hello has ended

    def _admit(self, peer: bytes, hello: Hello, now_ns: int) -> None:
        self._waiting.remove(peer, hello.robot)
        session = self._table.open(peer, hello, now_ns)
        self._counts.opened += 1
        if not self._welcome(session):
            self._close(session, "unreachable")  # it has gone while it waited
        elif self._phase in SERVING:
            self._serve(session)

    def _admit_waiting(self, now_ns: int) -> None:
        """Give rows that are free to the robots that have waited longest for one."""
        if self._phase in ENDING:
            return
        while not self._table.is_full and (robot := self._waiting.pop(now_ns, self._table.holds)):
            self._admit(robot.peer, robot.hello, now_ns)

    def _describe(self, peer: bytes, question: Describe) -> None:
        """Tells the contract to whoever may connect, in every phase; nothing depends on it."""
        if line := version_problem(question.major, question.minor):
            self._refuse(peer, "version", [line])
        else:
            self._socket.send(self._description, peer)

    def _serve(self, session: Session) -> None:
        session.serve()
        self.requests.begin(session)
        self._alone = self._find_alone(session)

    def _begin_second(self, now_ns: int) -> None:
        """Does what is due about once a second, not for each frame."""
        self._second_ns = now_ns + NS_PER_S
        self._strangers_left = STRANGER_FRAMES_PER_S
        self._table.refill()
        self._counts.connections_refused = refused = self._socket.refused()
        self._refused_connections.note(refused, now_ns)
        self.requests.each_second(now_ns)

    def _close_silent(self, now_ns: int) -> None:
        """Close who has been silent for too long; for twice that where much is still to be read.

        All are read in turn, so that time is enough for each, also behind a pause of this rank.
        """
        silent_ns = now_ns
        if self._socket.has_more:
            silent_ns -= SILENCE_NS
            self._patience_ns = self._patience_ns or now_ns + SILENCE_NS
            if now_ns < self._patience_ns:
                return
        for session in self._table.silent(silent_ns):
            self._close(session, "silent")
        self._admit_waiting(now_ns)
        due_ns = self._table.next_silent_ns()
        self._silent_ns = now_ns + SILENCE_NS if due_ns is None else due_ns
        if self._silent_ns > now_ns:
            self._patience_ns = 0

    def _close(self, session: Session, reason: str) -> None:
        self._counts.closed[reason] += 1
        self._alone = None
        self._table.close(session)
        self.requests.end(session, reason)

    # ---- answers -----------------------------------------------------------------------------

    def _welcome(self, session: Session) -> bool:
        """Tells a robot of its session; False: nobody is there any more."""
        told = welcome(self._config, session.hello, session.id, self._phase, SILENCE_NS)
        return self._send(session.peer, told)

    def _send_phase(self, session: Session) -> None:
        self._send(session.peer, Phase(self._phase, tuple(session.degraded.values())))

    def _refuse(self, peer: bytes, reason: str, details: list[str]) -> None:
        self._counts.refused[reason] += 1
        self._send(peer, refusal(reason, details))

    def _send_lost(self, peer: bytes, session: int, now_ns: int) -> None:
        if now_ns >= self._lost_due_ns:
            self._lost_due_ns = now_ns + LOST_PAUSE_NS
            self._send(peer, Lost(session))

    def _send(self, peer: bytes, message: ToRobot) -> bool:
        return self._socket.send(encoder.encode(message), peer)

    def _wake(self) -> None:
        self._socket.wake()

    def _drop(self, reason: str) -> None:
        self._counts.frames_dropped[reason] += 1


def _took_long(frames: Sequence[Frame]) -> bool:
    """True when more may have come while these were read: to look costs less than a wait."""
    return any(type(frame.message) is LargeMessage for frame in frames)
