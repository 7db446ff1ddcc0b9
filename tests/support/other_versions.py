"""``ungated`` whose rank 2 has another version of torch installed, by its metadata."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ungated

from ppstream.launch import handshake


def main(argv: Sequence[str]) -> int:
    """As ``ungated``."""
    if os.environ["RANK"] == "2":
        installed = handshake.version
        handshake.version = lambda name: "2.0.0+other" if name == "torch" else installed(name)
    return ungated.main(argv)
