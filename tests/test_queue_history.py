"""Moves learned late are booked by the time at which the devices made them."""

from __future__ import annotations

import pytest

from ppstream.core.errors import ProtocolError
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.credits import CreditLedger
from ppstream.pipeline.device.in_flight import Move, QueueHistory


def test_moves_are_booked_by_time_however_they_became_known() -> None:
    ledger = CreditLedger(2, 1)
    history = QueueHistory(ledger)
    for at_ns, move in (
        (30, Move.RECEIVE),
        (35, Move.DECODE),
        (10, Move.COMMIT),  # of the same envelope
        (20, Move.COMMIT),  # of the next, whose event was seen last
    ):
        history.add(at_ns, move)
    history.book_until(40)
    record = EnvelopeRecord()
    ledger.book(record, 40)
    assert (record.outstanding_max, record.q_decode_max) == (2, 1)
    assert ledger.outstanding_ns_total(40) == 10 + 2 * 10 + 10
    assert (ledger.outstanding, ledger.q_decode) == (1, 0)


def test_what_happened_later_stays_unbooked() -> None:
    ledger = CreditLedger(2, 1)
    history = QueueHistory(ledger)
    history.add(10, Move.COMMIT)
    history.add(50, Move.COMMIT)
    history.book_until(49)
    assert ledger.outstanding == 1
    history.book_until(50)
    assert ledger.outstanding == 2


def test_of_two_moves_at_one_instant_the_one_that_makes_room_goes_first() -> None:
    ledger = CreditLedger(1, 1)
    history = QueueHistory(ledger)
    history.add(10, Move.COMMIT)
    history.add(20, Move.COMMIT)
    history.add(20, Move.RECEIVE)
    history.book_until(20)
    assert (ledger.outstanding, ledger.q_decode) == (1, 1)


def test_a_bound_that_the_devices_broke_is_found() -> None:
    history = QueueHistory(CreditLedger(1, 1))
    history.add(10, Move.COMMIT)
    history.add(20, Move.COMMIT)
    with pytest.raises(ProtocolError, match="outstanding would become 2, bound 1"):
        history.book_until(20)
