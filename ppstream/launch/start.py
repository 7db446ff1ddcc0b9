"""``ppstream.start``: a run from Python, owned by the process that started it.

The ranks are processes, as those of ``ppstream run``, or one thread (``in_thread.py``); this
process reads their log. When it ends, the run drains; its processes do so however it ends.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.run_report import RunReport
from ppstream.analysis.verdict import ACCEPTABLE
from ppstream.config import load
from ppstream.config.schema import PipelineConfig
from ppstream.config.to_toml import as_toml, toml_value
from ppstream.control.peer_process import bound_command, environment_to_import
from ppstream.core.clock import NS_PER_S, limit_ns, now_ns
from ppstream.core.errors import ExitCode, PpstreamError
from ppstream.launch.in_thread import ThreadRank
from ppstream.observe.run_folder import EventLog, Run

LOOK_S: Final = 0.05  # between two looks at the log
STOP_LIMIT_S: Final = 30.0
OUTPUT: Final = "output.txt"
LINES_TOLD: Final = 20  # of what the ranks printed, with an error
MAIN: Final = "__main__"


def start(
    config: str | Path | PipelineConfig = load.DEFAULT,
    *,
    policy: str | Callable[..., Any] | None = None,
    settings: Sequence[str] = (),
    timeout_s: float | None = 120.0,
) -> StartedRun:
    """Start a run on this host, and return once it serves robots.

    Unless the configuration says what to accept, a policy whose overlap is refused is served with a
    warning.

    Args:
        config: a TOML file, the name of a shipped configuration, or a configuration.
        policy: instead of ``policy.target``: ``"module:build"``, or ``build`` itself. One that
            other processes cannot import, such as a notebook's cell, a closure or a ``partial``, is
            called in a thread of this process, by one rank: stages take turns, and nothing is
            proven to overlap. One such run at a time.
        settings: ``"path=value"`` texts, as ``--set``.
        timeout_s: until the run serves; None: as long as it takes.

    Returns:
        The run, a context manager that stops it.

    Raises:
        ConfigError: holds every problem found; nothing was started.
        PpstreamError: the run ended before it served, with what its ranks said last; in a thread
            caused by what ended it. Or another run is in a thread of this process.
        TimeoutError: it does not serve in time; it was stopped.
    """
    target, maker = _found(policy)
    named = [] if target is None else [f"policy.target={target}"]
    run = StartedRun(config, [*settings, *named], maker)
    try:
        run.wait_ready(timeout_s)
    except BaseException as error:
        try:
            run.stop()
        except TimeoutError as late:
            error.add_note(str(late))
        raise
    return run


class StartedRun:
    """A run that this process started; ``start`` makes it."""

    def __init__(
        self,
        config: str | Path | PipelineConfig,
        settings: Sequence[str],
        maker: Callable[..., Any] | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ppstream-"))
        try:
            self.config, self._ranks = self._begin(config, settings, maker)
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        self._logs: dict[Path, EventLog] = {}
        self._phase = "starting"
        self._verdict: str | None = None

    def _begin(
        self,
        config: str | Path | PipelineConfig,
        settings: Sequence[str],
        maker: Callable[..., Any] | None,
    ) -> tuple[PipelineConfig, _Processes | ThreadRank]:
        """Start the ranks; returns the configuration that they run, too."""
        name, given = str(config), [*settings]
        if isinstance(config, PipelineConfig):
            name = str(self._folder / "run.toml")
            # The file goes with its folder: what the run leaves must not lie there.
            Path(name).write_text(as_toml(config, Path.cwd()))
        checked = load.read(name, given)
        if not checked.bringup.accept:  # what is tried out may be too quick to overlap
            given.append(f"bringup.accept={toml_value(ACCEPTABLE)}")
            checked = load.read(name, given)
        if maker is None:
            return checked, _Processes(name, given, Path(checked.log.root), self._folder / OUTPUT)
        if not isinstance(config, PipelineConfig):
            load.make_importable(name)  # as the ranks do, which are processes
        return checked, ThreadRank(checked, maker)

    @property
    def endpoint(self) -> str | None:
        """Address for a ``RobotClient``; None: the run serves no robots."""
        return self.config.service.endpoint

    @property
    def directory(self) -> Path | None:
        """Folder with the run's log; None: not there yet."""
        return self._ranks.directory

    @property
    def phase(self) -> str:
        """The run's phase now; ``stopped`` once it has ended."""
        self._read_events()
        return self._phase if self._ranks.poll() is None else "stopped"

    @property
    def verdict(self) -> str | None:
        """Bring-up's verdict, PASS, FAIL or INCONCLUSIVE; None: not told yet, or of one rank."""
        self._read_events()
        return self._verdict

    @property
    def output(self) -> str:
        """Everything that the ranks have printed; a thread logs it here, as ``ppstream``."""
        return self._ranks.output

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until robots are served. Raises as ``start``."""
        until_ns = None if timeout_s is None else now_ns() + limit_ns(timeout_s)
        while self.phase not in ("ready", "degraded"):
            if (code := self._ranks.poll()) is not None:
                told = self._ranks.reason
                text = f"the run ended with {code} before it served:\n{told}"
                raise PpstreamError(text) from self._ranks.error
            if until_ns is not None and now_ns() > until_ns:
                raise TimeoutError(f"phase is {self._phase!r} after {timeout_s:g} s, not ready")
            time.sleep(LOOK_S)

    def report(self) -> RunReport:
        """Judge the run as far as it is, as ``ppstream report`` does.

        Raises:
            PpstreamError: there is no log yet.
        """
        if self.directory is None:
            raise PpstreamError("this run has no log yet")
        return judge(read_run(self.directory))

    def stop(self, timeout_s: float = STOP_LIMIT_S) -> int:
        """Drain the run, and return its exit code; again: the same code.

        Raises:
            SpecError: the limit is NaN.
            TimeoutError: it does not end. Its processes were killed; its thread goes on.
        """
        limit_s = limit_ns(timeout_s) / NS_PER_S  # math.inf is no limit
        _ = self.directory  # which is found while the launcher runs
        if self._ranks.poll() is None:
            self._ranks.ask_to_stop()
        try:
            return self._ranks.wait(limit_s)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> StartedRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        code = self.stop()
        if kind is None and code not in (ExitCode.DRAINED, -signal.SIGTERM):
            text = f"the run ended with {code}; its report: {self.directory}"
            if self._ranks.error is not None:
                text += f"\n{self._ranks.reason}"
            raise PpstreamError(text) from self._ranks.error

    def _read_events(self) -> None:
        if self.directory is None:
            return
        for path in sorted(self.directory.glob("rank0.gen*.jsonl")):
            for event in self._logs.setdefault(path, EventLog(path)).read():
                if event["name"] == "phase":
                    self._phase = event["phase"]
                elif event["name"] == "verdict":
                    self._verdict = event["verdict"]


class _Processes:
    """Ranks of their own, under a launcher: all that ``StartedRun`` needs of them."""

    error = None  # it stands in ``reason``

    def __init__(self, name: str, settings: Sequence[str], root: Path, output: Path) -> None:
        self._root = root
        self._run: Run | None = None
        self._file = output
        self._output = ""
        pairs = (word for setting in settings for word in ("--set", setting))
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                bound_command("ppstream.launch.commands", "run", name, *pairs),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment_to_import(),
                start_new_session=True,  # Ctrl-C comes here, and ends the run by stop()
            )

    @property
    def directory(self) -> Path | None:
        if self._run is None:
            self._run = Run.of_launcher(self._root, self._process.pid)
        return None if self._run is None else self._run.directory

    @property
    def output(self) -> str:
        with suppress(FileNotFoundError):  # it has ended
            self._output = self._file.read_text(errors="replace")
        return self._output

    @property
    def reason(self) -> str:
        return "\n".join(self.output.splitlines()[-LINES_TOLD:])

    def poll(self) -> int | None:
        return self._process.poll()

    def ask_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Returns the exit code. Raises TimeoutError: they did not end, and were killed."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks leave by themselves
            self._process.wait()
            raise TimeoutError(f"the run did not end within {timeout_s:g} s; killed") from None
        finally:
            self._output = self.output


def _found(
    policy: str | Callable[..., Any] | None,
) -> tuple[str | None, Callable[..., Any] | None]:
    """Returns the policy's name, and the function itself where the ranks could not import it."""
    if policy is None or isinstance(policy, str):
        return policy, None
    module = getattr(policy, "__module__", None) or MAIN
    name = getattr(policy, "__qualname__", type(policy).__name__)
    if module != MAIN and getattr(import_module(module), name, None) is policy:
        return f"{module}:{name}", None
    words = module.rpartition(".")[2], name.rpartition(".")[2]
    return ":".join(re.sub(r"\W", "_", word) for word in words), policy
