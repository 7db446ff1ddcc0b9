"""Lookout: a thread of a rank that sees its launcher, or the other rank, end or stop.

It runs from the first moment, beside imports, builds and loops, and leaves for a main thread that
does not. Silence means nothing until a run is warm: until then a stopped rank is known by its
state, and the launcher would wait 30 s more to end it. One that a debugger holds (``t``) is left
alone: somebody is looking at it. A main thread that waits for other ranks of a mesh asks nobody
whether rank 0 is still heard: then this thread does.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ppstream.control.peer_process import HeldProcess, children, of_rank
from ppstream.control.watchdog import is_warm
from ppstream.core.clock import NS_PER_MS, NS_PER_S, POLL_NS_MAX, now_ns
from ppstream.core.errors import ExitCode, PeerLostError, PpstreamError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppstream.control.peer import Peer
    from ppstream.launch.rank_exit import RankEnd

INTERVAL_MS: Final = 100
LAUNCHER_GRACE_S: Final = 1.5  # to drain, when the launcher is gone
LAUNCHER_LOST: Final = "LAUNCHER_LOST"  # how the reason of such an end begins


def parent_launcher(environment: Mapping[str, str]) -> HeldProcess | None:
    """The process that a launcher started this rank from; None: no launcher did, or none is seen.

    Raises:
        PeerLostError: it is gone.
    """
    is_launched = "TORCHELASTIC_RUN_ID" in environment or _world_size(environment) > 1
    try:
        return HeldProcess.parent() if is_launched else None
    except ProcessLookupError as error:
        raise PeerLostError(f"{LAUNCHER_LOST}: {error}") from error


class Lookout:
    """Watches from ``start`` to the end of the process.

    Args:
        end: this rank's, told of what is seen; ``end.lookout`` is set.
        environment: of this rank: the launcher's variables name the run.
        frozen_ms: a rank that was stopped for so long before it served is ended, and so is this one
            when the peer that it listens to is silent for so long.
    """

    def __init__(self, end: RankEnd, environment: Mapping[str, str], frozen_ms: float) -> None:
        self._end = end
        self._environment = environment
        self._frozen_ns = round(frozen_ms * NS_PER_MS)
        self._stopped_looks_max = frozen_ms / INTERVAL_MS
        self._stopped_looks: dict[int, int] = {}  # of each rank, in a row
        self._launcher = parent_launcher(environment)
        self._is_bereft = False  # the launcher was seen to be gone
        world_size = _world_size(environment)
        others = range(1, world_size) if end.rank == 0 else (0,)
        self._siblings = list(others) if world_size > 1 else []
        self._is_warm = False
        self._heard: Peer | None = None  # whose silence ends this rank
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._deadline_ns: int | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        end.lookout = self

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def on_phase(self, phase: str) -> None:
        """Past ``warming`` silence tells what state told: the other rank's is no longer asked."""
        if is_warm(phase):
            self._siblings = []
            self._is_warm = True

    def listen_to(self, peer: Peer) -> None:
        """Leave when ``peer`` is silent in a warm run, whatever the main thread waits for."""
        self._heard = peer
        os.eventfd_write(self._wake_fd, 1)

    def leave_by(self, seconds: float) -> None:
        """Leave as ``end.told()`` says unless somebody else has by then; any thread.

        An earlier moment stays.
        """
        with self._lock:
            due_ns = now_ns() + round(seconds * NS_PER_S)
            self._deadline_ns = min(due_ns, self._deadline_ns or due_ns)
        os.eventfd_write(self._wake_fd, 1)

    def launcher_lost(self) -> str | None:
        """Returns why nobody is left to stop this run, also before this thread has seen it."""
        launcher = self._launcher
        if launcher is None or not launcher.wait_gone(0):
            return None
        return f"{LAUNCHER_LOST}: process {launcher.pid}, which started this rank, is gone"

    def clear_deadline(self) -> None:
        """Nobody has to leave by a certain moment any more."""
        with self._lock:
            self._deadline_ns = None

    def _run(self) -> None:
        while True:
            self._poll_until_error()
            time.sleep(INTERVAL_MS / 1000)

    def _poll_until_error(self) -> None:
        try:
            self._poll()
        except Exception as error:  # noqa: BLE001 - no memory or descriptor now, perhaps later
            self._end.complain("its lookout begins anew", error)

    def _poll(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if self._launcher is not None and not self._is_bereft:
            poll.register(self._launcher.fileno(), select.POLLIN)
        while True:
            ready = dict(poll.poll(self._wait_ms()))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._launcher is not None and self._launcher.fileno() in ready:
                self._is_bereft = True
                poll.unregister(self._launcher.fileno())
                self._on_launcher_gone()
            for rank in list(self._siblings):
                self._check_sibling(rank)
            if self._heard is not None and self._is_warm:
                self._check_heard(self._heard)
            if (due_ns := self._deadline_ns) is not None and now_ns() >= due_ns:
                self._leave()

    def _leave(self) -> None:
        code, reason = ExitCode.PEER_LOST, "this rank's main thread did not leave in time"
        try:
            code, reason = self._end.end_without_main_thread()
        finally:
            self._end.leave(code, reason)

    def _wait_ms(self) -> float | None:
        waits: list[float] = [INTERVAL_MS] if self._siblings or self._heard is not None else []
        if (due_ns := self._deadline_ns) is not None:
            waits.append(min(max(0, due_ns - now_ns()), POLL_NS_MAX) / NS_PER_MS)
        return min(waits, default=None)

    def _on_launcher_gone(self) -> None:
        """Nobody is left to start, stop or see this run: drain what is on its way, and leave."""
        reason = self.launcher_lost() or LAUNCHER_LOST
        self.leave_by(LAUNCHER_GRACE_S if self._end.on_launcher_lost(reason) else 0.0)

    def _check_heard(self, peer: Peer) -> None:
        with suppress(PpstreamError):  # of an end that is noticed elsewhere
            if peer.listen is not None:
                peer.listen()  # what came while this process stood still
        silent_ns = now_ns() - peer.last_heard_ns
        if silent_ns > self._frozen_ns:
            self._heard = None
            peer.mark_lost()
            self._end.peer_lost = (
                f"{peer.name} was silent for {silent_ns / NS_PER_S:.2f} s, limit "
                f"{self._frozen_ns / NS_PER_S:.2f} s, while this rank waited for its mesh"
            )
            self._end.leave_when_lost()

    def _check_sibling(self, rank: int) -> None:
        end = self._end
        process = end.processes.get(rank)
        if process is None:
            process = next(of_rank(rank, self._environment, children(os.getppid())), None)
            if process is None:
                return
            end.processes[rank] = process
        if process.wait_gone(0):
            self._siblings = []
            end.leave_when_lost()
            return
        is_stopped = process.state() == "T" and not end.is_leaving
        looks = self._stopped_looks.get(rank, 0) + 1 if is_stopped else 0
        self._stopped_looks[rank] = looks
        if looks > self._stopped_looks_max:
            what = f"rank {rank} was stopped before it served"
            end.peer_lost = what  # before it is ended: the main thread will see no more than that
            end.leave(ExitCode.PEER_LOST, what + end.end_other_ranks(0.0, rank))


def _world_size(environment: Mapping[str, str]) -> int:
    return int(environment.get("WORLD_SIZE", "1"))
