"""KeepWarm: a dry run before an envelope is expected, and a CPU that is awake for it.

After some milliseconds of other work the same call takes several times what it takes back to back,
mostly for memory that left the caches; and a CPU that has slept wakes late. A dry run reads the
newest data, writes into memory of its own and accounts for nothing. When a result is about to come,
rank 0 looks for it and does not sleep. On a host with CPUs to spare a rank does not sleep between a
dry run and its envelope either, as long as nobody else wants that CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.cpus import has_spare_cpus, preemptions
from ppstream.core.errors import MAX_TEXT
from ppstream.core.phases import SERVING
from ppstream.core.rhythm import AHEAD_NS, SHORTEST_NS, Rhythm, usual
from ppstream.core.user_code import message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.core.waiter import Waiter
    from ppstream.observe.log_writer import TimestampLog

LONGEST_NS: Final = NS_PER_MS  # an envelope that comes early waits for a dry run that has begun
EARLY_NS: Final = 150_000  # so long before a result is due it is looked for without a sleep
LATE_NS: Final = 250_000  # and so long behind
PAUSE_NS: Final = NS_PER_S
LOOK_NS: Final = 20_000  # between two looks for samples, each two system calls
WARM_NS: Final = 2 * NS_PER_MS  # so long after a dry run another gains nothing
TAKEN_MAX: Final = 3  # waits in a row in which another thread took the CPU: they share it
SHARED_NS: Final = 10 * NS_PER_S  # it is left alone so long
GATHERED_NS: Final = 4 * NS_PER_MS  # what came so long before an envelope began came for it


class KeepWarm:
    """Sleeps, but for a dry run before an envelope and looks for its result; one thread.

    A dry run begins so early that it usually ends ``ahead_ns`` before: what the robot does then, on
    this CPU perhaps, finds it free. Bring-up is measured without. Dry runs end, and an event says
    why, when one raises. When they take more than ``LONGEST_NS``, as on a busy machine, there are
    none for ``PAUSE_NS``. Behind a dry run the CPU stays awake until ``LATE_NS`` after the envelope
    is expected, where the host has CPUs to spare; when another thread takes that CPU in
    ``TAKEN_MAX`` such waits in a row, not for the next ``SHARED_NS``. Before the result of an
    envelope that takes ``SHORTEST_NS`` or more there is a dry run, too: where a robot asks at the
    answer, the next envelope comes too soon for one of its own.

    Args:
        log: of this rank.
        get_ready: the dry run.
        ahead_ns: between its end and the envelope.
        look_ns: between two looks, awake, for what no doorbell tells of.

    Attributes:
        sent_ns: when the one envelope left that is under way; None: none is, or several are, or
            its result is not to be looked for here.
    """

    def __init__(
        self,
        log: TimestampLog,
        get_ready: Callable[[], None],
        ahead_ns: int = AHEAD_NS,
        look_ns: int = LOOK_NS,
    ) -> None:
        self._get_ready: Callable[[], None] | None = get_ready
        self._ahead_ns = ahead_ns
        self._look_ns = look_ns
        self._log = log
        self._rhythm = Rhythm()
        self._usual_ns = 0  # a mean that forgets
        self._paused_ns = 0  # until then none
        self._warmed_ns = 0  # when the newest ended
        self._may_stay_awake = has_spare_cpus()
        self._taken = 0  # in a row
        self._shared_ns = 0  # until then it sleeps
        self.sent_ns: int | None = None
        self._usual_trip_ns = 0  # from there to its result; late ones hardly count
        self._came_ns: int | None = None  # when the first wait since an envelope was ended

    def began(self, at_ns: int) -> None:
        """An envelope began, and has left: the next is expected when something comes for it."""
        came_ns, self._came_ns = self._came_ns, None
        if came_ns is not None and 0 <= at_ns - came_ns < GATHERED_NS:
            at_ns = came_ns
        self._rhythm.note(at_ns)

    def answered(self, at_ns: int) -> None:
        """The result of the envelope that left at ``sent_ns``, if it was the only one, is there."""
        if self.sent_ns is not None:
            self._usual_trip_ns = usual(self._usual_trip_ns, at_ns - self.sent_ns)
            self.sent_ns = None

    def wait(self, waiter: Waiter, limit_ns: int, phase: str) -> Sequence[int]:
        """As ``Waiter.wait``."""
        ready = self._wait(waiter, limit_ns, phase)
        if ready and self._came_ns is None:
            self._came_ns = now_ns()
        return ready

    def _wait(self, waiter: Waiter, limit_ns: int, phase: str) -> Sequence[int]:
        if self._rhythm.next_ns is None or phase not in SERVING:
            return waiter.wait(max(0, limit_ns))
        now = now_ns()
        until_ns = now + limit_ns
        if self.sent_ns is not None and self._usual_trip_ns and now >= self._paused_ns:
            due_ns = self.sent_ns + self._usual_trip_ns
            if now < due_ns + LATE_NS and due_ns - EARLY_NS < until_ns:
                ready = self._await_result(waiter, due_ns, min(until_ns, due_ns + LATE_NS), phase)
                if ready or waiter.woken:
                    return ready
                now = now_ns()
        late_ns = self._rhythm.next_ns + LATE_NS
        if now - self._warmed_ns < WARM_NS and late_ns - now < WARM_NS:
            ready = self._stay_awake(waiter, min(until_ns, late_ns))
            if ready or waiter.woken:
                return ready
            now = now_ns()
        while (at_ns := self._next_ns(now)) is not None and at_ns < until_ns:
            ready = waiter.wait(at_ns - now)
            if ready or waiter.woken:
                return ready
            late_ns = at_ns + self._ahead_ns + self._usual_ns + LATE_NS
            self.run()
            ready = self._stay_awake(waiter, min(until_ns, late_ns))
            if ready or waiter.woken:
                return ready
            now = now_ns()
        return waiter.wait(max(0, until_ns - now))

    def _await_result(
        self, waiter: Waiter, due_ns: int, until_ns: int, phase: str
    ) -> Sequence[int]:
        assert self.sent_ns is not None, "an envelope is under way"
        ready: Sequence[int] = ()
        if (at_ns := self.ready_ns(self.sent_ns, due_ns, phase)) is not None:
            ready = waiter.wait(at_ns - now_ns())
            if ready or waiter.woken:
                return ready
            self.run()
        if (left_ns := due_ns - EARLY_NS - now_ns()) > 0:
            ready = waiter.wait(left_ns)
        return ready if ready or waiter.woken else waiter.wait_awake(until_ns - now_ns())

    def ready_ns(self, sent_ns: int, due_ns: int, phase: str) -> int | None:
        """When to ``run`` before a result that is due then; None: it is past, or there is none."""
        now, at_ns = now_ns(), due_ns - EARLY_NS - self._usual_ns
        is_long = due_ns - sent_ns >= SHORTEST_NS
        is_due = is_long and phase in SERVING and at_ns > max(now, self._paused_ns)
        return at_ns if is_due and self._get_ready else None

    def _stay_awake(self, waiter: Waiter, until_ns: int) -> Sequence[int]:
        now = now_ns()
        if not self._may_stay_awake or now < self._shared_ns or until_ns <= now:
            return ()
        before = preemptions()
        ready = waiter.wait_awake(until_ns - now, self._look_ns)
        self._taken = self._taken + 1 if preemptions() != before else 0
        if self._taken >= TAKEN_MAX:
            self._taken, self._shared_ns = 0, now + SHARED_NS
        return ready

    def expects(self, phase: str) -> bool:
        """True when ``get_ready`` will run before another envelope comes, if that is in step."""
        at_ns = self._rhythm.next_ns if self._get_ready else None
        return at_ns is not None and at_ns > self._paused_ns and phase in SERVING

    def _next_ns(self, now: int) -> int | None:
        ahead_ns = self._ahead_ns + self._usual_ns
        at_ns = self._rhythm.ready_ns(now, ahead_ns) if self._get_ready else None
        return None if at_ns is None or at_ns < self._paused_ns else at_ns

    def run(self) -> None:
        """A dry run; ``ready_ns`` says when."""
        assert self._get_ready is not None, "so ready_ns said"
        begun_ns = now_ns()
        try:
            self._get_ready()
        except BaseException as error:  # noqa: BLE001 - user code; no envelope is lost by it
            self._get_ready = None
            why = f"{type(error).__name__}: {message_of(error)}"
            self._log.event("keep_warm_ended", why=why[:MAX_TEXT])
            return
        ended_ns = self._warmed_ns = now_ns()
        self._usual_ns += (ended_ns - begun_ns - self._usual_ns) >> 3
        if self._usual_ns > LONGEST_NS:
            self._usual_ns, self._paused_ns = 0, ended_ns + PAUSE_NS
