"""The API reference builds from the docstrings, and a warning would end it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 110


def test_every_module_has_its_page_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/make_docs.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    for module in ("robot", "timeline", "memory_use"):
        page = (tmp_path / f"ppstream/{module}.html").read_text()
        source = (ROOT / f"ppstream/{module}.py").read_text()
        first = source.removeprefix('"""').split("\n")[0].split(":")[0]
        assert first.split("`")[0] in page
    pages = len(list(tmp_path.rglob("*.html")))
    assert pages > len(list((ROOT / "ppstream").glob("*.py")))
