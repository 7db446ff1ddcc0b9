"""The pages that the project ships, and the commands that they show."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = str(Path(__file__).with_name("small.toml"))
BOOKS = ROOT / "runbooks"
PAGES = sorted(BOOKS.glob("*.md"))
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python|torchrun|tools/|--set)[^`]+)`")


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every command of ours, from blocks and from running text."""
    text = page.read_text()
    lines = [line for block in FENCE.findall(text) for line in _joined(block)]
    for line in [*lines, *INLINE.findall(text)]:
        if line.startswith(("·", "{", "  ")):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # text between backticks, not a command
            continue
        if words:
            yield words


def started(words: list[str]) -> tuple[str, list[str]] | None:
    """The tool or module that a command starts, and its own options."""
    if words[0] == "ppstream":
        return "ppstream.launch.commands", words[1:]
    for at, word in enumerate(words):
        if word == "-m" and words[at + 1].startswith("ppstream"):
            return words[at + 1], words[at + 2 :]
        if word.startswith("tools/"):
            return word, words[at + 1 :]
    return None


def _joined(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()
