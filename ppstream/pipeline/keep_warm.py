"""KeepWarm: dry runs while a thread waits, so that the next envelope finds its code in the caches.

After some milliseconds of other work the same call takes several times what it takes back to back,
mostly for memory that left the caches; and a CPU that has slept long wakes late. A dry run reads
the newest data, writes into memory of its own and accounts for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import MAX_TEXT
from ppstream.core.rhythm import AHEAD_NS, Rhythm
from ppstream.wire.robot_messages import SERVING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.core.waiter import Waiter
    from ppstream.observe.log_writer import TimestampLog

SHARE_MAX: Final = 0.5  # of the time between two: an envelope waits for a dry run that has begun
PAUSE_NS: Final = NS_PER_S


class KeepWarm:
    """Sleeps, with a dry run before an envelope is expected; one thread.

    With ``pipeline.keep_warm_ms`` there is one in each such period instead. Bring-up is measured
    without. They end, and an event says why, when one raises or those of a period take more than
    ``SHARE_MAX`` of it. When those before envelopes take as much of ``AHEAD_NS``, as on a busy
    machine, there are none for ``PAUSE_NS``.

    Args:
        config: of the run.
        rehearse: one dry run of each period; None: there are none.
        log: of this rank.
        get_ready: the dry run before an envelope; None: there are none.
    """

    def __init__(
        self,
        config: PipelineConfig,
        rehearse: Callable[[], None] | None,
        log: TimestampLog,
        get_ready: Callable[[], None] | None = None,
    ) -> None:
        self._period_ns = round((config.pipeline.keep_warm_ms or 0) * NS_PER_MS)
        self._rehearse = rehearse if self._period_ns else None
        self._get_ready = get_ready
        self._log = log
        self._rhythm = Rhythm()
        self._usual_ns = 0  # a mean that forgets
        self._paused_ns = 0  # until then none before an envelope
        self.began = self._rhythm.note  # told when an envelope began, once it has left

    def wait(self, waiter: Waiter, limit_ns: int, phase: str) -> Sequence[int]:
        """As ``Waiter.wait``."""
        if (self._rhythm.next_ns is None and self._rehearse is None) or phase not in SERVING:
            return waiter.wait(max(0, limit_ns))
        now = now_ns()
        until_ns = now + limit_ns
        while (due := self._next_due(now)) and due.at_ns < until_ns:
            ready = waiter.wait(due.at_ns - now)
            if ready or waiter.woken:
                return ready
            self._run(due)
            now = now_ns()
        return waiter.wait(max(0, until_ns - now))

    def expects(self, phase: str) -> bool:
        """True when ``get_ready`` will run before another envelope comes, if that is in step."""
        at_ns = self._rhythm.next_ns if self._rehearse is None and self._get_ready else None
        return at_ns is not None and at_ns > self._paused_ns and phase in SERVING

    def _next_due(self, now: int) -> _DryRun | None:
        if self._rehearse is not None:
            return _DryRun(now + self._period_ns, self._rehearse)
        at_ns = self._rhythm.ready_ns(now)
        if self._get_ready is None or at_ns is None or at_ns < self._paused_ns:
            return None
        return _DryRun(at_ns, self._get_ready)

    def _run(self, due: _DryRun) -> None:
        begun_ns = now_ns()
        try:
            due.run()
        except BaseException as error:  # noqa: BLE001 - user code; no envelope is lost by it
            self._end(f"{type(error).__name__}: {error}")
            return
        ended_ns = now_ns()
        self._usual_ns += (ended_ns - begun_ns - self._usual_ns) >> 3
        if self._rehearse is None:
            if self._usual_ns > SHARE_MAX * AHEAD_NS:
                self._usual_ns, self._paused_ns = 0, ended_ns + PAUSE_NS
        elif self._usual_ns > SHARE_MAX * self._period_ns:
            took_ms, period_ms = self._usual_ns / NS_PER_MS, self._period_ns / NS_PER_MS
            self._end(
                f"a dry run takes {took_ms:.2f} ms, more than {SHARE_MAX:g} of "
                f"pipeline.keep_warm_ms {period_ms:g}"
            )

    def _end(self, why: str) -> None:
        self._rehearse = self._get_ready = None
        self._log.event("keep_warm_ended", why=why[:MAX_TEXT])


class _DryRun(NamedTuple):
    at_ns: int
    run: Callable[[], None]
