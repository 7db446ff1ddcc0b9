"""What tools say of a real run on two H200: its logs to two seconds behind ready, and its metrics.

``two_gpus`` with ``policy.graph=false``; A and C simulated at 0.4 and 0.1 ms of the device's time.
Half a second behind ready torch.profiler began: what expired and was allocated there is its doing.
Host, paths and process numbers are taken out; nothing else is changed.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from pathlib import Path

import pytest
from headless_browser import MISSING, Browser, find_browser
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from prometheus_rules import BOARD, RULES
from report_pages import Reader
from trace_format import problems

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.records import RunLog
from ppstream.analysis.run_report import RunReport
from ppstream.report.cli import main
from ppstream.report.perfetto import trace_events
from ppstream.report.text import WIDTH, render

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "run"
    with tarfile.open(GOLDEN / "gpu-run.tar.xz") as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> RunLog:
    return read_run(folder)


@pytest.fixture(scope="module")
def report(run: RunLog) -> RunReport:
    return judge(run)


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    out = folder.parent / "report.html"
    assert main([str(folder), "--html", str(out)]) == 0
    return out


def test_real_run_is_judged_as_it_was_on_its_machine(report: RunReport) -> None:
    assert (report.verdict.name, report.reasons) == ("PASS", [])
    assert report.primary is not None
    assert round(report.primary.period_ns / 1e6, 2) == 2.43
    assert round(report.primary.s or 0, 2) == 0.84
    assert {name: audit.ok for name, audit in report.audits.items() if audit.ok is False} == {}
    assert report.limited_by == "stage1-limited"


def test_terminal_says_what_the_devices_took_and_held(report: RunReport) -> None:
    text = render(report)
    assert "device       A 0.48 ms   B 2.28 ms   C 0.16 ms\n" in text
    assert "GPU rank 0   0.13 GiB allocated   0.13 GiB reserved   0.75 GiB not torch's" in text
    assert "GPU rank 1   0.11 GiB allocated   0.12 GiB reserved   0.69 GiB not torch's" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_page_compares_a_devices_stamps_with_no_other_clock(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r'<td>([ABC])</td><td class="n">(\S+ ms)', text) == [
        ("A", "0.48 ms"),
        ("B", "2.28 ms"),
        ("C", "0.16 ms"),
    ]
    assert text.count("same events") == 3
    assert "Rank 0&#x27;s device clock: 4 anchors" in text
    assert "Rank 1&#x27;s device clock: 4 anchors" in text


def test_page_draws_the_memory_of_both_gpus_and_marks_what_grew(page: Path) -> None:
    text = page.read_text()
    Reader(text)
    for title in ("RAM", "GPU of rank 0", "GPU of rank 1"):
        assert f'aria-label="memory over time: {title}"' in text
    grew = "segments asked of CUDA while ready</td>"
    assert f'{grew}<td class="n bad">1</td><td class="n good">0</td>' in text
    assert 'free at least</td><td class="n">138.9 GiB</td><td class="n">139.0 GiB</td>' in text


def test_trace_of_a_real_run_is_drawn_as_meant(run: RunLog) -> None:
    trace = {"traceEvents": json.loads(json.dumps(trace_events(run)))}
    assert problems(trace) == []


#: Words of a drawing that stick out of it: nobody sees their ends.
OUTSIDE = """[...document.querySelectorAll('svg[role=img] text')].filter(t => {
 const word = t.getBoundingClientRect(), sheet = t.ownerSVGElement.getBoundingClientRect();
 return word.left < sheet.left - 0.5 || word.right > sheet.right + 0.5;
}).map(t => t.ownerSVGElement.getAttribute('aria-label') + ': ' + t.textContent)"""


@pytest.mark.skipif(find_browser() is None, reason=MISSING)
def test_real_browser_shows_every_word_of_the_page(page: Path, tmp_path: Path) -> None:
    """Its picture is kept under ``PPSTREAM_TEST_ARTIFACTS`` when that is set."""
    kept = Path(os.environ.get("PPSTREAM_TEST_ARTIFACTS") or tmp_path / "pictures")
    kept.mkdir(parents=True, exist_ok=True)
    with Browser(tmp_path / "profile") as browser:
        browser.emulate()
        browser.open(page.as_uri())
        assert browser.complaints() == []
        assert browser.requests() == [page.as_uri()]
        assert browser.evaluate(OUTSIDE) == []
        assert browser.screenshot(kept / "report-gpus.png").stat().st_size > 100_000


# ---- metrics -----------------------------------------------------------------------------------

SELECTOR = re.compile(r"(ppstream_gpu_\w+)(?:\{([^}]*)\})?")
GPU_NAME = re.compile(r"ppstream_gpu_\w+")
PRINTED = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")
MATCHER = re.compile(r"(\w+)(=~|!=|!~|=)\"([^\"]*)\"")
OF_THE_SCRAPE = {"instance", "job", "rank"}  # labels that the server adds


def exported() -> dict[str, list[Sample]]:
    """Samples of the page that rank 1 showed while it was ready, by name."""
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families((GOLDEN / "metrics-gpu-rank1.txt").read_text()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def queries() -> list[tuple[str, str]]:
    """Of the dashboard: expressions and their legends."""
    panels = json.loads(BOARD.read_text())["panels"]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    return [(target["expr"], target["legendFormat"]) for target in targets]


def selectors() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """What alerts and dashboard ask of GPUs: names, and label, operator and value to match."""
    text = " ".join([RULES.read_text(), *(query for query, _ in queries())])
    return [(name, MATCHER.findall(labels)) for name, labels in SELECTOR.findall(text)]


def test_a_real_gpu_rank_exports_what_alerts_and_dashboard_ask_of_it() -> None:
    shown = exported()
    asked = selectors()
    assert {name for name, _ in asked} == {
        "ppstream_gpu_memory_bytes",
        "ppstream_gpu_segments_total",
        "ppstream_gpu_alloc_retries_total",
        "ppstream_gpu_ooms_total",
    }
    for name, matches in asked:
        assert name in shown
        for label, _, values in matches:
            seen = {sample.labels.get(label) for sample in shown[name]}
            assert set(values.split("|")) <= seen, (name, label)


def test_labels_that_gpu_alerts_and_legends_print_are_there() -> None:
    """One that is not would print as nothing."""
    rules = [(rule, rule) for rule in RULES.read_text().split("- alert: ")]
    printed = 0
    for expression, text in rules + queries():
        wanted = set(PRINTED.findall(text)) - OF_THE_SCRAPE
        for name in set(GPU_NAME.findall(expression)) if wanted else ():
            printed += 1
            assert all(wanted <= set(sample.labels) for sample in exported()[name]), (name, wanted)
    assert printed == 2  # kind: of what grew, and of the memory panel


def test_a_real_gpu_rank_shows_what_gpu_alerts_are_joined_with() -> None:
    shown = exported()
    assert {s.labels["phase"]: s.value for s in shown["ppstream_phase"] if s.value} == {"ready": 1}
    assert [s.value for s in shown["ppstream_recompiles_total"]] == [0]
    assert "process_start_time_seconds" in shown
