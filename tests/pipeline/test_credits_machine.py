from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ppstream.core.errors import ProtocolError
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.credits import DECODING_MAX, CreditLedger

#: Where an envelope stands, in order, with the move that brings it there.
PLACES = {"commit": "outstanding", "receive": "q_decode", "begin_decode": "decoding"}


class CreditsNeitherLoseNorMakeEnvelopes(RuleBasedStateMachine):
    """Envelopes as the stamps at which each entered the place where it stands."""

    @initialize(d_in=st.integers(1, 3), d_out=st.integers(1, 3), start_ns=st.integers(0, 10**18))
    def begin(self, d_in: int, d_out: int, start_ns: int) -> None:
        self.ledger = CreditLedger(d_in, d_out)
        self.bounds = {"outstanding": d_in, "q_decode": d_out, "decoding": DECODING_MAX}
        self.now_ns = start_ns
        self.entered: dict[str, list[int]] = {place: [] for place in PLACES.values()}
        self.spent_ns = dict.fromkeys(PLACES.values(), 0)  # by those that left
        self.highest = dict.fromkeys(PLACES.values(), 0)  # since the last record
        self.moved = dict.fromkeys((*PLACES, "emit"), 0)

    @rule(passed_ns=st.integers(-50, 10**9))
    def time_passes_or_two_threads_swap_their_stamps(self, passed_ns: int) -> None:
        self.now_ns += passed_ns

    @rule()
    def commit(self) -> None:
        self.move("commit", None, "outstanding")

    @rule()
    def receive(self) -> None:
        self.move("receive", "outstanding", "q_decode")

    @rule()
    def begin_decode(self) -> None:
        self.move("begin_decode", "q_decode", "decoding")

    @rule()
    def emit(self) -> None:
        self.move("emit", "decoding", None)

    def move(self, name: str, origin: str | None, goal: str | None) -> None:
        is_empty = origin is not None and not self.entered[origin]
        is_full = goal is not None and len(self.entered[goal]) == self.bounds[goal]
        if is_empty or is_full:  # refused whole: the invariants see that nothing moved
            texts = [f"{origin} would become -1"] * is_empty
            if is_full:
                bound = self.bounds[goal]
                texts.append(f"{goal} would become {bound + 1}, bound {bound}")
            with pytest.raises(ProtocolError, match="|".join(texts)):
                getattr(self.ledger, name)(self.now_ns)
            return
        getattr(self.ledger, name)(self.now_ns)
        self.moved[name] += 1
        if origin is not None:
            self.spent_ns[origin] += self.now_ns - self.entered[origin].pop(0)
        if goal is not None:
            self.entered[goal].append(self.now_ns)
            self.highest[goal] = max(self.highest[goal], len(self.entered[goal]))

    @rule()
    def a_record_has_the_counts_and_their_maxima_since_the_last_one(self) -> None:
        record = EnvelopeRecord()
        self.ledger.write_counts(record, self.now_ns)
        booked = {
            "outstanding": (record.outstanding, record.outstanding_max),
            "q_decode": (record.q_decode, record.q_decode_max),
        }
        totals_ns = record.outstanding_ns_total, record.q_decode_ns_total
        assert totals_ns == (self.total_ns("outstanding"), self.total_ns("q_decode"))
        for place, counts in booked.items():
            assert counts == (len(self.entered[place]), self.highest[place])
            self.highest[place] = len(self.entered[place])

    def total_ns(self, place: str) -> int:
        return self.spent_ns[place] + sum(self.now_ns - stamp for stamp in self.entered[place])

    @invariant()
    def every_envelope_stands_in_one_place(self) -> None:
        counts = self.ledger.statistics()
        outstanding, waiting, decoding = map(len, self.entered.values())
        assert (self.ledger.outstanding, self.ledger.q_decode) == (outstanding, waiting)
        assert (counts.outstanding, counts.q_decode) == (outstanding, waiting)
        assert counts.committed == self.moved["commit"]
        assert counts.received == self.moved["receive"]
        assert counts.emitted == self.moved["emit"]
        assert counts.in_system == self.ledger.in_system == outstanding + waiting + decoding

    @invariant()
    def both_queues_are_bounded_and_say_whether_there_is_room(self) -> None:
        ledger = self.ledger
        assert 0 <= ledger.outstanding <= ledger.d_in
        assert 0 <= ledger.q_decode <= ledger.d_out
        assert ledger.in_system <= ledger.d_in + ledger.d_out + DECODING_MAX
        assert ledger.may_commit() == (ledger.outstanding < ledger.d_in)
        assert ledger.may_receive() == (ledger.q_decode < ledger.d_out)

    @invariant()
    def integrals_are_the_time_that_envelopes_spent(self) -> None:
        assert self.ledger.outstanding_ns_total(self.now_ns) == self.total_ns("outstanding")
        assert self.ledger.q_decode_ns_total(self.now_ns) == self.total_ns("q_decode")


TestCredits = CreditsNeitherLoseNorMakeEnvelopes.TestCase
TestCredits.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
