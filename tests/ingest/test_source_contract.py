"""One contract for every source of rank 0's own: what ``Source`` promises to who drains it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stream_cases import MS, Input, at_ms, config, ramp, stream

from ppstream.ingest.sources import OWN_SESSION, RecordedSource, Source
from ppstream.ingest.synthetic import SyntheticRobots, SyntheticSource

HOST = 5_000_000 * MS  # rank 0's clock when a test begins
SPAN = 600 * MS
Open = Callable[[Input, Path], Any]


def recorded(speed: float, **more: bool) -> Open:
    def open_it(case: Input, folder: Path) -> Source:
        fast = at_ms(*(10_000 + np.arange(0, 401, 4)))
        slow = at_ms(*(10_025 + np.arange(0, 301, 30)))
        arrays = {"fast.stamps_ns": fast, "fast.values": ramp(fast, 1)}
        arrays |= {"slow.stamps_ns": slow, "slow.values": ramp(slow, 1)}
        np.savez(folder / "run.npz", allow_pickle=False, **arrays)
        return RecordedSource(folder / "run.npz", case.config, case.rows, speed, **more)

    return open_it


SOURCES: dict[str, Open] = {
    "recorded": recorded(1.0),
    "recorded, 3.7 times as fast": recorded(3.7),
    "recorded, repeated": recorded(1.0, repeat=True),
    "synthetic robots": lambda case, _: SyntheticRobots(case.config, case.rows, 3, HOST),
    "synthetic": lambda case, _: SyntheticSource(case.config, case.rows[0], 3, HOST),
}


@pytest.fixture(params=SOURCES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], tuple[Any, Input]]:
    rows = 1 if request.param == "synthetic" else 2

    def fresh() -> tuple[Any, Input]:
        fast = stream("fast", dim=1, rate_hz=250, jitter_ms=1.0)
        slow = stream("slow", dim=1, rate_hz=33, jitter_ms=50.0)
        case = Input(config(fast, slow, rows=rows), capacity=1024)
        source: Source = SOURCES[request.param](case, tmp_path)
        return source, case

    return fresh


def counts(case: Input) -> list[int]:
    return [ring.ledger.received for row in case.rows for ring in row.rings.values()]


def held(case: Input) -> list[tuple[bytes, bytes]]:
    """All that the rings hold, as the resampling call reads it."""
    found = []
    for bank in case.banks.values():
        for row, (head, count) in enumerate(zip(bank.head, bank.count, strict=True)):
            order = (int(head) + np.arange(int(count))) % bank.capacity
            arrays = np.asarray(bank.stamps_ns[row])[order], np.asarray(bank.values[row])[order]
            found.append((arrays[0].tobytes(), arrays[1].tobytes()))
    return found


def waits(source: Any, until_ns: int) -> list[int]:
    """Drains when a sample falls due, until then; returns those moments."""
    moments = [HOST]
    source.drain(HOST)
    while (due_ns := source.next_due_ns()) is not None and due_ns <= until_ns:
        assert due_ns > moments[-1]
        moments.append(due_ns)
        source.drain(due_ns)
    return moments


def test_a_drain_says_how_many_samples_it_wrote_and_drops_none(make: Any) -> None:
    source, case = make()
    total = 0
    for now_ns in range(HOST, HOST + SPAN, 7 * MS):
        total += source.drain(now_ns)
        assert sum(counts(case)) == total
    assert total > 100
    assert all(row.session == OWN_SESSION and row.present for row in case.rows)
    assert not any(ring.ledger.dropped for row in case.rows for ring in row.rings.values())
    case.check()


def test_something_is_due_exactly_when_it_is_said(make: Any) -> None:
    source, case = make()
    moments = waits(source, HOST + SPAN)
    assert len(moments) > 50
    again, other = make()
    again.drain(HOST)
    before = sum(counts(other))
    for due_ns in moments[1:]:
        assert again.next_due_ns() == due_ns
        assert again.drain(due_ns - 2) == 0  # a stamp of another clock may round by one
        assert again.drain(due_ns) > 0
    assert sum(counts(other)) > before
    assert held(case) == held(other)


def test_how_often_one_looks_does_not_matter(make: Any) -> None:
    (often, first), (once, second) = make(), make()
    waits(often, HOST + SPAN)
    often.drain(HOST + SPAN)
    once.drain(HOST)
    once.drain(HOST + SPAN)
    assert counts(first) == counts(second)
    assert held(first) == held(second)


def test_a_source_that_ended_stays_so_and_has_nothing_due(make: Any) -> None:
    source, case = make()
    waits(source, HOST + SPAN)
    assert source.exhausted == (source.next_due_ns() is None)
    if source.exhausted:
        before = counts(case)
        assert source.drain(HOST + 100 * SPAN) == 0
        assert (counts(case), source.next_due_ns(), source.exhausted) == (before, None, True)


def test_rows_are_given_back_empty(make: Any) -> None:
    source, case = make()
    source.drain(HOST)
    source.drain(HOST + SPAN)
    source.close()
    for row in case.rows:
        assert (row.session, row.present) == (0, False)
        assert all(ring.count == 0 for ring in row.rings.values())
    case.check()
