"""Every command of ours on a run-book page is run: here, or by the test that is named here."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from documents import PAGES, ROOT, SMALL, commands, started
from forked_process import run_forked
from golden_runs import jittered, simulate, stages
from kernel_traces import CPU_TRACE, nsys

#: Run here, on the files below, as the page has them.
RUN: Final = (
    "tools/overlap_report.py",
    "tools/kernel_report.py",
    "tools/gil_report.py",
    "tools/claims_audit.py",
)
#: Start nothing: run here, too.
LOOKS: Final = {
    "--check",
    "--print-config",
    "--help",
    "--list",
    "check",
    "explain",
    "report",
}
#: What runs the others; a benchmark's numbers stand in measured.md, its parts are tried there.
ELSEWHERE: Final = {
    "ppstream.serve": "tests/multirank/test_torchrun.py",
    "ppstream.launch.commands": "tests/multirank/test_launcher.py",
    "ppstream.view": "tests/view/test_live_view.py",
    "tools/d_sweep.py": "tests/tools/test_d_sweep.py",
    "tools/dev/draw_golden_cases.py": "tests/docs/test_golden_pictures.py",
    "tools/drill/": "tests/multirank/test_faults.py",  # parts of the next
    "tools/drill/fault_drill.py": "tests/multirank/test_faults.py",
    "tools/profile_sweep.py": "tests/tools/test_profile_sweep.py",
    "tools/replay.py": "tests/launch/test_replay.py",
    "tools/robot_view.py": "tests/tools/test_robot_view.py",
    "tools/graph_breaks.py": "tests/policy/test_compiled.py",
    "tools/nsys_profile.sh": "tests/tools/test_nsys_profile.py",
    "tools/bench/": "tests/tools/test_benchmarks.py",
}
#: Need more minutes than a test has: their command line at least is understood.
UNDERSTOOD: Final = ("tools/drill/soak.py", "tools/drill/mutants.py")
NEED_GPU: Final = ("tools/dev/gpu_check.sh", "tools/dev/gpu_once.py")  # and take no options of ours
REPORTS: Final = {"tools/overlap_report.py", "report"}
REPORT_CODES: Final = (0, 1, 2)  # a verdict, whatever it is
LIMIT_S: Final = 100
#: Tests and tools beside this one may make these in the checkout.
MADE_BY_OTHERS: Final = {"logs", "build", ".ruff_cache", ".mypy_cache", ".hypothesis"}
TRY_EACH: Final = """
import argparse, json, os, runpy, sys
tool, lines = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, os.path.dirname(tool))
parse = argparse.ArgumentParser.parse_args
def parse_and_leave(*args):
    parse(*args)
    print("understood")
    raise SystemExit(0)
argparse.ArgumentParser.parse_args = parse_and_leave
for options in lines:
    sys.argv = [tool, *options]
    try:
        runpy.run_path(tool, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (options, end.code)
"""


def shown() -> dict[str, list[str]]:
    """Commands by their text, each once: the tool or module first."""
    found = (started(words) for page in PAGES for words in commands(page))
    return {
        " ".join([tool, *options]): [tool, *options]
        for tool, options in (one for one in found if one is not None)
    }


def runs_here(words: list[str]) -> bool:
    """Examples without their file, in running text, name a tool and no command."""
    tool, *options = words
    return bool(options) and (tool in RUN or not LOOKS.isdisjoint(options))


HERE: Final = [text for text, words in shown().items() if runs_here(words)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the names on the pages."""
    folder = tmp_path_factory.mktemp("files")
    for name, b_ms in (("old", 12), ("new", 11)):
        simulate(jittered(stages(b=b_ms), 120, 1)).write(folder / name)
    (folder / "claims.json").write_text(
        json.dumps([{"kind": "ratio", "numbers": {"of": 6, "over": 3}, "claimed": 2}])
    )
    trace = folder / "new" / "profile.rank1.gen0.0.json"
    trace.write_bytes(gzip.decompress(CPU_TRACE.read_bytes()))
    old, new = str(folder / "old"), str(folder / "new")
    return {
        "logs/latest": new,
        "logs/OLD": old,
        "logs/NEW": new,
        "BEFORE": old,
        "AFTER": new,
        "NEW.toml": SMALL,
        "robot.toml": SMALL,
        "trace.json": str(folder / "trace.json"),
        "report.json": str(folder / "report.json"),
        "rank0.raw": str(ROOT / "tests/golden/pyspy-convoy.raw"),
        "logs/latest/profile.rank1.gen0.0.json": str(trace),
        "OUT/cells/small-512-forward.trace.json": str(CPU_TRACE),
        "OUT/rank1.sqlite": str(nsys(folder / "rank1.sqlite")),
        "claims": str(folder / "claims.json"),
    }


@pytest.mark.parametrize("text", HERE)
def test_command_runs(text: str, files: dict[str, str]) -> None:
    tool, *options = shown()[text]
    options = options[: options.index("|")] if "|" in options else options
    files = {**files, "FILE": files["claims"] if "claims" in tool else SMALL}
    given = [files.get(option, option) for option in options]
    before = set(ROOT.iterdir())
    if tool in RUN:  # they import no torch: an interpreter of their own costs little
        command = [sys.executable, tool, *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    else:
        program = str(ROOT / tool) if "/" in tool else tool
        done = run_forked([program, *given], LIMIT_S, folder=ROOT)
    assert done.returncode in (REPORT_CODES if REPORTS & {tool, *options} else (0,)), done.stderr
    assert done.stdout.strip()
    left = {path.name for path in set(ROOT.iterdir()) - before} - MADE_BY_OTHERS
    assert left == set(), "a file that the command writes needs a name in `files`"


@pytest.mark.parametrize("tool", UNDERSTOOD)
def test_command_line_is_understood(tool: str, tmp_path: Path) -> None:
    options = [words[1:] for words in shown().values() if words[0] == tool] or [[]]
    program = tmp_path / "try_each.py"
    program.write_text(TRY_EACH)
    done = run_forked([str(program), str(ROOT / tool), json.dumps(options)], LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("understood") == len(options)


def test_no_command_is_left_out() -> None:
    known = (*RUN, *UNDERSTOOD, *NEED_GPU, *ELSEWHERE)
    assert [t for t in shown() if not t.startswith(known) and t not in HERE] == []
    assert len(HERE) >= 14
    for tool, test in ELSEWHERE.items():
        name = Path(tool).name.removesuffix(".py")
        text = (ROOT / test).read_text()
        assert name in text or name.removesuffix("_") in text, (tool, test)
