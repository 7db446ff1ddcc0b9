"""The device-ordered loops: order, bounds, stamps, cuts, faults, ends; over a driver of threads."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_in_process import DevicePipeline
from fake_cuda import queue_call
from pipeline_in_process import NewestValues, small_config

from ppstream.bringup import time_standalone
from ppstream.clock import now_ns
from ppstream.errors import PeerLostError
from ppstream.pacing import OnSample
from ppstream.synthetic import SyntheticSource

GPUS = ("placement.rank0=cuda:0", "placement.policy=cuda:1", "actions.lease_ms=60000")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*overrides: str, runs_ahead: bool = True) -> DevicePipeline:
        config = small_config(*GPUS, *overrides)
        return DevicePipeline(config, NewestValues(), tmp_path, monkeypatch, runs_ahead=runs_ahead)

    return make


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("credit", ["before_window", "after_window"])
def test_every_envelope_is_answered_once_in_order_and_in_bounds(
    build: Any, depth: int, credit: str
) -> None:
    settings = (f"pipeline.d_in={depth}", f"pipeline.d_out={depth}", f"pipeline.credit={credit}")
    with build(*settings) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(60)
        chunks, envelopes = pipeline.collector.chunks, pipeline.envelopes()
    assert [seq for _, seq, _, _ in chunks] == list(range(60))
    assert all(line["outstanding_max"] <= depth for line in envelopes)
    assert all(line["q_decode_max"] <= depth for line in envelopes)
    for giver, taker in zip(envelopes, envelopes[depth:], strict=False):
        assert taker["tSend"] >= giver["tRecv"]  # no credit, no send
        if credit == "before_window":
            assert taker["tA0"] >= giver["tRecv"]  # nor a window


def test_a_slow_stage_c_holds_receipts_back_and_with_them_the_credits(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build("pipeline.d_in=3", "pipeline.d_out=1") as pipeline:
        slow = partial(queue_call, pipeline.stream_c, lambda: time.sleep(0.004))
        monkeypatch.setattr(pipeline.rank0._queueing, "work_c", slow)
        pipeline.saturate()
        pipeline.rank0.run(30)
        envelopes = pipeline.envelopes()
    for freed, line in pairwise(envelopes):
        assert line["tRecv"] >= freed["tDecode"]  # a place in D_out
    assert max(line["q_decode_max"] for line in envelopes) == 1


def test_what_is_decoded_is_the_policys_answer_to_that_window(build: Any) -> None:
    with build() as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(40)
    ends = [end for _, _, end, _ in pipeline.collector.chunks]
    assert ends == sorted(ends)
    assert all(np.isfinite(values).all() for _, _, _, values in pipeline.collector.chunks)
    assert len({values.tobytes() for _, _, _, values in pipeline.collector.chunks}) > 1


def test_the_policy_rank_logs_every_envelope_by_its_name(build: Any) -> None:
    with build() as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(30)
        pipeline.rank0.measure_b(0)
        lines = [line for line in pipeline.lines(1) if line["kind"] == "stage1"]
        mine = {line["seq"]: line for line in pipeline.envelopes()}
    assert [line["seq"] for line in lines] == list(range(30))
    for line in lines:
        assert line["eB_ns"] <= line["residence_ns"]
        assert line["residence_ns"] <= mine[line["seq"]]["tRecv"] - mine[line["seq"]]["tSend"]


def test_a_policy_without_a_graph_is_queued_only_when_its_envelope_is_there(build: Any) -> None:
    with build(runs_ahead=False) as pipeline:
        calls = pipeline.queued
        assert calls.calls == 0  # though receipts stand queued
        pipeline.saturate()
        pipeline.rank0.run(20)
        assert calls.calls == 20
    assert [seq for _, seq, _, _ in pipeline.collector.chunks] == list(range(20))


def test_a_cut_drops_what_is_under_way_and_emits_nothing_older(build: Any) -> None:
    with build() as pipeline:
        policy = pipeline.policy
        policy.act = lambda call: pipeline.rank0.request_cut("test") if call == 20 else None
        pipeline.saturate()
        pipeline.rank0.run(50)
        drops = [line.get("drop") for line in pipeline.envelopes()]
    epochs = [epoch for epoch, _, _, _ in pipeline.collector.chunks]
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}
    assert 1 <= drops.count("stale") <= 9  # what the host had queued
    assert pipeline.rank0.stage_c.emitted + drops.count("stale") == 50


def test_a_policy_that_fails_while_queued_still_answers(build: Any) -> None:
    with build() as pipeline:
        pipeline.queued.refuse = {20, 21}  # behind those that are queued already
        pipeline.saturate()
        pipeline.rank0.run(30)
        lines = pipeline.envelopes()
        faults = [line for line in pipeline.lines(0) if line.get("name") == "fault"]
    assert [line["seq"] for line in lines if line.get("drop") == "policy_error"] == [20, 21]
    assert len(faults) == 2
    assert "no such kernel" in faults[0]["text"]


def test_paced_by_samples_no_envelope_begins_without_a_new_one(build: Any) -> None:
    with build() as pipeline:
        source = SyntheticSource(
            pipeline.config, pipeline.intake.rows[0], seed=1, start_ns=now_ns()
        )
        pipeline.enter(source, OnSample(pipeline.intake.rows, "joints"))
        pipeline.rank0.run(20)
        accepted = pipeline.intake.rows[0].rings["joints"].accepted
    assert pipeline.rank0.started == 20 <= accepted


def test_standalone_times_are_of_this_path_and_nothing_is_emitted_twice(build: Any) -> None:
    with build() as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(10)
        times = time_standalone(pipeline.rank0, 5)
        assert set(times) == {"A_ns", "B_ns", "C_ns"}
        assert all(value > 0 for value in times.values())
        pipeline.rank0.run(10)
    assert [seq for _, seq, _, _ in pipeline.collector.chunks] == list(range(25))


def test_a_policy_rank_that_vanishes_ends_the_run_though_streams_wait_for_it(build: Any) -> None:
    with build() as pipeline:

        def vanish(call: int) -> None:
            if call == 15:
                pipeline.stage1.drain_reason = "vanished"
                pipeline.back.close()

        pipeline.policy.act = vanish
        pipeline.saturate()
        with pytest.raises(PeerLostError):
            pipeline.rank0.run(1000)


def test_the_policy_rank_leaves_with_its_waits_queued(build: Any) -> None:
    with build() as pipeline:
        pass  # leaving releases them: see __exit__
    assert not pipeline.failure
