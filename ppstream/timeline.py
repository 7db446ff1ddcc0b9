"""ActionTimeline: which action is due now, out of the action chunks that arrived so far.

All instants are the robot's clock and are passed in; nothing here reads a clock or opens a socket.
A newer chunk replaces everything from now on, or from its first step when that is still to come.
Between policy points actions are linear, on a point they are the policy's own bits, and behind the
last point that one is held until the chunk expires.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from ppstream.messages import ActionChunk

Actions: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Refusal = Literal["malformed", "non_finite", "out_of_order", "expired", "superseded", "future"]

ACTION_BYTES: Final = 4  # float32
MAX_PENDING: Final = 64  # chunks whose first step is still to come
MAX_OUTCOMES: Final = 1024  # what became of chunks, until somebody takes it


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one merged chunk.

    ``age_ns``: from its window's end to the execution of its first action, or to its receipt when
    none was executed. ``executed`` and ``skipped`` count its steps.
    """

    session: int
    epoch: int
    seq: int
    age_ns: int
    executed: int
    skipped: int


@dataclass(frozen=True, slots=True)
class TimelineStatistics:
    """Counts since the start: received = refused + executed + superseded + pending.

    ``executed``: at least one step was; ``superseded``: none, a newer chunk came first.
    """

    received: int
    refused: dict[str, int]
    executed: int
    superseded: int
    pending: int
    steps_executed: int
    steps_skipped: int


@dataclass(slots=True)
class _Playing:
    """A merged chunk and how far it was executed."""

    chunk: ActionChunk
    actions: Actions
    received_ns: int
    first_ns: int = 0
    last_step: int = -1
    executed: int = 0
    skipped: int = 0

    def play(self, step: int, now_ns: int) -> None:
        if not self.executed:
            self.first_ns = now_ns
        if step > self.last_step:
            self.skipped += step - self.last_step - 1
            self.executed += 1
            self.last_step = step

    def outcome(self) -> Outcome:
        chunk = self.chunk
        until_ns = self.first_ns if self.executed else self.received_ns
        return Outcome(
            chunk.session,
            chunk.epoch,
            chunk.seq,
            until_ns - chunk.window_end_ns,
            self.executed,
            self.skipped,
        )


@dataclass(slots=True)
class _Counts:
    received: int = 0
    executed: int = 0
    superseded: int = 0
    steps_executed: int = 0
    steps_skipped: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class ActionTimeline:
    """Merges chunks on one thread, gives actions on another: both under one short lock.

    Args:
        dim: actions per step, in the order declared to the server.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._lock = threading.Lock()
        self._playing: deque[_Playing] = deque()  # by start, at most one of them begun
        self._newest: ActionChunk | None = None
        self._outcomes: deque[Outcome] = deque(maxlen=MAX_OUTCOMES)
        self._counts = _Counts()

    @property
    def expires_ns(self) -> int | None:
        """When the newest chunk expires, robot clock; None before the first one."""
        newest = self._newest
        return None if newest is None else newest.expires_ns

    def merge(self, chunk: ActionChunk, now_ns: int) -> Refusal | None:
        """Take a chunk over from ``now_ns`` on; returns why it was refused, or None.

        ``malformed``: not horizon × dim float32; ``out_of_order``: not newer than the newest;
        ``expired``: its lease is over; ``superseded``: all its steps are past; ``future``: its
        window ends more than one lease ahead of ``now_ns``, so this is not the clock that stamps
        the samples, or it was set back.
        """
        actions = self._view(chunk)
        with self._lock:
            self._counts.received += 1
            refusal = self._refuse(chunk, actions, now_ns)
            if refusal is None:
                self._take_over(_Playing(chunk, actions, now_ns))
                self._forget_past(now_ns)
                return None
            self._counts.refused[refusal] += 1
            if refusal in ("expired", "superseded"):
                self._outcomes.append(_Playing(chunk, actions, now_ns).outcome())
        return refusal

    def action_at(self, now_ns: int) -> Actions | None:
        """The action to execute at ``now_ns``, ``[dim]`` float32, and count it as executed.

        None when nothing may be executed: no chunk yet, none begun, or the begun one expired.
        """
        with self._lock:
            self._forget_past(now_ns)
            playing = self._playing[0] if self._playing else None
            if playing is None or now_ns < playing.chunk.start_ns:
                return None  # also when the clock was set back: nothing outlives its lease by that
            step, within_ns = divmod(now_ns - playing.chunk.start_ns, playing.chunk.dt_ns)
            last = playing.chunk.horizon - 1
            playing.play(min(step, last), now_ns)
        if step >= last or within_ns == 0:
            point: Actions = playing.actions[min(step, last)].copy()
            return point
        return _between(
            playing.actions[step], playing.actions[step + 1], within_ns / playing.chunk.dt_ns
        )

    def mark_executed(self, chunk: ActionChunk, now_ns: int) -> bool:
        """Count a chunk's first action as executed at ``now_ns`` by someone who plays it himself.

        False when the chunk has been replaced since.
        """
        with self._lock:
            for playing in self._playing:
                if _order(playing.chunk) == _order(chunk):
                    playing.play(max(playing.last_step, 0), now_ns)
                    return True
        return False

    def clear(self) -> None:
        """Forget all chunks (a new episode): until the next one there is no action to execute."""
        with self._lock:
            while self._playing:
                self._end(self._playing.popleft())
            self._newest = None

    def take_outcomes(self, now_ns: int) -> list[Outcome]:
        """What became of the chunks that ended by ``now_ns`` and since the last call."""
        with self._lock:
            self._forget_past(now_ns)
            outcomes = list(self._outcomes)
            self._outcomes.clear()
        return outcomes

    def statistics(self) -> TimelineStatistics:
        with self._lock:
            counts = self._counts
            return TimelineStatistics(
                received=counts.received,
                refused=dict(counts.refused),
                executed=counts.executed,
                superseded=counts.superseded,
                pending=len(self._playing),
                steps_executed=counts.steps_executed,
                steps_skipped=counts.steps_skipped,
            )

    def _view(self, chunk: ActionChunk) -> Actions:
        """The chunk's actions ``[horizon, dim]`` without a copy; empty when they are malformed."""
        if len(chunk.actions) != chunk.horizon * self.dim * ACTION_BYTES:
            return np.empty((0, self.dim), dtype=np.float32)
        flat: Actions = np.frombuffer(chunk.actions, dtype=np.float32)
        return flat.reshape(chunk.horizon, self.dim)

    def _refuse(self, chunk: ActionChunk, actions: Actions, now_ns: int) -> Refusal | None:
        if not len(actions):
            return "malformed"
        if not np.isfinite(actions).all():
            return "non_finite"
        newest = self._newest
        same_session = newest is not None and newest.session == chunk.session
        if newest is not None and same_session and _order(chunk) <= _order(newest):
            return "out_of_order"
        if now_ns > chunk.expires_ns:
            return "expired"
        if now_ns >= chunk.start_ns + chunk.horizon * chunk.dt_ns:
            return "superseded"
        lease_ns = chunk.expires_ns - chunk.window_end_ns  # stamps may lead a little, by jitter
        return "future" if chunk.window_end_ns - now_ns > lease_ns else None

    def _take_over(self, playing: _Playing) -> None:
        self._newest = playing.chunk
        while self._playing and self._playing[-1].chunk.start_ns >= playing.chunk.start_ns:
            self._end(self._playing.pop())
        self._playing.append(playing)
        if len(self._playing) > MAX_PENDING:
            self._end(self._playing.popleft())

    def _forget_past(self, now_ns: int) -> None:
        """Drop chunks that a newer, begun one has replaced, and the begun one once it expired."""
        playing = self._playing
        while len(playing) > 1 and playing[1].chunk.start_ns <= now_ns:
            self._end(playing.popleft())
        while playing and now_ns > playing[0].chunk.expires_ns:
            self._end(playing.popleft())

    def _end(self, playing: _Playing) -> None:
        outcome = playing.outcome()
        self._outcomes.append(outcome)
        self._counts.steps_executed += outcome.executed
        self._counts.steps_skipped += outcome.skipped
        if outcome.executed:
            self._counts.executed += 1
        else:
            self._counts.superseded += 1


def _order(chunk: ActionChunk) -> tuple[int, int, int, int]:
    return (chunk.session, chunk.session_epoch, chunk.epoch, chunk.seq)


def _between(left: Actions, right: Actions, fraction: float) -> Actions:
    """``left + fraction * (right - left)`` for a fraction in [0, 1), never outside the two.

    In float64, whose rounding to float32 cannot pass either end.
    """
    start = left.astype(np.float64)
    action: Actions = (start + fraction * (right - start)).astype(np.float32)
    return action
