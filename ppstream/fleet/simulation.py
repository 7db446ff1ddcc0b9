"""One pipeline and its robots, event by event: how old the actions are that the robots execute.

As rank 0 does it: A takes a credit and then each robot's newest sample, so nothing queues and what
a newer sample overtakes is never computed; results come back in order and give their credit back;
one thread begins an envelope first, then decodes one (``pipeline/loop.py``). A place of
``replicas`` ranks takes envelopes in turn, and their results keep the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ppstream.fleet.service_times import Duration, Floats, ServiceTimes

NEVER: Final = float("inf")
D_OUT: Final = 2  # results that wait for C
DRAWN: Final = 256  # durations at a time
WARM_SHARE: Final = 0.2  # of the time, at the begin; not counted
MS_PER_S: Final = 1000.0

Pacing = Literal["sample", "rows"]


@dataclass(frozen=True)
class RobotGroup:
    """Robots of one pipeline; each samples ``rate_hz`` times a second.

    Their phases are drawn; ``arrivals = "poisson"`` draws each interval, too.
    """

    count: int
    rate_hz: float
    net_ms: float = 0.0  # one way, from a robot to rank 0 and back again
    arrivals: Literal["periodic", "poisson"] = "periodic"


@dataclass(frozen=True)
class Shape:
    """Form of a pipeline; ``gather_ms`` is of pacing ``rows``."""

    pacing: Pacing = "sample"
    threads: Literal["serial", "split"] = "serial"
    replicas: int = 1
    gather_ms: float = 0.0


@dataclass(frozen=True)
class SimulatedService:
    """Simulated service; times in ms, warm-up left out.

    Attributes:
        ages_ms: of a robot's newest window at moments drawn evenly, all robots.
        latencies_ms: of each window that a robot's sample ended, at the robot.
        period_ms: mean time between two envelopes.
        answered_share: windows that had an answer, of all samples.
    """

    ages_ms: Floats
    latencies_ms: Floats
    period_ms: float
    answered_share: float


def simulate(
    times: ServiceTimes, robots: RobotGroup, shape: Shape, seconds: float, rng: np.random.Generator
) -> SimulatedService:
    """Serve ``robots`` for ``seconds``; every random draw is of ``rng``.

    Raises:
        ValueError: more robots than rows, or none.
    """
    if not 1 <= robots.count <= times.rows:
        raise ValueError(f"got {robots.count} robots, want 1 to {times.rows}, the pipeline's rows")
    stamps = [_stamps(robots, seconds, rng) for _ in range(robots.count)]
    return serve(times, stamps, robots.net_ms, shape, seconds, rng)


def serve(
    times: ServiceTimes,
    stamps: Sequence[Floats],
    net_ms: float,
    shape: Shape,
    seconds: float,
    rng: np.random.Generator,
) -> SimulatedService:
    """Serve robots that sample at ``stamps``, in ms and rising, for ``seconds``."""
    begins, ends, emits = _Pipeline(times, shape, stamps, net_ms, rng).run(seconds * MS_PER_S)
    warm_ms = WARM_SHARE * seconds * MS_PER_S
    arrivals = emits + net_ms
    ages, latencies = [], []
    answered = asked = 0
    for row, own in enumerate(stamps):
        counts = int((own >= warm_ms).sum())
        moments = rng.uniform(warm_ms, seconds * MS_PER_S, counts)
        ages.append(ages_at(moments, arrivals, ends[:, row]))
        counted = ends[:, row] >= warm_ms
        counted[1:] &= ends[1:, row] > ends[:-1, row]  # else the window is the one before
        latencies.append(arrivals[counted] - ends[counted, row])
        answered, asked = answered + int(counted.sum()), asked + counts
    steady = begins[begins >= warm_ms]
    period_ms = float(np.diff(steady).mean()) if len(steady) > 1 else NEVER
    found = np.concatenate(ages), np.concatenate(latencies)
    return SimulatedService(*found, period_ms, answered / asked if asked else 0.0)


def ages_at(moments: Floats, arrivals: Floats, ends: Floats) -> Floats:
    """Ages of the newest window whose chunk has arrived; moments before the first are left out.

    Args:
        moments: when to look.
        arrivals: of chunks at the robot, rising.
        ends: their windows' ends.
    """
    newest = np.searchsorted(arrivals, moments, "right") - 1
    seen = newest >= 0
    return np.asarray(moments[seen] - ends[newest[seen]])


def _stamps(robots: RobotGroup, seconds: float, rng: np.random.Generator) -> Floats:
    """When one robot samples, in ms."""
    period_ms, count = MS_PER_S / robots.rate_hz, int(seconds * robots.rate_hz)
    if robots.arrivals == "periodic":
        return np.asarray((rng.random() + np.arange(count)) * period_ms)
    return np.cumsum(rng.exponential(period_ms, count), dtype=np.float64)


class _Draws:
    """Durations one by one, of one kind."""

    def __init__(self, kind: Duration, rng: np.random.Generator) -> None:
        self._kind, self._rng = kind, rng
        self._left: list[float] = []

    def next(self) -> float:
        if not self._left:
            self._left = self._kind.drawn(DRAWN, self._rng).tolist()
        return self._left.pop()


class _Inbox:
    """Samples in order of arrival at rank 0, and each robot's newest one so far."""

    def __init__(self, stamps: Sequence[Floats], net_ms: float) -> None:
        self._at = np.concatenate(stamps) + net_ms
        rows = np.repeat(np.arange(len(stamps)), [len(own) for own in stamps])
        order = np.argsort(self._at, kind="stable")
        self._arrivals: list[float] = self._at[order].tolist()
        self._rows: list[int] = rows[order].tolist()
        self._net_ms = net_ms
        self._read = 0
        self.newest = [-NEVER] * len(stamps)  # stamp of each robot's newest sample
        self.fresh: dict[int, float] = {}  # arrival of a robot's first sample behind its window

    def take(self, now: float) -> None:
        """All that has arrived by ``now``."""
        while self._read < len(self._arrivals) and self._arrivals[self._read] <= now:
            at, row = self._arrivals[self._read], self._rows[self._read]
            self.newest[row] = at - self._net_ms
            self.fresh.setdefault(row, at)
            self._read += 1

    def next_ms(self) -> float:
        """When the next one arrives."""
        return self._arrivals[self._read] if self._read < len(self._arrivals) else NEVER


class _Pipeline:
    """Rank 0's thread and the places behind it; all instants in ms."""

    def __init__(
        self,
        times: ServiceTimes,
        shape: Shape,
        stamps: Sequence[Floats],
        net_ms: float,
        rng: np.random.Generator,
    ) -> None:
        self._shape, self._robots = shape, len(stamps)
        self._inbox = _Inbox(stamps, net_ms)
        self._a, self._c = _Draws(times.a, rng), _Draws(times.c, rng)
        self._b = [_Draws(place, rng) for place in times.places]
        self._hops = [_Draws(hop, rng) for hop in times.hops]
        self._free = [[0.0] * len(times.places) for _ in range(shape.replicas)]
        self._credits = times.d_in
        self._back: deque[float] = deque()  # results on their way, in order
        self._to_decode = 0  # results that the only thread has received
        self._decoding: deque[float] = deque(maxlen=D_OUT)  # when C began, on a thread of its own
        self._begun = 0
        self._owed = [0] * len(stamps)  # its answer is out once so many envelopes are finished
        self._was_owed = False
        self._until: float | None = None  # of pacing rows: begins without the rest
        self._begins: list[float] = []
        self._ends: list[list[float]] = []
        self._emits: list[float] = []

    def run(self, until: float) -> tuple[Floats, Floats, Floats]:
        """When A began, the window's end of each robot and when C ended, by envelope."""
        now = 0.0
        while now < until:
            self._inbox.take(now)
            self._receive(now)
            due = self._due(now) if self._credits else NEVER
            worked = due <= now or bool(self._to_decode)
            if due <= now:
                now = self._begin(now)
            if self._to_decode:
                now = self._decode(now)
            if not worked:
                arrives = self._inbox.next_ms() if self._credits else NEVER
                now = min(due, arrives, self._next_receipt())
        n = len(self._emits)
        ends = np.array(self._ends[:n]).reshape(n, self._robots)
        return np.array(self._begins), ends, np.array(self._emits)

    def _receive(self, now: float) -> None:
        """Take in the results that are there: each gives its credit back."""
        while self._next_receipt() <= now:
            at = self._back.popleft()
            self._credits += 1
            if self._shape.threads == "serial":
                self._to_decode += 1
            else:  # a thread of its own decodes it at once, or behind the one before
                begin = max(at, self._emits[-1] if self._emits else 0.0)
                self._decoding.append(begin)
                self._emits.append(begin + self._c.next())

    def _next_receipt(self) -> float:
        """When the oldest result is received: with ``D_OUT`` undecoded ones it waits."""
        if not self._back:
            return NEVER
        is_full = len(self._decoding) == D_OUT
        return max(self._back[0], self._decoding[0] if is_full else 0.0)

    def _due(self, now: float) -> float:
        """When A may begin for what has arrived (``pipeline/pacing.py``: ``OnRows``)."""
        fresh = self._inbox.fresh
        if not fresh:
            return NEVER
        if self._shape.pacing == "sample" or len(fresh) == self._robots:
            return -NEVER
        finished = len(self._emits)
        if any(owed > finished for row, owed in enumerate(self._owed) if row not in fresh):
            self._was_owed, self._until = True, None
            return NEVER
        if self._until is None:
            since = now if self._was_owed else min(fresh.values())
            self._until = since + self._shape.gather_ms
        return self._until

    def _begin(self, now: float) -> float:
        """A, and the whole way through the policy ranks; returns when A is over."""
        self._begins.append(now)
        self._ends.append(list(self._inbox.newest))
        for row in self._inbox.fresh:
            self._owed[row] = self._begun + 1
        self._inbox.fresh.clear()
        self._was_owed, self._until = False, None
        self._credits -= 1
        over = at = now + self._a.next()
        free = self._free[self._begun % self._shape.replicas]
        for place, (hop, b) in enumerate(zip(self._hops, self._b, strict=False)):
            free[place] = at = max(at + hop.next(), free[place]) + b.next()
        self._back.append(at + self._hops[-1].next())
        self._begun += 1
        return over

    def _decode(self, now: float) -> float:
        """C of the oldest result on rank 0's only thread; returns when that goes on."""
        self._to_decode -= 1
        self._emits.append(now + self._c.next())
        return self._emits[-1]
