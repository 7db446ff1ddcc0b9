"""Colours are for terminals alone: everywhere else the report has the same bytes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from golden_runs import simulate

from ppstream.analysis.period_model import PipelineForm

TOOL: Final = Path(__file__).resolve().parents[2] / "tools" / "overlap_report.py"
STYLED: Final = re.compile(r"\x1b\[([0-9;]*)m([^\x1b]*)")
RED, GREEN = "31", "32"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return simulate(form=PipelineForm("serial", "decode_first")).write(tmp_path / "run")


def in_a_pipe(run: Path) -> str:
    """Also where others are told to force colours, as in continuous integration."""
    command, environment = [sys.executable, TOOL, run], os.environ | {"FORCE_COLOR": "1"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True).stdout


def on_a_terminal(run: Path, *options: str, **environment: str) -> str:
    """What a real pseudo-terminal is sent, its line ends undone."""
    ours, theirs = pty.openpty()
    own = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM")}
    command = [sys.executable, *options, TOOL, run]
    environment = own | {"TERM": "xterm-256color", "COLUMNS": "120"} | environment
    parts = []
    with subprocess.Popen(command, stdout=theirs, env=environment):
        os.close(theirs)
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # Linux says so that nobody holds the other end
            pass
        os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_a_terminal_gets_the_text_of_a_pipe_in_colours(run: Path) -> None:
    shown = on_a_terminal(run)
    styles = [(style.split(";"), text) for style, text in STYLED.findall(shown)]
    assert any(RED in style and text == "FAIL" for style, text in styles)
    assert any(RED in style and "overlap" in text for style, text in styles)  # below its limit
    assert any(GREEN in style and text == "ok" for style, text in styles)
    assert STYLED.sub(r"\2", shown) == in_a_pipe(run)


@pytest.mark.parametrize(
    ("options", "environment"),
    [((), {"NO_COLOR": "1"}), ((), {"TERM": "dumb"}), (("-S", "-E"), {})],
    ids=["NO_COLOR", "dumb", "no rich"],
)
def test_who_wants_no_colours_or_has_none_gets_plain_text(
    options: tuple[str, ...], environment: dict[str, str], run: Path
) -> None:
    shown = on_a_terminal(run, *options, **environment)
    assert "\x1b" not in shown
    assert shown == in_a_pipe(run)


@pytest.mark.parametrize(("given", "used"), [("80", 80), ("20", 72), ("300", 100)])
def test_lines_fit_the_terminal(given: str, used: int, run: Path) -> None:
    shown = STYLED.sub(r"\2", on_a_terminal(run, COLUMNS=given))
    lengths = [len(line) for line in shown.splitlines()]
    assert max(lengths) == lengths[0] == used
    assert shown.replace("─", "").split() == in_a_pipe(run).replace("─", "").split()
