"""Sessions: robots on rank 0. One endpoint, one session per robot, one row per session.

It decodes what robots say, puts samples into their row's rings and sends action chunks back. A ring
judges the samples and the policy the actions; here only who may speak, and for which row. No frame
that a stranger can send raises: each is counted with its reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ppstream.clock import NS_PER_MS
from ppstream.contract import objection, other_version
from ppstream.errors import ConfigError
from ppstream.messages import (
    DECODE_ERRORS,
    MAX_DETAILS,
    MAX_TEXT,
    WIRE_MAJOR,
    WIRE_MINOR,
    ActionChunk,
    Bye,
    Hello,
    Lost,
    Phase,
    Ping,
    Refused,
    Report,
    Reset,
    Samples,
    ToRobot,
    Welcome,
    encoder,
    from_robot,
    hello_version,
)
from ppstream.session_records import Session, SessionCounts, SessionStatistics
from ppstream.session_table import SILENCE_NS, SessionTable
from ppstream.sockets import MAX_DRAIN, Frame, bind_server

if TYPE_CHECKING:
    from ppstream.config import PipelineConfig
    from ppstream.ring import RowInput

LOST_PAUSE_NS: Final = 20 * NS_PER_MS  # between two answers to strangers: no amplifier of a flood
MAX_REPORTS: Final = 4096  # waiting for the log
SERVING: Final = frozenset({"ready", "degraded"})  # phases in which samples and actions flow
ENDING: Final = frozenset({"draining", "stopped"})  # phases in which nobody is admitted


class Sessions:
    """A source of samples and a taker of action chunks, on one socket.

    ``drain``, ``set_phase`` and ``close`` belong to the thread that owns the rows; ``emit`` may be
    called from any one thread. Rows are opened when the phase first is one of ``SERVING``, so that
    bring-up may use them before, and have to be free then. Robots are admitted from the start.

    Args:
        config: the run's configuration; ``service.endpoint`` must not be None.
        rows: one place per robot.

    Raises:
        ConfigError: the endpoint cannot be bound.
    """

    exhausted: Final = False

    def __init__(self, config: PipelineConfig, rows: Sequence[RowInput]) -> None:
        if config.service.endpoint is None:
            raise ConfigError(["service.endpoint: none is configured, so no robot can connect"])
        self._config = config
        self._table = SessionTable(rows)
        self._socket = bind_server(config.service.endpoint)
        self._phase = "starting"
        self._lost_due_ns = 0
        self._counts = SessionCounts()
        self.reports: deque[Report] = deque(maxlen=MAX_REPORTS)
        self.fds: tuple[int, ...] = (self._socket.fd,)

    @property
    def endpoint(self) -> str:
        """Where robots connect, with the port that the system chose for ``:0``."""
        return self._socket.endpoint

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when ``fds`` will not tell of frames to drain."""
        self._socket.wake = wake

    def next_due_ns(self) -> int | None:
        """When the next silent robot is given up."""
        return self._table.next_silent_ns()

    def drain(self, now_ns: int) -> int:
        """Handle the frames that are there, about a millisecond's worth at most.

        Returns:
            How many samples the rings accepted.
        """
        frames = self._socket.drain()
        if self._socket.malformed:
            self._counts.frames_dropped["malformed"] = self._socket.malformed
        taken = 0
        for frame in frames:
            taken += self._take(frame, now_ns)
        if len(frames) < MAX_DRAIN:  # else more is waiting: nobody can be called silent yet
            for session in self._table.silent(now_ns):
                self._close(session, "silent")
        return taken

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        """Send a chunk to the robot of ``row``; it is encoded before this returns.

        Returns:
            None, or why it was dropped, counted here, too: ``not_ready`` (outside a serving phase),
            ``no_session`` (the robot it answers has left), ``episode`` (it began a new one),
            ``undeliverable``.
        """
        session = self._table.at(row)
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
        for session in self._table.all():
            if phase in SERVING and not session.is_serving:
                session.serve()
            self._send(session.peer, Phase(phase))

    def statistics(self) -> SessionStatistics:
        return self._counts.statistics(len(self._table))

    def close(self) -> None:
        """Free the rows and release the endpoint; what was sent has 0.2 s to leave."""
        for session in self._table.all():
            self._close(session, "ended")
        self._socket.close()

    # ---- frames ------------------------------------------------------------------------------

    def _take(self, frame: Frame, now_ns: int) -> int:
        """Handle one frame; returns how many samples the rings accepted."""
        try:
            message = from_robot.decode(frame.body)
        except DECODE_ERRORS:
            self._drop("undecodable")
            self._answer_other_version(frame)
            return 0
        if isinstance(message, Hello):
            self._counts.frames_handled += 1
            self._hello(frame.peer, message, now_ns)
            return 0
        session = self._table.of(frame.peer)
        if session is None or session.id != message.session:
            self._drop("stranger")
            self._tell_lost(frame.peer, message.session, now_ns)
            return 0
        session.heard_ns = now_ns
        if isinstance(message, Samples):
            return self._samples(session, message, now_ns)
        self._counts.frames_handled += 1
        self._note(session, message)
        return 0

    def _note(self, session: Session, message: Report | Reset | Bye | Ping) -> None:
        if isinstance(message, Report):
            self._counts.reports_lost += len(self.reports) == MAX_REPORTS
            self.reports.append(message)
        elif isinstance(message, Reset):
            self._counts.resets += 1
            session.begin_episode()
        elif isinstance(message, Bye):
            self._close(session, "bye")

    def _samples(self, session: Session, message: Samples, now_ns: int) -> int:
        if message.stream >= len(session.streams):
            self._drop("stream")
            return 0
        self._counts.frames_handled += 1
        stream = session.streams[message.stream]
        n, rest = divmod(len(message.stamps), 8)
        if not session.is_serving:
            self._counts.samples_early += n
            return 0
        if rest or len(message.values) != n * stream.sample_bytes:
            stream.ring.refuse("shape", max(n, 1))
            return 0
        stamps = np.frombuffer(message.stamps, np.int64)
        values = np.frombuffer(message.values, stream.dtype).reshape(n, stream.dim)
        return stream.ring.append(stamps, values, now_ns)

    def _answer_other_version(self, frame: Frame) -> None:
        """A Hello of another major version is told so, whatever else is in it."""
        try:
            version = hello_version.decode(frame.body)
        except DECODE_ERRORS:
            return
        if version.major != WIRE_MAJOR:
            line = other_version(version.major, version.minor)
            self._refuse(frame.peer, "version", [line])

    # ---- sessions ----------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: Hello, now_ns: int) -> None:
        known = self._table.of(peer)
        if known is not None and known.hello == hello:
            known.heard_ns = now_ns
            self._welcome(known)  # it asked again before it heard the answer
            return
        reason, details = objection(self._config, hello)
        if self._phase in ENDING:
            reason, details = "draining", [f"the run is {self._phase}"]
        if reason is None:
            for old in self._table.replaced_by(peer, hello):
                self._close(old, "resumed")
            reason, details = self._table.objection(hello)
        if reason is not None:
            self._refuse(peer, reason, details)
            return
        session = self._table.open(peer, hello, now_ns)
        self._counts.opened += 1
        if self._phase in SERVING:
            session.serve()
        self._welcome(session)

    def _close(self, session: Session, reason: str) -> None:
        self._counts.closed[reason] += 1
        self._table.close(session)

    # ---- answers -----------------------------------------------------------------------------

    def _welcome(self, session: Session) -> None:
        actions = self._config.actions
        self._send(
            session.peer,
            Welcome(
                major=WIRE_MAJOR,
                minor=WIRE_MINOR,
                session=session.id,
                phase=self._phase,
                silence_ns=SILENCE_NS,
                lease_ns=round(actions.lease_ms * NS_PER_MS),
                horizon=actions.horizon,
                dt_ns=round(actions.dt_ms * NS_PER_MS),
                low=actions.low,
                high=actions.high,
            ),
        )

    def _refuse(self, peer: bytes, reason: str, details: list[str]) -> None:
        self._counts.refused[reason] += 1
        shown = tuple(line[:MAX_TEXT] for line in details[:MAX_DETAILS])
        self._send(peer, Refused(reason, shown))

    def _tell_lost(self, peer: bytes, session: int, now_ns: int) -> None:
        if now_ns >= self._lost_due_ns:
            self._lost_due_ns = now_ns + LOST_PAUSE_NS
            self._send(peer, Lost(session))

    def _send(self, peer: bytes, message: ToRobot) -> None:
        self._socket.send(encoder.encode(message), peer)

    def _drop(self, reason: str) -> None:
        self._counts.frames_dropped[reason] += 1
