"""ThreadRank: a run of world size 1 in a thread, for a policy that this process alone has.

The same rank 0 as everywhere: rings, leases, ledger, limits, log. It sets no signal handler, and
behind it the interpreter and torch are as they were. What nobody can do is to end a thread from
outside: a call of the policy that never returns is told, and holds the endpoint until the process
ends; its robots hold when their leases do.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ppstream.config.schema import PipelineConfig
from ppstream.control.watchdog import where
from ppstream.core.errors import ConfigError, ExitCode, PpstreamError
from ppstream.core.interpreter import as_guest
from ppstream.launch.rank_exit import CLOSE_GRACE_S, RankEnd
from ppstream.launch.requirements import missing_packages
from ppstream.observe.run_folder import Run

logger = logging.getLogger("ppstream")

THREAD: Final = "ppstream-run"
_only: Final = threading.Lock()  # held while a run is in a thread: it sets what a process has once


class ThreadEnd(RankEnd):
    """End of a rank whose process goes on: nothing is left but told."""

    takes_signals = False
    thread = "the run's thread"

    def __init__(self) -> None:
        super().__init__(0)
        self.given_up: tuple[ExitCode, str] | None = None  # the thread stands
        self._asked = ""

    def ask_to_stop(self, reason: str) -> None:
        """Have the run drain, also one that is not built yet; from any thread."""
        self._asked = reason
        if self.on_stop is not None:
            self.on_stop(reason)

    def pass_stops_to(self, act: Callable[[str], None]) -> None:
        """As ``RankEnd``, for what ``ask_to_stop`` came before."""
        if self._asked:
            act(self._asked)

    def pass_cuts_to(self, act: Callable[[str], None]) -> None:
        """Nobody asks for cuts: a signal is the process's own."""

    def leave(self, code: ExitCode, reason: str) -> None:
        """The thread stands, and cannot be ended: say so, and drain if it ever goes on."""
        self.given_up = code, reason
        self.record(code, reason)
        logger.error("the run is given up: %s", reason)
        self.ask_to_stop(reason)


class ThreadRank:
    """One run, begun at once; one at a time in a process. It drains when the interpreter exits.

    Args:
        config: of the run; its ``policy.target`` is a name for people.
        maker: the policy's ``build(options, device)``.

    Raises:
        ConfigError: packages are missing.
        PpstreamError: another one goes on.
    """

    output = ""  # its lines go to the logger ``ppstream`` of this process

    def __init__(self, config: PipelineConfig, maker: Callable[..., Any]) -> None:
        missing = missing_packages(config)
        if find_spec("torch") is None:
            missing.append("torch is not installed: pip install 'ppstream[serve]'")
        if missing:
            raise ConfigError(missing)
        self._config = config
        self._maker = maker
        self._end = ThreadEnd()
        self._final: tuple[ExitCode, str] | None = None
        self.error: BaseException | None = None  # which ended it
        self._run_folder: Run | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        if not _only.acquire(blocking=False):
            raise PpstreamError(
                "another run goes on in a thread of this process, which holds one: stop() it, or "
                "put the policy at the top of a module file, which makes the ranks processes"
            )
        logger.warning(
            "%s is known to this process alone: one rank runs A, B and C in turn, in a thread of "
            "it, and nothing overlaps; at the top of a module file it runs in ranks of its own",
            config.policy.target,
        )
        atexit.register(self._drain)
        try:
            self._thread.start()
        except BaseException:
            self._forget()
            raise

    def poll(self) -> int | None:
        """Returns how it ended; None: it goes on."""
        final = self._end.given_up or self._final
        return None if final is None else int(final[0])

    @property
    def reason(self) -> str:
        """The reason of its end."""
        final = self._end.given_up or self._final
        return "" if final is None else final[1]

    @property
    def directory(self) -> Path | None:
        """Folder with the run's log; None: not there yet."""
        return None if self._end.run is None else self._end.run.directory

    def ask_to_stop(self) -> None:
        self._end.ask_to_stop("stop()")

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; returns the exit code.

        Raises:
            TimeoutError: it goes on, and says where.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the run did not end within {timeout_s:g} s: its thread is in "
                f"{where(self._thread.ident or 0)}, and no thread can be ended from outside"
            )
        code = self.poll()
        assert code is not None, "its thread has ended"
        return code

    def _run(self) -> None:
        final = ExitCode.INTERNAL, "this run's end could not be told"
        try:
            final = self._serve()
        except BaseException as error:  # noqa: BLE001 - the top of a thread: its owner raises it
            self.error = error
            final = self._end.because_of(error)
        finally:
            self._end.record(*final)
            if self._run_folder is not None:
                self._run_folder.release()
            self._final = final
            self._forget()

    def _serve(self) -> tuple[ExitCode, str]:
        import torch  # loads for seconds, and not before a run is wanted

        from ppstream.launch.run_rank0 import run_front
        from ppstream.policy.compatibility import build_parts

        threads = torch.get_num_threads()
        self._run_folder = run = Run.create(Path(self._config.log.root), self._config.log.keep)
        build = partial(build_parts, maker=self._maker)
        try:
            with as_guest():
                return ExitCode.DRAINED, run_front(self._config, self._end, run, 1, build)
        finally:
            torch.set_num_threads(threads)

    def _drain(self) -> None:
        """The interpreter exits: its other threads are stopped behind this, wherever they are."""
        self.ask_to_stop()
        if self._end.given_up is None:
            self._thread.join(self._config.liveness.drain_s + CLOSE_GRACE_S)

    def _forget(self) -> None:
        atexit.unregister(self._drain)
        _only.release()
