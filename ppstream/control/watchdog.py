"""Watchdog: notices a thread of this process that makes no progress, and names it and its place.

Every watched loop counts its turns in a ``ProgressMark``; a thread that owns no lock compares. The
other rank is not its business: that is the heartbeat's (``peer.py``, ``heartbeat.py``). While the
interpreter itself is held, by a call into C that never lets go of it, no Python thread can run: the
other rank notices the silence, and has this one write its stacks by SIGQUIT before it ends it. A
timer could write them, too, but reads frames of threads that may be running after all. Of a lone
rank a process beside it notices (``launch/held_rank.py``): the time of the stacks' file says by
when this thread looks again.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from ppstream.core.clock import NS_PER_S, Clock, now_ns

INTERVAL_NS: Final = NS_PER_S // 4  # between two looks
USUAL_FACTOR: Final = 5  # stage B may take so many times its usual time
FRAMES_SHOWN: Final = 3  # innermost ones of the stuck thread; the file has all of all threads
FILE_MODE: Final = 0o640

P = ParamSpec("P")
T = TypeVar("T")


def overdue_ns(stacks: Path, now_ns: int) -> int:
    """Returns for how long a watchdog should have looked by now; 0 or less: it has, or is over.

    Args:
        stacks: its file.
        now_ns: monotonic, of this host.
    """
    try:
        return now_ns - stacks.stat().st_mtime_ns  # without a promise the time of day: far ahead
    except OSError:
        return 0


class ProgressMark:
    """Progress of one thread's loop; written by that thread, read by the watchdog.

    Attributes:
        turns: the loop adds one each time round, and at least each 0.1 s while it waits.
        is_running: between entry and exit of the loop; nothing is expected of it otherwise.
        busy_with: what it works on, for the message.
    """

    __slots__ = ("busy_with", "is_running", "name", "thread_id", "turns")

    def __init__(self, name: str, busy_with: Callable[[], str] = str) -> None:
        self.name = name
        self.busy_with = busy_with
        self.turns = 0
        self.thread_id = 0
        self.is_running = False

    def __enter__(self) -> ProgressMark:
        self.thread_id = threading.get_ident()
        self.is_running = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_running = False


def stage_b_limit_ns(watchdog_ns: int, usual_b_ns: int) -> int:
    """Returns the time limit of stage B: the watchdog's, or 5 times its usual time."""
    return max(watchdog_ns, USUAL_FACTOR * usual_b_ns)


def is_warm(phase: str) -> bool:
    """True behind builds and first calls: before, any may hold its interpreter for long."""
    return phase not in ("starting", "warming")


def is_patient(phase: str, mode: str) -> bool:
    """True when a standstill may be long: first calls compile, and a profiler writes its trace."""
    return not is_warm(phase) or mode != "throughput"


class Marked(Protocol):
    """A loop with a mark of its own."""

    mark: ProgressMark


S = TypeVar("S", bound=Marked)


def with_watchdog(run: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that is a loop: its object's ``mark`` is running while it does."""

    @functools.wraps(run)
    def marked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.mark:
            return run(self, *args, **kwargs)

    return marked


class Watchdog:
    """Looks at ``marks`` from ``start`` to ``stop``.

    Args:
        marks: the loops of this process, as they are now.
        limit_ns: how long a running one may stand still, as of now.
        on_stuck: called once, on the watchdog's thread, with what is stuck; must not return to it.
        stacks: file for the stacks of all threads.
        takes_signals: SIGQUIT writes them, too; False in a process that is not this rank's own.
    """

    def __init__(
        self,
        marks: Callable[[], Sequence[ProgressMark]],
        limit_ns: Callable[[], int],
        on_stuck: Callable[[str], None],
        stacks: Path,
        *,
        takes_signals: bool = True,
        clock: Clock = now_ns,
    ) -> None:
        self._marks = marks
        self._limit_ns = limit_ns
        self._on_stuck = on_stuck
        self._path = stacks
        self._takes_signals = takes_signals
        self._clock = clock
        self._still: dict[ProgressMark, tuple[int, int]] = {}  # turns, and for how long unchanged
        self._looked_ns = clock()
        self._file = os.open(stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, FILE_MODE)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look; where it takes signals on the main thread only."""
        if self._takes_signals:
            faulthandler.register(signal.SIGQUIT, file=self._file, chain=False)
        self._promise()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a file without stacks is removed. Twice is fine."""
        if self._file < 0:
            return
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()
        with suppress(OSError):
            os.utime(self._file)  # nobody looks any more
        if self._takes_signals:
            faulthandler.unregister(signal.SIGQUIT)
        is_empty = os.fstat(self._file).st_size == 0
        os.close(self._file)
        self._file = -1
        if is_empty:
            with suppress(OSError):  # its folder may be gone, or read-only by now
                self._path.unlink()

    def check(self) -> None:
        """Compare all marks with the last look; ``on_stuck`` is told of the first that is stuck.

        Time in which this process was stopped does not count: a look never adds more than two
        intervals.
        """
        now = self._clock()
        passed_ns = min(now - self._looked_ns, 2 * INTERVAL_NS)
        self._looked_ns = now
        for mark in self._marks():
            turns, still_ns = self._still.get(mark, (-1, 0))
            if not mark.is_running or mark.turns != turns:
                self._still[mark] = (mark.turns, 0)
                continue
            self._still[mark] = (turns, still_ns + passed_ns)
            if still_ns + passed_ns > self._limit_ns():
                self._report(mark, still_ns + passed_ns)
                return

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_NS / NS_PER_S):
            self._promise()
            self.check()

    def _promise(self) -> None:
        """Say by when this thread looks again, or another one of this process runs."""
        due_ns = self._clock() + self._limit_ns()
        with suppress(OSError):  # the folder is read-only by now
            os.utime(self._file, ns=(due_ns, due_ns))

    def _report(self, mark: ProgressMark, still_ns: int) -> None:
        self._end.set()
        try:
            faulthandler.dump_traceback(self._file, all_threads=True)
            text = (
                f"{mark.name} made no progress for {still_ns / NS_PER_S:.1f} s, "
                f"limit {self._limit_ns() / NS_PER_S:.1f} s{_after(' at ', mark.busy_with())}; "
                f"{_name(mark.thread_id)} is in {where(mark.thread_id)} (all stacks: {self._path})"
            )
        except Exception as error:  # noqa: BLE001 - a stuck rank leaves whatever cannot be told
            text = f"{mark.name} made no progress; no more can be told: {type(error).__name__}"
        self._on_stuck(text)


def _after(prefix: str, text: str) -> str:
    return prefix + text if text else ""


def _name(thread_id: int) -> str:
    return next((t.name for t in threading.enumerate() if t.ident == thread_id), "its thread")


def where(thread_id: int) -> str:
    """The innermost frames of a thread, outermost of them first."""
    frame = sys._current_frames().get(thread_id)
    found = traceback.extract_stack(frame)[-FRAMES_SHOWN:] if frame is not None else []
    return " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in found) or "no thread"
