"""``python -m ppstream.serve``: one rank of a run, from configuration to exit code.

Under torchrun, rank 0 runs stages A and C, and the policy ranks run stage B, whole or a part each;
alone, one process runs the unpipelined twin. ``--check`` and ``--print-config`` start nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppstream.config import load
from ppstream.config.to_toml import as_toml
from ppstream.core.errors import (
    FINAL_CODES,
    MEANINGS,
    ConfigError,
    ExitCode,
    PeerFrozenError,
)
from ppstream.core.interpreter import uncollected
from ppstream.launch import guard
from ppstream.launch.from_env import LAUNCHERS, become_torchrun
from ppstream.launch.lookout import Lookout
from ppstream.launch.placement import ranks_wanted
from ppstream.launch.progress import CLEAR
from ppstream.launch.rank_exit import (
    SEE_OUT_S,
    RankEnd,
    ignore_cut_signal,
    ignore_signals,
    on_signals,
)
from ppstream.launch.requirements import (
    PYTHON_MIN,
    missing_packages,
    rank_numbers,
    refuse,
    refuse_python,
)
from ppstream.observe.run_folder import LAUNCHER_RUN, ROBOT_STORY, Run
from ppstream.report import attribution, cli

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

#: Ends behind a bring-up: there is something to report.
REPORTED: Final = (ExitCode.DRAINED, ExitCode.GATE_FAIL, ExitCode.GATE_INCONCLUSIVE)

#: Of a log that is read at the end of a run, in some 10 s: a launcher kills its ranks 30 s behind a
#: SIGTERM. An hour at 100 Hz logs 400 MB.
REPORT_BYTES_MAX: Final = 50_000_000
PAGE: Final = "report.html"  # in the run's folder
#: What the extra ``serve`` brings.
SERVE_PACKAGES: Final = ("torch", "safetensors", "nvtx", "prometheus_client")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run this rank; under torchrun this does not return."""
    args = _parser().parse_args(argv)
    if sys.version_info < PYTHON_MIN:
        return refuse_python()
    try:
        rank, world_size = rank_numbers(os.environ)
    except ConfigError as error:
        return refuse(error)
    begin = CLEAR if sys.stderr.isatty() else ""  # a rank may show there how far its start is
    logging.basicConfig(
        level=logging.INFO, format=f"{begin}ppstream: %(message)s", stream=sys.stderr
    )
    try:
        config = load.load(args)
        if missing := missing_packages(config):
            raise ConfigError(missing)
        if args.print_config:
            print(as_toml(config), end="")
            return 0
        if args.check:
            with uncollected():
                from ppstream.launch.dry_run import describe
            text = describe(config, max(world_size, args.ranks or ranks_wanted(config)))
            if rank == 0:  # every rank has looked: say it once
                print(text)
            return 0
        if args.from_env is not None:
            become_torchrun(os.environ, config, load.arguments_of(args))
    except ConfigError as error:
        if rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0":  # those of one host agree
            return refuse(error, rank)
        return int(ExitCode.CONFIG)
    if guard.is_wanted(config, rank):
        guard.become(sys.argv[1:] if argv is None else argv)
    return run_rank(config, rank)


def run_rank(config: PipelineConfig, rank: int) -> int:
    """Run one rank to its end, record the end in exit.json, and leave the process.

    Returns only what an earlier generation already decided; every other end leaves the process
    from inside, because threads and sockets of a broken run must not be able to hold it up.
    """
    run, generation = _begun_before(Path(config.log.root), rank)
    end = RankEnd(rank, generation)
    end.log_root = Path(config.log.root)
    if run is not None and (code := run.final_code()) is not None:
        end.print_last_line(code, "an earlier generation ended so; restarting cannot improve it")
        return int(code)
    final = ExitCode.INTERNAL, "this rank's end could not be told"
    try:
        final = _run(config, end, run)
        final = end.end_of_main_thread(*final)
        end.record(*final)
        if rank == 0 and end.run is not None and end.on_stop is not None and final[0] in REPORTED:
            print_report(end.run)
    except BaseException as error:  # noqa: BLE001 - a report that fails changes no end
        end.complain("there is no report", error)
    end.leave(*final)
    return int(final[0])


def _begun_before(root: Path, rank: int) -> tuple[Run | None, int]:
    """The run that this host's launcher began in an earlier start, if any, and this start's number.

    The number is what this host knows: ranks agree on theirs when they meet. Rank 0 looks into its
    run's folder, too: a launcher of several hosts does not count each restart (control/generation).
    """
    counted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    may_be_uncounted = rank == 0 and LAUNCHER_RUN in os.environ
    run = Run.of_launcher(root) if counted or may_be_uncounted else None
    if run is None or rank != 0:
        return run, counted
    return run, max(counted, run.next_generation())


def _run(config: PipelineConfig, end: RankEnd, run: Run | None) -> tuple[ExitCode, str]:
    """This rank from its first to its last act but leaving; ``run``: an earlier generation's."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        on_signals(end.stop_early)
        ignore_cut_signal()
        Lookout(end, os.environ, config.liveness.frozen_ms).start()
        if end.rank == 0:
            with uncollected():
                from ppstream.launch.run_rank0 import run_front

            run = run or Run.create(Path(config.log.root), config.log.keep)
            reason = run_front(config, end, run, world_size)
        else:
            with uncollected():
                from ppstream.launch.run_policy_rank import run_back

            reason = run_back(config, end, world_size)
    except BaseException as error:  # noqa: BLE001 - the top of the process: say it, and leave
        ignore_signals()
        end.has_closed()
        return end_of(error, end)
    end.has_closed()
    return ExitCode.DRAINED, reason


def end_of(error: BaseException, end: RankEnd) -> tuple[ExitCode, str]:
    """Returns this rank's end for ``error``; one that nobody expected is printed in full."""
    if isinstance(error, ModuleNotFoundError) and error.name in SERVE_PACKAGES:
        return ExitCode.CONFIG, f"{error.name} is not installed: pip install 'ppstream[serve]'"
    code, reason = end.because_of(error)
    try:
        if code is ExitCode.INTERNAL:
            traceback.print_exception(error)
        if code not in REPORTED and code not in FINAL_CODES:  # else it may be printing its report
            reason += end.end_other_ranks(0.0 if isinstance(error, PeerFrozenError) else SEE_OUT_S)
    except Exception as failure:  # noqa: BLE001 - nothing changes the code
        end.complain("the end is not told in full", failure)
    return code, reason


def print_report(run: Run) -> None:
    """Prints the run's report and writes it as a page; then what the embedded robot printed.

    Of a long run it says how to get the report.
    """
    log_bytes = sum(path.stat().st_size for path in run.directory.glob("rank*.jsonl"))
    if log_bytes <= REPORT_BYTES_MAX:
        page = run.directory / PAGE
        if cli.main([str(run.directory), "--html", str(page)]) != cli.BAD_INPUT:
            print(f"the same with pictures: {page}")
        if blocks := attribution.report(run.directory):
            print(blocks)
    else:
        print(
            f"the log of {run.run_id} has {log_bytes / 1e6:.0f} MB, and up to "
            f"{REPORT_BYTES_MAX / 1e6:.0f} are read at the end of a run; its report: "
            f"ppstream report {run.directory}"
        )
    story = run.directory / ROBOT_STORY
    if story.exists():
        print(story.read_text(), end="")


def _parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code:3d}  {code.name:18}{MEANINGS[code]}" for code in ExitCode)
    parser = argparse.ArgumentParser(
        prog="ppstream-serve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Live sensors to actions over one rank or several: "
        "torchrun --nproc-per-node=2 -m ppstream.serve [FILE]",
        epilog=f"exit codes of a rank (torchrun itself returns 0 or 1):\n{codes}",
    )
    load.add_arguments(parser, is_positional=True)
    parser.add_argument(
        "--check", action="store_true", help="print the placement and what it needs; start nothing"
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks that --check plans for (default: what the placement wants)"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective configuration and leave"
    )
    parser.add_argument(
        "--from-env",
        choices=LAUNCHERS,
        help="start the ranks of this pod of a LeaderWorkerSet (lws) through torchrun",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
