"""``ungated`` whose policies are compiled to graphs and to no kernels, which takes far longer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import ungated

from ppstream.launch import device_ranks
from ppstream.policy import graphed
from ppstream.policy.compiled import compiled


def main(argv: Sequence[str]) -> int:
    """As ``ungated``."""
    for module in (device_ranks, graphed):
        module.compiled = partial(compiled, backend="eager")
    return ungated.main(argv)
