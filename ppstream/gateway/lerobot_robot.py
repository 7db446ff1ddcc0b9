"""ServedRobot: one peer of LeRobot's clients as a robot, and what is known of its calls.

Its server, ``lerobot.py``, calls it from the event loop; only ``remember`` comes from a thread of
the robot's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from ppstream.analysis.records import RequestError
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.gateway.request_log import CountedRequest
from ppstream.gateway.session import GatewaySession, Reply

ASKS_WITHIN_S: Final = 5.0  # a client that has asked once asks all the time, or has left
REMEMBERED: Final = 256  # observations that actions may still come for
PACE_STEPS: Final = 60  # executed, over which a client's pace is measured


class Step(NamedTuple):
    """Place of an observation in its robot's time."""

    timestep: int
    timestamp: float


class Observed(NamedTuple):
    """One observation that actions may still come for."""

    step: Step
    request: CountedRequest


class Pace:
    """Steps that a client executes each second, as its observations tell."""

    def __init__(self) -> None:
        self._first: Step | None = None

    def add(self, step: Step) -> float:
        """Steps per second of the last ``PACE_STEPS``; 0: not known now."""
        first = self._first
        if first is None or step.timestep < first.timestep:
            self._first = step
            return 0.0
        steps, seconds = step.timestep - first.timestep, step.timestamp - first.timestamp
        if steps < PACE_STEPS:
            return 0.0
        self._first = step
        return steps / seconds if seconds > 0 else 0.0


class ServedRobot:
    """One peer: its session, and what is known of its calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.session: GatewaySession | None = None
        self.opening = asyncio.Lock()
        self.arrived = asyncio.Event()  # actions, perhaps
        self.calls = 0
        self.called_ns = now_ns()  # begin or end of the latest
        self.has_asked = False  # for actions
        self.told_ns = 0
        self.pace = Pace()
        self.is_fast = False  # faster than the actions, and that is told
        self.is_reading = False  # a call brings an observation
        self.observing: asyncio.Future[None] | None = None  # it, which outlives its call
        self.actions_max: int | None = None  # of a reply; None: all
        self._sent: dict[int, Observed] = {}  # by stamp

    @contextmanager
    def call(self) -> Iterator[None]:
        self.calls += 1
        self.called_ns = now_ns()
        try:
            yield
        finally:
            self.calls -= 1
            self.called_ns = now_ns()

    @property
    def is_busy(self) -> bool:
        """True while an observation is read, or taken in on a thread."""
        return self.is_reading or (self.observing is not None and not self.observing.done())

    def is_silent(self, now: int, silence_s: float) -> bool:
        limit_s = min(silence_s, ASKS_WITHIN_S) if self.has_asked else silence_s
        return not self.calls and now - self.called_ns > limit_s * NS_PER_S

    def remember(self, observation: Observed) -> None:
        while len(self._sent) >= REMEMBERED:
            self._sent.pop(next(iter(self._sent))).request.failed("superseded")
        self._sent[observation.request.received_ns] = observation

    def pop(self) -> tuple[Reply, Step] | None:
        """The newest actions, and the observation that they answer."""
        self.arrived.clear()
        reply = None if self.session is None else self.session.pop()
        answered = None if reply is None else self._sent.get(reply.chunk.window_end_ns)
        return None if reply is None or answered is None else (reply, answered.step)

    def answered(self, reply: Reply) -> None:
        """Count its observation as answered, and those before as superseded."""
        for stamp_ns, observation in list(self._sent.items()):
            if stamp_ns < reply.chunk.window_end_ns:
                observation.request.failed("superseded")
            elif stamp_ns == reply.chunk.window_end_ns:
                observation.request.answered()

    def leave(self, reason: RequestError) -> None:
        """Count the observations that get no answer any more."""
        for observation in list(self._sent.values()):
            observation.request.failed(reason)
