from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pipeline_in_process import NewestValues, PipelineInProcess, small_config

from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns, thread_cpu_ns
from ppstream.core.errors import PolicyError
from ppstream.core.simulated_delay import Delay
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.decode import CopyDecoder
from ppstream.pipeline.flight import Flight, Owner
from ppstream.pipeline.stage_c import NoEmitter, StageC
from ppstream.policy.protocol import Decoder
from ppstream.wire.robot_messages import ActionChunk


class Chunks:
    """An emitter that keeps whole chunks."""

    def __init__(self) -> None:
        self.chunks: list[ActionChunk] = []

    def emit(self, row: int, chunk: ActionChunk) -> None:
        kept = memoryview(bytes(chunk.actions))
        self.chunks.append(msgspec.structs.replace(chunk, actions=kept))


class Steps(NewestValues):
    """Steps of 0.5 each, beginning at 0: with dt 10 ms they move at 50 a second."""

    def __call__(self, window: Any, out: Any) -> None:
        self.calls += 1
        self.act(self.calls - 1)
        out["actions"][:] = 0.5 * out["actions"].new_tensor([[[0, 0], [1, 1], [2, 2], [3, 3]]])


@contextmanager
def pipeline(
    folder: Path,
    *settings: str,
    policy: NewestValues | None = None,
    inline: bool = True,
    decoder: Decoder | None = None,
) -> Iterator[tuple[PipelineInProcess, Chunks]]:
    config = small_config(*settings)
    parts = PipelineInProcess(config, policy or Steps(), folder, inline=inline, decoder=decoder)
    with parts as running:
        emitter = Chunks()
        running.saturate()
        running.rank0.emitter = emitter
        yield running, emitter


def test_limits_are_clipped_and_the_chunk_is_emitted(tmp_path: Path) -> None:
    with pipeline(tmp_path) as (running, emitter):
        running.rank0.run(3)
        statistics = running.rank0.stage_c.statistics()
    assert (statistics.emitted, statistics.clipped_values) == (3, 6)
    actions = np.frombuffer(emitter.chunks[0].actions, np.float32).reshape(4, 2)
    assert actions[:, 0].tolist() == [0.0, 0.5, 1.0, 1.0]


def test_chunks_that_go_to_nobody_are_held_to_the_rules_and_not_counted(tmp_path: Path) -> None:
    with pipeline(tmp_path) as (running, _):
        running.rank0.emitter = NoEmitter()
        running.rank0.run(3)
        statistics = running.rank0.stage_c.statistics()
    assert (statistics.emitted, statistics.chunks, statistics.clipped_values) == (3, 0, 0)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("actions.on_limit=drop", "limit"),
        ("actions.velocity=[49, 60]", "velocity"),
        ("actions.acceleration=[4000, 4000]", "acceleration"),  # by the clip of the last step
    ],
)
def test_a_chunk_that_breaks_a_rule_is_not_emitted_and_counted(
    tmp_path: Path, setting: str, reason: str
) -> None:
    with pipeline(tmp_path, setting) as (running, emitter):
        running.rank0.run(3)
        statistics = running.rank0.stage_c.statistics()
        lines = running.envelopes()
    assert emitter.chunks == []
    assert statistics.dropped == statistics.violations == {reason: 3}
    assert [line["drop"] for line in lines] == [reason] * 3


def test_a_policy_that_keeps_breaking_a_rule_ends_the_run(tmp_path: Path) -> None:
    with (
        pipeline(tmp_path, "actions.velocity=[1, 1]") as (running, _),
        pytest.raises(PolicyError, match="velocity"),
    ):
        running.rank0.run(10)


@pytest.mark.parametrize(
    "reason",
    [
        "policy_error",
        "unwritten",
        "decoder_error",
        "non_finite",
        "limit",
        "velocity",
        "acceleration",
    ],
)
def test_as_many_unusable_results_in_a_row_as_are_allowed_end_the_run(reason: str) -> None:
    stage_c = StageC(small_config("liveness.policy_errors_max=3"), CopyDecoder(), Delay(0))
    for drop in (reason, reason, None, reason, reason):
        stage_c.count(drop)
    with pytest.raises(PolicyError, match=f"3 results in a row .* the last: {reason}"):
        stage_c.count(reason)


def test_a_chunk_begins_one_step_behind_its_window_and_has_the_window_s_lease(
    tmp_path: Path,
) -> None:
    with pipeline(tmp_path, "actions.dt_ms=10") as (running, emitter):
        stage_c, row = running.rank0.stage_c, running.intake.rows[0]
        owner = Owner(True, (row.session, row.session_epoch), 7, 99)
        flight = Flight(1, 0, 1, EnvelopeRecord(), [owner], received_ns=1, emit_ns=1)
        assert stage_c.emit(flight, [0], emitter) is None
    (chunk,) = emitter.chunks
    assert (chunk.window_end_ns, chunk.start_ns) == (7, 7 + 10 * NS_PER_MS)
    assert (chunk.dt_ns, chunk.expires_ns) == (10 * NS_PER_MS, 99)


@pytest.mark.parametrize("inline", [True, False])
def test_a_chunk_tells_where_its_age_comes_from(tmp_path: Path, *, inline: bool) -> None:
    with pipeline(tmp_path, "actions.provenance=true", inline=inline) as (running, emitter):
        running.rank0.run(20)
        lines = running.envelopes()
    assert len(emitter.chunks) == len(lines) == 20
    for chunk, line in zip(emitter.chunks, lines, strict=True):
        found = chunk.provenance
        assert found is not None
        ages = {name: age for name, age in line["input_age_ns"].items() if age is not None}
        assert found.input_age_ns == ages
        assert found.a_ns == line["tSend"] - line["tA0"]
        assert found.b_ns == line["B_ns"]
        assert min(found.wait_b_ns, found.links_ns, found.wait_c_ns, found.c_ns) >= 0
        assert line["tDecode"] <= line["tRx"] + found.server_ns <= line["tEmit"]


class Stamped(Chunks):
    """Notes when each chunk was given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.given_ns: list[int] = []

    def emit(self, row: int, chunk: ActionChunk) -> None:
        self.given_ns.append(now_ns())
        super().emit(row, chunk)


@pytest.mark.parametrize("form", ["serial", "split", "inline"])
def test_the_emit_is_stamped_before_it_so_that_the_lease_looks_at_that_stamp(
    tmp_path: Path, form: str
) -> None:
    threads = "serial" if form == "inline" else form
    with pipeline(tmp_path, f"pipeline.threads={threads}", inline=form == "inline") as (running, _):
        running.rank0.emitter = emitter = Stamped()
        running.rank0.run(20)
        lines = running.envelopes()
    assert len(lines) == len(emitter.given_ns) == 20
    for line, given_ns in zip(lines, emitter.given_ns, strict=True):
        assert line["age_rank0_ns"] == line["tEmit"] - line["tRx"]
        assert line["tDecode"] <= line["tEmit"] <= given_ns


class Computing(Chunks):
    """Computes for 10 ms before it keeps a chunk."""

    def emit(self, row: int, chunk: ActionChunk) -> None:
        until_ns = thread_cpu_ns() + 10 * NS_PER_MS
        while thread_cpu_ns() < until_ns:
            pass
        super().emit(row, chunk)


@pytest.mark.parametrize("form", ["serial", "split", "inline"])
def test_what_an_emitter_computes_is_no_cpu_time_of_stage_c(tmp_path: Path, form: str) -> None:
    threads = "serial" if form == "inline" else form
    with pipeline(tmp_path, f"pipeline.threads={threads}", inline=form == "inline") as (running, _):
        running.rank0.emitter = Computing()
        running.rank0.run(20)
        lines = running.envelopes()
    asked = [line["cpu_c_ns"] for line in lines if "cpu_c_ns" in line]
    assert asked
    assert max(asked) < 10 * NS_PER_MS


def test_a_lease_ends_a_millisecond_early_to_the_nanosecond(tmp_path: Path) -> None:
    with pipeline(tmp_path, "actions.lease_ms=300") as (running, emitter):
        running.rank0.run(1)
        stage_c, row = running.rank0.stage_c, running.intake.rows[0]
        owner = Owner(True, (row.session, row.session_epoch), 0, 0)
        flight = Flight(1, 0, 1, EnvelopeRecord(), [owner], received_ns=NS_PER_S)
        flight.emit_ns = NS_PER_S + 299 * NS_PER_MS
        assert stage_c.emit(flight, [0], emitter) is None
        flight.emit_ns += 1
        assert stage_c.emit(flight, [0], emitter) == "expired"


def test_unless_asked_for_it_is_not_sent(tmp_path: Path) -> None:
    with pipeline(tmp_path) as (running, emitter):
        running.rank0.run(1)
    assert emitter.chunks[0].provenance is None


def test_a_robot_with_limits_of_its_own_is_held_to_those(tmp_path: Path) -> None:
    setting = "actions.robots={arm={high=[0.25, 0.75]}}"
    with pipeline(tmp_path, setting) as (running, emitter):
        running.intake.rows[0].robot = "arm"
        running.rank0.run(1)
        running.intake.rows[0].robot = "another"
        running.rank0.run(1)
    own, common = (np.frombuffer(c.actions, np.float32).reshape(4, 2) for c in emitter.chunks)
    assert own.max(axis=0).tolist() == [0.25, 0.75]
    assert common.max(axis=0).tolist() == [1.0, 1.0]


def test_what_the_rules_did_is_counted_once_the_chunk_has_left(tmp_path: Path) -> None:
    counted: list[int] = []

    class Looking(Chunks):
        def emit(self, row: int, chunk: ActionChunk) -> None:
            super().emit(row, chunk)
            counted.append(running.rank0.stage_c.statistics().chunks)

    with pipeline(tmp_path) as (running, _):
        running.rank0.emitter = Looking()
        running.rank0.run(3)
        assert running.rank0.stage_c.statistics().chunks == 3
    assert counted == [0, 1, 2]


class Forgetful:
    """A decoder that writes everything in its first call, and later leaves the last step out."""

    def __init__(self) -> None:
        self.calls = 0

    def reset(self, row: int) -> None:
        pass

    def __call__(self, row: int, result: Any, actions: np.ndarray[Any, Any]) -> None:
        self.calls += 1
        actions[: 4 if self.calls == 1 else 3] = 0.5


@pytest.mark.parametrize("is_emitted", [True, False])
def test_what_a_decoder_leaves_out_is_refused_also_behind_a_result_that_was_not_emitted(
    tmp_path: Path, *, is_emitted: bool
) -> None:
    with pipeline(tmp_path, decoder=Forgetful()) as (running, emitter):
        stage_c, row = running.rank0.stage_c, running.intake.rows[0]
        owner = Owner(True, (row.session, row.session_epoch), 0, 0)
        result = {"actions": np.zeros((1, 4, 2), np.float32)}
        dropped = []
        for seq in range(2):
            flight = Flight(seq, 0, seq, EnvelopeRecord(), [owner], received_ns=1, emit_ns=1)
            rows = stage_c.decode(flight, result)
            if is_emitted or seq:  # a cut may come in between
                dropped.append(stage_c.emit(flight, rows, emitter))
    assert dropped == [None, "non_finite"][not is_emitted :]


def test_a_row_without_actions_is_refused_alone_and_ends_no_run(tmp_path: Path) -> None:
    settings = ("batch.rows=2", "liveness.policy_errors_max=1")
    with pipeline(tmp_path, *settings) as (running, emitter):
        stage_c, served = running.rank0.stage_c, running.intake.rows

        def count(seq: int, *steps: float) -> None:
            owners = [Owner(True, (row.session, row.session_epoch), seq, 0) for row in served]
            result = {"actions": np.repeat(np.float32(steps), 8).reshape(2, 4, 2)}
            flight = Flight(seq, 0, seq, EnvelopeRecord(), owners, received_ns=1, emit_ns=1)
            stage_c.count(stage_c.emit(flight, stage_c.decode(flight, result), emitter))

        for seq in range(3):
            count(seq, np.nan, 0.5)
        assert [chunk.session for chunk in emitter.chunks] == [served[1].session] * 3
        assert stage_c.rows_dropped == {"non_finite": 3}
        with pytest.raises(PolicyError, match="non_finite"):
            count(3, np.nan, np.nan)


class Popping:
    """A decoder that takes out of its mapping what it reads."""

    def reset(self, row: int) -> None: ...

    def __call__(self, row: int, result: Any, actions: np.ndarray[Any, Any]) -> None:
        actions[...] = result.pop("actions")


def test_what_a_decoder_does_to_its_mapping_reaches_no_later_result(tmp_path: Path) -> None:
    with pipeline(tmp_path, decoder=Popping()) as (running, emitter):
        running.rank0.run(9)
    assert len(emitter.chunks) == 9


class Ensemble:
    """A decoder that averages each chunk with the one before."""

    def __init__(self) -> None:
        self.older: Any = None

    def reset(self, row: int) -> None:
        self.older = None

    def __call__(self, row: int, result: Any, actions: np.ndarray[Any, Any]) -> None:
        newest = result["actions"].copy()
        actions[...] = newest if self.older is None else (self.older + newest) / 2
        self.older = newest


class Turning(NewestValues):
    """Says one value until it is reset for the second time, and its opposite from then on."""

    def __call__(self, window: Any, out: Any) -> None:
        self.calls += 1
        self.act(self.calls - 1)
        out["actions"].fill_(0.5 if len(self.resets) == 1 else -0.5)


@pytest.mark.parametrize("inline", [False, True])
def test_a_decoder_s_memory_does_not_outlive_a_cut(tmp_path: Path, *, inline: bool) -> None:
    def act(call: int) -> None:
        if call == 4:
            running.rank0.request_cut("test")

    parts: Any = {"inline": inline, "policy": Turning(act), "decoder": Ensemble()}
    with pipeline(tmp_path, **parts) as (running, emitter):
        running.rank0.run(12)
    told: dict[int, set[float]] = {}
    for chunk in emitter.chunks:
        told.setdefault(chunk.epoch, set()).update(np.frombuffer(chunk.actions, np.float32))
    assert told == {0: {0.5}, 1: {-0.5}}
