"""Until a run is warm: what ends a rank that waits for one of this host that was stopped.

Silence means nothing until then: imports, weights, kernels and first calls take their time. A
stopped process is known by its state; the launcher would wait 30 s more to end it. One that a
debugger holds (``t``) is left alone: somebody is looking at it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppstream.errors import ExitCode
from ppstream.peer_process import PeerProcess

if TYPE_CHECKING:
    from ppstream.ends import RankEnd

INTERVAL_MS: Final = 100
SAME: Final = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


@contextmanager
def watched(end: RankEnd, limit_ms: float) -> Iterator[Callable[[str], None]]:
    """End the other rank's process, and this one with 20, once it was stopped for ``limit_ms``.

    Gives what a loop tells its phases: past ``warming`` silence tells, and the watch is over.
    """
    served = threading.Event()

    def watch() -> None:
        other, looks = None, 0
        while not served.wait(INTERVAL_MS / 1000):
            other = other or find(1 - end.rank, os.getppid(), os.environ)
            is_stopped = other is not None and other.state() == "T" and not other.wait_gone(0)
            looks = looks + 1 if is_stopped else 0
            if looks * INTERVAL_MS > limit_ms:
                end.peer_process = other
                what = f"rank {1 - end.rank} was stopped before it served"
                end.leave(ExitCode.PEER_LOST, what + end.see_peer_out(frozen=True))
        if other is not None:
            other.close()

    def tell(phase: str) -> None:
        if phase != "warming":
            served.set()

    threading.Thread(target=watch, name="stopped sibling", daemon=True).start()
    try:
        yield tell
    finally:
        served.set()


def find(rank: int, launcher: int, environment: Mapping[str, str]) -> PeerProcess | None:
    """Rank ``rank`` of the run that ``environment`` is of, if process ``launcher`` started it."""
    wanted = {f"{name}={environment[name]}" for name in SAME if name in environment}
    wanted.add(f"RANK={rank}")
    for thread in Path(f"/proc/{launcher}/task").glob("*"):
        for pid in _words(thread / "children", None):
            with suppress(OSError):  # it has ended
                process = PeerProcess(int(pid), os.pidfd_open(int(pid)))
                if wanted <= set(_words(Path(f"/proc/{pid}/environ"), "\0")):
                    return process
                process.close()
    return None


def _words(file: Path, separator: str | None) -> list[str]:
    """Of a file of the kernel's; none where it is gone, or another user's."""
    try:
        return file.read_bytes().decode(errors="replace").split(separator)
    except OSError:
        return []
