"""ControlLoop: a robot's own loop: reads, executes what the timeline permits, is safe without it.

It needs nobody to be safe: when no action may be executed it holds, and once the lease of the last
one has run out, that is a fault, which stays until somebody clears it. Ticks are absolute
deadlines, and Python's garbage is collected between them. It plans no trajectory.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from ppstream.clock import NS_PER_MS, NS_PER_S, Clock, Ticker, now_ns
from ppstream.durations import Bin, Durations, Quantiles
from ppstream.garbage import Garbage
from ppstream.playing import Actions
from ppstream.realtime import RealTime, RealTimeScope
from ppstream.timeline import ActionTimeline

OnExpiry = Literal["hold", "stop", "home"]

SWITCH_INTERVAL_S: Final = 0.0005  # a receiving thread gives the interpreter back this soon


class ActionSource(Protocol):
    """The part of RobotClient that the loop uses."""

    timeline: ActionTimeline
    clock: Clock

    @property
    def ready(self) -> bool: ...

    def push(self, stream: str, stamp_ns: int, values: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the loop no longer executes actions.

    ``lease``: the newest action chunk expired before another came; ``phase``: the run left the
    phases in which robots may move. ``at_ns`` and ``expired_ns`` are the robot's clock.
    """

    reason: Literal["lease", "phase"]
    at_ns: int
    expired_ns: int | None


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """Counts since the start; ``lateness`` is how long after its deadline a tick began.

    ``oldest`` tells the age of the oldest action executed, and of how much was allowed.
    ``collections`` and ``longest_collection_ns``: of garbage, between ticks. ``refused``: what the
    operating system did not permit.
    """

    ticks: int
    missed_ticks: int
    executed: int
    held: int
    faults: int
    lateness: Quantiles
    histogram: tuple[Bin, ...]
    oldest: str
    collections: int
    longest_collection_ns: int
    refused: tuple[str, ...]


class ControlLoop:
    """Runs ``read``, then ``write`` or a safe reaction, once per tick, on the caller's thread.

    Args:
        rate_hz: ticks per second.
        read: called with the robot's time; returns new samples by stream, ``[dim]`` each, stamped
            with that time and pushed. None: samples are pushed elsewhere.
        write: executes one action ``[dim]`` float32.
        client: where actions come from.
        hold: keeps the robot where it is; called each tick when no action may be executed.
        on_expiry: what follows a fault: ``hold`` only, or ``stop`` or ``home`` instead, ``hold_ms``
            later, each tick until the fault is cleared.
        stop: called with what shall be left of the motion: from 1.0 linearly to 0.0 within
            ``ramp_ms``, then 0.0 at every tick. Velocities and forces are scaled by it.
        home: moves it to its rest position, one tick at a time.
        hold_ms: from the fault to ``stop`` or ``home``.
        ramp_ms: how long ``stop`` takes.
        resume: a fault ends by itself as soon as an action may be executed again.
        realtime: what to ask the operating system for while ``run`` runs.

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
        home: Callable[[], None] | None = None,
        hold_ms: float = 0.0,
        ramp_ms: float = 0.0,
        resume: bool = False,
        realtime: RealTime | None = None,
    ) -> None:
        if rate_hz <= 0:
            raise ValueError(f"rate_hz must be above 0, got {rate_hz}")
        if {"hold": hold, "stop": stop, "home": home}[on_expiry] is None:
            raise ValueError(f"on_expiry={on_expiry!r} needs {on_expiry}=: say how this robot does")
        self.period_ns = round(NS_PER_S / rate_hz)
        self.fault: Fault | None = None
        self._read = read
        self._write = write
        self._client = client
        self._hold = hold
        self._stop = stop if on_expiry == "stop" else None
        self._home = home if on_expiry == "home" else None
        self._hold_ns = round(hold_ms * NS_PER_MS)
        self._ramp_ns = round(ramp_ms * NS_PER_MS)
        self._realtime = RealTimeScope(realtime or RealTime())
        self._garbage = Garbage()
        self._resume = resume
        self._is_engaged = False  # an action was executed, and losing the next is a fault
        self._end = threading.Event()
        self._lateness = Durations()
        self._ticks = self._missed = self._executed = self._held = self._faults = 0

    def run(self, duration_s: float | None = None) -> LoopStatistics:
        """Tick until ``end`` is called or ``duration_s`` is over; holds before it returns.

        Raises:
            NotPermittedError: the operating system refuses what ``realtime`` requires.
        """
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(interval_s, SWITCH_INTERVAL_S))
        try:
            with self._realtime, self._garbage:
                self._run(None if duration_s is None else round(duration_s * NS_PER_S))
        finally:
            sys.setswitchinterval(interval_s)
            self._hold()
        return self.statistics()

    def end(self) -> None:
        """Have ``run`` return after the current tick; from any thread or signal handler."""
        self._end.set()

    def tick(self) -> None:
        """One tick; ``run`` calls it, and so may a loop of your own."""
        self._ticks += 1
        if self._read is not None:
            stamp_ns = self._client.clock()
            for stream, values in self._read(stamp_ns).items():
                self._client.push(stream, stamp_ns, values)
        at_ns = self._client.clock()  # again: reading may have taken longer than the lease
        action = self._permitted(at_ns)
        if action is not None:
            self._is_engaged = True
            self._executed += 1
            self._write(action)
            return
        self._held += 1
        self._react(at_ns)

    def clear_fault(self) -> None:
        """Permit actions again; what may be executed then, the timeline says."""
        self._is_engaged = False
        self.fault = None

    def statistics(self) -> LoopStatistics:
        return LoopStatistics(
            ticks=self._ticks,
            missed_ticks=self._missed,
            executed=self._executed,
            held=self._held,
            faults=self._faults,
            lateness=self._lateness.quantiles(),
            histogram=self._lateness.histogram(),
            oldest=self._client.timeline.statistics().oldest_text(),
            collections=self._garbage.collections,
            longest_collection_ns=self._garbage.longest_ns,
            refused=self._realtime.refused,
        )

    def _run(self, duration_ns: int | None) -> None:
        began_ns = now_ns()
        ticker = Ticker(self.period_ns, began_ns)
        while not self._end.is_set():
            if duration_ns is not None and ticker.due_ns > began_ns + duration_ns:
                return
            time.sleep(max(0, ticker.due_ns - now_ns()) / NS_PER_S)
            tick_ns = now_ns()
            self._lateness.add(tick_ns - ticker.due_ns)
            self._missed += max(0, ticker.take(tick_ns) - 1)
            self.tick()
            done_ns = now_ns()
            self._garbage.offer(done_ns, ticker.due_ns - done_ns)

    def _react(self, at_ns: int) -> None:
        """Hold, or what follows it once a fault is old enough."""
        since_ns = -1 if self.fault is None else at_ns - self.fault.at_ns - self._hold_ns
        if since_ns < 0:
            self._hold()
        elif self._stop is not None:
            is_ramp = since_ns < self._ramp_ns
            self._stop(1 - since_ns / self._ramp_ns if is_ramp else 0.0)
        elif self._home is not None:
            self._home()
        else:
            self._hold()

    def _permitted(self, at_ns: int) -> Actions | None:
        """The action to execute now; latches a fault when the permission ended while moving."""
        client = self._client
        if self.fault is not None and not self._resume:
            return None
        action = client.timeline.action_at(at_ns) if client.ready else None
        if action is not None:
            self.fault = None
            return action
        expires_ns = client.timeline.expires_ns
        if expires_ns is None and client.ready:
            self._is_engaged = False  # a new episode: nothing is owed yet
        elif self._is_engaged and not client.ready:
            self._latch("phase", at_ns, expires_ns)
        elif self._is_engaged and expires_ns is not None and at_ns > expires_ns:
            self._latch("lease", at_ns, expires_ns)
        return None

    def _latch(self, reason: Literal["lease", "phase"], at_ns: int, expires_ns: int | None) -> None:
        self._is_engaged = False
        self._faults += 1
        self.fault = Fault(reason, at_ns, expires_ns)
