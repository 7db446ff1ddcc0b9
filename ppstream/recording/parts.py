"""Parts of a recording: each is a file of its own, whole and with its index, beside the first.

``run.mcap`` goes on in ``run.part002.mcap``, and that in ``run.part003.mcap``.
"""

from __future__ import annotations

import glob
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

FILE_MODE: Final = 0o640
_LATER: Final = re.compile(r"(?P<first>.+)\.part(?P<number>\d{3,})\Z")  # stem of a later part


class NewFile(NamedTuple):
    """A file that was made, or a named pipe."""

    path: Path
    fd: int


def part_of(path: Path, step: int) -> Path | None:
    """The part ``step`` places behind ``path``, or before it; None before the first one."""
    found = _LATER.match(path.stem)
    first, number = (found["first"], int(found["number"])) if found else (path.stem, 1)
    number += step
    if number < 1:
        return None
    return path.with_name((first if number == 1 else f"{first}.part{number:03}") + path.suffix)


def create(path: Path) -> int:
    """A descriptor of a new file. Raises FileExistsError when there is one already."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)


def new_file(path: Path) -> NewFile:
    """A new file, ``path``, or while it or a part of it is there ``name-2``, ``name-3``.

    No recording is overwritten, and runs that begin together share none. A named pipe is opened
    as it is, once somebody reads it.
    """
    if path.is_fifo():
        return NewFile(path, os.open(path, os.O_WRONLY))
    number, chosen = 1, path
    while True:
        parts = f"{glob.escape(chosen.stem)}.part*{glob.escape(path.suffix)}"
        if not any(path.parent.glob(parts)):
            with suppress(FileExistsError):
                return NewFile(chosen, create(chosen))
        number += 1
        chosen = path.with_name(f"{path.stem}-{number}{path.suffix}")
