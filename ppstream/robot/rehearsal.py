"""AskRehearsal: an ``ask`` is gone through shortly before the next, to bring it into the caches.

Robots that ask at a rate of their own leave code and data alone for so long that the first call of
each function takes several times what it takes back to back. The client's thread goes through the
newest ask once more, while the caller sleeps: nothing is sent, merged or counted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS
from ppstream.core.rhythm import Rhythm
from ppstream.wire.fields import encoder
from ppstream.wire.robot_messages import ActionChunk, Samples, to_robot

if TYPE_CHECKING:
    from ppstream.robot.session import RobotSession
    from ppstream.robot.timeline import ActionTimeline

AHEAD_NS: Final = NS_PER_MS  # of an ask: the ranks, which may share this CPU, do it later
ASKS_MAX: Final = 64  # between two turns of the client's thread


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
            self._run()
        self._due_ns = self._rhythm.ready_ns(now, AHEAD_NS)
        return self._due_ns

    def _run(self) -> None:
        if (chunk := self.newest) is None:
            return
        encoder.encode(Samples(chunk.session, 0, chunk.actions, chunk.actions))
        again = to_robot.decode(encoder.encode(chunk))
        if isinstance(again, ActionChunk):
            self._session.reject(again)
            self._timeline.rehearse(again)
