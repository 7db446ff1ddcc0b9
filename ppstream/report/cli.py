"""The report: reads run logs, judges them, prints what they mean. Also ``tools/overlap_report.py``.

``--html`` and ``--perfetto`` draw the same runs, ``--compare`` sets two beside each other. Exit
codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input; of several runs the worst one's. 0 as well where
the run's configuration accepts every reason. A comparison ends with 0 when it could be made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import find_runs, read_run
from ppstream.analysis.records import RunLog
from ppstream.analysis.run_report import RunReport
from ppstream.analysis.verdict import SEVERITY, Verdict
from ppstream.core.errors import CompareError, LogError
from ppstream.core.phases import PHASES
from ppstream.report.comparison import compare_folders, comparison_dict, comparison_text
from ppstream.report.terminal import columns, show
from ppstream.report.text import Line, lines_of

if TYPE_CHECKING:
    from ppstream.report.html.page import Judged

SCHEMA: Final = "ppstream.report/1"
BAD_INPUT: Final = 3


class _Parser(argparse.ArgumentParser):
    """Ends as bad input, where argparse's own 2 is the verdict INCONCLUSIVE."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Report on the runs under a folder, or compare two; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.logs is None) == (options.compare is None):
        parser.error("give a run's folder (or a folder of runs), or --compare A B")
    try:
        return _compare(options) if options.compare is not None else _report(options)
    except (LogError, CompareError) as error:
        print(f"bad input: {error}", file=sys.stderr)
    except OSError as error:
        where = error.filename or "standard output"
        print(f"cannot write {where}: {error.strerror}", file=sys.stderr)
    return BAD_INPUT


def _report(options: argparse.Namespace) -> int:
    judged: list[Judged] = []
    refused = False
    for folder in find_runs(options.logs):
        try:
            run = read_run(folder)
            report = judge(run, profile=options.gate, phase=options.phase)
        except LogError as error:
            print(f"bad input: {error}", file=sys.stderr)
            refused = True
            continue
        show(lines_of(report, columns()))
        keep = options.html is not None or options.perfetto is not None
        judged.append((run if keep else _without_lines(run), report))
    _write_files(options, judged)
    return BAD_INPUT if refused else max((r for _, r in judged), key=_severity).exit_code


def _write_files(options: argparse.Namespace, judged: Sequence[Judged]) -> None:
    """Every file that was asked for; the trace is the newest run's."""
    if options.json is not None:
        _write_json(options.json, report_dict(judged))
    if options.html is not None and judged:
        from ppstream.report.html.page import render_page  # here: most reports are only printed

        _write(options.html, render_page(judged))
    if options.perfetto is not None and judged:
        from ppstream.report.perfetto import write_trace

        run = judged[-1][0]
        left_out = write_trace(options.perfetto, run)
        if left_out:
            newest = len(run.envelopes) - left_out
            print(f"{options.perfetto}: the newest {newest} envelopes, {left_out} left out")


def _compare(options: argparse.Namespace) -> int:
    found = compare_folders(*options.compare, phase=options.phase)
    show([Line(line) for line in comparison_text(found).split("\n")])
    if options.json is not None:
        _write_json(options.json, {"schema": SCHEMA, "comparison": comparison_dict(found)})
    return 0


def report_dict(judged: Iterable[Judged]) -> dict[str, object]:
    """The whole JSON form."""
    return {"schema": SCHEMA, "runs": [report.as_dict() for _, report in judged]}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ppstream report",
        description="Judge run logs: does the pipeline overlap, and can the log be believed?",
        epilog="exit: 0 PASS or accepted by the run's own bringup.accept, 1 FAIL, 2 INCONCLUSIVE, "
        "3 bad input; of several runs the worst one's",
    )
    parser.add_argument("logs", type=Path, nargs="?", help="a run's folder, or a folder of runs")
    files = {"json": "write the report there as well", "html": "one page for a browser"}
    files |= {"perfetto": "trace of the newest run, for ui.perfetto.dev and chrome://tracing"}
    for name, text in files.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="how much faster is B than A? runs, or folders of runs",
    )
    parser.add_argument(
        "--gate",
        choices=("bringup", "release"),
        default="bringup",
        help="bringup: safety and overlap; release: efficiency and the model, too",
    )
    parser.add_argument(
        "--phase",
        metavar="PHASE",
        choices=PHASES,
        help="judge this phase (default: bring-up where there is any)",
    )
    return parser


def _without_lines(run: RunLog) -> RunLog:
    """A report that is only printed keeps no run's lines while it reads the next."""
    return RunLog(run.run_id, run.topology, run.config, run.finished, ())


def _severity(report: RunReport) -> int:
    return SEVERITY.index(Verdict(report.exit_code))


def _write_json(path: Path, document: Any) -> None:
    _write(path, json.dumps(document, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk has no file's name
        raise OSError(error.errno, error.strerror, str(path)) from error


if __name__ == "__main__":
    sys.exit(main())
