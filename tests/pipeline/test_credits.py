from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppstream.core.errors import ProtocolError
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.credits import CreditLedger


def test_a_full_pipe_gives_no_credit() -> None:
    ledger = CreditLedger(d_in=2, d_out=1)
    ledger.commit(0)
    assert ledger.may_commit()
    ledger.commit(1)
    assert not ledger.may_commit()
    with pytest.raises(ProtocolError, match="outstanding would become 3, bound 2"):
        ledger.commit(2)
    assert ledger.outstanding == 2


def test_a_full_decode_queue_takes_no_result() -> None:
    ledger = CreditLedger(d_in=2, d_out=1)
    ledger.commit(0)
    ledger.commit(0)
    ledger.receive(1)
    assert not ledger.may_receive()
    with pytest.raises(ProtocolError, match="q_decode would become 2, bound 1"):
        ledger.receive(2)
    assert (ledger.outstanding, ledger.q_decode) == (1, 1)


@pytest.mark.parametrize("move", [CreditLedger.receive, CreditLedger.begin_decode])
def test_nothing_comes_from_nothing(move: Callable[[CreditLedger, int], None]) -> None:
    ledger = CreditLedger(1, 1)
    with pytest.raises(ProtocolError, match="-1"):
        move(ledger, 0)
    assert ledger.statistics() == CreditLedger(1, 1).statistics()


def test_stage_c_is_serial() -> None:
    ledger = CreditLedger(2, 2)
    for _ in range(2):
        ledger.commit(0)
        ledger.receive(0)
    ledger.begin_decode(1)
    with pytest.raises(ProtocolError, match="decoding would become 2"):
        ledger.begin_decode(1)
    assert ledger.q_decode == 1
    ledger.emit(2)
    with pytest.raises(ProtocolError, match="decoding would become -1"):
        ledger.emit(2)


def test_maxima_are_those_since_they_were_taken() -> None:
    ledger = CreditLedger(3, 3)
    for _ in range(3):
        ledger.commit(0)
    ledger.receive(0)
    ledger.receive(0)
    assert booked_maxima(ledger) == (3, 2)
    assert booked_maxima(ledger) == (1, 2)
    ledger.begin_decode(0)
    assert booked_maxima(ledger) == (1, 2)
    assert booked_maxima(ledger) == (1, 1)


def booked_maxima(ledger: CreditLedger) -> tuple[int | None, int | None]:
    record = EnvelopeRecord()
    ledger.book(record, 0)
    return record.outstanding_max, record.q_decode_max


def test_bounds_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="start at 1"):
        CreditLedger(0, 1)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**18))
def test_any_history_agrees_with_its_stamps(
    data: st.DataObject, d_in: int, d_out: int, start_ns: int
) -> None:
    """Counts, bounds and integrals against a model that keeps every stamp."""
    ledger = CreditLedger(d_in, d_out)
    stamps: dict[str, list[int]] = {"commit": [], "receive": [], "begin_decode": [], "emit": []}
    now_ns = start_ns
    for _ in range(data.draw(st.integers(0, 60))):
        now_ns += data.draw(st.integers(-50, 10**9))  # two threads may swap their stamps
        commits, receives, decodes, emits = map(len, stamps.values())
        allowed = {
            "commit": commits - receives < d_in,
            "receive": commits > receives and receives - decodes < d_out,
            "begin_decode": receives > decodes and decodes == emits,
            "emit": decodes > emits,
        }
        assert ledger.may_commit() == allowed["commit"]
        assert ledger.may_receive() == (receives - decodes < d_out)
        move = data.draw(st.sampled_from(list(stamps)))
        if allowed[move]:
            getattr(ledger, move)(now_ns)
            stamps[move].append(now_ns)
        else:
            with pytest.raises(ProtocolError):
                getattr(ledger, move)(now_ns)
    commits, receives, decodes, emits = map(len, stamps.values())
    statistics = ledger.statistics()
    assert (statistics.outstanding, statistics.q_decode) == (commits - receives, receives - decodes)
    assert (statistics.committed, statistics.received) == (commits, receives)
    assert statistics.emitted == emits
    assert ledger.in_system == statistics.in_system == commits - emits
    assert ledger.in_system <= d_in + d_out + 1
    for first, then, total_ns in (
        ("commit", "receive", ledger.outstanding_ns_total(now_ns)),
        ("receive", "begin_decode", ledger.q_decode_ns_total(now_ns)),
    ):
        left = stamps[then] + [now_ns] * (len(stamps[first]) - len(stamps[then]))
        assert total_ns == sum(left) - sum(stamps[first])


def test_two_threads_never_lose_a_count() -> None:
    ledger = CreditLedger(2, 2)
    rounds = 3000
    credit, envelope = threading.Semaphore(2), threading.Semaphore(0)

    def send() -> None:
        for count in range(rounds):
            credit.acquire()
            ledger.commit(count)
            envelope.release()

    sender = threading.Thread(target=send)
    sender.start()
    for count in range(rounds):
        envelope.acquire()
        ledger.receive(count)
        credit.release()
        ledger.begin_decode(count)
        ledger.emit(count)
    sender.join()
    statistics = ledger.statistics()
    assert (statistics.committed, statistics.received, statistics.emitted) == (rounds,) * 3
    assert statistics.in_system == 0
