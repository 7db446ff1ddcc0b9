"""A chunk leaves first; its envelope is accounted for behind it, for several at once, and none is
lost: whatever ends a run, an epoch or a pause.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ppstream
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import PolicyError
from ppstream.cuda import device_clock
from ppstream.cuda.device_clock import DeviceClock
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.pipeline.device import executor
from ppstream.pipeline.device.in_flight import UNSETTLED_MAX
from ppstream.pipeline.loop import Rank0Loop
from ppstream.pipeline.pacing import OnTick

#: Of ppstream's Python functions an envelope, with those of windows that the host cuts here.
CALLS_MAX = 72


@pytest.fixture(params=["events", "stamps", "graphs"])
def any_way(build: Any, request: pytest.FixtureRequest) -> Any:
    return partial(build, **{} if request.param == "events" else {request.param: True})


def test_chunks_leave_before_their_envelopes_are_accounted_for(any_way: Any) -> None:
    owed: list[int] = []
    with any_way() as pipeline:
        emit = pipeline.collector.emit

        def counted(row: int, chunk: Any) -> None:
            emit(row, chunk)
            accounted = pipeline.rank0.credits.statistics().emitted
            owed.append(len(pipeline.collector.chunks) - accounted)

        pipeline.collector.emit = counted
        pipeline.saturate()
        pipeline.rank0.run(60)
        assert pipeline.rank0.credits.statistics().emitted == 60
        assert len(pipeline.envelopes()) == 60
    assert min(owed) >= 1
    assert max(owed) <= UNSETTLED_MAX


def test_the_anchor_of_the_clock_moves_while_nothing_is_owed(
    any_way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times by two anchors may be out of order, which the ledger would refuse."""
    owed: list[int] = []
    renew = DeviceClock.renew_when_due
    monkeypatch.setattr(device_clock, "RENEW_NS", NS_PER_MS // 10)
    with any_way() as pipeline:

        def renewed(clock: Any, *given: Any) -> bool:
            has_moved = renew(clock, *given)
            if has_moved and given:  # rank 0's
                accounted = pipeline.rank0.credits.statistics().emitted
                owed.append(len(pipeline.collector.chunks) - accounted)
            return has_moved

        monkeypatch.setattr(DeviceClock, "renew_when_due", renewed)
        pipeline.saturate()
        for _ in range(20):  # a loop that never rests moves it after a quarter of a second
            pipeline.rank0.run(200)
            if owed:
                break
    assert set(owed) == {0}


@pytest.mark.parametrize("stamps", [False, True])
def test_what_ended_before_a_run_failed_has_its_line(build: Any, stamps: bool) -> None:
    with build(stamps=stamps) as pipeline:
        most = pipeline.config.liveness.policy_errors_max
        first = 20
        pipeline.queued.refuse = set(range(first, 1000))
        pipeline.saturate()
        with pytest.raises(PolicyError, match="in a row"):
            pipeline.rank0.run(200)
        lines = pipeline.envelopes()
    assert [line["seq"] for line in lines] == list(range(first + most))
    assert sum(line.get("drop") == "policy_error" for line in lines) == most
    assert all(line["tA0"] <= line["tA1"] <= line["tRecv"] <= line["tDecode"] for line in lines)


def test_nothing_is_owed_while_nothing_is_under_way(
    any_way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owed: list[int] = []
    with any_way() as pipeline:
        wait = pipeline.rank0.waiter.wait

        def looked(limit_ns: int) -> Any:
            if limit_ns > NS_PER_MS and not pipeline.executor.in_flight:
                accounted = pipeline.rank0.credits.statistics().emitted
                owed.append(len(pipeline.collector.chunks) - accounted)
            return wait(limit_ns)

        rows = pipeline.intake.rows
        source = SyntheticSource(pipeline.config, rows[0], seed=1, start_ns=now_ns())
        pipeline.enter(source, OnTick(rows, 20.0, now_ns()))
        monkeypatch.setattr(source, "next_due_ns", lambda: None)
        monkeypatch.setattr(pipeline.rank0.waiter, "wait", looked)
        pipeline.rank0.run(12)  # a busy machine may be late for some
    assert len(owed) >= 5
    assert not any(owed)


def test_an_epoch_begins_with_nothing_owed(any_way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("GLANCE_NS", "POLL_LATEST_NS"):  # no poll falls due by the clock
        monkeypatch.setattr(executor, limit, NS_PER_S)
    owed: list[int] = []
    with any_way() as pipeline:
        emit, cut = pipeline.collector.emit, pipeline.rank0.cut

        def cut_at(row: int, chunk: Any) -> None:
            emit(row, chunk)
            if len(pipeline.collector.chunks) in (30, 45):
                pipeline.rank0.request_cut("test")

        def looked(*given: Any) -> None:
            owed.append(pipeline.rank0.finished - pipeline.rank0.credits.statistics().emitted)
            cut(*given)

        pipeline.collector.emit, pipeline.rank0.cut = cut_at, looked
        pipeline.saturate()
        monkeypatch.setattr(pipeline.rank0.source, "next_due_ns", lambda: None)
        pipeline.rank0.run(80)
    assert owed == [0, 0]


def test_provenance_tells_the_times_of_its_own_envelope(any_way: Any) -> None:
    told: dict[int, Any] = {}
    with any_way("actions.provenance=true") as pipeline:
        emit = pipeline.collector.emit

        def keep(row: int, chunk: Any) -> None:
            told[chunk.seq] = chunk.provenance
            emit(row, chunk)

        pipeline.collector.emit = keep
        pipeline.saturate()
        pipeline.rank0.run(30)
        lines = {line["seq"]: line for line in pipeline.envelopes()}
    assert len(told) == 30
    for seq, provenance in told.items():
        assert provenance.a_ns == lines[seq]["tSend"] - lines[seq]["tA0"]
        assert provenance.wait_c_ns == lines[seq]["tDecode"] - lines[seq]["tRecv"]


def test_an_envelope_that_is_late_is_looked_for_less_and_less_often(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0
    with build(graphs=True) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(30)
        waiter = pipeline.rank0.waiter
        wait = waiter.wait

        def counted(limit_ns: int) -> Any:
            nonlocal waits
            waits += 1
            return wait(limit_ns)

        monkeypatch.setattr(waiter, "wait", counted)
        monkeypatch.setattr(pipeline.rank0.source, "next_due_ns", lambda: now_ns() + NS_PER_S)
        pipeline.policy.act = lambda call: time.sleep(0.5)
        pipeline.rank0.run(1)
        pipeline.policy.act = lambda call: None  # what is queued ahead runs at the end
    assert waits < 1000  # each 20 us these are some 5,000


class Calls:
    """Counts calls of ppstream's own functions on this thread, inside those of ``spans``."""

    def __init__(self, spans: dict[str, str]) -> None:
        self.found: Counter[str] = Counter()
        self._spans, self._depth = spans, 0
        self._root = str(Path(ppstream.__file__).parent)

    def __enter__(self) -> Calls:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call":
            is_own = code.co_filename.startswith(self._root)
            if not self._depth:
                is_span = is_own and self._spans.get(code.co_name) == Path(code.co_filename).name
                if not is_span:
                    return
            self._depth += 1
            if is_own and not code.co_name.startswith("<"):
                self.found[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1
        elif event == "return" and self._depth:
            self._depth -= 1


def test_an_envelope_costs_few_calls(build: Any) -> None:
    """To begin it, to finish it and to account for it, whatever the loop waits for meanwhile."""
    envelopes = 160
    spans = {"start": "loop.py", "finish": "loop.py", "settle": "in_flight.py"}
    spans |= {"all_past_ns": "device_clock.py", "record_rank0_times": "event_times.py"}
    spans |= {"write_counts": "credits.py"}
    with build(graphs=True) as pipeline:
        assert isinstance(pipeline.rank0, Rank0Loop)
        pipeline.saturate()
        pipeline.rank0.run(40)
        with Calls(spans) as calls:
            pipeline.rank0.run(envelopes)
    assert calls.found["loop.start"] == calls.found["loop.finish"] == envelopes
    assert calls.found["in_flight.settle"] == envelopes
    each = sum(calls.found.values()) / envelopes
    assert each <= CALLS_MAX, calls.found.most_common(30)
