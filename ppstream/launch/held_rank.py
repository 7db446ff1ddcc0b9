"""``python -m ppstream.launch.held_rank``: ends a lone rank whose interpreter a call into C holds.

Its own watchdog is a thread of that interpreter, and no other rank is there to hear the silence. So
a lone rank starts this process beside it, which sees the watchdog miss the look that it has
promised, and tells the rank's end in its stead. It needs no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppstream.control.peer_process import HeldProcess, descendants
from ppstream.control.watchdog import overdue_ns
from ppstream.core.clock import now_ns

if TYPE_CHECKING:
    from contextlib import ExitStack

    from ppstream.config.schema import PipelineConfig
    from ppstream.launch.rank_exit import RankEnd

LOOK_S: Final = 1.0  # one that was stopped, and goes on, has looked again by then
STOPPED: Final = ("T", "t")


def watch_from_outside(config: PipelineConfig, end: RankEnd, stack: ExitStack) -> None:
    """Have this lone rank ended when no thread of it can run; ``stack`` ends that."""
    assert end.run is not None, "as for its watchdog"
    limits = config.liveness.watchdog_s, config.liveness.start_s
    stacks = end.run.stacks_path(end.rank, end.generation)
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(stacks)]
    command += [str(end.generation), *(f"{limit:g}" for limit in limits)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a stop is the rank's
        )
    except OSError as error:
        end.complain("nobody looks at it from outside", error)
    else:
        stack.callback(process.wait)
        stack.callback(process.kill)


def main(arguments: Sequence[str]) -> int:
    """Look at the process that has started this one until it ends, or has to be ended."""
    pid, file, generation, watchdog_s, start_s = arguments
    stacks = Path(file)
    with suppress(ProcessLookupError):
        rank = HeldProcess.parent()
        was_held = False
        while rank is not None and rank.pid == int(pid) and not rank.wait_gone(LOOK_S):
            is_held = overdue_ns(stacks, now_ns()) > 0 and rank.state() not in STOPPED
            if is_held and was_held:
                text = (
                    "no Python thread of rank 0 could run for longer than one may stand still "
                    f"(liveness.watchdog_s = {watchdog_s}, start_s = {start_s} before ready): a "
                    f"call into C holds the interpreter (all stacks: {stacks})"
                )
                _end(rank, stacks.parent, int(generation), text)
            was_held = is_held
    return 0


def _end(process: HeldProcess, directory: Path, generation: int, text: str) -> None:
    from ppstream.core.errors import ExitCode
    from ppstream.launch.rank_exit import RankEnd
    from ppstream.observe.run_folder import Run

    end = RankEnd(0, generation)
    end.run = Run(directory)
    end.record(ExitCode.WATCHDOG, text)
    end.print_last_line(ExitCode.WATCHDOG, text)
    started = [HeldProcess.of(pid) for pid in descendants(process.pid) if pid != os.getpid()]
    process.end_with_stacks()
    for each in filter(None, started):
        each.end()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a terminal
    sys.exit(main(sys.argv[1:]))
