"""RobotClient: the robot's end of a session. Samples out, action chunks in, no torch.

It decides nothing about motion: ``timeline`` says what is due, ``control_loop.py`` executes it.
Sending never waits; samples that nobody can take now are counted and forgotten, not queued.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from ppstream.clock import NS_PER_MS, Clock, now_ns
from ppstream.durations import Durations, Quantiles
from ppstream.errors import PpstreamError
from ppstream.messages import ActionChunk, Report, Reset, Samples
from ppstream.outbox import Batch, Outbox, Stream, Values
from ppstream.robot_link import RobotLink
from ppstream.robot_session import RobotSession
from ppstream.timeline import ActionTimeline, TimelineStatistics

MAX_REPORTS: Final = 256  # waiting to be sent


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """Counts since the start; ``age`` is observation to action, in the robot's clock.

    ``unsent``: samples pushed while nobody could take them. ``dropped``: chunks that were not for
    this robot as it was; the timeline counts the rest. ``undecodable``: frames.
    """

    session: int
    phase: str
    sessions_opened: int
    sent: int
    unsent: int
    undecodable: int
    dropped: dict[str, int]
    timeline: TimelineStatistics
    age: Quantiles


class RobotClient:
    """One robot: declares its streams and actions, pushes samples, receives action chunks.

    All methods may be called from any thread; ``close`` ends it for good.

    Args:
        endpoint: where rank 0 listens, ``tcp://host:port`` or ``ipc://path``.
        robot: a name for people and logs.
        streams: ``(name, dim)`` or ``(name, dim, dtype)``, all that the pipeline has configured.
        actions: action names in the order of a chunk's columns.
        batch_ms: gather samples this long before they are sent; 0 sends each push at once, from
            the caller's thread.
        on_chunk: called by the receiving thread with each chunk it merged; must return quickly.
        clock: the clock that stamps the samples; leases and ages are judged by it alone.
        real_time: False when a recording is replayed at another speed than its own.

    Raises:
        SpecError: streams or names cannot be declared like this.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        robot: str,
        streams: Sequence[Stream],
        actions: Sequence[str],
        batch_ms: float = 0.0,
        on_chunk: Callable[[ActionChunk], None] | None = None,
        clock: Clock = now_ns,
        real_time: bool = True,
    ) -> None:
        self.timeline = ActionTimeline(len(actions))
        self.clock = clock
        self._endpoint = endpoint
        self._outbox = Outbox(streams, round(batch_ms * NS_PER_MS))
        self._session = RobotSession(
            robot, self._outbox.declarations, tuple(actions), real_time=real_time
        )
        self._on_chunk = on_chunk
        self._link: RobotLink | None = None
        self._counting = threading.Lock()
        self._sent = 0
        self._unsent = 0
        self._dropped: Counter[str] = Counter()
        self._ages = Durations()
        self._reports: deque[Report] = deque(maxlen=MAX_REPORTS)

    def connect(self, timeout_s: float = 10.0) -> None:
        """Open a session. From then on the client reconnects by itself, as a new session.

        After an error it goes on trying in the background until it is closed; ask again to wait
        again.

        Raises:
            HandshakeError: the server refuses this robot for good; the message is the difference.
            PeerLostError: no session in time; the message has the last refusal.
            ConfigError: the endpoint is malformed.
        """
        if self._link is None:
            self._link = RobotLink(self._endpoint, self._session, self._merge, self._turn)
            self._link.start()
        self._link.wait_open(timeout_s)

    @property
    def connected(self) -> bool:
        """Whether a session is open, as far as this side knows."""
        return self._session.session != 0

    @property
    def phase(self) -> str:
        """The run's phase as last heard; ``connecting`` before the first session."""
        return self._session.phase

    @property
    def ready(self) -> bool:
        """Whether the phase permits to execute actions; the lease of each must permit it, too."""
        return self._session.executable

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for a phase in which actions may be executed; False when it did not come in time.

        Raises:
            PpstreamError: ``connect`` was not called, or the receiving thread ended by an error.
        """
        return self._connected_link().wait_executable(timeout_s)

    def push(self, stream: str, stamp_ns: int | Values, values: Any) -> bool:
        """Send one sample ``[dim]``, or several ``[n, dim]`` with stamps ``[n]``; never waits.

        Values are copied. False: nobody can take samples now, and those due were counted unsent.

        Raises:
            SpecError: the samples are not what was declared for ``stream``.
            PpstreamError: ``connect`` was not called.
        """
        link = self._connected_link()
        now = now_ns()
        begins = self._outbox.due_ns is None
        batches = self._outbox.add(stream, stamp_ns, values, now)
        if batches:
            return self._send_batches(link, batches, now)
        if begins:
            link.wake()  # its thread sends this batch if no push follows in time
        return self.connected

    def executed(self, chunk: ActionChunk, at_ns: int) -> bool:
        """Tell that the first action of ``chunk`` was executed at ``at_ns``, the robot's clock.

        For those who play chunks from ``on_chunk`` themselves; ``timeline.action_at`` counts by
        itself. False when a newer chunk has replaced it.
        """
        return self.timeline.mark_executed(chunk, at_ns)

    def reset(self) -> None:
        """Begin a new episode: what is owed to the old one is dropped, here and on rank 0."""
        link = self._connected_link()
        self._flush(link)
        with link.changed:
            self.timeline.clear()
            self._session.session_epoch += 1
            if self.connected and not link.send(Reset(self._session.session)):
                self._session.lose(now_ns())  # rank 0 did not hear it: only a new session is safe
        link.wake()

    def statistics(self) -> ClientStatistics:
        self._collect_outcomes()
        session = self._session
        with self._counting:
            return ClientStatistics(
                session=session.session,
                phase=session.phase,
                sessions_opened=session.opened,
                sent=self._sent,
                unsent=self._unsent,
                undecodable=self._link.undecodable if self._link else 0,
                dropped=dict(self._dropped),
                timeline=self.timeline.statistics(),
                age=self._ages.quantiles(),
            )

    def close(self) -> None:
        """Send what is gathered, say goodbye, release the socket. Twice is fine."""
        if self._link is not None:
            self._flush(self._link)
            self.timeline.clear()  # so that the last chunks are reported, too
            self._collect_outcomes()
            self._send_reports(self._link)
            self._link.close()

    def __enter__(self) -> RobotClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _connected_link(self) -> RobotLink:
        if self._link is None:
            raise PpstreamError("this client has no connection yet; call connect() first")
        return self._link

    def _merge(self, chunk: ActionChunk) -> None:
        """The link's thread: a chunk arrived."""
        link = self._connected_link()
        with link.changed:  # a reset comes wholly before or wholly after
            reason = self._session.reject(chunk)
            refusal = None if reason else self.timeline.merge(chunk, self.clock())
        if reason is not None:
            with self._counting:
                self._dropped[reason] += 1
        elif refusal is None and self._on_chunk is not None:
            self._on_chunk(chunk)

    def _turn(self, now: int) -> int | None:
        """The link's thread: send what is due, and say when the next batch is.

        Reports leave here, just after a chunk came, when they delay nobody's samples.
        """
        link = self._connected_link()
        self._collect_outcomes()
        self._send_reports(link)
        self._send_batches(link, self._outbox.take_due(now), now)
        return self._outbox.due_ns

    def _flush(self, link: RobotLink) -> None:
        now = now_ns()
        self._send_batches(link, self._outbox.take_due(now, everything=True), now)

    def _send_batches(self, link: RobotLink, batches: list[Batch], now: int) -> bool:
        session = self._session.session
        sent = unsent = 0
        for stream, stamps, values, samples in batches:
            if session and link.send(Samples(session, stream, stamps, values)):
                sent += samples
            else:
                unsent += samples
        with self._counting:
            self._sent += sent
            self._unsent += unsent
        if sent:
            self._session.spoke(now)
        if unsent and session:
            self._session.doubt()
            link.wake()
        return not unsent

    def _send_reports(self, link: RobotLink) -> None:
        """What became of earlier chunks; lost ones are not repeated."""
        with suppress(IndexError):  # empty, perhaps because close() was faster
            while True:
                link.send(self._reports.popleft())

    def _collect_outcomes(self) -> None:
        with self._counting:
            for outcome in self.timeline.take_outcomes(self.clock()):
                if outcome.executed:
                    self._ages.add(outcome.age_ns)
                identity = (outcome.session, outcome.epoch, outcome.seq)
                self._reports.append(Report(*identity, outcome.age_ns, outcome.executed))
