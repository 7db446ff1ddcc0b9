"""``python -m ppstream.launch.guard``: has no launcher end a run for a replica that may be lost.

A launcher ends all ranks when the process of one fails. So where ``placement.replicas_min`` lets a
run go on without a replica, the process that the launcher has started becomes the guard of a
process of its own, the rank, and ends with 0 however the rank ends. What a loss means is rank 0's
to decide (``pipeline/replica_losses.py``). A guard does nothing else, and needs no torch.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ppstream.control.peer_process import GUARDED, HeldProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from ppstream.config.schema import PipelineConfig

RANK: Final = GUARDED  # a guard has no RANK: nobody takes it for the rank
LINKED_FD: Final = "PPSTREAM_GUARD_FD"  # the rank writes there that its loop runs
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK_S: Final = 0.1
GRACE_S: Final = 2.0  # for a rank whose launcher is gone


def is_wanted(config: PipelineConfig, rank: int) -> bool:
    """True on a replica without a guard that may be lost."""
    placement = config.placement
    is_spare = rank > 0 and placement.fewest < placement.replicas
    return is_spare and "WORLD_SIZE" in os.environ and LINKED_FD not in os.environ


def become(arguments: Sequence[str]) -> None:
    """Replace this program by the guard of a rank with these arguments."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment[RANK] = os.environ["RANK"]
    command = [sys.executable, "-u", "-m", __name__, *arguments]
    os.execve(sys.executable, command, environment)


def tell_linked() -> None:
    """In the rank: from now on rank 0 sees its end."""
    if (fd := os.environ.get(LINKED_FD)) is not None:
        with suppress(OSError):  # the guard is gone, and so will be this rank
            os.write(int(fd), b"1")


def on_stop(handle: Callable[[int, FrameType | None], None]) -> None:
    """Have ``STOP_SIGNALS`` call ``handle``; a SIGHUP that nohup has turned off stays off."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def main(arguments: Sequence[str]) -> int:
    """Start the rank; returns how it ended, or 0 where rank 0 saw its end."""
    linked_fd, write_fd = os.pipe()
    os.set_blocking(linked_fd, False)
    environment = {name: value for name, value in os.environ.items() if name != RANK}
    environment |= {"RANK": os.environ[RANK], LINKED_FD: str(write_fd)}
    command = [sys.executable, "-u", "-m", "ppstream.serve", *arguments]
    launcher = HeldProcess.parent()
    rank: subprocess.Popen[bytes] | None = None
    asked: list[int] = []
    early: list[int] = []  # as the rank starts: passed on then

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if rank is None:
            early.append(number)
        else:
            rank.send_signal(number)

    on_stop(pass_on)
    rank = subprocess.Popen(command, env=environment, pass_fds=(write_fd,))
    os.close(write_fd)
    for number in early[:1]:
        rank.send_signal(number)
    while rank.poll() is None:
        if launcher is not None and launcher.wait_gone(0):
            return _end(rank)
        with suppress(subprocess.TimeoutExpired):
            rank.wait(LOOK_S)
    is_linked = bool(select.select([linked_fd], [], [], 0)[0]) and os.read(linked_fd, 1) == b"1"
    if is_linked and not asked:
        return 0  # what was lost is told by rank 0, which went on, or ended the run
    if rank.returncode < 0:  # as a signal ended it
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-rank.returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -rank.returncode)
    return rank.returncode


def _end(rank: subprocess.Popen[bytes]) -> int:
    """The launcher is gone: the rank notices by itself that this process ends, or is made to."""
    rank.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        return rank.wait(GRACE_S)
    rank.kill()
    return rank.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
