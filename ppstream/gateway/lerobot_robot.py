"""ServedRobot: one peer of LeRobot's clients as a robot, and what is known of its calls.

Its server, ``lerobot.py``, calls it from the event loop; only ``take`` and ``check_pace`` come from
a thread of the robot's own. ``Connection`` finds out when two clients share a peer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from ppstream.analysis.records import RequestError
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PpstreamError
from ppstream.gateway.request_log import CountedRequest
from ppstream.gateway.session import GatewaySession, Reply

logger = logging.getLogger("ppstream")

ASKS_WITHIN_S: Final = 5.0  # a client that has asked once asks all the time, or has left
REMEMBERED: Final = 256  # observations that actions may still come for
PACE_STEPS: Final = 60  # executed, over which a client's pace is measured
PACE_MARGIN: Final = 1.2  # of the actions' own
QUIET_S: Final = 0.5  # between two calls of a client that runs; a cancelled call has ended by then
LOOK_S: Final = 0.01
CALL_S: Final = 3.0  # a call for actions ends by then
SET_BACK_S: Final = 60.0  # a client's clock is not set back twice so soon
SHARED_S: Final = 5.0  # two clients of a connection were seen so lately: neither is served
TABLES: Final = tuple(Path("/proc/self/net", name) for name in ("tcp", "tcp6"))
ESTABLISHED: Final = "01"  # as they have it
REMEDY: Final = (
    "two clients share this connection, and nothing tells whose actions are whose: give each a "
    "channel with the option ('grpc.use_local_subchannel_pool', 1), or a process of its own"
)


class SharedError(PpstreamError):
    """Two clients share a connection; the message is the remedy."""


class Step(NamedTuple):
    """Place of an observation in its robot's time."""

    timestep: int
    timestamp: float


class Observed(NamedTuple):
    """One observation that actions may still come for."""

    step: Step
    request: CountedRequest


def ended(peers: Sequence[str], port: int) -> set[str]:
    """Those of ``peers`` that have no open connection to ``port`` of this host.

    gRPC tells nobody of one that ends between two calls. Where the system cannot say, none has.
    """
    found = set(peers)
    for _ in range(2):  # a table that changes while it is read may lack one
        try:
            lines = [line.split() for file in TABLES for line in file.read_text().splitlines()[1:]]
        except OSError:
            return set()
        ends = [(line[1], line[2]) for line in lines if line[3] == ESTABLISHED]
        theirs = {int(far[-4:], 16) for near, far in ends if int(near[-4:], 16) == port}
        found = {peer for peer in found if int(peer.rpartition(":")[2]) not in theirs}
    return found


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


class Connection:
    """Calls of one connection, and whether they are of one client alone.

    gRPC lets the clients of a process share a connection, and nothing in a call says whose it is.
    Each has one call for actions at a time: two at once are of two clients.

    Args:
        actions_max: of a reply, until its client says how many; None: all.
    """

    def __init__(self, actions_max: int | None = None) -> None:
        self.actions_max = actions_max
        self.is_known = False  # its client has said what it will send, or the log that it has not
        self.calls = 0  # under way, but Ready
        self.asking = 0  # of them, for actions
        self.is_starting = False  # a Ready is pending
        self._called_ns = now_ns()  # begin or end of the latest call
        self._begun = 0  # calls ever, but Ready
        self._shared_ns: int | None = None  # two clients were last seen

    @contextmanager
    def call(self, *, asks: bool = False) -> Iterator[None]:
        self._begun += 1
        self.calls += 1
        self.asking += asks
        self._called_ns = now_ns()
        try:
            yield
        finally:
            self.calls -= 1
            self.asking -= asks
            self._called_ns = now_ns()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A Ready, one at a time."""
        self.is_starting, self._called_ns = True, now_ns()
        try:
            yield
        finally:
            self.is_starting, self._called_ns = False, now_ns()

    def is_silent(self, silence_s: float) -> bool:
        """True when no call was under way for so long."""
        is_called = self.calls or self.is_starting
        return not is_called and now_ns() - self._called_ns > silence_s * NS_PER_S

    @property
    def is_shared(self) -> bool:
        return self._shared_ns is not None and now_ns() - self._shared_ns < SHARED_S * NS_PER_S

    @property
    def is_idle(self) -> bool:
        """True when nothing is under way, and nothing has to be remembered."""
        return not self.calls and not self.is_starting and not self.is_shared

    def found_two(self) -> None:
        self._shared_ns = now_ns()

    async def is_alone(self) -> bool:
        """True once this call for actions is the only one: others may be cancelled ones."""
        until_ns = now_ns() + round(QUIET_S * NS_PER_S)
        while self.asking > 1 and now_ns() < until_ns:
            await asyncio.sleep(LOOK_S)
        return self.asking == 1

    async def refusal(self, robot: ServedRobot | None, silence_s: float) -> str:
        """Reason for which no client can start, as ``robot`` is another one's; empty: it can.

        A robot whose client has stopped, or whose calls it has cancelled, is free soon.
        """
        begun, until_ns = self._begun, now_ns() + round(CALL_S * NS_PER_S)
        if robot is None and not self.calls:
            return ""
        while self.calls and self._begun == begun and now_ns() < until_ns:
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(QUIET_S)
        if self.calls or self._begun != begun or (robot is not None and robot.is_busy):
            return REMEDY
        if robot is not None and robot.is_fresh:
            return f"{REMEDY}; or wait {silence_s:g} s, if one client has started and not called"
        return ""


class ServedRobot:
    """One peer: its session, and what is known of its observations."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self.session: GatewaySession | None = None
        self.opening = asyncio.Lock()
        self.arrived = asyncio.Event()  # actions, perhaps
        self.has_asked = False  # for actions
        self.is_fresh = False  # its client has said what it will send, and not called since
        self.told_ns = 0
        self._pace = Pace()
        self._is_fast = False  # faster than the actions, and that is told
        self.is_reading = False  # a call brings an observation
        self.observing: asyncio.Future[None] | None = None  # it, which outlives its call
        self._sent: dict[int, Observed] = {}  # by stamp
        self._timestep: int | None = None  # the newest since Ready
        self._before: int | None = None  # and before it
        self._timestamp = -math.inf  # the newest
        self._set_back_ns: int | None = None  # a time stamp lay before the one that came before it

    async def wait(self, limit_ns: int) -> None:
        """Wait until actions may have come, or ``limit_ns`` are over.

        Not by ``wait_for``, which loses a cancellation beside them (Python 3.11): a call that its
        client has given up would go on, beside the client's next one.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_ns / NS_PER_S):
                await self.arrived.wait()

    def check_pace(self, step: Step, wanted: float) -> None:
        """Warn once of a client that executes faster than ``wanted`` actions per second."""
        pace = self._pace.add(step)
        if pace > PACE_MARGIN * wanted and not self._is_fast:
            self._is_fast = True
            logger.warning(
                "%s executes %.1f actions/s, and they are made for %.1f: start it with --fps=%d, "
                "or set actions.dt_ms",
                *(self.name, pace, wanted, round(wanted)),
            )

    def tell_unchecked(self, horizon: int) -> None:
        """Log once of a client that connected anew, and said nothing of what it wants."""
        if not self.connection.is_known:
            self.connection.is_known = True
            most = self.connection.actions_max or horizon
            logger.warning(
                "%s has connected anew, and does not say what it sends and wants: it is not "
                "checked, and gets %d of %d actions; start the client again to change that",
                *(self.name, most, horizon),
            )

    @property
    def is_busy(self) -> bool:
        """True while an observation is read, or taken in on a thread."""
        return self.is_reading or (self.observing is not None and not self.observing.done())

    def is_silent(self, silence_s: float) -> bool:
        limit_s = min(silence_s, ASKS_WITHIN_S) if self.has_asked else silence_s
        return self.connection.is_silent(limit_s)

    def restart(self) -> None:
        """Begin a new episode: its steps may be counted anew."""
        self._before, self._timestep = self._timestep, None
        self._timestamp, self._set_back_ns = -math.inf, None

    def take(self, observation: Observed, horizon: int) -> None:
        """Remember an observation that is the same client's as those before.

        A client executes ``horizon`` steps of its queue at most, forth or, after a new chunk, back.

        Raises:
            SharedError: its step or time stamp is of another client.
        """
        step, newest, before = observation.step.timestep, self._timestep, self._before
        if newest is not None:
            is_back = step < newest - horizon
            goes_on = before is not None and newest < before - horizon and step >= before
            if is_back or (goes_on and step > newest + horizon):
                raise SharedError(f"timestep {step} comes after {newest}, without Ready: {REMEDY}")
        self._timestep = step
        self._check_clock(observation)
        self._remember(observation)

    def _check_clock(self, observation: Observed) -> None:
        """Raises SharedError: its time stamps are of two clocks, in turn."""
        stamp, received_ns = observation.step.timestamp, observation.request.received_ns
        back_s, before_ns = self._timestamp - stamp, self._set_back_ns
        self._timestamp = stamp
        if back_s > 0:
            self._set_back_ns = received_ns
            if before_ns is not None and received_ns - before_ns < SET_BACK_S * NS_PER_S:
                raise SharedError(f"time stamps go back again, by {back_s:.3g} s: {REMEDY}")

    def _remember(self, observation: Observed) -> None:
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
