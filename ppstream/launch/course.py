"""Course of a rank from its start to its end, and the watchdog that ends it where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from ppstream.control.watchdog import ProgressMark, Watchdog
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ExitCode
from ppstream.launch.rank_exit import RankEnd
from ppstream.wire.rank_messages import Goodbye

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

WAIT_SPARE_NS: Final = 4 * NS_PER_S  # a thread that waits for the other rank's is never named first


class Loop(Protocol):
    """A rank's loop, as the watchdog sees it."""

    @property
    def marks(self) -> Sequence[ProgressMark]: ...

    @property
    def standstill_ns(self) -> int: ...


class Course:
    """A rank from its start to its end, for the watchdog: its loop while one runs, else its thread.

    Attributes:
        loop: None until it is built.

    Args:
        config: says how long a start may take.
        thread: as of ``RankEnd``.
    """

    def __init__(self, config: PipelineConfig, thread: str = RankEnd.thread) -> None:
        self.loop: Loop | None = None
        self._mark = ProgressMark(thread, lambda: self._step).__enter__()  # it never rests
        self._step = ""
        self._steps = 0
        self._start_ns = round(config.liveness.start_s * NS_PER_S)

    @property
    def marks(self) -> Sequence[ProgressMark]:
        loops = self.loop.marks if self.loop is not None else ()
        if any(mark.is_running for mark in loops):
            return loops
        self._mark.turns = self._steps + sum(mark.turns for mark in loops)
        return (self._mark,)

    @property
    def standstill_ns(self) -> int:
        if self.loop is not None and self._mark not in self.marks:
            return self.loop.standstill_ns
        return self._start_ns if self._step else self._start_ns + WAIT_SPARE_NS

    @property
    def step_name(self) -> str:
        """The call that the main thread is in; empty: none of those that may take long."""
        return self._step

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Inside: one call that may take long, as a build does; it is named when it stands."""
        self._step, self._steps = name, self._steps + 1
        try:
            yield
        finally:
            self._step, self._steps = "", self._steps + 1


def start_watchdog(config: PipelineConfig, loop: Loop, end: RankEnd) -> Watchdog:
    """A watchdog over ``loop`` that ends this rank with 21, and tells the other one why."""

    def leave(text: str) -> None:
        try:
            for peer in end.peers.values():
                peer.send(Goodbye(int(ExitCode.WATCHDOG), text))
            end.save_nccl_dump(ExitCode.WATCHDOG)
        except Exception as error:  # noqa: BLE001 - nothing may keep a stuck rank
            end.complain("the other rank is not told", error)
        finally:
            end.leave(ExitCode.WATCHDOG, text)

    assert end.run is not None, "a run that has not begun cannot be stuck"
    watchdog = Watchdog(
        lambda: loop.marks,
        lambda: loop.standstill_ns,
        leave,
        end.run.stacks_path(end.rank, end.generation),
        takes_signals=end.takes_signals,
    )
    watchdog.start()
    return watchdog
