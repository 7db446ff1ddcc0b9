from __future__ import annotations

import pytest

from ppstream.ingest.sample_ledger import SampleLedger, total


def filled() -> SampleLedger:
    ledger = SampleLedger()
    ledger.received = 10
    ledger.in_flight = 7
    ledger.reject("late", 3)
    ledger.account_used(used=4, passed_over=1)
    return ledger


def test_every_sample_received_is_used_dropped_or_in_flight() -> None:
    ledger = filled()
    ledger.check()
    assert ledger.as_dict() == {
        "received": 10,
        "used": 4,
        "dropped": {"late": 3, "passed_over": 1},
        "in_flight": 2,
    }


def test_losing_what_is_in_flight_keeps_the_balance() -> None:
    ledger = filled()
    ledger.drop("overwritten", 2)
    ledger.check()
    assert ledger.in_flight == 0
    assert ledger.dropped["overwritten"] == 2


def test_a_lost_sample_is_reported_with_all_numbers() -> None:
    ledger = filled()
    ledger.received += 1
    with pytest.raises(AssertionError, match=r"1 samples lost.*'received': 11.*'used': 4"):
        ledger.check()


def test_a_negative_count_is_reported_although_the_sum_is_right() -> None:
    ledger = filled()
    ledger.account_used(used=3, passed_over=0)
    with pytest.raises(AssertionError, match="negative"):
        ledger.check()


def test_the_form_of_the_log_is_a_copy() -> None:
    ledger = filled()
    ledger.as_dict()["dropped"]["late"] = 99
    assert ledger.dropped["late"] == 3


def test_the_total_adds_up_by_reason() -> None:
    other = SampleLedger()
    other.received = 2
    other.reject("late", 1)
    other.reject("shape", 1)
    whole = total([filled(), other])
    whole.check()
    assert whole.received == 12
    assert whole.dropped == {"late": 4, "passed_over": 1, "shape": 1}
