from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ppstream.ingest.sample_ledger import (
    CLOSED,
    DUPLICATE,
    LATE,
    OVERWRITTEN,
    PASSED_OVER,
    SampleLedger,
    total,
)

ROWS = 2
WAITING, USED = "in flight", "used"
SAMPLES = st.integers(0, 5)
row = st.integers(0, ROWS - 1)


class NoSampleIsLostWithoutAReason(RuleBasedStateMachine):
    """Each sample of each row as the name of what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledgers = [SampleLedger() for _ in range(ROWS)]
        self.fates: list[Counter[str]] = [Counter() for _ in range(ROWS)]
        self.holes: list[list[int]] = [[] for _ in range(ROWS)]
        self.written: list[tuple[Any, Any]] = []  # lines of the log, and what they said

    @rule(row=row, samples=st.integers(0, 20))
    def samples_are_accepted(self, row: int, samples: int) -> None:
        self.ledgers[row].received += samples
        self.ledgers[row].in_flight += samples
        self.fates[row][WAITING] += samples

    @rule(row=row, samples=st.integers(1, 5), reason=st.sampled_from([LATE, DUPLICATE]))
    def samples_are_refused_on_arrival(self, row: int, samples: int, reason: str) -> None:
        self.ledgers[row].received += samples
        self.ledgers[row].reject(reason, samples)
        self.fates[row][reason] += samples

    @rule(row=row, samples=st.integers(1, 5), reason=st.sampled_from([OVERWRITTEN, CLOSED]))
    def samples_in_flight_are_dropped(self, row: int, samples: int, reason: str) -> None:
        samples = min(samples, self.fates[row][WAITING])
        self.ledgers[row].drop(reason, samples)
        self.fates[row][WAITING] -= samples
        self.fates[row][reason] += samples

    @rule(row=row, used=SAMPLES, passed_over=SAMPLES)
    def a_window_is_cut(self, row: int, used: int, passed_over: int) -> None:
        used = min(used, self.fates[row][WAITING])
        passed_over = min(passed_over, self.fates[row][WAITING] - used)
        self.ledgers[row].account_used(used, passed_over)
        self.fates[row][WAITING] -= used + passed_over
        self.fates[row][USED] += used
        self.fates[row][PASSED_OVER] += passed_over

    @rule(row=row, holes_ns=st.lists(st.integers(1, 99), min_size=1, max_size=3))
    def samples_come_after_holes(self, row: int, holes_ns: list[int]) -> None:
        self.ledgers[row].add_holes(len(holes_ns), max(holes_ns))
        self.holes[row] += holes_ns

    @rule(row=row)
    def the_log_is_given_a_copy(self, row: int) -> None:
        self.written.append((self.ledgers[row].as_dict(), self.expected(self.fates[row])))

    @rule(row=row, lost=st.integers(1, 3))
    def a_sample_that_is_nowhere_is_reported(self, row: int, lost: int) -> None:
        ledger = total([self.ledgers[row]])  # of its own
        ledger.received += lost
        said = f"{lost} samples lost.*'received': {ledger.received}, 'used': {ledger.used}"
        with pytest.raises(AssertionError, match=said):
            ledger.check()

    @rule(row=row, what=st.sampled_from([USED, CLOSED]))
    def a_sample_that_ends_twice_is_reported(self, row: int, what: str) -> None:
        ledger = total([self.ledgers[row]])
        if what == USED:
            ledger.account_used(ledger.in_flight + 1, 0)
        else:
            ledger.drop(what, ledger.in_flight + 1)
        with pytest.raises(AssertionError, match="negative"):
            ledger.check()

    def expected(self, fates: Counter[str]) -> dict[str, Any]:
        ended = {reason: n for reason, n in fates.items() if n and reason not in (WAITING, USED)}
        return {
            "received": fates.total(),
            "used": fates[USED],
            "dropped": ended,
            "in_flight": fates[WAITING],
        }

    @invariant()
    def every_sample_is_used_in_flight_or_dropped_with_its_reason(self) -> None:
        for ledger, fates in zip(self.ledgers, self.fates, strict=True):
            ledger.check()
            assert without_zeros(ledger.as_dict()) == self.expected(fates)

    @invariant()
    def holes_stand_beside_the_balance(self) -> None:
        for ledger, holes_ns in zip(self.ledgers, self.holes, strict=True):
            assert ledger.holes == len(holes_ns)
            assert ledger.longest_hole_ns == max(holes_ns, default=0)

    @invariant()
    def the_total_is_the_sum_of_the_rows(self) -> None:
        whole = total(self.ledgers)
        whole.check()
        assert without_zeros(whole.as_dict()) == self.expected(sum(self.fates, Counter()))
        holes_ns = [hole for holes in self.holes for hole in holes]
        assert (whole.holes, whole.longest_hole_ns) == (len(holes_ns), max(holes_ns, default=0))

    @invariant()
    def what_was_written_stays_as_it_was(self) -> None:
        for line, said in self.written:
            assert without_zeros(line) == said


def without_zeros(balance: Any) -> dict[str, Any]:
    """A reason that cost nothing so far may be named or not."""
    return {**balance, "dropped": {reason: n for reason, n in balance["dropped"].items() if n}}


TestSampleLedger = NoSampleIsLostWithoutAReason.TestCase
TestSampleLedger.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
