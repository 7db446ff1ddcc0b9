"""ControlLoop: a robot's own loop: reads, executes what the timeline permits, is safe without it.

It needs nobody to be safe: when no action may be executed it holds, and once the lease of the last
one has run out, that is a fault, which stays until somebody clears it. Ticks are absolute
deadlines, and Python's garbage is collected between them. It plans no trajectory.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ppstream.core.clock import NS_PER_MS, NS_PER_S, Clock, Ticker, now_ns
from ppstream.core.durations import Bin, Durations
from ppstream.core.errors import MAX_TEXT, PpstreamError, ReceiverEndedError, counted, printable
from ppstream.core.interpreter import GcControl, short_turns
from ppstream.core.quantiles import Quantiles
from ppstream.core.realtime import (
    NotPermittedError,
    RealTime,
    RealTimeScope,
    timeouts_on_time,
)
from ppstream.robot.chunk_playback import Actions
from ppstream.robot.statistics import oldest_text
from ppstream.robot.timeline import ActionTimeline

OnExpiry = Literal["hold", "stop", "home"]
FaultReason = Literal["lease", "phase", "client", "loop", "stop"]


class ActionSource(Protocol):
    """The part of RobotClient that the loop uses."""

    timeline: ActionTimeline
    clock: Clock

    @property
    def ready(self) -> bool: ...

    def push(self, stream: str, stamp_ns: int, values: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class LoopFault:
    """Reason why the loop no longer executes actions.

    ``lease``: the newest action chunk expired before another came; ``phase``: the run left the
    phases in which robots may move; ``client``: the client was closed, or its receiving thread has
    ended and ``text`` has its traceback; ``loop``: a tick raised ``text``, as ``run`` did then;
    ``stop``: a call of ``stop``, ``text`` is its reason. ``at_ns`` and ``expired_ns`` are the
    robot's clock.
    """

    reason: FaultReason
    at_ns: int
    expired_ns: int | None
    text: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.text}" if self.text else self.reason


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """Counts since the start; ``lateness`` is how long after its deadline a tick began.

    ``oldest_ns``: age of the oldest action executed; ``max_age_ns``: the limit, 0 when only
    the lease limits. ``collections`` and ``longest_collection_ns``: of garbage, between ticks.
    ``fault``: the newest of ``faults``, in words. ``refused``: what the operating system did not
    permit.
    """

    ticks: int
    missed_ticks: int
    executed: int
    held: int
    faults: int
    lateness: Quantiles
    histogram: tuple[Bin, ...]
    oldest_ns: int
    max_age_ns: int
    collections: int
    longest_collection_ns: int
    refused: tuple[str, ...]
    fault: str
    refused_text: str = ""  # of chunks

    def oldest_text(self) -> str:
        """For people: ``oldest action executed: 41.3 ms of 60``."""
        return oldest_text(self.oldest_ns, self.max_age_ns)

    def line(self) -> str:
        """For people: ticks, what was done at them, the last fault, the oldest action executed."""
        ticks = f"{counted(self.ticks, 'tick')}, {self.missed_ticks} missed"
        fault = printable(self.fault.splitlines()[0], MAX_TEXT) if self.fault else ""
        last = f" (last: {fault})" if fault else ""
        done = f"{self.executed} executed, {self.held} held, faults: {self.faults}{last}"
        why = "" if self.oldest_ns else self.refused_text
        return f"{ticks}; {done}; {self.oldest_text()}{why}"


class ControlLoop:
    """Runs ``read``, then ``write`` or a safe reaction, once per tick, on the caller's thread.

    Args:
        rate_hz: ticks per second.
        read: called with the robot's time; returns new samples by stream, ``[dim]`` each, stamped
            with that time and pushed. None: samples are pushed elsewhere.
        write: executes one action ``[dim]`` float32.
        client: source of the actions.
        hold: keeps the robot where it is; called each tick when no action may be executed.
        on_expiry: reaction to a fault: ``hold`` only, or from ``hold_ms`` later on ``stop`` or
            ``home`` at each tick until the fault is cleared.
        stop: called with the factor for velocities and forces: from 1.0 linearly to 0.0 within
            ``ramp_ms``, then 0.0 at every tick. The method ``stop`` uses this ramp for every
            ``on_expiry``.
        home: moves it to its rest position, one tick at a time; returns True once it rests there:
            a stop then begins with 0.0. Without that, it ramps as if the robot still moved.
        hold_ms: from the fault to ``stop`` or ``home``.
        ramp_ms: how long ``stop`` takes.
        resume: a fault ends by itself as soon as an action may be executed again.
        realtime: settings of the operating system while ``run`` runs.

    Raises:
        ValueError: ``on_expiry`` names a reaction that was not given, or the rate is not positive.
    """

    def __init__(
        self,
        rate_hz: float,
        read: Callable[[int], Mapping[str, Any]] | None,
        write: Callable[[Actions], None],
        client: ActionSource,
        *,
        hold: Callable[[], None],
        on_expiry: OnExpiry = "hold",
        stop: Callable[[float], None] | None = None,
        home: Callable[[], bool | None] | None = None,
        hold_ms: float = 0.0,
        ramp_ms: float = 0.0,
        resume: bool = False,
        realtime: RealTime | None = None,
    ) -> None:
        if rate_hz <= 0:
            raise ValueError(f"rate_hz must be above 0, got {rate_hz}")
        if {"hold": hold, "stop": stop, "home": home}[on_expiry] is None:
            raise ValueError(
                f"on_expiry={on_expiry!r} needs {on_expiry}=: pass the function that does it"
            )
        self.period_ns = round(NS_PER_S / rate_hz)
        self._read = read
        self._write = write
        self._client = client
        self._hold = hold
        self._slow = stop
        self._home = home
        self._on_expiry = on_expiry
        self._hold_ns = round(hold_ms * NS_PER_MS)
        self._ramp_ns = round(ramp_ms * NS_PER_MS)
        self._realtime = RealTimeScope(realtime or RealTime())
        self._garbage = GcControl()
        self._resume = resume
        self._fault: LoopFault | None = None  # the loop's own
        self._stopped: LoopFault | None = None  # set by any thread, cleared by clear_fault alone
        self._seen: LoopFault | None = None  # the newest fault that was reacted to
        self._said = ""  # it, in words
        self._rest_ns = 0  # when the reaction to it begins
        self._is_engaged = False  # an action was executed, and losing the next is a fault
        self._is_moving = False  # the tick before executed one, or went home
        self._left = 0.0  # of the motion, as stop= was told since the robot moved last
        self._is_ended = False  # no lock: a signal handler may set it
        self._lateness = Durations()
        self._ticks = self._missed = self._executed = self._held = self._faults = 0

    @property
    def fault(self) -> LoopFault | None:
        """Reason why no action is executed until ``clear_fault``; None: there is none."""
        return self._stopped or self._fault

    def run(self, duration_s: float | None = None) -> LoopStatistics:
        """Tick until ``end`` is called or ``duration_s`` is over; holds before it returns.

        What ``read``, ``write`` or a reaction raises ends it, as a fault ``loop`` that stays.

        Raises:
            PpstreamError: the loop was ended before.
            NotPermittedError: the operating system refuses what ``realtime`` requires.
        """
        if self._is_ended:
            raise PpstreamError(
                "this loop has ended and cannot run again: create a new one; to stop "
                "for a while use stop(reason), and clear_fault() to go on"
            )
        try:
            with short_turns(), timeouts_on_time(), self._realtime, self._garbage:
                self._run(None if duration_s is None else round(duration_s * NS_PER_S))
        except NotPermittedError:
            raise
        except Exception as error:
            self._break(error)
            raise
        finally:
            self._hold()
        return self.statistics()

    def end(self) -> None:
        """Have ``run`` return after the current tick, for good; any thread or signal handler."""
        self._is_ended = True

    def stop(self, reason: str) -> None:
        """Latch a fault and bring the robot to rest; from any thread or signal handler.

        From the next tick on nothing is executed until ``clear_fault``, also with ``resume``: a
        robot that moves, also one that ``home`` moves, goes through the ramp of ``stop=`` at once,
        without ``hold_ms``, or holds where there is none; it never goes home. A tick in progress
        may still execute its action. Of several calls only the first counts, so that the ramp does
        not restart. The call needs a loop that ticks, and does not replace a hardware emergency
        stop.
        """
        if self._stopped is None:
            self._stopped = LoopFault("stop", self._client.clock(), None, reason)

    def clear_fault(self) -> None:
        """Permit actions again, after ``stop`` too; the timeline decides which may be executed.

        A fault whose cause lasts, such as ``client``, latches again at the next tick.
        """
        self._is_engaged = False
        self._fault = self._stopped = None

    def tick(self) -> None:
        """One tick; ``run`` calls it, and so may a loop of your own."""
        self._ticks += 1
        if self._read is not None:
            stamp_ns = self._client.clock()
            for stream, values in self._read(stamp_ns).items():
                with suppress(ReceiverEndedError):  # it is latched below
                    self._client.push(stream, stamp_ns, values)
        at_ns = self._client.clock()  # again: reading may have taken longer than the lease
        action = self._permitted(at_ns)
        if action is not None:
            self._is_engaged = self._is_moving = True
            self._left = 1.0
            self._executed += 1
            self._write(action)
            return
        self._held += 1
        self._is_moving = self._react(self.fault, at_ns)

    def statistics(self) -> LoopStatistics:
        timeline = self._client.timeline.statistics()
        return LoopStatistics(
            ticks=self._ticks,
            missed_ticks=self._missed,
            executed=self._executed,
            held=self._held,
            faults=self._faults,
            lateness=self._lateness.quantiles(),
            histogram=self._lateness.histogram(),
            oldest_ns=timeline.oldest_ns,
            max_age_ns=timeline.max_age_ns,
            collections=self._garbage.collections,
            longest_collection_ns=self._garbage.longest_ns,
            refused=self._realtime.refused,
            fault=self._said,
            refused_text=timeline.refused_text(),
        )

    def _run(self, duration_ns: int | None) -> None:
        began_ns = now_ns()
        ticker = Ticker(self.period_ns, began_ns)
        while not self._is_ended:
            if duration_ns is not None and ticker.due_ns > began_ns + duration_ns:
                return
            time.sleep(max(0, ticker.due_ns - now_ns()) / NS_PER_S)
            tick_ns = now_ns()
            self._lateness.add(tick_ns - ticker.due_ns)
            self._missed += max(0, ticker.consume(tick_ns) - 1)
            self.tick()
            done_ns = now_ns()
            self._garbage.offer(done_ns, ticker.due_ns - done_ns)

    def _react(self, fault: LoopFault | None, at_ns: int) -> bool:
        """Hold, or what follows it once a fault is old enough; True: it moves home."""
        if fault is not None and fault is not self._seen:
            self._begin_rest(fault)
        self._client.timeline.held(at_ns, "" if fault is None else self._said)
        since_ns = -1 if fault is None else at_ns - self._rest_ns
        is_stopped = fault is not None and fault.reason == "stop"
        if since_ns < 0:
            self._hold()
        elif self._slow is not None and (is_stopped or self._on_expiry == "stop"):
            share = 1 - since_ns / self._ramp_ns if since_ns < self._ramp_ns else 0.0
            self._left = min(self._left, share)  # a fault on top of another speeds nothing up
            self._slow(self._left)
        elif self._home is not None and self._on_expiry == "home" and not is_stopped:
            self._left = 1.0
            return self._home() is not True
        else:
            self._hold()
        return False

    def _begin_rest(self, fault: LoopFault) -> None:
        """A fault is seen for the first time: say when what follows it begins."""
        self._seen, self._said = fault, str(fault)
        self._faults += 1
        if fault.reason != "stop":
            self._rest_ns = fault.at_ns + self._hold_ns
        elif self._is_moving:
            self._rest_ns = fault.at_ns
        elif self._fault is None or self._on_expiry != "stop":
            self._rest_ns = fault.at_ns - self._ramp_ns  # at rest: nothing of a motion is left
        # else the reaction to the fault before goes on

    def _permitted(self, at_ns: int) -> Actions | None:
        """The action to execute now; latches a fault when the permission ended while moving."""
        client = self._client
        if self._stopped is not None:
            self._is_engaged = False
            return None
        if self._fault is not None and not self._resume:
            return None
        try:
            client.timeline.raise_failure()
            action = client.timeline.action_at(at_ns) if client.ready else None
        except ReceiverEndedError as error:
            self._latch_client(at_ns, str(error))
            return None
        if client.timeline.is_closed:
            self._latch_client(at_ns, "it was closed while the loop ran; end the loop first")
            return None
        if action is not None:
            self._fault = None
            return action
        expires_ns = client.timeline.expires_ns
        if expires_ns is None and client.ready:
            self._is_engaged = False  # a new episode: nothing is owed yet
        elif self._is_engaged and not client.ready:
            self._latch("phase", at_ns, expires_ns)
        elif self._is_engaged and expires_ns is not None and at_ns > expires_ns:
            self._latch("lease", at_ns, expires_ns)
        return None

    def _break(self, error: Exception) -> None:
        """A tick raised: record the fault for other threads and for rank 0."""
        at_ns = self._client.clock()
        *_, what = traceback.format_exception_only(error)
        fault = self._fault = LoopFault(
            "loop", at_ns, self._client.timeline.expires_ns, what.strip()
        )
        self._begin_rest(fault)
        self._client.timeline.held(at_ns, self._said)

    def _latch_client(self, at_ns: int, text: str) -> None:
        """No action can come any more; of such faults the first one stays."""
        if self._fault is None or self._fault.reason != "client":
            self._latch("client", at_ns, self._client.timeline.expires_ns, text)

    def _latch(
        self, reason: FaultReason, at_ns: int, expires_ns: int | None, text: str = ""
    ) -> None:
        self._is_engaged = False
        self._fault = LoopFault(reason, at_ns, expires_ns, text)
