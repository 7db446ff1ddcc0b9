"""ActionTimeline: which action is due now, out of the action chunks that arrived so far.

All instants are the robot's clock and are passed in; nothing here reads a clock or opens a socket.
A newer chunk replaces everything from now on, or from its first step when that is still to come:
at once, or blended over a stated time. The arithmetic of a single chunk is ``chunk_playback.py``'s.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Final, Literal, NamedTuple

import numpy as np

from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import ReceiverEndedError, SpecError
from ppstream.robot.chunk_playback import (
    Actions,
    Blending,
    BlendPart,
    ChunkOutcome,
    ChunkPlayback,
    Mask,
    blended,
)
from ppstream.robot.statistics import HoldCounts, Holds, TimelineCounts, TimelineStatistics
from ppstream.wire.robot_messages import ActionChunk

Refusal = Literal[
    "malformed", "non_finite", "out_of_order", "expired", "too_old", "superseded", "future"
]

ACTION_BYTES: Final = 4  # float32
MAX_PENDING: Final = 64  # chunks whose first step is still to come
MAX_OUTCOMES: Final = 1024  # fates of chunks, until they are popped
SUMMED_BYTES: Final = 256  # of a chunk's actions
_FLOAT32: Final = np.dtype(np.float32)
DELAYS: Final = 10  # chunks whose longest delay the policy gets


class Executing(NamedTuple):
    """One action as it was given out: of which chunk, and how old."""

    chunk: ActionChunk
    step: int
    at_ns: int
    age_ns: int  # from the end of the oldest window that has a share in it
    received_ns: int  # when the chunk was merged


class Plan(NamedTuple):
    """Actions executed from ``start_ns`` on unless a newer chunk comes: ``actions [n, dim]``."""

    start_ns: int
    dt_ns: int
    expires_ns: int
    actions: Actions


class ActionTimeline:
    """Merges chunks on one thread, gives actions on another: both under one short lock.

    While two chunks are blended, an action lies between both: the blend begins at the last executed
    action and ends at the newer chunk, ``blend_ms`` after that one began and before the older
    chunk's lease ends. Discrete actions are never blended.

    Args:
        dim: actions per step, in the order declared to the server.
        blend_ms: how long a newer chunk takes to replace the one before; 0: at once.
        max_age_ms: no action is executed later than this after its window's end; None: as long as
            its lease runs.

    Raises:
        SpecError: ``max_age_ms`` is not above 0.

    Attributes:
        failure: the reason why no more chunks can arrive; None: they can.
        is_closed: True once the client was closed: nothing is merged or executed any more.
        is_ready: returns True while the run's phase permits motion; only then holds are counted.
        on_trouble: called, outside the lock, by the thread that sees a hold begin or a fault latch.
    """

    def __init__(self, dim: int, *, blend_ms: float = 0.0, max_age_ms: float | None = None) -> None:
        self.dim = dim
        self.executing: Executing | None = None  # the newest action given out
        self.failure: str | None = None
        self.is_closed = False
        self.is_ready: Callable[[], bool] = _always
        self.on_trouble: Callable[[], None] = _nothing
        if max_age_ms is not None and not max_age_ms > 0:
            raise SpecError(
                f"max_age_ms is {max_age_ms}, want above 0; None leaves the limit to the server"
            )
        self._own_max_age_ns = 0 if max_age_ms is None else round(max_age_ms * NS_PER_MS)
        self._max_age_ns = self._own_max_age_ns
        self._discrete: Mask | None = None
        self._lock = threading.Lock()
        self._fading = Blending(round(blend_ms * NS_PER_MS))
        self._playing: deque[ChunkPlayback] = deque()  # by start, at most one of them begun
        self._newest: ActionChunk | None = None
        self._delays_ns: deque[int] = deque(maxlen=DELAYS)
        self._outcomes: deque[ChunkOutcome] = deque(maxlen=MAX_OUTCOMES)
        self._ended: list[ChunkPlayback] = []  # not counted yet
        self._counts = TimelineCounts()
        self._holds = HoldCounts()
        self._is_asked = False  # for actions, or told of holds: by whoever executes

    def adopt(self, *, discrete: Sequence[int], max_age_ns: int) -> None:
        """Takes the server's settings for later chunks; the smaller maximum age counts.

        Args:
            discrete: indices of actions that are switched.
            max_age_ns: 0: as long as the lease runs.
        """
        mask = np.zeros(self.dim, dtype=np.bool_)
        mask[[index for index in discrete if index < self.dim]] = True
        limits = [limit for limit in (self._own_max_age_ns, max_age_ns) if limit > 0]
        with self._lock:
            self._discrete = mask if mask.any() else None
            self._max_age_ns = min(limits, default=0)

    @property
    def expires_ns(self) -> int | None:
        """When the newest chunk expires, robot clock; None before the first one."""
        newest = self._newest
        return None if newest is None else newest.expires_ns

    @property
    def delay_ns(self) -> int:
        """Window end to receipt: the longest of the last ``DELAYS`` chunks; 0 before the first."""
        with self._lock:
            return max(self._delays_ns, default=0)

    def merge(
        self,
        chunk: ActionChunk,
        now_ns: int,
        actions: Actions | None = None,
        *,
        is_awaited: bool = False,
    ) -> Refusal | None:
        """Take a chunk over from ``now_ns`` on; returns why it was refused, or None.

        ``actions`` is what ``actions_of`` makes of it, for who has that already. ``is_awaited``: a
        program gets the chunk itself, and counts as executing it now, also a ``superseded`` one,
        unless this timeline is asked for actions.

        ``malformed``: not horizon × dim float32; ``out_of_order``: not newer than the newest;
        ``expired``: its lease is over; ``too_old``: no action of it may be executed any more, by
        the maximum age; ``superseded``: all its steps are past; ``future``: its window ends more
        than one lease ahead of ``now_ns``, so this is not the clock that stamps the samples, or it
        was set back.
        """
        if actions is None:
            actions = self.actions_of(chunk)
        with self._lock:
            deadline_ns = chunk.expires_ns
            if self._max_age_ns:
                deadline_ns = min(deadline_ns, chunk.window_end_ns + self._max_age_ns)
            playing = ChunkPlayback(chunk, actions, self._discrete, now_ns, deadline_ns)
            self._counts.received += 1
            refusal = self._refuse(playing, now_ns)
            if is_awaited and not self._is_asked and refusal in (None, "superseded"):
                self._play_first(playing, now_ns)
            if refusal is None:
                self._take_over(playing)
                self._delays_ns.append(now_ns - chunk.window_end_ns)
                self._drop_past(now_ns)
                return None
            if playing.executed:
                self._end(playing)
                return refusal
            self._counts.refused[refusal] += 1
            if refusal in ("expired", "too_old", "superseded"):
                self._outcomes.append(playing.outcome())
        return refusal

    def rehearse(self, chunk: ActionChunk) -> None:
        """Do what ``merge`` does of a chunk that is none; nothing is changed or counted."""
        actions = self.actions_of(chunk)
        with self._lock:
            playing = ChunkPlayback(chunk, actions, self._discrete, 0, chunk.expires_ns)
            self._refuse(playing, 0)

    def action_at(self, now_ns: int) -> Actions | None:
        """The action to execute at ``now_ns``, ``[dim]`` float32, and count it as executed.

        None when nothing may be executed: no chunk yet, none begun, or the begun one expired or
        became too old. That is a hold, and counted.

        Raises:
            ReceiverEndedError: no chunk can come any more.
        """
        self.raise_failure()
        self._is_asked = True
        with self._lock:
            self._drop_past(now_ns)
            playing = self._playing[0] if self._playing else None
            if playing is not None and now_ns >= playing.chunk.start_ns:
                parts = self._execute(playing, now_ns)
            else:  # also when the clock was set back: nothing outlives its lease by that
                parts = []
                newest = self._newest
                is_leased = newest is not None and newest.start_ns <= now_ns <= newest.expires_ns
                self._counts.too_old += playing is None and is_leased
        if parts:
            return blended(parts, now_ns)
        self._hold(now_ns)
        return None

    def held(self, now_ns: int, fault: str = "") -> None:
        """Count that nothing is executed at ``now_ns``, for a loop that has its own reasons.

        Args:
            now_ns: robot clock.
            fault: the fault that blocks motion until it is cleared; empty: none.
        """
        self._is_asked = True
        with self._lock:
            is_new = self._holds.latch(fault)
        self._hold(now_ns, is_trouble=is_new)

    def fail(self, why: str, fault: str) -> None:
        """No more chunks can arrive: ``action_at`` raises ``why``, and ``fault`` is counted."""
        self.failure = why
        with self._lock:
            self._holds.latch(fault)
            self._holds.untold = ""  # it is logged with its traceback

    def raise_failure(self) -> None:
        """Raises ReceiverEndedError when no chunk can come any more."""
        if self.failure is not None:
            raise ReceiverEndedError(self.failure)

    def pop_fault(self) -> str:
        """Returns the newest fault, once; empty: none latched since the last call."""
        if not self._holds.untold:
            return ""
        with self._lock:
            fault, self._holds.untold = self._holds.untold, ""
        return fault

    def begin_session(self) -> None:
        """Restart the counts of holds and faults; a hold in progress belongs to the new session."""
        with self._lock:
            self._holds.begin_session()

    def holds(self, now_ns: int) -> Holds:
        """Holds and faults since the session began, until ``now_ns``."""
        with self._lock:
            return self._holds.so_far(now_ns)

    def plan(self, now_ns: int) -> Plan | None:
        """The newest chunk's steps from the one due at ``now_ns`` on, as they would be executed.

        Nothing is counted. None when there is no chunk.
        """
        with self._lock:
            self._drop_past(now_ns)
            if not self._playing:
                return None
            newest = self._playing[-1]
            chunk, first = newest.chunk, max(0, newest.step_at(now_ns))
            points = newest.actions[first:].copy()
            for row in range(len(points)):
                at_ns = chunk.start_ns + (first + row) * chunk.dt_ns
                parts = self._fading.parts(self._playing, at_ns)
                if len(parts) == 1:
                    break  # from here on they are the policy's own points
                points[row] = blended(parts, at_ns)
        return Plan(chunk.start_ns + first * chunk.dt_ns, chunk.dt_ns, newest.deadline_ns, points)

    def mark_executed(self, chunk: ActionChunk, now_ns: int) -> bool:
        """Count a chunk's first action as executed at ``now_ns`` by someone who plays it himself.

        False when the chunk has been replaced since.
        """
        with self._lock:
            for playing in self._playing:
                if _order(playing.chunk) == _order(chunk):
                    self._play_first(playing, now_ns)
                    return True
        return False

    def clear(self) -> None:
        """Forget all chunks (a new episode): until the next one there is no action to execute."""
        with self._lock:
            self._fading.clear()
            while self._playing:
                self._end(self._playing.popleft())
            self._newest = None
            self._holds.begin_episode()

    def close(self) -> None:
        """Forget all chunks for good: there is no action to execute any more."""
        self.is_closed = True
        self.clear()

    def pop_outcomes(self, now_ns: int) -> list[ChunkOutcome]:
        """Returns the fate of the chunks that ended by ``now_ns`` and since the last call."""
        with self._lock:
            self._drop_past(now_ns)
            self._count_ended()
            outcomes = list(self._outcomes)
            self._outcomes.clear()
        return outcomes

    def statistics(self) -> TimelineStatistics:
        with self._lock:
            self._count_ended()
            return self._counts.statistics(len(self._playing), self._max_age_ns)

    def _hold(self, now_ns: int, *, is_trouble: bool = False) -> None:
        is_ready = self.is_ready()
        with self._lock:
            if is_ready:
                is_trouble |= self._holds.hold(now_ns)
            else:
                self._holds.pause(now_ns)
        if is_trouble:
            self.on_trouble()

    # ---- under the lock ------------------------------------------------------------------------

    def _execute(self, playing: ChunkPlayback, now_ns: int) -> list[BlendPart]:
        """Returns what the action at ``now_ns`` is mixed from; it counts as executed."""
        self._fading.forget(playing, now_ns)
        parts = self._fading.parts((playing,), now_ns)
        age_ns = now_ns - min(part.playing.chunk.window_end_ns for part in parts)
        step = playing.step_at(now_ns)
        playing.play(step, now_ns, age_ns)
        self._counts.oldest_ns = max(self._counts.oldest_ns, age_ns)
        self._holds.execute(now_ns)
        self.executing = Executing(playing.chunk, step, now_ns, age_ns, playing.received_ns)
        return parts

    def _play_first(self, playing: ChunkPlayback, now_ns: int) -> None:
        """Count the first action as executed, by someone who plays it himself."""
        age_ns = now_ns - playing.chunk.window_end_ns
        playing.play(max(playing.last_step, 0), now_ns, age_ns)
        self._counts.oldest_ns = max(self._counts.oldest_ns, age_ns)
        self._holds.execute(now_ns)

    def actions_of(self, chunk: ActionChunk) -> Actions:
        """Returns the chunk's actions ``[horizon, dim]``, not copied; empty when malformed."""
        if len(chunk.actions) != chunk.horizon * self.dim * ACTION_BYTES:
            return np.empty((0, self.dim), dtype=np.float32)
        return np.ndarray((chunk.horizon, self.dim), _FLOAT32, chunk.actions)

    def _refuse(self, playing: ChunkPlayback, now_ns: int) -> Refusal | None:
        chunk, newest = playing.chunk, self._newest
        if not len(playing.actions):
            return "malformed"
        if not _are_finite(playing):
            return "non_finite"
        if newest is not None and newest.session == chunk.session:
            order = chunk.session_epoch, chunk.epoch, chunk.seq
            if order <= (newest.session_epoch, newest.epoch, newest.seq):
                return "out_of_order"
        if now_ns > playing.deadline_ns:
            return "expired" if now_ns > chunk.expires_ns else "too_old"
        if now_ns >= chunk.start_ns + chunk.horizon * chunk.dt_ns:
            return "superseded"
        lease_ns = chunk.expires_ns - chunk.window_end_ns  # stamps may lead a little, by jitter
        return "future" if chunk.window_end_ns - now_ns > lease_ns else None

    def _take_over(self, playing: ChunkPlayback) -> None:
        self._newest = playing.chunk
        while self._playing and self._playing[-1].chunk.start_ns >= playing.chunk.start_ns:
            self._replace(self._playing.pop(), playing)
        if len(self._playing) >= MAX_PENDING:  # never the one that plays: none would ever be begun
            self._end(self._playing.pop())
        self._playing.append(playing)

    def _drop_past(self, now_ns: int) -> None:
        """Drop chunks that a newer, begun one has replaced, and the begun one once it expired."""
        playing = self._playing
        while len(playing) > 1 and playing[1].chunk.start_ns <= now_ns:
            self._replace(playing.popleft(), playing[0])
        while playing and now_ns > playing[0].deadline_ns:
            self._end(playing.popleft())
            self._fading.clear()

    def _replace(self, playing: ChunkPlayback, by: ChunkPlayback) -> None:
        """A chunk ends because a newer one takes over."""
        self._end(playing)
        self._fading.replace(playing, by)

    def _end(self, playing: ChunkPlayback) -> None:
        """A chunk ends; it is counted at the next read, not while the next one is merged."""
        self._ended.append(playing)
        if len(self._ended) >= MAX_PENDING:
            self._count_ended()

    def _count_ended(self) -> None:
        for playing in self._ended:
            outcome = playing.outcome()
            self._outcomes.append(outcome)
            self._counts.end(outcome)
        self._ended.clear()


def _are_finite(playing: ChunkPlayback) -> bool:
    """Few values by their sum, which no finite float32 can make infinite: numpy is a long way."""
    data = playing.chunk.actions
    if len(data) <= SUMMED_BYTES:
        return isfinite(sum(memoryview(data).cast("B").cast("f")))
    return 0 not in np.isfinite(playing.actions).tobytes()


def _order(chunk: ActionChunk) -> tuple[int, int, int, int]:
    return (chunk.session, chunk.session_epoch, chunk.epoch, chunk.seq)


def _always() -> bool:
    return True


def _nothing() -> None:
    pass
