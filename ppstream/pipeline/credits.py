"""CreditLedger: the two bounded queues of a link, counted and checked at every transition.

``outstanding`` = committed and not yet received back, at most ``d_in``; ``q_decode`` = received and
not yet decoding, at most ``d_out``. The ledger holds permissions, never data, and never waits: who
may not go on is told so and waits elsewhere.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from ppstream.core.errors import ProtocolError
from ppstream.observe.statistics import CreditStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ppstream.observe.log_writer import EnvelopeRecord

DECODING_MAX: Final = 1  # stage C is serial

NO_LEAD: Final = 1 << 62


class QueueTransition(IntEnum):
    """Kinds of queue transitions; of two at one instant, the one that makes room goes first."""

    EMIT = 0
    DECODE = 1
    RECEIVE = 2
    COMMIT = 3


_EMIT, _DECODE, _RECEIVE, _COMMIT = map(int, QueueTransition)  # compared without a look-up


class CreditLedger:
    """Permissions of one link, for any thread.

    Every method that moves an envelope takes this rank's ``now_ns`` and holds a lock for the move,
    so the counts, their maxima and their integrals over time always agree. A count is what has come
    in less what has gone on; its integral up to an instant follows from the sums of these moves'
    stamps, which may come in any order.

    Args:
        d_in: bound of envelopes committed and not yet answered.
        d_out: bound of results received and not yet decoding.
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        if d_in < 1 or d_out < 1:
            raise ValueError(f"bounds start at 1, got d_in = {d_in}, d_out = {d_out}")
        self.d_in = d_in
        self.d_out = d_out
        self._lock = threading.Lock()
        self._committed = self._received = self._begun = self._emitted = 0  # moves
        self._committed_ns = self._received_ns = self._begun_ns = 0  # sums of their stamps
        self._outstanding_max = self._q_decode_max = 0  # since they were written last

    def may_commit(self, lead: int = NO_LEAD) -> bool:
        """True when a credit is free; it stays free until this side commits.

        Args:
            lead: bound of ``in_system``, for a side that can use no more.
        """
        return self.outstanding < self.d_in and self._committed - self._emitted < lead

    def may_receive(self) -> bool:
        """True when a result may be received; it stays so until this side receives."""
        return self.q_decode < self.d_out

    def commit(self, now_ns: int) -> None:
        """An envelope goes to the policy rank.

        Raises:
            ProtocolError: ``outstanding`` stands at ``d_in``.
        """
        self.apply(((now_ns, _COMMIT),))

    def receive(self, now_ns: int) -> None:
        """Its result's receipt is observed: the credit returns.

        Raises:
            ProtocolError: nothing is outstanding, or ``q_decode`` stands at ``d_out``.
        """
        self.apply(((now_ns, _RECEIVE),))

    def begin_decode(self, now_ns: int) -> None:
        """Stage C takes the oldest received result.

        Raises:
            ProtocolError: none was received, or the one before is still being decoded.
        """
        self.apply(((now_ns, _DECODE),))

    def emit(self, now_ns: int) -> None:
        """The result being decoded left: emitted, or dropped with its reason.

        Raises:
            ProtocolError: nothing is being decoded.
        """
        self.apply(((now_ns, _EMIT),))

    def apply(self, moves: Iterable[tuple[int, int]]) -> None:
        """Apply moves, oldest first: an instant, and a ``QueueTransition``.

        Raises:
            ProtocolError: as the method of that move; those before it are applied.
        """
        with self._lock:
            for at_ns, move in moves:
                if move == _COMMIT:
                    outstanding = self._committed + 1 - self._received
                    if outstanding > self.d_in:
                        raise _too_many("outstanding", outstanding, self.d_in)
                    if outstanding > self._outstanding_max:
                        self._outstanding_max = outstanding
                    self._committed += 1
                    self._committed_ns += at_ns
                elif move == _RECEIVE:
                    if self._received == self._committed:
                        raise _too_few("outstanding")
                    q_decode = self._received + 1 - self._begun
                    if q_decode > self.d_out:
                        raise _too_many("q_decode", q_decode, self.d_out)
                    if q_decode > self._q_decode_max:
                        self._q_decode_max = q_decode
                    self._received += 1
                    self._received_ns += at_ns
                elif move == _DECODE:
                    if self._begun == self._received:
                        raise _too_few("q_decode")
                    if self._begun - self._emitted == DECODING_MAX:
                        raise _too_many("decoding", DECODING_MAX + 1, DECODING_MAX)
                    self._begun += 1
                    self._begun_ns += at_ns
                else:
                    if self._emitted == self._begun:
                        raise _too_few("decoding")
                    self._emitted += 1

    @property
    def outstanding(self) -> int:
        """Committed and not yet received back."""
        return self._committed - self._received

    @property
    def q_decode(self) -> int:
        """Received and not yet decoding."""
        return self._received - self._begun

    @property
    def in_system(self) -> int:
        """Committed and neither emitted nor dropped."""
        with self._lock:
            return self._committed - self._emitted

    def outstanding_ns_total(self, now_ns: int) -> int:
        """Integral of ``outstanding`` over time up to ``now_ns``."""
        with self._lock:
            return self._received_ns - self._committed_ns + self.outstanding * now_ns

    def q_decode_ns_total(self, now_ns: int) -> int:
        """Integral of ``q_decode`` over time up to ``now_ns``."""
        with self._lock:
            return self._begun_ns - self._received_ns + self.q_decode * now_ns

    def write_counts(self, record: EnvelopeRecord, now_ns: int) -> None:
        """Write the counts of ``now_ns`` into a record, with the maxima since the last one."""
        with self._lock:
            committed_ns, received_ns = self._committed_ns, self._received_ns
            outstanding = self._committed - self._received
            record.outstanding, record.outstanding_max = outstanding, self._outstanding_max
            record.outstanding_ns_total = received_ns - committed_ns + outstanding * now_ns
            q_decode = self._received - self._begun
            record.q_decode, record.q_decode_max = q_decode, self._q_decode_max
            record.q_decode_ns_total = self._begun_ns - received_ns + q_decode * now_ns
            self._outstanding_max, self._q_decode_max = outstanding, q_decode

    def statistics(self) -> CreditStatistics:
        """All counts of one moment."""
        with self._lock:
            return CreditStatistics(
                outstanding=self.outstanding,
                q_decode=self.q_decode,
                in_system=self._committed - self._emitted,
                committed=self._committed,
                received=self._received,
                emitted=self._emitted,
            )


def _too_many(name: str, count: int, bound: int) -> ProtocolError:
    return ProtocolError(
        f"{name} would become {count}, bound {bound}: ask the ledger before moving an envelope"
    )


def _too_few(name: str) -> ProtocolError:
    return ProtocolError(f"{name} would become -1: a result without its envelope")
