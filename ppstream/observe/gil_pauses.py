"""Long work on a thread beside the loops, in pieces between which the loops have the interpreter.

Python runs one thread at a time, and a loop that gave its turn away for a system call gets it back
when the other thread pauses, or after the switch interval. A loop with a little slack does not
notice pieces that are shorter than that; one long stretch it would wait for.
"""

from __future__ import annotations

import time
from typing import Final

from ppstream.core.clock import now_ns

PIECE_NS: Final = 100_000  # half of a short stage's time
PAUSE_S: Final = 0.0001


class Pieces:
    """The pieces of one thread's work, from now on."""

    def __init__(self) -> None:
        self._began_ns = now_ns()

    def pause(self) -> None:
        """To be called every few µs of work: sleeps when the piece is long enough."""
        if now_ns() - self._began_ns >= PIECE_NS:
            time.sleep(PAUSE_S)
            self._began_ns = now_ns()
