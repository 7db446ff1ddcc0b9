"""Stamps and waits of an envelope follow from its events, and no time is lost or claimed twice."""

from __future__ import annotations

import pytest

from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord
from ppstream.pipeline.device.event_times import (
    PolicyTimes,
    Rank0Times,
    record_policy_times,
    record_rank0_times,
)

BEFORE = Rank0Times(a0=0, a1=100, committed=101, received=300, c0=305, c1=350)
TIMES = Rank0Times(a0=400, a1=500, committed=503, received=700, c0=710, c1=760)


def booked(
    times: Rank0Times = TIMES,
    before: Rank0Times | None = BEFORE,
    *,
    credit_ns: int = 300,
    queued_ns: int = 0,
    waits_for_input: bool = False,
) -> EnvelopeRecord:
    record = EnvelopeRecord()
    record_rank0_times(record, times, before, credit_ns, queued_ns, waits_for_input=waits_for_input)
    return record


def test_stamps_are_the_events() -> None:
    record = booked()
    stamps = (record.tA0, record.tA1, record.tSend, record.tRecv, record.tDecode)
    assert stamps == (400, 500, 503, 700, 710)
    assert (record.eA_ns, record.eC_ns) == (100, 50)
    assert record.tEmit is None  # only what is emitted has one


@pytest.mark.parametrize("credit_ns", [0, 50, 100, 250, 400, 9999])
@pytest.mark.parametrize("queued_ns", [0, 90, 350, 9999])
@pytest.mark.parametrize("waits_for_input", [False, True])
def test_the_gap_before_a_is_claimed_once_whatever_it_was_for(
    credit_ns: int, queued_ns: int, waits_for_input: bool
) -> None:
    record = booked(credit_ns=credit_ns, queued_ns=queued_ns, waits_for_input=waits_for_input)
    parts = (record.w_input_ns, record.w_credit_ns, record.w_slot_ns, record.busy_link_ns)
    assert all(part is not None and part >= 0 for part in parts)
    assert sum(part or 0 for part in parts) == 400 - 100


def test_a_late_host_is_a_wait_for_input_only_where_input_sets_the_pace() -> None:
    late = booked(credit_ns=0, queued_ns=380, waits_for_input=True)
    assert (late.w_input_ns, late.busy_link_ns) == (280, 20)
    saturated = booked(credit_ns=0, queued_ns=380)
    assert (saturated.w_input_ns, saturated.busy_link_ns) == (0, 300)


def test_c_waits_for_its_result_since_the_c_before() -> None:
    assert booked().w_result_ns == 710 - 350
    assert booked(before=None).w_result_ns == 0


def test_the_policy_waits_for_its_envelope_and_the_rest_of_the_gap_is_the_links() -> None:
    record = PolicyRecord()
    record_policy_times(record, PolicyTimes(complete=150, b0=170, b1=270), PolicyTimes(0, 10, 100))
    assert (record.tB0, record.tB1, record.eB_ns, record.idle_ns) == (170, 270, 100, 70)
    assert (record.wait_input_ns, record.busy_link_ns, record.residence_ns) == (50, 20, 120)


def test_an_envelope_that_came_while_the_policy_was_busy_is_not_waited_for() -> None:
    record = PolicyRecord()
    record_policy_times(record, PolicyTimes(complete=40, b0=103, b1=200), PolicyTimes(0, 10, 100))
    assert (record.wait_input_ns, record.busy_link_ns) == (0, 3)
    assert record.residence_ns == 160  # includes the wait for the B before


def test_b_never_outlasts_its_residence() -> None:
    record = PolicyRecord()
    record_policy_times(
        record, PolicyTimes(complete=105, b0=103, b1=200), None
    )  # the events' own error
    assert record.residence_ns == record.eB_ns == 97
