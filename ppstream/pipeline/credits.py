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


_DECODE, _RECEIVE, _COMMIT = map(  # compared without a look-up
    int, (QueueTransition.DECODE, QueueTransition.RECEIVE, QueueTransition.COMMIT)
)


class CreditLedger:
    """Permissions of one link, for any thread.

    Every method that moves an envelope takes this rank's ``now_ns`` and holds a lock for the move,
    so the counts, their maxima and their integrals over time always agree.

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
        self._outstanding = _Level("outstanding", d_in)
        self._q_decode = _Level("q_decode", d_out)
        self._decoding = _Level("decoding", DECODING_MAX)
        self._committed = self._received = self._emitted = 0

    def may_commit(self, lead: int = NO_LEAD) -> bool:
        """True when a credit is free; it stays free until this side commits.

        Args:
            lead: bound of ``in_system``, for a side that can use no more.
        """
        return self._outstanding.count < self.d_in and self._committed - self._emitted < lead

    def may_receive(self) -> bool:
        """True when a result may be received; it stays so until this side receives."""
        return self._q_decode.count < self.d_out

    def commit(self, now_ns: int) -> None:
        """An envelope goes to the policy rank.

        Raises:
            ProtocolError: ``outstanding`` stands at ``d_in``.
        """
        with self._lock:
            self._outstanding.rise(now_ns)
            self._committed += 1

    def receive(self, now_ns: int) -> None:
        """Its result's receipt is observed: the credit returns.

        Raises:
            ProtocolError: nothing is outstanding, or ``q_decode`` stands at ``d_out``.
        """
        with self._lock:
            self._outstanding.pass_on(self._q_decode, now_ns)
            self._received += 1

    def begin_decode(self, now_ns: int) -> None:
        """Stage C takes the oldest received result.

        Raises:
            ProtocolError: none was received, or the one before is still being decoded.
        """
        with self._lock:
            self._q_decode.pass_on(self._decoding, now_ns)

    def emit(self, now_ns: int) -> None:
        """The result being decoded left: emitted, or dropped with its reason.

        Raises:
            ProtocolError: nothing is being decoded.
        """
        with self._lock:
            self._decoding.fall(now_ns)
            self._emitted += 1

    def apply(self, moves: Iterable[tuple[int, int]]) -> None:
        """Apply moves that others made, oldest first: an instant, and a ``QueueTransition``.

        Raises:
            ProtocolError: as the method of that move; those before it are applied.
        """
        outstanding, q_decode = self._outstanding, self._q_decode
        with self._lock:
            for at_ns, move in moves:
                if move == _COMMIT:
                    outstanding.rise(at_ns)
                    self._committed += 1
                elif move == _RECEIVE:
                    outstanding.pass_on(q_decode, at_ns)
                    self._received += 1
                elif move == _DECODE:
                    q_decode.pass_on(self._decoding, at_ns)
                else:
                    self._decoding.fall(at_ns)
                    self._emitted += 1

    @property
    def outstanding(self) -> int:
        """Committed and not yet received back."""
        return self._outstanding.count

    @property
    def q_decode(self) -> int:
        """Received and not yet decoding."""
        return self._q_decode.count

    @property
    def in_system(self) -> int:
        """Committed and neither emitted nor dropped."""
        with self._lock:
            return self._committed - self._emitted

    def outstanding_ns_total(self, now_ns: int) -> int:
        """Integral of ``outstanding`` over time up to ``now_ns``."""
        with self._lock:
            return self._outstanding.integral_ns(now_ns)

    def q_decode_ns_total(self, now_ns: int) -> int:
        """Integral of ``q_decode`` over time up to ``now_ns``."""
        with self._lock:
            return self._q_decode.integral_ns(now_ns)

    def end(self, record: EnvelopeRecord, now_ns: int) -> None:
        """``emit``, then ``write_counts``, as one. Raises as ``emit``."""
        with self._lock:
            self._decoding.fall(now_ns)
            self._emitted += 1
            self._write_counts(record, now_ns)

    def write_counts(self, record: EnvelopeRecord, now_ns: int) -> None:
        """Write the counts of ``now_ns`` into a record, with the maxima since the last one."""
        with self._lock:
            self._write_counts(record, now_ns)

    def _write_counts(self, record: EnvelopeRecord, now_ns: int) -> None:
        record.outstanding, record.outstanding_max, record.outstanding_ns_total = (
            self._outstanding.drain(now_ns)
        )
        record.q_decode, record.q_decode_max, record.q_decode_ns_total = self._q_decode.drain(
            now_ns
        )

    def statistics(self) -> CreditStatistics:
        """All counts of one moment."""
        with self._lock:
            return CreditStatistics(
                outstanding=self._outstanding.count,
                q_decode=self._q_decode.count,
                in_system=self._committed - self._emitted,
                committed=self._committed,
                received=self._received,
                emitted=self._emitted,
            )


class _Level:
    """One bounded count with its highest value and its integral. The ledger's lock guards it."""

    __slots__ = ("_bound", "_highest", "_name", "_weight_ns", "count")

    def __init__(self, name: str, bound: int) -> None:
        self._name = name
        self._bound = bound
        self.count = 0
        self._highest = 0
        self._weight_ns = 0  # stamps of all falls less those of all rises, in any order

    def rise(self, now_ns: int) -> None:
        count = self.count + 1
        if count > self._bound:
            raise ProtocolError(
                f"{self._name} would become {count}, bound {self._bound}: "
                "ask the ledger before moving an envelope"
            )
        self._weight_ns -= now_ns
        self.count = count
        if count > self._highest:
            self._highest = count

    def fall(self, now_ns: int) -> None:
        if self.count < 1:
            raise ProtocolError(f"{self._name} would become -1: a result without its envelope")
        self._weight_ns += now_ns
        self.count -= 1

    def pass_on(self, to: _Level, now_ns: int) -> None:
        """One leaves here and is counted there; neither when either refuses."""
        count = to.count + 1
        if self.count < 1:
            self.fall(now_ns)  # raises
        if count > to._bound:
            to.rise(now_ns)  # raises
        to._weight_ns -= now_ns
        to.count = count
        if count > to._highest:
            to._highest = count
        self._weight_ns += now_ns
        self.count -= 1

    def integral_ns(self, now_ns: int) -> int:
        return self._weight_ns + self.count * now_ns

    def drain(self, now_ns: int) -> tuple[int, int, int]:
        """The count, the highest since the last call, and the integral."""
        count, highest = self.count, self._highest
        self._highest = count
        return count, highest, self._weight_ns + count * now_ns
