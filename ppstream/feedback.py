"""Feedback: what a robot tells rank 0 about the action chunks it got.

Reports of what became of them, for the run's log; and for policies that ask, the executed prefix:
what is executed while the next chunk is being made. It sends when it is told to and repeats nothing
that is lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ppstream.clock import Clock
from ppstream.durations import Durations, Quantiles
from ppstream.messages import FromRobot, Prefix, Report, Welcome
from ppstream.timeline import ActionTimeline

MAX_REPORTS: Final = 256  # waiting to be sent

Send = Callable[[FromRobot], bool]


class Feedback:
    """For any thread; ``timeline`` and ``clock`` are the robot's."""

    def __init__(self, timeline: ActionTimeline, clock: Clock) -> None:
        self._timeline = timeline
        self._clock = clock
        self._lock = threading.Lock()
        self._ages = Durations()
        self._dispatches = Durations()
        self._reports: deque[Report] = deque(maxlen=MAX_REPORTS)
        self._tells_prefix = False

    def adopt(self, welcome: Welcome) -> None:
        """A session opened: what its actions mean, and what its policy wants to know."""
        self._tells_prefix = welcome.prefix_steps > 0
        self._timeline.adopt(discrete=welcome.discrete, max_age_ns=welcome.max_age_ns)

    def collect(self) -> None:
        """Take what became of chunks since the last call."""
        with self._lock:
            for outcome in self._timeline.take_outcomes(self._clock()):
                if outcome.executed:
                    self._ages.add(outcome.age_ns)
                    self._dispatches.add(outcome.dispatch_ns)
                identity = (outcome.session, outcome.epoch, outcome.seq)
                found = (outcome.age_ns, outcome.executed, outcome.oldest_ns, outcome.dispatch_ns)
                self._reports.append(Report(*identity, *found))

    def quantiles(self) -> tuple[Quantiles, Quantiles]:
        """Observation to action, and receipt to action, of the chunks that were executed."""
        with self._lock:
            return self._ages.quantiles(), self._dispatches.quantiles()

    def send_reports(self, send: Send) -> None:
        """What was collected, whether anybody takes it or not."""
        with suppress(IndexError):  # empty, perhaps because another thread was faster
            while True:
                send(self._reports.popleft())

    def send_prefix(self, send: Send, session: int, session_epoch: int) -> None:
        """What will be executed while the next chunk is on its way, if the policy asks for it."""
        plan = self._timeline.plan(self._clock()) if self._tells_prefix else None
        if plan is not None:
            when = (plan.start_ns, plan.dt_ns, plan.expires_ns, self._timeline.delay_ns)
            send(Prefix(session, session_epoch, *when, plan.actions.data.cast("B")))
