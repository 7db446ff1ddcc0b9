"""Blocks on the device-ordered loops, over a driver of threads, while receipts stand queued."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_in_process import GPUS, DevicePipeline, QueuedPolicy
from fake_cuda import queue_call
from pipeline_in_process import NewestValues, small_config
from policy_calls import OnlyLabelled

from ppstream.core.clock import now_ns
from ppstream.cuda.driver import CudaEvent
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.observe.attribution import Attribution, block
from ppstream.pipeline import bringup as block_timing
from ppstream.pipeline.bringup import STOP_REASON, time_blocks
from ppstream.report import attribution
from ppstream.wire.rank_messages import PhaseChange

ENCODE_S = 0.001
ENVELOPES = 150
HOLD_LIMIT_S = 10.0


class Settling:
    """``end_of_stream`` of the fake device's stage B; counts what it meets.

    Until it has met a receipt that stands queued, rank 0's GPU takes each envelope to its end only
    when the policy rank has queued the receipt of the next: so one always stands.
    """

    def __init__(self, pipeline: DevicePipeline, patch: pytest.MonkeyPatch) -> None:
        self._pipeline = pipeline
        self.calls = self.beside_waits = 0
        self._receipts = 0
        self._limit_s = HOLD_LIMIT_S
        link = pipeline.policy_rank.link
        receive = link.queue_receive
        begin = pipeline.executor.begin

        def queue_receive(index: int, stream: Any = None) -> None:
            receive(index, stream)
            self._receipts = index + 1

        def queue_slowly(flight: Any, ends_ns: Any) -> None:
            queue_call(pipeline.a, partial(self._hold, flight.index))
            begin(flight, ends_ns)

        patch.setattr(link, "queue_receive", queue_receive)
        patch.setattr(pipeline.executor, "begin", queue_slowly)

    def __call__(self) -> None:
        done = CudaEvent()
        self._pipeline.b.record(done)
        done.wait()
        self.calls += 1
        self.beside_waits += not self._pipeline.policy_rank.link.receiving.is_idle()

    def _hold(self, index: int) -> None:
        """On stage A's stream, before envelope ``index``."""
        until = time.monotonic() + self._limit_s
        while self.calls and not self.beside_waits and self._receipts < index + 2:
            if time.monotonic() >= until:
                self._limit_s = 0.0  # of the others: none will
                return
            time.sleep(0.001)


def queue_blocks(self: QueuedPolicy, envelope: Any, result: Any, rows: int | None = None) -> None:
    """Two blocks of work that is queued: on the host both take next to nothing."""
    with block("encode"):
        queue_call(self.stream, partial(time.sleep, ENCODE_S))
    with block("decode"):
        queue_call(self.stream, lambda: self.policy(envelope.tensors, result.tensors))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(QueuedPolicy, "__call__", queue_blocks)
    monkeypatch.setattr(block_timing, "Attribution", OnlyLabelled)
    config = small_config(
        *GPUS, 'mode="attribution"', f"bringup.envelopes={ENVELOPES}", "policy.graph=false"
    )
    with DevicePipeline(
        config, NewestValues(), tmp_path, monkeypatch, runs_ahead=False
    ) as pipeline:
        rank0 = pipeline.rank0
        settling = Settling(pipeline, monkeypatch)
        log = pipeline.policy_rank.log
        log.watchers.append(Attribution(log, settling))
        rank0.on_phase.append(lambda phase: pipeline.front.send(PhaseChange(phase)))
        source = SyntheticSource(config, pipeline.intake.rows[0], seed=1, start_ns=now_ns())
        time_blocks(rank0, pipeline.intake, source)
        assert rank0.stop_reason == STOP_REASON
        yield pipeline, settling, tmp_path


def test_each_envelope_has_its_blocks_at_the_time_of_the_device(run: Any) -> None:
    pipeline, _, folder = run
    lines = pipeline.lines(1)
    blocks = [line["blocks"] for line in lines if line["kind"] == "blocks"]
    assert len(blocks) > ENVELOPES // 2
    for found in blocks:
        assert list(found) == ["encode", "decode"]
        assert found["encode"] * 1e-9 >= ENCODE_S
    totals = [line for line in lines if line["kind"] == "stage1" and line["mode"] == "attribution"]
    assert all(line["eB_ns"] * 1e-9 >= ENCODE_S for line in totals)
    # a line each, also where two were queued before one was finished; the first had begun before
    assert len(blocks) == len(totals) - 1
    pipeline.rank0.log.flush()
    text = attribution.report(folder)
    assert text is not None
    rows = {line.split()[0]: line.split() for line in text.splitlines()[3:9]}
    assert list(rows) == ["A", "B", "encode", "decode", "(in", "C"]
    assert int(rows["B"][1]) == len(totals)
    share = {name: float(row[-1].rstrip("%")) for name, row in rows.items()}
    assert sum(share[name] for name in "ABC") == pytest.approx(100, abs=0.2)
    parts = (share["encode"], share["decode"], share["(in"])
    assert sum(parts) == pytest.approx(share["B"], abs=0.2)
    assert float(rows["encode"][2]) >= ENCODE_S * 1e3
    assert "events of their own streams" in text


def test_the_waits_of_the_link_stand_queued_meanwhile_and_nobody_waits_for_them(run: Any) -> None:
    _, settling, _ = run
    assert settling.calls > ENVELOPES
    assert settling.beside_waits > 0


def test_rank_0_is_attributed_and_its_perturbation_said(run: Any) -> None:
    pipeline, _, _ = run
    modes = {(line["phase"], line["mode"]) for line in pipeline.envelopes()}
    assert modes == {("warming", "throughput"), ("bring-up", "attribution")}
    (said,) = [line for line in pipeline.lines(0) if line.get("name") == "attribution"]
    ratio = said["period_ns"] / said["throughput_period_ns"]
    assert said["perturbation"] == pytest.approx(ratio, rel=1e-3)


def test_a_block_is_nothing_outside_the_phase(run: Any) -> None:
    pipeline, settling, _ = run
    before = settling.calls
    deadline = time.monotonic() + 5
    while pipeline.policy_rank.log.mode != "throughput" and time.monotonic() < deadline:
        pipeline.rank0.stop_reason = None
        pipeline.rank0.run(1)
        before = settling.calls
    pipeline.rank0.stop_reason = None
    pipeline.rank0.run(10)
    assert settling.calls == before
    assert torch.cuda.is_available() or block("a") is block("b")
