"""End of a rank: signals become a wish to stop, and the end is written down before it happens.

Leaving needs nothing that can be gone: no file, no descriptor, no memory, no other rank.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from ppstream.control.peer_process import HeldProcess, command, descendants, everybody, of_rank
from ppstream.control.watchdog import where
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import OTHER_LEFT, ExitCode, PeerLeftError, StoppedEarlyError
from ppstream.core.user_code import how_it_ends
from ppstream.launch.guard import on_stop
from ppstream.links import nccl_dump
from ppstream.observe.run_folder import Run

if TYPE_CHECKING:
    from ppstream.control.peer import Peer

LOST_GRACE_S: Final = 1.0  # a rank whose peer is gone leaves by itself within this, or is made to
CLOSE_GRACE_S: Final = 25.0  # to close all it has opened, once it has decided; torchrun gives 30 s
SEE_OUT_S: Final = LOST_GRACE_S + 1.0  # a policy rank that has not left by then is ended
BEREFT_SEE_OUT_S: Final = 0.7  # the same when the launcher is gone: nobody else would end it
ZOMBIE_S: Final = 0.1  # from the end of a process's sockets to its own
TELL_LIMIT_S: Final = 2.0  # a disk or terminal that stands cannot hold up the end
STDERR: Final = 2
CLEANER: Final = "multiprocessing.resource_tracker"  # leaves by itself when its work is done
COMMAND_SHOWN: Final = 80  # characters


class Deadline(Protocol):
    """Ends the process at a moment, whatever its main thread does (``lookout.py``)."""

    def on_phase(self, phase: str) -> None: ...

    def listen_to(self, peer: Peer) -> None: ...

    def leave_by(self, seconds: float) -> None: ...

    def clear_deadline(self) -> None: ...

    def launcher_lost(self) -> str | None: ...


class RankEnd:
    """This rank's end, to be told once: in exit.json and as the last line on standard error.

    Attributes:
        run: where it is recorded, once there is one.
        log_root: where a policy rank that has not met rank 0 looks for the run; None: nowhere.
        peers: the ranks that this one answers to, once they have met: rank 0 has all policy ranks,
            each of them has rank 0.
        processes: those of them that are on this host, once they are known.
        peer_reason: how one of them said that it ends.
        decided: this rank is leaving, and why.
        is_drained: both sides said goodbye: the other one may go first.
        peer_lost: what is known of another rank's end that its sockets do not tell.
        launcher_lost: why this run has nobody left to stop it.
        on_stop: asks the loop to stop; None: there is no loop yet.
        bears_loss: the run goes on though a rank of ``peers`` is lost.
        takes_signals: the process is this rank's own, as ``in_thread.py`` has it otherwise.
        thread: the one that runs it, for people.
    """

    takes_signals = True
    thread = "the main thread"

    def __init__(self, rank: int, generation: int = 0) -> None:
        self.rank = rank
        self.generation = generation
        self.run: Run | None = None
        self.log_root: Path | None = None
        self.peers: dict[int, Peer] = {}
        self.processes: dict[int, HeldProcess] = {}
        self.peer_reason: str | None = None
        self.decided: tuple[ExitCode, str] | None = None
        self.is_drained = False
        self.peer_lost: str | None = None
        self.launcher_lost: str | None = None
        self.on_stop: Callable[[str], None] | None = None
        self.bears_loss: Callable[[], bool] = lambda: False
        self.lookout: Deadline | None = None
        self._asked_early = ""  # by which signal
        self._main_thread = threading.main_thread().ident or 0
        self._decided_by: BaseException | None = None
        self._leaving = threading.Lock()
        self._is_recorded = False

    # ---- what is told --------------------------------------------------------------------------

    def record(self, code: ExitCode, reason: str) -> None:
        """Write the end into exit.json and, on rank 0, run.json; only the first time counts.

        Raises nothing: what could not be written is one line on standard error.
        """
        self._look_for_run()
        if self.run is None or self._is_recorded:
            return
        self._is_recorded = True
        try:
            self.run.record_exit(self.rank, code, reason, self.generation)
            if self.rank == 0:
                self.run.finish(code)
        except Exception as error:  # noqa: BLE001 - no disk, folder, descriptor, memory: leave all the same
            self.complain(f"the end is not recorded in {self.run.directory}", error)

    def leave(self, code: ExitCode, reason: str) -> None:
        """Tell, flush, and end the process: no thread, lock, file or socket can hold it up."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()  # the other thread that is leaving ends this process
        try:
            teller = threading.Thread(target=self._write_end, args=(code, reason), daemon=True)
            try:
                teller.start()
            except (RuntimeError, MemoryError):  # no thread to be had
                self._write_end(code, reason)
            else:
                teller.join(TELL_LIMIT_S)
        finally:
            os._exit(int(code))

    def _write_end(self, code: ExitCode, reason: str) -> None:
        try:
            self.record(code, reason)
            _end_all(filter(None, map(HeldProcess.of, descendants(os.getpid()))))
            if code is not ExitCode.DRAINED and (told := self.print_first_failure(code)):
                reason = reason.replace(f": {told}", "", 1)
        except Exception as error:  # noqa: BLE001 - the last line is told whatever else failed
            self.complain("the end is not told in full", error)
        if self.rank == 0 or code is not ExitCode.DRAINED:
            self.print_last_line(code, reason)
        with suppress(OSError, ValueError):
            sys.stdout.flush()

    def print_last_line(self, code: ExitCode, reason: str) -> None:
        """The last line of a rank; only the failing ones of the policy ranks say it."""
        where = "" if self.rank == 0 else f"rank {self.rank}: "
        _print(f"ppstream: {where}exit {int(code)} {code.name} {reason}")

    def complain(self, what: str, error: BaseException) -> None:
        """One line about what could not be done on the way out."""
        with suppress(Exception):  # a text of user code's may raise
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            _print(f"ppstream: rank {self.rank}: {what}: {text}")

    def print_first_failure(self, code: ExitCode) -> str:
        """One line that stands above the launcher's many, unless it is this rank itself.

        Several ranks of a host print it once. Returns what the first one said, if all of it stands
        in the output of this host.
        """
        first = self.run and self.run.failed_before(self.rank, self.generation)
        said = ""
        if self.launcher_lost is not None:
            return ""  # the last line says it
        if first:
            rank, said = f"rank {first[0]}", first[1].reported
        elif self.peer_reason is not None:
            rank, said = self._another[0], self.peer_reason
        elif code is not ExitCode.PEER_LOST:
            return ""
        else:
            rank, status = self._another
            found = "it left no exit code" if self.peers else "no handshake; read its output"
            text = f"{rank}: {found} ({status or 'killed, crashed, or out of reach'})"
        if said:
            text = f"{rank}: {said.partition(chr(10))[0]}"
        if self.run is None or self.run.is_untold(text, self.generation):
            _print(f"ppstream: first to fail: {text}")
        is_whole = first or chr(10) not in said
        return said.split(" ", 3)[-1] if said and is_whole else ""

    def save_nccl_dump(self, code: ExitCode) -> None:
        """Keeps NCCL's record if this rank ends because something is stuck: before links close."""
        if code is ExitCode.WATCHDOG and self.run is not None:
            name = f"rank{self.rank}.gen{self.generation}.nccl.json"
            nccl_dump.write(self.run.directory / name)

    # ---- what decides it -----------------------------------------------------------------------

    def met(self, rank: int, peer: Peer) -> HeldProcess | None:
        """This rank and ``rank`` have met; returns its process, if it is on this host."""
        self.peers[rank] = peer
        if process := HeldProcess.at_end_of(peer.fileno()):
            self.processes[rank] = process  # what was held before may be its guard by now
        return self.processes.get(rank)

    @property
    def _another(self) -> tuple[str, str]:
        """Names the rank that was lost first, and how its process ended, as far as is known."""
        gone = {rank: one for rank, one in self.processes.items() if one.wait_gone(0)}
        first = self._first_lost
        ranks = [first] if first is not None else list(gone or self.peers)
        rank = ranks[0] if ranks else int(not self.rank)
        if len(ranks) > 1:
            return "one of the policy ranks", ""
        return f"rank {rank}", (rank in gone and gone[rank].ended_with) or ""

    @property
    def _first_lost(self) -> int | None:
        """The rank whose silence or end was noticed first: others leave because of it."""
        lost = {rank: peer.lost_ns for rank, peer in self.peers.items() if peer.lost_ns}
        return min(lost, key=lambda rank: lost[rank]) if lost else None

    def end_of_main_thread(self, code: ExitCode, reason: str) -> tuple[ExitCode, str]:
        """Returns this rank's end when its main thread ends with ``code``.

        All ranks lose their launcher at once: a rank may hear of another's end before its lookout
        has looked.
        """
        if self.launcher_lost is None and self.lookout is not None:
            self.launcher_lost = self.lookout.launcher_lost()
        if self.launcher_lost is not None and code in (ExitCode.DRAINED, ExitCode.PEER_LOST):
            return ExitCode.PEER_LOST, self.launcher_lost
        self._look_for_run()
        if code is not ExitCode.PEER_LOST:
            return code, reason
        if drained := self._how_rank0_drained():
            return ExitCode.DRAINED, drained
        first = self.run and self.run.failed_before(self.rank, self.generation)
        if first and not self.peers:  # nobody said goodbye
            return first[1].exit_code, str(first[1])
        if self.peer_lost is not None:
            return code, self.peer_lost
        how = "" if self.peer_reason is not None else self._another[1]
        return code, f"{reason}; it ended with {how}" if how else reason

    def _look_for_run(self) -> None:
        """Before a policy rank meets rank 0: finds the run of its launcher, if it has begun."""
        if self.run is None and self.rank != 0 and self.log_root is not None:
            self.run = Run.of_launcher(self.log_root)

    def _how_rank0_drained(self) -> str | None:
        """Returns what rank 0 recorded, if it drained without the time to send it."""
        if self.rank == 0 or self.run is None:
            return None
        end = self.run.ends().get("0", {})
        is_over = end.get("generation") == self.generation and end.get("code") == ExitCode.DRAINED
        return f"{OTHER_LEFT} 0 DRAINED: {end.get('reason')}" if is_over else None

    def end_without_main_thread(self) -> tuple[ExitCode, str]:
        """Returns this rank's end when its main thread does not leave by itself."""
        stands = f"; this rank's main thread is in {where(self._main_thread)}"
        if self.launcher_lost is not None:
            return ExitCode.PEER_LOST, self.launcher_lost + self.end_other_ranks(BEREFT_SEE_OUT_S)
        if self.decided is not None:
            code, reason = self.decided
            return code, f"{reason}{stands} and did not close within {CLOSE_GRACE_S:g} s"
        for peer in self.peers.values():
            if (goodbye := peer.goodbye) is not None:
                left = PeerLeftError(goodbye.code, goodbye.reason)
                self.peer_reason = left.reported
                return left.exit_code, str(left)
        return self.end_of_main_thread(ExitCode.PEER_LOST, f"{self._how_gone()}{stands}")

    def stop_early(self, name: str) -> None:
        """The answer to a signal while nothing is started yet.

        Raises:
            StoppedEarlyError: somebody wants this run to stop, or the launcher does because the
                other rank is gone: with what that recorded, as its goodbye was not read.
        """
        self._asked_early = name
        if first := self.run and self.run.failed_before(self.rank, self.generation):
            raise StoppedEarlyError(str(first[1]), first[1].exit_code)
        if any(process.wait_gone(0) for process in self.processes.values()):
            raise StoppedEarlyError(self._how_gone(), ExitCode.PEER_LOST)
        raise StoppedEarlyError(f"{name} before the run was ready")

    @property
    def is_leaving(self) -> bool:
        """It has decided, or was asked to stop before anything had started: with that reason."""
        return self.decided is not None or bool(self._asked_early)

    def pass_stops_to(self, act: Callable[[str], None]) -> None:
        """From now on a signal is answered by ``act``, and so is one before that something caught.

        What is imported or called while a rank starts may catch everything, the stop with it.
        """
        on_signals(act)
        if self._asked_early:
            act(self._asked_early)

    def because_of(self, error: BaseException) -> tuple[ExitCode, str]:
        """Returns this rank's end for ``error``; one of closing changes no end but a good one."""
        if isinstance(error, PeerLeftError):
            self.peer_reason = error.reported
        if self.decided is None or error is self._decided_by:
            return how_it_ends(error)
        if self.decided[0] is not ExitCode.DRAINED or isinstance(error, OSError):
            self.complain("closing failed", error)
            return self.decided
        return how_it_ends(error)

    def pass_cuts_to(self, act: Callable[[str], None]) -> None:
        """Call ``act`` with the signal's name on SIGUSR1, by which an operator cuts the epoch."""
        signal.signal(signal.SIGUSR1, lambda number, _frame: act(signal.Signals(number).name))

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Inside: a whole run; when it is left, this rank has decided, and closes in time."""
        try:
            yield
        except BaseException as error:
            self._decided_by = error
            self._decide(*how_it_ends(error))
            raise
        self._decide(ExitCode.DRAINED, "drained")

    def _decide(self, code: ExitCode, reason: str) -> None:
        self.decided = code, reason
        self.has_closed()  # nothing else has to be waited for
        if self.lookout is not None:
            self.lookout.leave_by(CLOSE_GRACE_S)

    def has_closed(self) -> None:
        """Lifts the deadline: what is left, as a report, takes the time it takes."""
        if self.lookout is not None and self.launcher_lost is None:
            self.lookout.clear_deadline()

    def leave_when_lost(self) -> None:
        """The peer hung up or ended: leave within a grace, even from inside a long stage."""
        if self.lookout is None or self.is_drained or self.decided or self.bears_loss():
            return
        self.lookout.leave_by(LOST_GRACE_S)

    def let_go(self, rank: int) -> str:
        """The run goes on without a rank: its processes are ended; returns what was done."""
        self.peers.pop(rank, None)
        process = self.processes.pop(rank, None)
        if process is None:
            return ""
        done = self._end_rank(rank, process, ZOMBIE_S, is_hasty=True)
        with suppress(OSError):  # the disk is full: the run goes on
            if self.run is not None:
                self.run.bear_loss(rank)
        return done

    def on_launcher_lost(self, reason: str) -> bool:
        """Nobody is left who could stop this run; returns whether a loop was asked to drain."""
        self.launcher_lost = reason
        if self.on_stop is not None:
            self.on_stop(reason)
        return self.on_stop is not None

    def end_other_ranks(self, limit_s: float, stopped: int | None = None) -> str:
        """Leave no process of this run behind: end other ranks' unless they leave by themselves.

        The launcher would wait 30 s for it before it restarts. Rank 0 may have a robot to end and
        is given its time: a policy rank ends only a frozen one. What a dead rank has forked is
        ended, too: nobody else knows of it.

        Args:
            limit_s: of their leaving, all together; 0: the one that fell silent is ended at once.
            stopped: the rank that is known to be the one.

        Returns:
            What was done, to be added to the reason of this rank's end.
        """
        until_ns = now_ns() + round((limit_s or SEE_OUT_S) * NS_PER_S)  # of all together
        done = ""
        frozen = self._first_lost if stopped is None else stopped
        for rank, process in sorted(self.processes.items(), key=lambda item: item[0] != frozen):
            is_hasty = not limit_s and frozen in (rank, None)
            left_s = 0.0 if is_hasty else max(0, until_ns - now_ns()) / NS_PER_S
            done += self._end_rank(rank, process, left_s, is_hasty=is_hasty)
        return done

    def _end_rank(self, rank: int, process: HeldProcess, limit_s: float, *, is_hasty: bool) -> str:
        is_patient = self.rank != 0 and not is_hasty
        done = ""
        if not process.wait_gone(ZOMBIE_S if is_patient else limit_s):
            if is_patient:
                return ""
            state = process.state()
            process.end_with_stacks()
            done = f"; its process {process.pid} (state {state}) was ended"
        others = (pid for pid in everybody() if pid != process.pid)
        forks = _end_all(of_rank(rank, os.environ, others))
        return f"{done}; ended what it had started: {', '.join(forks)}" if forks else done

    def _how_gone(self) -> str:
        if not self.peers:
            return f"{self._another[0]} ended before its handshake with this rank; read its output"
        return "the other rank's process exited without a message"


def _end_all(processes: Iterable[HeldProcess]) -> list[str]:
    """Kill them; returns which. What cleans up behind processes that were killed is left to it."""
    ended = []
    for process in processes:
        what = command(process.pid)
        if CLEANER not in what:
            ended.append(f"{process.pid} ({what[:COMMAND_SHOWN]})")
            process.end()
        process.close()
    return ended


def _print(text: str) -> None:
    """One line on standard error, by the shortest way there is: nobody may be listening."""
    with suppress(OSError):
        os.write(STDERR, f"{text}\n".encode(errors="backslashreplace"))


# ---- signals ------------------------------------------------------------------------------------


def ignore_cut_signal() -> None:
    """Nothing to cut: not a policy rank's, or not yet; unhandled it would end the process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def on_signals(act: Callable[[str], None]) -> None:
    """Call ``act`` with the signal's name on ``STOP_SIGNALS``; main thread only."""
    on_stop(lambda number, _frame: act(signal.Signals(number).name))


def ignore_signals() -> None:
    """This rank leaves: nothing is to be asked of it any more."""
    on_signals(lambda _name: None)
