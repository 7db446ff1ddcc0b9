"""The report: reads run logs, judges them, prints what they mean. Also ``tools/overlap_report.py``.

Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input; of several runs the worst one's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ppstream.errors import LogError
from ppstream.overlap import judge
from ppstream.report_text import ASCII, render
from ppstream.run_report import RunReport
from ppstream.runlog import find_runs, read_run
from ppstream.verdict import Verdict

SCHEMA: Final = "ppstream.report/1"
BAD_INPUT: Final = 3
#: From harmless to decisive.
SEVERITY: Final = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL)


def main(argv: Sequence[str] | None = None) -> int:
    """Report on the runs under a folder; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        folders = find_runs(options.logs)
    except LogError as error:
        print(f"bad input: {error}", file=sys.stderr)
        return BAD_INPUT
    reports: list[RunReport] = []
    refused = False
    for folder in folders:
        try:
            run = read_run(folder)
        except LogError as error:
            print(f"bad input: {error}", file=sys.stderr)
            refused = True
            continue
        reports.append(judge(run, profile=options.gate, phase=options.phase))
        _show(render(reports[-1]))
    if options.json is not None and not _write(options.json, reports):
        return BAD_INPUT
    return BAD_INPUT if refused else max(reports, key=_severity).exit_code


def report_dict(reports: Sequence[RunReport]) -> dict[str, object]:
    """The whole JSON form."""
    return {"schema": SCHEMA, "runs": [report.as_dict() for report in reports]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream-report",
        description="Judge run logs: does the pipeline overlap, and can the log be believed?",
        epilog="exit: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input; of several runs the worst one's",
    )
    parser.add_argument("logs", type=Path, help="a run's folder, or a folder of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument(
        "--gate",
        choices=("bringup", "release"),
        default="bringup",
        help="bringup: safety and overlap; release: efficiency and the model, too",
    )
    parser.add_argument(
        "--phase", metavar="PHASE", help="judge this phase (default: bring-up where there is any)"
    )
    return parser


def _show(text: str) -> None:
    """Print, in plain ASCII where the terminal cannot do better."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(ASCII).encode(encoding, "replace").decode(encoding)
    print(text)


def _severity(report: RunReport) -> int:
    return SEVERITY.index(report.verdict)


def _write(path: Path, reports: Sequence[RunReport]) -> bool:
    try:
        path.write_text(json.dumps(report_dict(reports), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
