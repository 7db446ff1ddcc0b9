from __future__ import annotations

import threading

import pytest

from ppstream.pipeline.credits import CreditLedger


def test_bounds_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="start at 1"):
        CreditLedger(0, 1)


def test_two_threads_never_lose_a_count() -> None:
    ledger = CreditLedger(2, 2)
    rounds = 3000
    credit, envelope = threading.Semaphore(2), threading.Semaphore(0)

    def send() -> None:
        for count in range(rounds):
            assert credit.acquire(timeout=30)
            ledger.commit(count)
            envelope.release()

    sender = threading.Thread(target=send)
    sender.start()
    for count in range(rounds):
        assert envelope.acquire(timeout=30)
        ledger.receive(count)
        credit.release()
        ledger.begin_decode(count)
        ledger.emit(count)
    sender.join()
    statistics = ledger.statistics()
    assert (statistics.committed, statistics.received, statistics.emitted) == (rounds,) * 3
    assert statistics.in_system == 0
