"""``ppstream.start``: a run from Python, owned by the process that started it.

The ranks are processes, as those of ``ppstream run``; this process reads their log. When it ends,
however it ends, the run drains.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
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
from ppstream.control.peer_process import bound_command
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, ExitCode, PpstreamError
from ppstream.observe.run_folder import EventLog, Run

LOOK_S: Final = 0.05  # between two looks at the log
STOP_LIMIT_S: Final = 30.0
OUTPUT: Final = "output.txt"
LINES_TOLD: Final = 20  # of what the ranks printed, with an error


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
        policy: instead of ``policy.target``: ``"module:build"``, or the function itself, which the
            ranks must be able to import.
        settings: ``"path=value"`` texts, as ``--set``.
        timeout_s: until the run serves; None: as long as it takes.

    Returns:
        The run, a context manager that stops it.

    Raises:
        ConfigError: holds every problem found; no process was started.
        PpstreamError: the run ended before it served, with what its ranks said last.
        TimeoutError: it does not serve in time; it was stopped.
    """
    run = StartedRun(config, [*settings, *_target_settings(policy)])
    try:
        run.wait_ready(timeout_s)
    except BaseException:
        run.stop()
        raise
    return run


class StartedRun:
    """A run that this process started; ``start`` makes it."""

    def __init__(self, config: str | Path | PipelineConfig, settings: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ppstream-"))
        try:
            self.config = self._begin(config, settings)
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        self._root = Path(self.config.log.root)
        self._run: Run | None = None
        self._output = ""
        self._logs: dict[Path, EventLog] = {}
        self._phase = "starting"
        self._verdict: str | None = None

    def _begin(
        self, config: str | Path | PipelineConfig, settings: Sequence[str]
    ) -> PipelineConfig:
        """Start the ranks; returns the configuration that they run."""
        name, given = str(config), [*settings]
        if isinstance(config, PipelineConfig):
            name = str(self._folder / f"{config.name}.toml")
            Path(name).write_text(as_toml(config))
        checked = load.read(name, given)
        if not checked.bringup.accept:  # what is tried out may be too quick to overlap
            given.append(f"bringup.accept={toml_value(ACCEPTABLE)}")
            checked = load.read(name, given)
        pairs = (word for setting in given for word in ("--set", setting))
        with (self._folder / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                bound_command("ppstream.launch.commands", "run", name, *pairs),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C comes here, and ends the run by stop()
            )
        return checked

    @property
    def endpoint(self) -> str | None:
        """Address for a ``RobotClient``; None: the run serves no robots."""
        return self.config.service.endpoint

    @property
    def directory(self) -> Path | None:
        """Folder with the run's log; None: not there yet."""
        if self._run is None:
            self._run = Run.of_launcher(self._root, self._process.pid)
        return None if self._run is None else self._run.directory

    @property
    def phase(self) -> str:
        """The run's phase now; ``stopped`` once its processes have ended."""
        self._read_events()
        return self._phase if self._process.poll() is None else "stopped"

    @property
    def verdict(self) -> str | None:
        """Bring-up's verdict, PASS, FAIL or INCONCLUSIVE; None: not told yet."""
        self._read_events()
        return self._verdict

    @property
    def output(self) -> str:
        """Everything that the ranks have printed."""
        with suppress(FileNotFoundError):  # it has ended
            self._output = (self._folder / OUTPUT).read_text(errors="replace")
        return self._output

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until robots are served. Raises as ``start``."""
        until_ns = None if timeout_s is None else now_ns() + round(timeout_s * NS_PER_S)
        while self.phase not in ("ready", "degraded"):
            if (code := self._process.poll()) is not None:
                told = "\n".join(self.output.splitlines()[-LINES_TOLD:])
                raise PpstreamError(f"the run ended with {code} before it served:\n{told}")
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
            TimeoutError: it does not end; its processes were killed.
        """
        self._read_events()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks leave by themselves
            self._process.wait()
            raise TimeoutError(f"the run did not end within {timeout_s:g} s; killed") from None
        finally:
            self._output = self.output
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
            raise PpstreamError(f"the run ended with {code}; its report: {self.directory}")

    def _read_events(self) -> None:
        if self.directory is None:
            return
        for path in sorted(self.directory.glob("rank0.gen*.jsonl")):
            for event in self._logs.setdefault(path, EventLog(path)).read():
                if event["name"] == "phase":
                    self._phase = event["phase"]
                elif event["name"] == "verdict":
                    self._verdict = event["verdict"]


def _target_settings(policy: str | Callable[..., Any] | None) -> list[str]:
    if policy is None:
        return []
    if isinstance(policy, str):
        return [f"policy.target={policy}"]
    module, name = policy.__module__, policy.__qualname__
    where = f"{module}:{name}"
    if module == "__main__" or not hasattr(import_module(module), name):
        raise ConfigError(
            [
                f"policy: {where} cannot be imported by the ranks, which are processes of their "
                "own; put it at the top of a module file and pass module:name"
            ]
        )
    return [f"policy.target={where}"]
