"""The run-books keep up with the project: pages, commands, options, settings, quotes, metrics."""

import ast
import re
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

import gil_report
import pytest
from documents import BOOKS, FENCE, PAGES, ROOT, SMALL, commands, started
from faulty_runs import in_parts
from golden_runs import chain, simulate, stages
from judging import judged
from watched_ranks import Watched

from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.reasons import REASONS
from ppstream.analysis.verdict import Verdict
from ppstream.config import load
from ppstream.pipeline.stage_c import UNUSABLE

DRILL = BOOKS / "drill-table.md"
HOUSE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
FILE = re.compile(r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.(?:py|toml|sh|cu|md))\b")
MADE_UP = {
    "my-arm.toml",
    "fleet.toml",
    "my_arm_robot.py",
    "robot.toml",
    "NEW.toml",
    "my_policy.py",
    "convoy.py",
}  # the reader's own
ROOMS = ("ppstream", "kernels", "stages", "tools", "tests", "runbooks")
FILES = [p for room in ROOMS for p in (ROOT / room).rglob("*.*")] + [*ROOT.glob("*.*")]
#: How a file may be named: from the top, or from any folder on its way.
PATHS = {"/".join(p.relative_to(ROOT).parts[n:]) for p in FILES for n in range(-6, 0)}
LINES_MAX = 80
PROSE_WORDS_MAX, NEW_TERMS_MAX = 1500, 4  # of README; the terms on a screen
SCREEN_LINES, COLUMNS = 40, 100
WHOLE = {
    "configuration.md",
    "measured.md",
    "README.md",
    "how-overlap-is-proven.md",
    "drill-table.md",
}  # tables and pictures, not situations
NUMBER = re.compile(r"-?\d[\d.]*")
METRIC = re.compile(r"\bppstream_[a-z0-9_]+[a-z0-9]\b")
GPU = re.compile(r"ppstream_gpu")
REASON = re.compile(r"[A-Z][A-Z_]{2,}")
DECIDES = ("verdict", "safety_counts", "judge", "unserved")  # what gives a run its reasons
#: Options stand in the tool, or in the module of ours that it calls.
SOURCE = "".join(
    path.read_text()
    for room in ("ppstream", "stages/ppstream_stages")
    for path in sorted((ROOT / room).rglob("*.py"))
)


def ids(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_page_is_short_and_linked(page: Path) -> None:
    assert page.name in WHOLE or len(page.read_text().splitlines()) <= LINES_MAX
    assert page.name == "README.md" or f"]({page.name})" in (BOOKS / "README.md").read_text()


@pytest.mark.parametrize("page", [*PAGES, *HOUSE], ids=ids)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(FILE.findall(page.read_text())) - MADE_UP
    assert {name for name in named if name not in PATHS} == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_option_it_shows_exists(page: Path) -> None:
    unknown = []
    for words in commands(page):
        found = started(words)
        if found is None:
            continue
        name, arguments = found
        source = SOURCE + ((ROOT / name).read_text() if "/" in name else "")
        options = {w.partition("=")[0] for w in arguments if w.startswith("--")} - {"--help"}
        if not name.endswith(".sh"):  # it hands its own on
            quoted = [(option, f'"{option}"', f'"{option[2:]}"') for option in options]
            unknown += [(name, o) for o, a, b in quoted if a not in source and b not in source]
    assert unknown == []


def test_the_readme_shows_the_files_that_init_writes() -> None:
    """They run in tests/launch/test_new_arm.py."""
    shown = re.findall(r"```(?:toml|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    stages = ROOT / "stages" / "ppstream_stages"
    files = [
        stages / "two_cameras.toml",
        *(stages / "new_arm" / f"{k}.py" for k in ("policy", "robot")),
    ]
    assert len(shown) == len(files) + 1
    assert shown[0] == files[0].read_text(), "the TOML in whole"
    for block, file in zip(shown, files, strict=False):
        lines = [line.strip() for line in block.splitlines()]
        assert "\n".join(lines).strip() in "\n".join(
            line.strip() for line in file.read_text().splitlines()
        )


def test_the_readme_brings_its_words_a_few_at_a_time() -> None:
    """Before "Measured" it is short, and no screen has more than four new words of its glossary."""
    before, _, _ = (ROOT / "README.md").read_text().partition("## Measured")
    assert "|---|" not in before[: before.index("class ArmPolicy")]
    assert len(re.findall(r"\S*\w\S*", FENCE.sub("", before))) <= PROSE_WORDS_MAX
    rows = re.findall(r"^\| (.*?) \| ", before[before.index("| word |") :], re.MULTILINE)[1:]
    new = [term for row in rows for term in row.split("; ")]
    assert len(new) >= 12
    lines = [part for line in before.splitlines() for part in wrap(line, COLUMNS) or [""]]
    for at in range(0, len(lines), SCREEN_LINES):
        screen = "\n".join(lines[at : at + SCREEN_LINES])
        seen = {term for term in new if re.search(_in_text(term), screen)}
        assert len(seen) <= NEW_TERMS_MAX, f"new words from line {at + 1} of {COLUMNS} columns"
        new = [term for term in new if term not in seen]
    assert new == []


def _in_text(term: str) -> str:
    """Pattern of a word or its plural, also inside names as ``D_in``'s; of a letter as it is."""
    return rf"\b{term}\b" if len(term) == 1 else rf"(?i:\b{term}s?\b)"


def test_the_readme_s_faults_are_rows_of_the_drill_s_table() -> None:
    """All columns but one, which the page leaves out."""
    rows = {
        page: re.findall(r"^\| (`.*) \|$", page.read_text(), re.M) for page in (DRILL, HOUSE[0])
    }
    cells = [row.split(" | ") for row in rows[DRILL]]
    measured = {tuple(row[:6] + row[7:]) for row in cells}
    shown = {tuple(row) for line in rows[HOUSE[0]] if len(row := line.split(" | ")) == 8}
    assert len(shown) >= 7
    assert shown - measured == set()


def test_the_resampler_s_ten_lines_run() -> None:
    for page in (ROOT / "README.md", BOOKS / "resample.md"):
        *_, block = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
        names: dict[str, Any] = {}
        exec(compile(block, page.name, "exec"), names)
        values, valid, age_s = names["values"], names["valid"], names["age_s"]
        assert (*values.shape, *valid.shape, *age_s.shape) == (1, 5, 11, 1, 5, 2, 1, 5, 2)
        assert valid[0, :, 0].all()
        assert valid[0, :, 1].tolist() == [False, True, True, True, True]  # the first is older


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_setting_it_shows_is_accepted(page: Path) -> None:
    for words in commands(page):
        pairs = [after for word, after in pairwise(words) if word == "--set"]
        if pairs:
            load.read(SMALL, tuple(pairs))


def test_quoted_sentences_are_what_the_report_says() -> None:
    runs: list[dict[str, Any]] = [
        {"form": PipelineForm("serial", "decode_first")},
        {"form": PipelineForm("split", d_in=1)},
        {"form": PipelineForm("split", d_in=6, d_out=6)},
        {"times": stages(a=2, b=12, c=2)},
        {"times": stages(5, 6, 6)},
        {"times": stages(2, 5, 2, t_in=20)},
    ]
    parts = ["vision"], ["language", "denoise_1"], ["denoise_2"]
    cut = simulate(chain(12, 4, a=4), PipelineForm("split", d_in=3))
    in_parts(cut, parts, vision=3, language=7, denoise_1=5, denoise_2=4)
    cut.set("topology.ranks.1.device", "cuda:1")
    golden = [*(simulate(**run) for run in runs), cut]
    said = {NUMBER.sub("#", s) for run in golden for s in judged(run).statements}
    source = (ROOT / "ppstream/analysis/statements.py").read_text()
    quoted = [
        line.removeprefix("· ")
        for page in PAGES
        for block in FENCE.findall(page.read_text())
        for line in block.splitlines()
        if line.startswith("· ")
    ]
    assert len(quoted) > 10
    unknown = [
        q for q in quoted if NUMBER.sub("#", q) not in said and q.partition(":")[0] not in source
    ]
    live = "(A + x_in + B + x_out + C) / 2"  # of the live run in overhead-limited.md
    assert [q for q in unknown if live not in q and "1.12 x max" not in q] == []


def test_quoted_convoy_is_what_the_tool_says() -> None:
    threads = gil_report.threads_of(ROOT / "tests/golden/pyspy-convoy.raw")
    assert "\n".join(gil_report.lines(threads)) in (BOOKS / "gil-and-affinity.md").read_text()


def test_every_metric_a_page_names_is_shown(tmp_path: Path) -> None:
    with ExitStack() as stack:
        watched = Watched(tmp_path, stack)
        watched.run(10)
        text = watched.get(0, "/metrics")[1] + watched.get(1, "/metrics")[1]
    shown = set(METRIC.findall(text)) | {"ppstream_overlap_score"}
    named = {name for page in PAGES for name in METRIC.findall(page.read_text())}
    named -= {"ppstream_kernels", "ppstream_stages"}  # packages
    missing = {n for n in named if not GPU.match(n) and not any(s.startswith(n) for s in shown)}
    assert missing == set()
    assert len(named) > 20


def test_a_command_with_an_unknown_option_would_be_seen() -> None:
    assert started(["python", "tools/d_sweep.py", "--nonsense"]) == (
        "tools/d_sweep.py",
        ["--nonsense"],
    )
    assert '"--nonsense"' not in (ROOT / "tools/d_sweep.py").read_text()


def test_every_reason_that_can_be_printed_has_a_page() -> None:
    """Reasons are the words in capitals of whatever decides; and each has a sentence."""
    sources = [ast.parse((ROOT / f"ppstream/analysis/{name}.py").read_text()) for name in DECIDES]
    words = {node.value for tree in sources for node in ast.walk(tree) if _is_word(node)}
    reasons = words - set(Verdict.__members__)
    assert len(reasons) > 25
    pages = "".join(page.read_text() for page in PAGES)
    assert {reason for reason in reasons if f"`{reason}`" not in pages} == set()
    said = (ROOT / "ppstream/analysis/statements.py").read_text()
    own = {reason for reason in reasons if reason.startswith("SERVICE_")}  # of analysis/judge.py
    assert {reason for reason in reasons - own if f'"{reason}": ' not in said} == set()
    assert reasons == set(REASONS)


def test_every_reason_of_a_drop_by_user_code_has_a_page() -> None:
    page = (BOOKS / "policy-faults.md").read_text()
    assert {reason for reason in UNUSABLE if f"`{reason}`" not in page} == set()


def _is_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and bool(REASON.fullmatch(str(node.value)))
