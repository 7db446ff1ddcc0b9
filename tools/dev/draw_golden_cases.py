"""Draw the golden cases that ``runbooks/how-overlap-is-proven.md`` shows, and print their rows.

Writes ``tests/golden/report.txt``, too: the report of a run with everything in it.

Each case is a complete log whose truth is known, from the same generator that the tests judge. The
picture shows what the log says; below it stand the published score and what the gate makes of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from golden_runs import GoldenRun, simulate, stages
from report_pages import complete

from ppstream.analysis.judge import judge
from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.run_report import RunReport
from ppstream.report.html.page import SKELETON, STYLE
from ppstream.report.html.timeline import timeline
from ppstream.report.series import stretch_of
from ppstream.report.text import render

FOLDER: Final = ROOT / "runbooks" / "pictures"
REPORT: Final = ROOT / "tests" / "golden" / "report.txt"


def serial() -> GoldenRun:
    return simulate(form=PipelineForm("serial", "decode_first"))


def wait_inside_b() -> GoldenRun:
    """tB0 stamped before the receive: stage B contains its wait, and the lie is consistent."""
    golden = serial()
    for line in golden.lines:
        line["B_ns"] += line["wait_input_ns"]
        line["residence_ns"] = line["B_ns"]
        line["wait_input_ns"] = line["idle_ns"] = 0
    golden.policy_lines.clear()
    return golden


def wait_inside_a() -> GoldenRun:
    """tA0 stamped before the wait for a credit: stage A contains it."""
    golden = simulate(form=PipelineForm("split", d_in=1))
    for line in golden.lines:
        line["tA0"] -= line["w_credit_ns"]
        line["tRx"] -= line["w_credit_ns"]
        line["w_credit_ns"] = 0
    return golden


CASES: Final[dict[str, Callable[[], GoldenRun]]] = {
    "healthy": simulate,
    "serial": serial,
    "wait-inside-b": wait_inside_b,
    "slow-input": lambda: simulate(stages(t_in=40)),
    "decode-bound": lambda: simulate(stages(c=20), PipelineForm("split")),
    "wait-inside-a": wait_inside_a,
}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        text, row = draw(name)
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
        print(row)
    REPORT.write_text(draw_report(), encoding="utf-8")
    return 0


def draw_report() -> str:
    """The text of a complete run's report."""
    return render(judge(complete().parse())) + "\n"


def draw(name: str) -> tuple[str, str]:
    """The picture, and the case's row in the run-book."""
    run = CASES[name]().parse()
    report = judge(run)
    stretch = stretch_of(report.window)
    assert stretch is not None, name
    opening, body = re.split(r"(?<=>)", timeline(run, stretch), maxsplit=1)
    opening = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="1060" ')
    style = f"<style>{escape(STYLE, quote=False)} svg{{background:var(--card)}}</style>"
    defs = re.findall(r"<defs>.*</defs>", SKELETON.template)[0]
    return f"{opening}{style}{defs}{body}\n", table_row(report)


def table_row(report: RunReport) -> str:
    """Period, published score, primary score and verdict, as the run-book's table has them."""
    score, published = report.primary, report.compat
    assert score is not None and published is not None and score.s is not None  # noqa: PT018
    verdict = " ".join([report.verdict.name, *(f"`{reason}`" for reason in report.reasons[:1])])
    period_ms = score.period_ns / 1e6
    return f"| {period_ms:.0f} ms | {published.score:.2f} | {score.s:.2f} | {verdict} |"


if __name__ == "__main__":
    sys.exit(main())
