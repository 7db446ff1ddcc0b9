"""``ppstream run``: starts the ranks of a run on this host, and ends as the run ends.

The ranks are those of ``serve.py``, started by torchrun's own agent, without restarts. This process
owns the signals, the last line and the exit code; when it is killed the ranks leave by themselves.
Several hosts, and restarts, are torchrun's: ``torchrun -m ppstream.serve``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from ppstream.config import load
from ppstream.config.doubts import warnings
from ppstream.control.peer_process import (
    HeldProcess,
    descendants,
    kills_for_memory,
    ranks_started_by,
    status_text,
)
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.core.interpreter import uncollected
from ppstream.launch.guard import STOP_SIGNALS, on_stop
from ppstream.launch.placement import ranks_wanted
from ppstream.launch.progress import CLEAR
from ppstream.launch.rank_exit import CLOSE_GRACE_S, RankEnd
from ppstream.launch.requirements import (
    HERE,
    PYTHON_MIN,
    missing_packages,
    problems_here,
    refuse,
    refuse_python,
)
from ppstream.observe.run_folder import Run

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

#: Rank 0 gets a stop first, so that the other one's end is never taken for a failure.
LEAD_S: Final = 0.2
SPARE_S: Final = 5.0  # on top of what the ranks need to drain and close
SILENT_LOOKS: Final = 10  # LEAD_S each: a stop that takes longer is told what it waits for
NO_MEMORY: Final = (
    "the kernel has killed a process of this host for want of memory meanwhile (dmesg names it): "
    "give the host or its container more, or load less"
)


def main(argv: Sequence[str] | None = None) -> int:
    """``ppstream run``: returns the exit code of the run."""
    parser = _parser(
        "run",
        "Live sensors to actions: starts the ranks of a run on this host. Drains "
        "on SIGTERM, SIGINT and SIGHUP; its exit code is that of the rank that failed first "
        "(ppstream-serve --help).",
    )
    return _act(parser.parse_args(argv), _run)


def check(argv: Sequence[str] | None = None) -> int:
    """``ppstream check``: prints what a run would place where, and every problem; starts nothing.

    A configuration with mistakes is refused before torch is imported.
    """
    parser = _parser(
        "check",
        "Print placement, tensors and memory of a run, or all its problems. "
        "Builds the policy once; starts no process and opens no socket.",
    )
    return _act(parser.parse_args(argv), _check)


Action = Callable[["PipelineConfig", argparse.Namespace, list[str]], int]


def _act(args: argparse.Namespace, action: Action) -> int:
    """Load the configuration and do it; returns the exit code, also of a refusal."""
    if sys.version_info < PYTHON_MIN:
        return refuse_python()
    try:
        config = load.load(args)
        missing = missing_packages(config)
        if find_spec("torch") is None:
            missing.append("torch is not installed: pip install 'ppstream[serve]'")
        return action(config, args, missing)
    except ConfigError as error:
        return refuse(error)


def _run(config: PipelineConfig, args: argparse.Namespace, problems: list[str]) -> int:
    count = args.nproc or ranks_wanted(config)
    found = [*problems, *problems_here(config, count)]
    if not problems and {config.placement.rank0, *config.placement.policy} != {"cpu"}:
        with uncollected():  # torch, which starts the ranks, too
            from ppstream.cuda import startup
        found += startup.missing(config, is_inline=count == 1, is_quick=True)
    if found:
        raise ConfigError(found)
    for line in warnings(config):
        print(f"ppstream: warning: {line}", file=sys.stderr, flush=True)
    return RankLauncher(config, count).run(load.arguments_of(args))


def _check(config: PipelineConfig, args: argparse.Namespace, problems: list[str]) -> int:
    if problems:
        raise ConfigError(problems)
    with uncollected():
        from ppstream.launch.dry_run import describe
    print(describe(config, args.nproc or ranks_wanted(config)))
    return 0


class RankLauncher:
    """One run of ``count`` ranks on this host; the main thread waits and takes signals."""

    def __init__(self, config: PipelineConfig, count: int) -> None:
        self._config = config
        self._count = count
        self._asked: int | None = None  # the signal that asked the run to stop
        self._is_told = False  # how long a stop may take; from then on SIGINT ends the ranks
        self._cut_short = ""  # why ranks were ended that had not left
        self._failures: Mapping[int, int] = {}
        self._killed_before = kills_for_memory()
        self._fault: BaseException | None = None
        self._run: Run | None = None  # once rank 0 has begun it: looking for it holds its folder
        self._over = threading.Event()

    def run(self, arguments: Sequence[str]) -> int:
        """Start the ranks with these arguments, and return how the run ended."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        on_stop(self._stop)
        threading.Thread(target=self._launch, args=(arguments,), daemon=True).start()
        while not self._over.wait(LEAD_S):
            pass  # without limit it may miss a signal of another thread
        if self._fault is not None:
            RankEnd(0).print_last_line(
                ExitCode.INTERNAL, f"the ranks could not be started: {self._fault}"
            )
            return int(ExitCode.INTERNAL)
        code, begun = self._code(), self._own_run()
        if begun is not None:
            with suppress(ConfigError):  # a full disk, say: the last line has the code
                begun.returned(code)
        if code is not ExitCode.DRAINED:
            RankEnd(0).print_last_line(code, self._reason())
        elif self._failures.get(0) and self._asked is not None:  # it could not tell yet
            name = signal.Signals(self._asked).name
            RankEnd(0).print_last_line(code, f"{name} before the run was ready")
        return int(code)

    def _launch(self, arguments: Sequence[str]) -> None:
        logging.disable()  # the agent's forty lines say nothing that ours do not
        try:
            self._failures = _run_agent(self._count, arguments)
        except BaseException as error:  # noqa: BLE001 - the top of a thread: the main one says it
            self._fault = error
        self._over.set()

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        """Ask the ranks to drain; once, or have them end where that takes long and SIGINT comes."""
        if self._asked is None:
            self._asked = number
            threading.Thread(target=self._ask, daemon=True).start()
        elif number == signal.SIGINT and self._is_told:
            self._cut_short = "SIGINT came again; "

    def _ask(self) -> None:
        """Pass the stop on, also to ranks that start only now; end those that do not heed it.

        A rank 0 that has not met all others serves nobody: it has nothing to drain, nor to close.
        """
        drain_s, since_s = self._config.liveness.drain_s, 0.0
        asked: list[HeldProcess] = []
        for look in itertools.count():
            met = self._met()
            limit_s = drain_s + CLOSE_GRACE_S + SPARE_S
            if asked and met < self._count - 1:
                limit_s = min(limit_s, since_s + max(drain_s, SPARE_S))
            if self._cut_short or look * LEAD_S >= limit_s:
                break
            if look == SILENT_LOOKS:
                self._tell(limit_s - look * LEAD_S)
            if asked and asked[0].wait_gone(0):  # however long it took to leave
                self._end_ranks(self._met())
            elif asked and len(asked) > met:  # it would take rank 0 for a lost one
                asked[0].wait_gone(LEAD_S)
                continue
            # rank 0, and the next a moment later
            pid = ranks_started_by(os.getpid()).get(len(asked))
            process = HeldProcess.of(pid) if pid is not None else None
            if process is not None:
                process.signal(self._stop_signal(len(asked)))
                asked.append(process)
                if len(asked) == 1:
                    since_s = look * LEAD_S
                    if not process.wait_gone(LEAD_S):
                        continue
                    self._end_ranks(self._met())
            if self._over.wait(LEAD_S):
                return
        self._cut_short = self._cut_short or f"no end within {limit_s:g} s of the stop; "
        self._end_ranks(-1)

    def _stop_signal(self, rank: int) -> int:
        """Returns the run's own, which rank 0 names; others raise where a rank still imports."""
        is_awake = rank == 0 and self._own_run() is not None
        return self._asked if is_awake and self._asked is not None else signal.SIGTERM

    def _tell(self, limit_s: float) -> None:
        """Say what a stop waits for, and how to end it; the ranks may say nothing for as long."""
        text = f"stopping: what is under way ends first, within {limit_s:.0f} s; Ctrl-C ends it now"
        begin = CLEAR if sys.stderr.isatty() else ""  # rank 0 may show there how far it is
        self._is_told = True
        with suppress(OSError):  # a terminal that was closed
            print(f"{begin}ppstream: {text}", file=sys.stderr, flush=True)

    def _end_ranks(self, last: int) -> None:
        """End the ranks behind ``last``.

        Those that rank 0 had not met when it left would take it for a lost one: they have built
        nothing, and nobody told them that the run is over.
        """
        for rank, pid in ranks_started_by(os.getpid()).items():
            for each in (*descendants(pid), pid) if rank > last else ():  # a guard's rank first
                if (process := HeldProcess.of(each)) is not None:
                    process.end()
                    process.close()

    def _met(self) -> int:
        """Returns how many policy ranks rank 0 has met."""
        run = self._own_run()
        return 0 if run is None else run.ranks_met()

    def _own_run(self) -> Run | None:
        if self._run is None:
            self._run = Run.of_launcher(Path(self._config.log.root), os.getpid())
        return self._run

    def _code(self) -> ExitCode:
        """Rank 0's; where that lost another rank, the code with which the first one failed.

        A rank that was killed has none, and is a lost one.
        """
        code = self._failures.get(0, 0)
        if self._asked is not None and -code in STOP_SIGNALS:  # it had not begun
            return ExitCode.DRAINED
        if code in set(ExitCode) and code != ExitCode.PEER_LOST:
            return ExitCode(code)
        run = self._own_run()
        first = None if run is None else run.first_to_fail(0)
        return ExitCode.PEER_LOST if first is None else ExitCode(first[1]["code"])

    def _reason(self) -> str:
        """Returns where to look, and how ranks ended that could not say so themselves."""
        run = self._own_run()
        told = {} if run is None else run.ends()
        untold = [
            f"rank {rank} ended with {status_text(code)}; "
            for rank, code in sorted(self._failures.items())
            if str(rank) not in told
        ]
        if -signal.SIGKILL in self._failures.values() and self._killed_before < kills_for_memory():
            untold.append(f"{NO_MEMORY}; ")
        where = "the lines above" if run is None else run.directory
        return f"{self._cut_short}{''.join(untold)}{where}"


def _run_agent(count: int, arguments: Sequence[str]) -> dict[int, int]:
    """Run the ranks to their end; returns the exit codes of those that failed, by rank."""
    with uncollected():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HERE}:0",
        local_addr=HERE,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "ppstream.serve", *arguments)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _rank_count(text: str) -> int:
    """Takes ``--nproc``; argparse words what is raised."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a whole number, at least 1")
    return int(text)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"ppstream {command}",
        description=description,
        epilog=f"Example: ppstream {command} my-arm.toml --set record.file=run.mcap",
    )
    load.add_arguments(parser, is_positional=True)
    parser.add_argument(
        "--nproc",
        type=_rank_count,
        metavar="N",
        help="ranks: 1 runs the unpipelined twin (default: what the placement asks for)",
    )
    return parser
