"""How a rank ends: signals become a wish to stop, and the end is written down before it happens."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from ppstream.errors import FINAL_CODES, ExitCode, PeerLostError, PpstreamError
from ppstream.messages import Goodbye
from ppstream.runs import Run

LOST_GRACE_S: Final = 1.0  # a rank whose peer is gone leaves by itself within this, or is made to


class StoppedEarlyError(PpstreamError):
    """A signal came before anything was started: leave, there is nothing to drain."""

    exit_code = ExitCode.DRAINED


class PeerLeftError(PeerLostError):
    """The other rank said why it leaves; what restarting cannot improve is our end, too."""

    def __init__(self, goodbye: Goodbye) -> None:
        self.goodbye = goodbye
        code = ExitCode(goodbye.code)
        self.exit_code = code if code in FINAL_CODES else ExitCode.PEER_LOST
        super().__init__(f"the other rank left with {goodbye.code} {code.name}: {goodbye.reason}")


class RankEnd:
    """This rank's end, to be told once: in exit.json and as the last line on standard error."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.run: Run | None = None
        self.is_drained = False  # both sides said goodbye: the other one may go first
        self._told = threading.Lock()
        self._is_recorded = False

    def record(self, code: ExitCode, reason: str) -> None:
        """Write the end into exit.json and, on rank 0, run.json; only the first time counts."""
        if self.run is None or self._is_recorded:
            return
        self._is_recorded = True
        self.run.record_exit(self.rank, code, reason)
        if self.rank == 0:
            self.run.finish(code)

    def leave(self, code: ExitCode, reason: str) -> None:
        """Tell, flush, and end the process at once: no thread or socket can hold it up."""
        if not self._told.acquire(blocking=False):
            threading.Event().wait()  # the other thread that is leaving ends this process
        self.record(code, reason)
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

    def leave_when_lost(self) -> None:
        """The peer's socket hung up: leave within a grace, even from inside a long stage."""
        if self.is_drained:
            return
        timer = threading.Timer(
            LOST_GRACE_S, self.leave, (ExitCode.PEER_LOST, "the other rank's process is gone")
        )
        timer.daemon = True
        timer.start()


def on_signals(act: Callable[[str], None]) -> None:
    """Call ``act`` with the signal's name on SIGTERM and SIGINT; main thread only."""

    def handle(number: int, _frame: FrameType | None) -> None:
        act(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def stop_early(name: str) -> None:
    """The answer to a signal while nothing is started yet."""
    raise StoppedEarlyError(f"{name} before the run was ready")
