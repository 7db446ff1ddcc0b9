"""Prints a report: in colours on a terminal where rich is installed, else the plain text.

A pipe, a file, ``NO_COLOR`` and a Python without rich get no colours; a pipe and a file get the
same bytes wherever they are written.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final, TextIO

from ppstream.report.text import WIDTH, Line

WIDTH_MIN: Final = 72  # a narrower terminal wraps lines
#: For terminals that know no more.
ASCII: Final = str.maketrans({"─": "-", "█": "#", "·": ".", "±": "+-", "→": "->"})

STYLES: Final = {
    "PASS": "bold green",
    "FAIL": "bold red",
    "INCONCLUSIVE": "bold yellow",
    "bold": "bold",
    "name": "cyan",
    "faint": "dim",
}
#: Words that have a style wherever they stand.
WORDS: Final = {
    r"\b(ok|balances)\b": "green",
    r"\b(BROKEN|ledger off)\b": "bold red",
    r"\bnot run\b": "yellow",
    r"█+": "blue",
    r"·{2,}": "dim",
}


def columns() -> int:
    """Columns of a report: those of the terminal, within reason; elsewhere always as many."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return max(WIDTH_MIN, min(WIDTH, shutil.get_terminal_size().columns))


def show(lines: Sequence[Line]) -> None:
    """Print, in plain ASCII where standard output cannot do better."""
    if sys.stdout is None:  # closed by the caller, who wants the exit code alone
        return
    text = "\n".join(line.text for line in lines)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(ASCII).encode(encoding, "replace").decode(encoding)
        lines = [Line(line) for line in text.split("\n")]
    try:
        if not _show_in_colour(lines, sys.stdout):
            print(text, flush=True)
    except BrokenPipeError:  # the reader, such as head, has enough: the verdict stays what it is
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_in_colour(lines: Sequence[Line], stream: TextIO) -> bool:
    """Print on a terminal that shows colours; False elsewhere, with nothing printed."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return False
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:  # the report needs the standard library only
        return False
    console = Console(file=stream)
    for line in lines:
        text = Text(line.text)
        for start, end, style in line.styles:
            text.stylize(STYLES[style], start, end)
        for words, style in WORDS.items():
            text.highlight_regex(words, style)
        console.print(text, soft_wrap=True)
    return True
