"""Rules of files that a configuration names: there, readable, or in a folder to write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def unreadable_file(path: str, name: str) -> Iterator[str]:
    """Yields why the file of the setting ``path`` cannot be read."""
    try:
        is_file = stat.S_ISREG(Path(name).stat().st_mode)
    except PermissionError:
        yield f"{path}: got {name!r}, in a folder that this user cannot enter; want one that it can"
        return
    except OSError:
        is_file = False
    if not is_file:
        yield f"{path}: got {name!r}, which is not there; want a file"
    elif not os.access(name, os.R_OK):
        yield f"{path}: got {name!r}, which this user cannot read; want a file that it can"


def unwritable_folder(path: str, name: str) -> Iterator[str]:
    """Yields why the file of the setting ``path`` cannot be made."""
    if not os.access(Path(name).parent, os.W_OK):
        yield f"{path}: got {name!r}, want it in a folder that can be written to"
