"""Way to ready: words how far rank 0's bring-up is, how long it still takes, and what it loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from ppstream.analysis.segments import ALONE
from ppstream.core.clock import NS_PER_S
from ppstream.core.phases import BRING_UP
from ppstream.launch.course import Course
from ppstream.launch.progress import Wait
from ppstream.pipeline.loop import Rank0Loop

STEPS: Final = 10  # looks that found a new envelope: the pace is that of the newest ones
LOST_MIN: Final = 0.5  # of a phase's envelopes: fewer that are dropped are not worth a word


class WayToReady:
    """Returns what rank 0 waits for on its way to ready, when it is called."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._phase: PhaseProgress | None = None

    def __call__(self, now: int) -> Wait | None:
        """As ``Progress`` asks.

        Raises:
            StopIteration: the way is over.
        """
        loop = self._course.loop
        if not isinstance(loop, Rank0Loop):
            return Wait(self._course.step_name) if self._course.step_name else None
        if loop.phase == "starting":
            return None
        if loop.phase not in ("warming", BRING_UP):
            raise StopIteration
        if loop.log.apart == ALONE:
            return Wait("timing each stage alone")
        with loop.counting:
            finished, dropped = loop.finished, loop.stage_c.statistics().dropped
        if self._phase is None or self._phase.name != loop.phase:
            self._phase = PhaseProgress(loop.phase, *loop.before, loop.planned, now)
        lease_ms = loop.config.actions.lease_ms
        return Wait(loop.phase, self._phase.text(finished, dropped, lease_ms, now))


class PhaseProgress:
    """Envelopes of one phase.

    Args:
        name: of the phase.
        before: envelopes of the run that were finished before it.
        dropped: those of them that were dropped, by reason.
        total: envelopes of this phase at most; None: not known.
        now: when it was first seen, monotonic ns.
    """

    def __init__(
        self, name: str, before: int, dropped: Mapping[str, int], total: int | None, now: int
    ) -> None:
        self.name = name
        self._before = before
        self._dropped = dict(dropped)
        self._total = total
        self._began_ns = now
        self._steps: deque[tuple[int, int]] = deque(maxlen=STEPS)  # when, and finished

    def text(self, finished: int, dropped: Mapping[str, int], lease_ms: float, now: int) -> str:
        """Words how many are done, what most are dropped for, how long one takes, and what is left.

        Args:
            finished: envelopes of the run by now.
            dropped: of the run, by reason.
            lease_ms: an action's longest age.
            now: monotonic ns.
        """
        done, total = max(0, finished - self._before), self._total  # counted before it began
        if total is not None:
            done = min(done, total)  # what comes behind it times each stage alone
        if done and (not self._steps or self._steps[-1][1] != finished):
            self._steps.append((now, finished))
        most = "" if total is None else f" of {'at most ' * (self.name == 'warming')}{total}"
        text = f"{done}{most} envelopes"
        if not done:
            return f"{text} after {_in_words(now - self._began_ns)}"
        text += self._lost(done, dropped, lease_ms)
        if len(self._steps) > 1:
            (then, before), (newest, after) = self._steps[0], self._steps[-1]
            each_ns = (newest - then) / (after - before)
            text += f", {_in_words(each_ns)} each"
            if total is not None and total > done:
                text += f", {_in_words(each_ns * (total - done))} left"
        return text

    def _lost(self, done: int, dropped: Mapping[str, int], lease_ms: float) -> str:
        """Names what most of the phase's envelopes are dropped for; empty: they are not."""
        new = {reason: n - self._dropped.get(reason, 0) for reason, n in dropped.items()}
        reason, n = max(new.items(), key=lambda item: item[1], default=("", 0))
        if n <= LOST_MIN * done:
            return ""
        if reason == "expired":
            return f", {n} older than actions.lease_ms = {lease_ms:g}"
        return f", {n} dropped as {reason}"


def _in_words(ns: float) -> str:
    seconds = ns / NS_PER_S
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
