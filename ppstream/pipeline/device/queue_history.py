"""QueueHistory: moves of envelopes between queues, in the order in which the device made them.

On a device-ordered link the host learns of a move when its event is done, and of those of several
envelopes at once. The ledger wants them by time. Pure, and no ledger itself.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppstream.pipeline.credits import CreditLedger


class Move(IntEnum):
    """What happened; of two at one instant, the one that makes room goes first."""

    EMIT = 0
    DECODE = 1
    RECEIVE = 2
    COMMIT = 3


class QueueHistory:
    """Moves that are known and not yet booked."""

    def __init__(self, ledger: CreditLedger) -> None:
        self._book = (ledger.emit, ledger.begin_decode, ledger.receive, ledger.commit)  # by Move
        self._known: list[tuple[int, Move]] = []

    def add(self, at_ns: int, move: Move) -> None:
        """``move`` happened at ``at_ns``."""
        heappush(self._known, (at_ns, move))

    def book_until(self, until_ns: int) -> None:
        """Book every known move up to ``until_ns``, oldest first.

        Raises:
            ProtocolError: a bound was exceeded, or a move had no envelope to move.
        """
        known = self._known
        while known and known[0][0] <= until_ns:
            at_ns, move = heappop(known)
            self._book[move](at_ns)
