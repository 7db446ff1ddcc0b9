"""How a rank ends: signals become a wish to stop, and the end is written down before it happens."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol

from ppstream import flight_recorder
from ppstream.clock import NS_PER_MS
from ppstream.errors import FINAL_CODES, ExitCode, PeerLostError, PpstreamError
from ppstream.messages import Goodbye
from ppstream.runs import Run
from ppstream.watchdog import Mark, Watchdog

if TYPE_CHECKING:
    from ppstream.config import PipelineConfig
    from ppstream.peer_process import PeerProcess

LOST_GRACE_S: Final = 1.0  # a rank whose peer is gone leaves by itself within this, or is made to
DECIDED_GRACE_S: Final = 15.0  # or within this, when it has a robot to end first
SEE_OUT_S: Final = LOST_GRACE_S + 1.0  # a policy rank that has not left by then is ended
HELD_SHARE: Final = 0.75  # of frozen_ms: stacks are written before the other rank ends this one


class StoppedEarlyError(PpstreamError):
    """A signal came before anything was started: leave, there is nothing to drain."""

    exit_code = ExitCode.DRAINED


class PeerLeftError(PeerLostError):
    """The other rank said why it leaves; what restarting cannot improve is our end, too."""

    def __init__(self, goodbye: Goodbye) -> None:
        self.goodbye = goodbye
        code = ExitCode(goodbye.code)
        self.exit_code = code if code in FINAL_CODES else ExitCode.PEER_LOST
        self.said = f"exit {goodbye.code} {code.name} {goodbye.reason}"
        super().__init__(f"the other rank left with {goodbye.code} {code.name}: {goodbye.reason}")


class RankEnd:
    """This rank's end, to be told once: in exit.json and as the last line on standard error."""

    def __init__(self, rank: int, generation: int = 0) -> None:
        self.rank = rank
        self.generation = generation
        self.run: Run | None = None
        self.is_drained = False  # both sides said goodbye: the other one may go first
        self.peer_process: PeerProcess | None = None  # on this host
        self.peer_said: str | None = None  # how the other rank said that it ends
        self.decided: tuple[ExitCode, str] | None = None  # this rank is leaving, and why
        self._told = threading.Lock()
        self._is_recorded = False

    def record(self, code: ExitCode, reason: str) -> None:
        """Write the end into exit.json and, on rank 0, run.json; only the first time counts."""
        if self.run is None or self._is_recorded:
            return
        self._is_recorded = True
        self.run.record_exit(self.rank, code, reason, self.generation)
        if self.rank == 0:
            self.run.finish(code)

    def keep_evidence(self, code: ExitCode) -> None:
        """What NCCL was at, if this rank ends because something is stuck: before links close."""
        if code is ExitCode.WATCHDOG and self.run is not None:
            name = f"rank{self.rank}.gen{self.generation}.nccl.json"
            flight_recorder.write(self.run.directory / name)

    def leave(self, code: ExitCode, reason: str) -> None:
        """Tell, flush, and end the process at once: no thread or socket can hold it up."""
        if not self._told.acquire(blocking=False):
            threading.Event().wait()  # the other thread that is leaving ends this process
        self.record(code, reason)
        if code is not ExitCode.DRAINED:
            self.say_who_failed_first(code)
        if self.rank == 0 or code is not ExitCode.DRAINED:
            self.say(code, reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))

    def say(self, code: ExitCode, reason: str) -> None:
        """The last line of a rank; only the failing ones of the policy ranks say it."""
        where = "" if self.rank == 0 else f"rank {self.rank}: "
        text = f"ppstream: {where}exit {int(code)} {code.name} {reason}"
        print(text, file=sys.stderr, flush=True)

    def say_who_failed_first(self, code: ExitCode) -> None:
        """One line that stands above the launcher's many, unless it is this rank itself."""
        first = self.run.first_to_fail(self.generation) if self.run is not None else None
        if first is not None and first[0] != self.rank:
            rank, end = first
            why = end["reason"].partition("\n")[0]
            text = f"rank {rank}: exit {end['code']} {end['name']} {why}"
        elif self.peer_said is not None:
            text = f"rank {1 - self.rank}: {self.peer_said.partition(chr(10))[0]}"
        elif code is ExitCode.PEER_LOST:
            text = f"rank {1 - self.rank}: it left no exit code (killed, crashed, or out of reach)"
        else:
            return
        print(f"ppstream: first to fail: {text}", file=sys.stderr, flush=True)

    def see_peer_out(self, *, frozen: bool) -> str:
        """Leave no process behind: end the other rank's when it is frozen, or does not leave.

        The launcher would wait 30 s for it before it restarts. Rank 0 may have a robot to end and
        is given its time: only a frozen one is ended.

        Returns:
            What was done, to be added to the reason of this rank's end.
        """
        process = self.peer_process
        if process is None or (self.rank != 0 and not frozen):
            return ""
        if process.wait_gone(0.0 if frozen else SEE_OUT_S):
            return ""
        state = process.state()
        process.end()
        return f"; its process {process.pid} (state {state}) was ended"

    def leave_when_lost(self) -> None:
        """The peer's socket hung up: leave within a grace, even from inside a long stage."""
        if self.is_drained:
            return
        timer = threading.Timer(LOST_GRACE_S, self._leave_lost)
        timer.daemon = True
        timer.start()

    def _leave_lost(self) -> None:
        code, reason = self.decided or (ExitCode.PEER_LOST, "the other rank's process is gone")
        if self.decided is not None:
            threading.Event().wait(DECIDED_GRACE_S)
        self.leave(code, reason)


class Loop(Protocol):
    """What the watchdog needs of a rank's loop."""

    @property
    def marks(self) -> Sequence[Mark]: ...

    @property
    def standstill_ns(self) -> int: ...


def start_watchdog(
    config: PipelineConfig, loop: Loop, end: RankEnd, tell: Callable[[Goodbye], None]
) -> Watchdog:
    """A watchdog over ``loop`` that ends this rank with 21; ``tell`` takes word to the other."""

    def leave(text: str) -> None:
        with suppress(PpstreamError):
            tell(Goodbye(int(ExitCode.WATCHDOG), text))
        end.keep_evidence(ExitCode.WATCHDOG)
        end.leave(ExitCode.WATCHDOG, text)

    assert end.run is not None, "a run that has not begun cannot be stuck"
    watchdog = Watchdog(
        lambda: loop.marks,
        lambda: loop.standstill_ns,
        leave,
        end.run.stacks_path(end.rank, end.generation),
        held_ns=round(HELD_SHARE * config.liveness.frozen_ms * NS_PER_MS),
    )
    watchdog.start()
    return watchdog


def on_cut_signal(act: Callable[[str], None]) -> None:
    """Call ``act`` with the signal's name on SIGUSR1, by which an operator cuts the epoch."""
    signal.signal(signal.SIGUSR1, lambda number, _frame: act(signal.Signals(number).name))


def ignore_cut_signal() -> None:
    """Nothing to cut: not a policy rank's, or not yet; unhandled it would end the process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def on_signals(act: Callable[[str], None]) -> None:
    """Call ``act`` with the signal's name on SIGTERM and SIGINT; main thread only."""

    def handle(number: int, _frame: FrameType | None) -> None:
        act(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def stop_early(name: str) -> None:
    """The answer to a signal while nothing is started yet."""
    raise StoppedEarlyError(f"{name} before the run was ready")
