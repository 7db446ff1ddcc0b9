"""One count from end to end: one function, three mutants of it, one that no test sees."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOL = Path(__file__).resolve().parents[2] / "tools" / "dev" / "mutants.py"
SOURCE = """def is_late(age_ms, wait_ms):
    if age_ms < 0:
        raise ValueError("age_ms: 1 too few")
    return age_ms - wait_ms > 5
"""
LAST = "return age_ms - wait_ms > 5"
TEST = """from ppstream.analysis.lateness import is_late
def test_late():
    assert is_late(20, 10)
    assert not is_late(10, 5)
"""


def mutants(root: Path, *arguments: str) -> str:
    where = ("--root", str(root), "--sample", str(root / "sample.json"))
    command = (sys.executable, str(TOOL), *where, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_what_no_test_sees_survives_and_a_changed_line_is_gone(tmp_path: Path) -> None:
    package, tests = tmp_path / "ppstream" / "analysis", tmp_path / "tests" / "analysis"
    for folder in (package, tests):
        folder.mkdir(parents=True)
    for name in ("ppstream/__init__.py", "ppstream/analysis/__init__.py"):
        (tmp_path / name).touch()
    (package / "lateness.py").write_text(SOURCE)
    (tests / "test_lateness.py").write_text(TEST)
    sample, earlier, now = (tmp_path / f"{name}.json" for name in ("sample", "earlier", "now"))

    mutants(tmp_path, "--draw", "1", "--count", "6")  # every one there is: none in the raise
    last = [row for row in read(sample)["mutants"] if row["line"] == LAST]
    assert sorted(row["after"] for row in last) == [
        "6",
        ">= 5",
        "age_ms + wait_ms",
        "return None",
    ]
    rows = [row for row in last if row["operator"] != "return"]
    gone = rows[0] | {"line": "return age_ms > 5"}
    sample.write_text(json.dumps({"seed": 1, "mutants": [*rows, gone]}))
    earlier.write_text(json.dumps([{"mutant": row, "state": "killed"} for row in rows]))

    text = mutants(tmp_path, "--json", str(now), "--against", str(earlier))
    assert f"-    {LAST}\n+    {LAST.replace('5', '6')}" in text
    assert re.search(r"^analysis +2 +0 +1 +1 +66.7%$", text, re.MULTILINE)
    assert "killed then, survives now: ppstream.analysis.lateness:is_late number#0: 5 -> 6" in text
    assert sorted(o["state"] for o in read(now)) == ["gone", "killed", "killed", "survived"]
    assert (package / "lateness.py").read_text() == SOURCE
