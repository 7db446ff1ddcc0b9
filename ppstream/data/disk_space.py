"""A full disk under a data set: one error that says what is written, what is free, what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ppstream.core.errors import PpstreamError
from ppstream.report.formatting import size_text

FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class DataSetWriteError(PpstreamError):
    """A data set cannot be written: its disk is full, or gone."""


@contextmanager
def writing(folder: Path, written: Callable[[], str]) -> Iterator[None]:
    """Words errors of what is written in here.

    Args:
        folder: of the data set.
        written: says what is there by now, and what the rest needs.

    Raises:
        DataSetWriteError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            quota = "" if error.errno == errno.ENOSPC else ", beyond the quota"
            text = f"the disk is full{quota}: {_free(folder)} free"
            remedy = "free space, and the same command goes on"
        else:
            text = f"cannot be written: {error.strerror or error}"
            remedy = "once that is mended, the same command goes on"
        raise DataSetWriteError(f"{folder}: {text}; {written()}; {remedy}") from error


def _free(folder: Path) -> str:
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return size_text(shutil.disk_usage(there).free)
