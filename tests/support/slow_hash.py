"""``ungated`` on whose ranks 0 and 2 the SHA-256 of a file takes seconds, as of gigabytes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence

import ungated

from ppstream.policy import fingerprint

PIECES = 40
SECONDS = {"0": 4.0, "2": 8.0}


class SlowSha256:
    """A hash whose every update takes its time."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pause_s = SECONDS.get(os.environ["RANK"], 0.0) / PIECES

    def update(self, piece: bytes) -> None:
        """As that of ``hashlib``."""
        time.sleep(self._pause_s)
        self._hash.update(piece)

    def hexdigest(self) -> str:
        """As that of ``hashlib``."""
        return self._hash.hexdigest()


def main(argv: Sequence[str]) -> int:
    """As ``ungated``."""
    fingerprint.sha256 = SlowSha256
    return ungated.main(argv)
