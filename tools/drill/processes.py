"""The processes of a run, by a mark in the environment that they hand on to what they start."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MARK: Final = "PPSTREAM_DRILL"


def marked(mark: str) -> dict[int, list[bytes]]:
    """Processes that have this mark, and their environments."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environ:
                found[int(entry.name)] = environ
    return found
