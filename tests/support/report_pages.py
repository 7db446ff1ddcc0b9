"""Pages of the report, and what a browser's reader finds on them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any, Final

from faulty_runs import event
from golden_gpus import on_gpus
from golden_runs import GoldenRun, jittered, ms, simulate, stages

from ppstream.analysis.judge import judge
from ppstream.report.html.page import render_page

VOID: Final = {"meta", "br", "hr", "img", "link", "input"}
OPTIONAL: Final = {"th"}  # their end may be left out


def complete() -> GoldenRun:
    """A run with everything a page can show."""
    run = simulate(jittered(stages(), 300, 1))
    run.bend(
        lambda line: line.update(input_age_ns={"joints": ms(1), "camera": ms(9 + line["seq"] % 5)})
    )
    run.manifest["config"] = {"streams": [{"name": "camera", "max_age_ms": 12.0}]}
    ready = simulate(stages(t_in=40), phase="ready", pacing="sample", epoch=1)
    for line in ready.lines + ready.policy_lines:  # it comes behind bring-up
        line |= {k: v + ms(10_000) for k, v in line.items() if k[0] == "t" and k[1].isupper()}
    run.lines += ready.lines
    run.policy_lines += ready.policy_lines
    run.manifest["finished_utc"] = "2025-01-01T00:01:00Z"
    run.tell(event("phase", phase="draining", t=run.lines[-1]["tEmit"]))
    run.extra += [{"kind": "robot", "seq": k, "age_ns": ms(30 + k % 7)} for k in range(1200)]
    return on_gpus(run)


def page(*goldens: GoldenRun) -> str:
    judged: list[Any] = []
    for golden in goldens:
        run = golden.parse()
        judged.append((run, judge(run)))
    return render_page(judged)


class Reader(HTMLParser):
    """Balanced tags, their attributes, and text in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID | OPTIONAL:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in OPTIONAL:
            assert self.open.pop() == tag
