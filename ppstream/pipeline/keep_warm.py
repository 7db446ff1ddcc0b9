"""KeepWarm: dry runs while a thread waits, so that the next envelope finds its code in the caches.

After some milliseconds of other work the same call takes several times what it takes back to back,
mostly for memory that left the caches. A dry run reads the newest data, writes into memory of its
own and accounts for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.errors import MAX_TEXT
from ppstream.wire.robot_messages import SERVING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.core.waiter import Waiter
    from ppstream.observe.log_writer import TimestampLog

SHARE_MAX: Final = 0.5  # of the time between two: an envelope waits for a dry run that has begun


class KeepWarm:
    """Sleeps in pieces of ``pipeline.keep_warm_ms``, with a dry run behind each; one thread.

    Bring-up is measured without. They end, and an event says why, when one raises or they take
    more than ``SHARE_MAX`` of that time.

    Args:
        config: of the run.
        rehearse: one dry run; None: there are none.
        log: of this rank.
    """

    def __init__(
        self, config: PipelineConfig, rehearse: Callable[[], None] | None, log: TimestampLog
    ) -> None:
        self._period_ns = round((config.pipeline.keep_warm_ms or 0) * NS_PER_MS)
        self._rehearse, self._log = rehearse if self._period_ns else None, log
        self._usual_ns = 0  # a mean that forgets

    def wait(self, waiter: Waiter, limit_ns: int, phase: str) -> Sequence[int]:
        """As ``Waiter.wait``."""
        until_ns = now_ns() + limit_ns
        while (rehearse := self._rehearse) and phase in SERVING and limit_ns > self._period_ns:
            ready = waiter.wait(self._period_ns)
            if ready or waiter.woken:
                return ready
            self._run(rehearse)
            limit_ns = until_ns - now_ns()
        return waiter.wait(max(0, limit_ns))

    def _run(self, rehearse: Callable[[], None]) -> None:
        begun_ns = now_ns()
        try:
            rehearse()
        except BaseException as error:  # noqa: BLE001 - user code; no envelope is lost by it
            self._end(f"{type(error).__name__}: {error}")
            return
        self._usual_ns += (now_ns() - begun_ns - self._usual_ns) >> 3
        if self._usual_ns > SHARE_MAX * self._period_ns:
            took_ms, period_ms = self._usual_ns / NS_PER_MS, self._period_ns / NS_PER_MS
            self._end(
                f"a dry run takes {took_ms:.2f} ms, more than {SHARE_MAX:g} of "
                f"pipeline.keep_warm_ms {period_ms:g}"
            )

    def _end(self, why: str) -> None:
        self._rehearse = None
        self._log.event("keep_warm_ended", why=why[:MAX_TEXT])
