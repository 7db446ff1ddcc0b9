"""What is under way on rank 0's device is finished in order, and booked by the device's time."""

from __future__ import annotations

from typing import Any

import pytest

from ppstream.core.errors import ProtocolError
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.credits import CreditLedger, QueueTransition
from ppstream.pipeline.device.event_times import Rank0Times
from ppstream.pipeline.device.in_flight import (
    CompletionEstimate,
    InFlight,
    Marks,
    Queued,
    QueueReplay,
)
from ppstream.pipeline.flight import Flight


class At:
    """An event; ``ns`` is None until it happens."""

    def __init__(self) -> None:
        self.ns: int | None = None

    def wait(self) -> bool:
        raise AssertionError("nobody waits for a device here")

    def ns_since(self, earlier: At) -> int | None:
        return None if self.ns is None or earlier.ns is None else self.ns - earlier.ns


ZERO = At()
ZERO.ns = 0


class Clock:
    """Maps by an anchor that can be renewed a little off."""

    def __init__(self) -> None:
        self.offset_ns = 0

    def host_ns(self, event: At) -> int | None:
        return None if event.ns is None else event.ns + self.offset_ns

    def is_past(self, event: At) -> bool:
        return event.ns is not None

    def past_ns(self, event: At) -> int:
        found = self.host_ns(event)
        assert found is not None
        return found

    def all_past_ns(self, events: Any) -> list[int]:
        return [ns + self.offset_ns for ns in events.ns_since(ZERO)]


class Rig:
    """Two credits and two places among the results."""

    def __init__(
        self, patch: pytest.MonkeyPatch, d_in: int = 2, d_out: int = 2, *, a_spins: bool = False
    ) -> None:
        self.ledger, self.clock = CreditLedger(d_in, d_out), Clock()
        clock: Any = self.clock
        marks = [Marks(*(At() for _ in Marks._fields)) for _ in range(9)]
        self.underway = InFlight(self.ledger, clock, marks, a_spins=a_spins)

    def add(self, index: int) -> Any:
        self.underway.add(Flight(index, 0, index, EnvelopeRecord()), index)
        return self.underway.marks(index)

    def finish(self) -> tuple[Queued, Rank0Times]:
        assert self.underway.is_oldest_done()
        finished = self.underway.finish(0)
        one, times = self.underway.settle()
        assert one is finished
        return one, times


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def happen(marks: Marks, a0: int, a1: int, received: int, c0: int, c1: int) -> None:
    times = dict(zip(("a0", "a1", "received", "c0", "c1"), (a0, a1, received, c0, c1), strict=True))
    for name, ns in times.items():
        getattr(marks, name).ns = ns


def test_an_envelope_is_done_when_its_last_event_is(rig: Rig) -> None:
    assert not rig.underway.is_oldest_done()  # there is none
    marks = rig.add(0)
    happen(marks, 10, 20, 50, 55, 60)
    marks.c1.ns = None
    assert not rig.underway.is_oldest_done()
    marks.c1.ns = 60
    assert rig.finish()[1] == (10, 20, 20, 50, 55, 60)
    assert not rig.underway


def test_an_envelope_is_sent_when_it_has_both_its_window_and_its_credit(rig: Rig) -> None:
    marks = [rig.add(index) for index in range(4)]
    happen(marks[0], 10, 20, 50, 55, 60)
    happen(marks[1], 20, 30, 70, 75, 80)
    happen(marks[2], 30, 40, 90, 95, 99)  # its window was there before its credit
    happen(marks[3], 80, 85, 110, 115, 120)  # its credit was there before its window
    ones = [rig.finish() for _ in marks]
    assert [times.committed for _, times in ones] == [20, 30, 50, 85]
    assert [one.credit_ns for one, _ in ones] == [0, 0, 50, 70]


def test_counts_at_an_emit_are_those_of_the_device_then(rig: Rig) -> None:
    first, second, third = (rig.add(index) for index in range(3))
    happen(first, 10, 20, 50, 55, 70)
    second.a1.ns, second.received.ns = 30, 60
    third.a1.ns = 65
    rig.finish()
    assert (rig.ledger.outstanding, rig.ledger.q_decode) == (1, 1)  # the third, the second
    assert rig.ledger.outstanding_ns_total(70) == (50 - 20) + (60 - 30) + (70 - 65)


def test_what_happens_later_is_booked_later(rig: Rig) -> None:
    first, second = rig.add(0), rig.add(1)
    happen(first, 10, 20, 50, 55, 60)
    second.a1.ns = 61
    rig.finish()
    assert rig.ledger.outstanding == 0


def test_an_anchor_that_is_a_little_off_turns_no_order_round(rig: Rig) -> None:
    first, second = rig.add(0), rig.add(1)
    happen(first, 10, 20, 50, 55, 170)
    second.a1.ns, second.received.ns = 30, 160
    rig.finish()
    rig.clock.offset_ns = -5
    happen(second, 20, 30, 160, 162, 164)
    times = rig.finish()[1]
    assert (times.received, times.c0, times.c1) == (160, 161, 161)
    assert rig.ledger.statistics().emitted == 2


def test_a_place_is_free_before_it_is_taken_whatever_the_anchor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, d_in=3, d_out=1)
    first, second, third = (rig.add(index) for index in range(3))
    happen(first, 10, 20, 50, 55, 100)
    second.a1.ns, second.received.ns, second.c0.ns = 30, 57, 100
    third.a1.ns, third.received.ns = 40, 102
    rig.finish()
    rig.clock.offset_ns = 5  # the third's receipt is known by the old anchor, c0 before it is not
    happen(second, 20, 30, 57, 100, 150)
    assert rig.finish()[1].c0 == 102


def test_a_result_comes_after_its_envelope_whatever_the_anchor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, d_in=1, d_out=1)
    first, second = rig.add(0), rig.add(1)
    happen(first, 10, 20, 50, 55, 60)
    second.a1.ns = 61
    rig.finish()
    rig.clock.offset_ns = -40
    happen(second, 52, 61, 95, 97, 99)
    times = rig.finish()[1]
    assert times.committed < times.received < times.c0 <= times.c1


def test_a_duration_of_the_device_knows_no_anchor(rig: Rig) -> None:
    first, second = rig.add(0), rig.add(1)
    happen(first, 10, 20, 50, 55, 60)
    second.a1.ns = 34
    rig.finish()
    rig.clock.offset_ns = 7
    happen(second, 30, 34, 70, 75, 80)
    times = rig.finish()[1]
    assert times.a1 - times.a0 == 4


def test_a_credit_is_known_however_far_ahead_the_host_has_queued(rig: Rig) -> None:
    marks = [rig.add(index) for index in range(3)]
    happen(marks[0], 10, 20, 50, 55, 60)
    happen(marks[1], 20, 30, 70, 75, 80)
    for _ in range(2):
        rig.finish()
    for index in range(3, 10):  # the last in the slot of the first, whose receipt was a credit
        rig.add(index)
    happen(marks[2], 30, 40, 90, 95, 99)
    assert rig.finish()[0].credit_ns == 50


def test_receipts_keep_their_order_around_a_new_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One place among the results: the second receipt follows the first one's decode."""
    rig = Rig(monkeypatch, d_in=3, d_out=1)
    first, second, third = (rig.add(index) for index in range(3))
    happen(first, 10, 20, 80, 85, 100)
    second.a1.ns, second.received.ns, third.a1.ns = 30, 96, 40
    rig.finish()
    rig.clock.offset_ns = -10
    happen(second, 20, 30, 96, 99, 200)
    third.received.ns = 104
    rig.finish()
    assert (rig.ledger.outstanding, rig.ledger.q_decode) == (0, 1)


@pytest.mark.parametrize(
    ("a0_ns", "expected_ns"),
    [(95_000, 95_000), (29_000, 29_000), (101_000, 100_000), (None, 100_000)],
    ids=["seen 5 us sooner", "a time slice sooner", "A came later", "A has not begun"],
)
def test_a_credit_counts_from_where_a_saw_it(
    monkeypatch: pytest.MonkeyPatch, a0_ns: int | None, expected_ns: int
) -> None:
    rig = Rig(monkeypatch, d_in=1, d_out=1, a_spins=True)
    giver, taker = rig.add(0), rig.add(1)
    happen(giver, 10_000, 20_000, 100_000, 100_500, 110_000)
    taker.a0.ns = a0_ns
    assert rig.finish()[1].received == expected_ns


def test_moves_are_booked_by_time_however_they_became_known() -> None:
    ledger = CreditLedger(2, 1)
    history = QueueReplay()
    for at_ns, move in (
        (30, QueueTransition.RECEIVE),
        (35, QueueTransition.DECODE),
        (10, QueueTransition.COMMIT),  # of the same envelope
        (20, QueueTransition.COMMIT),  # of the next, whose event was seen last
    ):
        history.add(at_ns, move)
    ledger.apply(history.pop_until(40))
    record = EnvelopeRecord()
    ledger.write_counts(record, 40)
    assert (record.outstanding_max, record.q_decode_max) == (2, 1)
    assert ledger.outstanding_ns_total(40) == 10 + 2 * 10 + 10
    assert (ledger.outstanding, ledger.q_decode) == (1, 0)


def test_what_happened_later_stays_unbooked() -> None:
    ledger = CreditLedger(2, 1)
    history = QueueReplay()
    history.add(10, QueueTransition.COMMIT)
    history.add(50, QueueTransition.COMMIT)
    ledger.apply(history.pop_until(49))
    assert ledger.outstanding == 1
    ledger.apply(history.pop_until(50))
    assert ledger.outstanding == 2


def test_of_two_moves_at_one_instant_the_one_that_makes_room_goes_first() -> None:
    ledger = CreditLedger(1, 1)
    history = QueueReplay()
    history.add(10, QueueTransition.COMMIT)
    history.add(20, QueueTransition.COMMIT)
    history.add(20, QueueTransition.RECEIVE)
    ledger.apply(history.pop_until(20))
    assert (ledger.outstanding, ledger.q_decode) == (1, 1)


def test_a_bound_that_the_devices_broke_is_found() -> None:
    ledger, history = CreditLedger(1, 1), QueueReplay()
    history.add(10, QueueTransition.COMMIT)
    history.add(20, QueueTransition.COMMIT)
    with pytest.raises(ProtocolError, match="outstanding would become 2, bound 1"):
        ledger.apply(history.pop_until(20))


GAP, ALONE = 200, 650


def settled(rhythm: CompletionEstimate, begin: int, count: int = 40, gap: int = GAP) -> int:
    """Envelopes that each stood queued before the one before was done; when the last was."""
    for n in range(count):
        rhythm.done(begin + n * gap - 1000, begin + n * gap)
    return begin + (count - 1) * gap


def test_one_that_stands_queued_comes_a_usual_gap_after_the_one_before() -> None:
    rhythm = CompletionEstimate()
    last = settled(rhythm, 10_000)
    assert abs(rhythm.due_ns(last - 500) - (last + GAP)) <= 3


def test_one_alone_comes_a_usual_time_after_it_was_queued() -> None:
    rhythm = CompletionEstimate()
    last = settled(rhythm, 10_000)
    for n in range(1, 40):
        rhythm.done(last + n * 5000, last + n * 5000 + ALONE)
    queued = last + 40 * 5000
    assert abs(rhythm.due_ns(queued) - (queued + ALONE)) <= 3


def test_a_pause_is_no_gap() -> None:
    rhythm = CompletionEstimate()
    last = settled(rhythm, 10_000)
    rhythm.done(last + 10**9, last + 10**9 + ALONE)  # queued long after
    last += 10**9 + ALONE
    assert abs(rhythm.due_ns(last - 1) - (last + GAP)) <= 3


def test_one_late_envelope_moves_little_and_many_move_it_there() -> None:
    rhythm = CompletionEstimate()
    last = settled(rhythm, 10_000)
    rhythm.done(last - 500, last + 5 * GAP)
    assert rhythm.due_ns(last) <= last + 5 * GAP + 2 * GAP
    last = settled(rhythm, last + 6 * GAP, gap=300)
    assert abs(rhythm.due_ns(last - 500) - (last + 300)) <= 3


def test_an_outlier_does_not_make_those_behind_it_late() -> None:
    rhythm = CompletionEstimate()
    last = settled(rhythm, 10_000)
    rhythm.done(last - 500, last + 100 * GAP)
    last += 100 * GAP
    assert last < rhythm.due_ns(last - 500) <= last + 2 * GAP + 250


def test_before_anything_is_known_it_is_due_at_once() -> None:
    assert CompletionEstimate().due_ns(1234) == 1234
