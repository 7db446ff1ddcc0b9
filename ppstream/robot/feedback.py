"""Feedback: what a robot tells rank 0 about the action chunks it got, and how it fares.

Reports of what became of them, and its holds and faults, for the run's log; for policies that ask,
the executed prefix: what is executed while the next chunk is being made. It sends when it is told
to and repeats nothing that is lost.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S, Clock
from ppstream.core.durations import Durations
from ppstream.core.quantiles import Quantiles
from ppstream.robot.timeline import ActionTimeline
from ppstream.wire.fields import fault_text
from ppstream.wire.robot_messages import (
    ActionChunk,
    ChunkReport,
    FromRobot,
    Prefix,
    RobotState,
    Welcome,
)

if TYPE_CHECKING:
    from ppstream.robot.session import RobotSession

logger = logging.getLogger("ppstream")

MERGED_MAX: Final = 256  # chunks that nothing was said of yet; of more the newest count
MAX_REPORTS: Final = 256  # waiting to be sent
REPORTS_AT_ONCE: Final = 8  # so many leave together: each packet alone wakes rank 0
REPORTS_LATE_NS: Final = 100 * NS_PER_MS  # fewer leave so long after the first
STATE_SINCE_MINOR: Final = 2  # an older rank 0 does not know RobotState
STATE_PAUSES_NS: Final = (NS_PER_S, 100 * NS_PER_MS)  # between two; when a hold or fault began
FAULT_PAUSE_NS: Final = 2 * NS_PER_S  # between two faults that are logged
MOST: Final = 2**53  # that the wire takes of a count or duration

Send = Callable[[FromRobot], bool]


class Feedback:
    """For any thread; ``timeline`` and ``clock`` are the robot's."""

    def __init__(self, timeline: ActionTimeline, clock: Clock) -> None:
        self._timeline = timeline
        self._clock = clock
        self._lock = threading.Lock()
        self._ages = Durations()
        self._dispatches = Durations()
        self._merged: deque[tuple[ActionChunk, int]] = deque(maxlen=MERGED_MAX)
        self._reports: deque[ChunkReport] = deque(maxlen=MAX_REPORTS)
        self._reports_due_ns: int | None = None
        self.tells_prefix = False
        self._session = 0  # that may be told how the robot fares
        self._state: RobotState | None = None  # as it was told last
        self._state_ns = 0  # when it was
        self._is_urgent = False
        self._told_ns = -FAULT_PAUSE_NS  # when a fault was last logged
        self._chunk_ns: int | None = None  # newest arrival since the run is ready
        self._gap_ns = 0

    def adopt(self, welcome: Welcome) -> None:
        """A session opened: what its actions mean, and what it wants to know."""
        self.tells_prefix = welcome.prefix_steps > 0
        self._session = welcome.session if welcome.minor >= STATE_SINCE_MINOR else 0
        self._state, self._is_urgent, self._gap_ns = None, True, 0
        self._timeline.begin_session()
        self._timeline.adopt(discrete=welcome.discrete, max_age_ns=welcome.max_age_ns)

    def collect(self) -> None:
        """Take what became of chunks since the last call."""
        with self._lock:
            for outcome in self._timeline.pop_outcomes(self._clock()):
                if outcome.executed:
                    self._ages.add(outcome.age_ns)
                    self._dispatches.add(outcome.dispatch_ns)
                identity = (outcome.session, outcome.epoch, outcome.seq)
                found = (outcome.age_ns, outcome.executed, outcome.oldest_ns, outcome.dispatch_ns)
                self._reports.append(ChunkReport(*identity, *map(_possible, found)))

    def unread(self, chunk: ActionChunk) -> None:
        """A chunk came that nobody will execute: reported as any other that was not."""
        age_ns = _possible(self._clock() - chunk.window_end_ns)
        with self._lock:
            self._reports.append(ChunkReport(chunk.session, chunk.epoch, chunk.seq, age_ns, 0))

    def quantiles(self) -> tuple[Quantiles, Quantiles]:
        """Observation to action, and receipt to action, of the chunks that were executed."""
        with self._lock:
            return self._ages.quantiles(), self._dispatches.quantiles()

    def send_due_reports(self, send: Send, now_ns: int) -> int | None:
        """Sends what was collected once it is much or old; returns when that will be, if ever."""
        waiting = len(self._reports)
        if not waiting:
            self._reports_due_ns = None
        elif self._reports_due_ns is None:
            self._reports_due_ns = now_ns + REPORTS_LATE_NS
        due_ns = self._reports_due_ns
        if waiting >= REPORTS_AT_ONCE or (due_ns is not None and now_ns >= due_ns):
            self.send_reports(send)
            return None
        return due_ns

    def send_reports(self, send: Send) -> None:
        """Sends what was collected, whether or not a server takes it."""
        self._reports_due_ns = None
        while self._reports:
            try:
                report = self._reports.popleft()
            except IndexError:  # another thread was faster
                return
            send(report)

    def merged(self, chunk: ActionChunk, now_ns: int) -> None:
        """The link's thread: a chunk was merged; what follows from it waits for ``send_merged``."""
        self._merged.append((chunk, now_ns))

    def send_merged(self, send: Send, session: RobotSession) -> None:
        """Sends rank 0 what the newest merged chunk changed; the first thread to call does it."""
        chunk = None
        while self._merged:
            try:
                chunk, arrived_ns = self._merged.popleft()
            except IndexError:  # another thread was faster
                break
            self.arrived(arrived_ns)
        if chunk is not None and chunk.session == session.session:
            self.send_prefix(send, chunk.session, chunk.session_epoch)

    def send_prefix(self, send: Send, session: int, session_epoch: int) -> None:
        """Sends what will be executed until the next chunk comes, if the policy asks for it."""
        plan = self._timeline.plan(self._clock()) if self.tells_prefix else None
        if plan is not None:
            delay_ns = _possible(self._timeline.delay_ns)
            when = (plan.start_ns, plan.dt_ns, plan.expires_ns, delay_ns)
            send(Prefix(session, session_epoch, *when, plan.actions.data.cast("B")))

    def arrived(self, now_ns: int) -> None:
        """The link's thread: a new chunk was merged, by the clock of this host."""
        self.await_ready(now_ns)
        self._chunk_ns = now_ns

    def await_ready(self, now_ns: int) -> None:
        """The link's thread: no chunk is due from now on, since the run is not ready."""
        if self._chunk_ns is not None:
            self._gap_ns = max(self._gap_ns, now_ns - self._chunk_ns)
        self._chunk_ns = None

    def hurry(self) -> None:
        """A hold or a fault began: rank 0 shall hear it soon. From any thread."""
        self._is_urgent = True

    def send_state(
        self, send: Send, session: int, now_ns: int, *, is_last: bool = False
    ) -> int | None:
        """Sends the robot's state if it changed and is due, or is the ``is_last`` one.

        Returns:
            When to ask again; None: rank 0 does not want to know, or there is no session.
        """
        if now_ns - self._told_ns > FAULT_PAUSE_NS:
            self._tell_fault(now_ns)
        with self._lock:
            if not session or session != self._session:
                return None
            due_ns = self._state_ns + STATE_PAUSES_NS[self._is_urgent]
            if now_ns < due_ns and not is_last:
                return due_ns
            self._state_ns, self._is_urgent = now_ns, False
            state = self._state_now(session, now_ns)
            if state != self._state and send(state):
                self._state = state
            return now_ns + STATE_PAUSES_NS[0]

    def _tell_fault(self, now_ns: int) -> None:
        """Here, not in the control loop: whoever reads the log may be slow."""
        if fault := self._timeline.pop_fault():
            self._told_ns = now_ns
            told = fault_text(fault.split("\n")[0])
            logger.warning("fault %s; no action is executed while it stands", told)

    def _state_now(self, session: int, now_ns: int) -> RobotState:
        holds, held_ns, faults, fault = self._timeline.holds(self._clock())
        waiting_ns = 0 if self._chunk_ns is None else now_ns - self._chunk_ns
        return RobotState(
            session,
            holds=_possible(holds),
            held_ns=_possible(held_ns),
            faults=_possible(faults),
            fault=fault_text(fault),
            chunk_gap_ns=_possible(max(self._gap_ns, waiting_ns)),
        )


def _possible(number: int) -> int:
    """As the wire takes it; below 0 comes of a clock that was set back, or stamps that lead it."""
    return number if 0 <= number <= MOST else max(0, min(number, MOST))
