"""AskRehearsal: an ``ask`` is gone through shortly before the next, to bring it into the caches.

Robots that ask at a rate of their own leave code and data alone for so long that the first call of
each function takes several times what it takes back to back. The client's thread goes through the
newest ask once more, while the caller sleeps: nothing is sent, merged or counted. AnswerWait does
so before an answer that takes long, on the thread that waits for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.cpus import has_spare_cpus
from ppstream.core.rhythm import SHORTEST_NS, Rhythm, usual
from ppstream.wire.fields import encoder
from ppstream.wire.robot_messages import ActionChunk, Samples, to_robot

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppstream.core.waiter import Waiter
    from ppstream.robot.session import RobotSession
    from ppstream.robot.timeline import ActionTimeline

AHEAD_NS: Final = NS_PER_MS  # of an ask: the ranks, which may share this CPU, do it later
ASKS_MAX: Final = 64  # between two turns of the client's thread
EARLY_NS: Final = 300_000  # so long before an answer is due the thread that waits gets ready,
LATE_NS: Final = 250_000  # and stays awake until so long behind
LOOK_NS: Final = 20_000  # between two looks for it


class AskRehearsal:
    """Told of asks by any thread; ``turn`` is for whoever does the client's work: two may at once.

    ``newest`` is the newest chunk that was merged.
    """

    def __init__(self, session: RobotSession, timeline: ActionTimeline) -> None:
        self._session, self._timeline = session, timeline
        self._asks: deque[int] = deque(maxlen=ASKS_MAX)
        self._rhythm = Rhythm()
        self._due_ns: int | None = None
        self.newest: ActionChunk | None = None
        self.asked = self._asks.append  # told when samples left

    def turn(self, now: int) -> int | None:
        """Rehearses if that is due; returns when it is due next."""
        while self._asks:
            try:
                asked_ns = self._asks.popleft()
            except IndexError:  # another thread was faster
                break
            self._rhythm.note(asked_ns)
        if self._due_ns is not None and 0 <= now - self._due_ns < AHEAD_NS:
            self.run()
        self._due_ns = self._rhythm.ready_ns(now, AHEAD_NS)
        return self._due_ns

    def run(self) -> None:
        """Goes through the newest ask."""
        if (chunk := self.newest) is None:
            return
        encoder.encode(Samples(chunk.session, 0, chunk.actions, chunk.actions))
        again = to_robot.decode(encoder.encode(chunk))
        if isinstance(again, ActionChunk):
            self._session.reject(again)
            self._timeline.rehearse(again)


class AnswerWait:
    """Waits for answers, one at a time, on the thread that asked.

    Before an answer that usually takes ``SHORTEST_NS`` or more it calls ``get_ready``; on a host
    with CPUs to spare it does not sleep from then until ``LATE_NS`` after the answer is due.
    """

    def __init__(self) -> None:
        self.get_ready: Callable[[], None] | None = None
        self._may_stay_awake = has_spare_cpus()
        self._usual_ns = self._asked_ns = 0

    def begin(self, asked_ns: int) -> None:
        """An answer is waited for from now on."""
        self._asked_ns = asked_ns

    def end(self, at_ns: int) -> None:
        """It has come; one that is late hardly counts."""
        self._usual_ns = usual(self._usual_ns, at_ns - self._asked_ns)

    def wait(self, arrivals: Waiter, limit_ns: int) -> None:
        """Return when something has come, or the limit is over, or sooner."""
        now = now_ns()
        until_ns, due_ns = now + limit_ns, self._asked_ns + self._usual_ns
        if self._usual_ns < SHORTEST_NS or not now < due_ns - EARLY_NS < until_ns:
            arrivals.wait(limit_ns)
            return
        if arrivals.wait(due_ns - EARLY_NS - now):
            return
        if self.get_ready is not None:
            self.get_ready()
        if self._may_stay_awake:
            arrivals.wait_awake(min(until_ns, due_ns + LATE_NS) - now_ns(), LOOK_NS)
