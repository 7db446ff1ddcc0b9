"""Robots that wait for each answer before they send again, as rows of one batch, by executor."""

from __future__ import annotations

import json
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from device_in_process import GPUS, RUN_ID, DevicePipeline
from pipeline_in_process import NewestValues, PipelineInProcess, small_config

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.specs import TensorSpec
from ppstream.ingest.window import input_specs
from ppstream.launch.device_ranks import policy_at
from ppstream.links.device_link import LONG_STAGE_NS
from ppstream.pipeline.pacing import service_pacing
from ppstream.pipeline.rank0 import WAIT_MAX_NS
from ppstream.policy.parts import cut, specs_of
from ppstream.wire.robot_messages import ActionChunk

CPU = torch.device("cpu")
ROBOTS = 4
ROUNDS = 30
GATHER_MS = 40.0
TURNS_MAX = 20  # looks at the input, by envelope
FORMS = ["serial", "split", "inline", "device"]
LEAVING = 9, 7, 4, 0  # samples of each robot, which then goes,
SIZES = [4] * 4 + [2] * 3 + [1] * 2  # and the batches that hold those that are there
IN_STEP = ("batch.rows=4", "pipeline.pacing=rows")
STREAMS = {"joints": 3, "imu": 2}


class InStep:
    """Source and emitter: each answer to a robot makes its next sample, until it has had enough.

    Args:
        rounds: samples of each robot; the first one is there from the start. Without any it is not
            there.
        leaves: robots that have had enough leave; else they are silent.
    """

    fds: tuple[int, ...] = ()

    def __init__(self, rows: Any, *rounds: int, leaves: bool = False) -> None:
        self.rows, self.rounds, self.leaves = rows, rounds, leaves
        self.sent = [0] * ROBOTS
        self.answered = self.drained = 0
        self.wrong: list[tuple[int, float, float]] = []
        self._next: SimpleQueue[int] = SimpleQueue()
        for number, row in enumerate(rows):
            if rounds[number]:
                row.open(1 + number)
                self._next.put(number)

    @property
    def exhausted(self) -> bool:
        return self.answered == sum(self.rounds)

    def drain(self, now_ns: int) -> int:
        taken = 0
        self.drained += 1
        while True:
            try:
                number = self._next.get_nowait()
            except Empty:
                return taken
            if self.sent[number] == self.rounds[number]:
                self.rows[number].close()
                continue
            self.sent[number] += 1
            for name in ("imu", "joints"):
                values = np.full((1, STREAMS[name]), self._value(number), np.float32)
                self.rows[number].rings[name].append(np.array([now_ns]), values, now_ns)
            taken += 1

    def next_due_ns(self) -> int | None:
        return None if self._next.empty() else now_ns()

    def emit(self, row: int, chunk: ActionChunk) -> None:
        newest = np.frombuffer(chunk.actions, np.float32)[-1]
        if newest != np.float32(self._value(row)):
            self.wrong.append((row, float(newest), self._value(row)))
        self.answered += 1
        if self.leaves or self.sent[row] < self.rounds[row]:
            self._next.put(row)

    def _value(self, row: int) -> float:
        return row / 10 + self.sent[row] / 1000


class AnyRows(NewestValues):
    """Keeps how many rows it was given."""

    any_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def __call__(self, window: Any, out: Any) -> None:
        self.given.append(len(out["actions"]))
        super().__call__(window, out)


class Piece(AnyRows):
    """A part of a policy that hands on what comes, and keeps how many rows it was given."""

    def __init__(self, name: str, into: TensorSpec, out: TensorSpec) -> None:
        super().__init__()
        self.name = name
        self.inputs, self.outputs = (into,), (out,)

    def __call__(self, window: Any, out: Any) -> None:
        mine = out[self.outputs[0].name]
        self.given.append(len(mine))
        mine.copy_(window[self.inputs[0].name][:, -4:, :2])


def serve(
    form: str,
    folder: Path,
    monkeypatch: Any,
    *rounds: int,
    gather_ms: float,
    policy: NewestValues | None = None,
    pieces: tuple[Piece, ...] = (),
    leaves: bool = False,
) -> tuple[InStep, list[dict[str, Any]]]:
    """What the robots made of it, and rank 0's lines of the envelopes.

    Of ``pieces`` the first is a front part, and long.
    """
    settings = [*IN_STEP, f"pipeline.gather_ms={gather_ms}"]
    settings += [f"pipeline.threads={form}"] if form == "split" else []
    config = small_config(*settings, *(GPUS if form == "device" else ()))
    served: Any = policy or NewestValues()
    front: Any = None
    if pieces:
        places = cut(specs_of(pieces), (0, 1), input_specs(config))
        front, served = (policy_at(at, pieces, config, CPU, RUN_ID) for at in places)
    own: dict[str, Any] = {"runs_ahead": not leaves, "front_ns": LONG_STAGE_NS}
    pipeline: Any = (
        DevicePipeline(config, served, folder, monkeypatch, front=front, **own)
        if form == "device"
        else PipelineInProcess(config, served, folder, inline=form == "inline", front=front)
    )
    with pipeline:
        rank0, rows = pipeline.rank0, pipeline.intake.rows
        robots = InStep(rows, *rounds, leaves=leaves)
        pacing = service_pacing(config, rows, now_ns(), lambda: rank0.finished)
        rank0.enter("ready", intake=pipeline.intake, source=robots, pacing=pacing, emitter=robots)
        rank0.run()
        return robots, pipeline.envelopes()


@pytest.mark.parametrize("form", FORMS)
def test_robots_in_step_share_every_envelope_and_get_their_own_answers(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robots, lines = serve(form, tmp_path, monkeypatch, *[ROUNDS] * ROBOTS, gather_ms=30_000)
    assert robots.sent == [ROUNDS] * ROBOTS
    assert robots.wrong == []
    assert {line["pacing"] for line in lines} == {"rows"}
    ends = [line["window_end_ns"] for line in lines]
    assert len(ends) == ROUNDS
    assert all(len(set(of_one)) == ROUNDS for of_one in zip(*ends, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_robot_that_stops_asking_costs_the_others_gather_ms_each_time(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robots, lines = serve(form, tmp_path, monkeypatch, 8, 8, 8, 4, gather_ms=GATHER_MS)
    assert robots.sent == [8, 8, 8, 4]
    assert robots.wrong == []
    ends = [line["window_end_ns"] for line in lines]
    assert [len(set(of_one)) for of_one in zip(*ends, strict=True)] == robots.sent
    waits_ns = [
        line["tA0"] - line["tRx"]
        for line, before, end in zip(lines[1:], ends, ends[1:], strict=False)
        if before[3] == end[3]
    ]
    assert len(waits_ns) >= 4
    assert GATHER_MS / 2 * NS_PER_MS <= min(waits_ns) < WAIT_MAX_NS  # the clock ended it
    if form in ("serial", "split", "inline"):
        assert robots.drained < TURNS_MAX * len(lines)  # nothing spins meanwhile


@pytest.mark.parametrize("form", FORMS)
def test_a_policy_of_any_rows_is_called_with_the_first_that_hold_all_robots(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AnyRows()
    robots, lines = serve(
        form, tmp_path, monkeypatch, *LEAVING, gather_ms=30_000, policy=policy, leaves=True
    )
    assert robots.sent == [*LEAVING]
    assert robots.wrong == []
    assert len(lines) == max(LEAVING)
    assert policy.given[-len(SIZES) :] == SIZES
    if form != "inline":
        text = (tmp_path / "rank1.gen0.jsonl").read_text()
        told = [json.loads(line) for line in text.splitlines()]
        assert [line["rows"] for line in told if line["kind"] == "stage1"] == SIZES


@pytest.mark.parametrize("form", [form for form in FORMS if form != "inline"])
def test_a_part_on_rank_0_is_called_with_the_first_rows_that_hold_all_robots(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = in_two()
    robots, _ = serve(
        form, tmp_path, monkeypatch, *LEAVING, gather_ms=30_000, pieces=pieces, leaves=True
    )
    assert robots.sent == [*LEAVING]
    assert robots.wrong == []
    first, second = (piece.given for piece in pieces)
    assert first[-len(SIZES) :] == SIZES
    assert second[-len(SIZES) :] == SIZES


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_part_on_rank_0_has_the_whole_batch_where_one_behind_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    """What stage B is called with it reads: rows that nobody made would be read, too."""
    pieces = in_two()
    robots, _ = serve(
        *("device", tmp_path, monkeypatch, 5, 0, 0, 0),
        gather_ms=30_000,
        pieces=pieces,
        leaves=not runs_ahead,
    )
    assert robots.wrong == []
    sizes = {ROBOTS} if runs_ahead else {1}
    assert [set(piece.given) for piece in pieces] == [sizes] * 2


def in_two() -> tuple[Piece, Piece]:
    """A policy of two pieces."""
    values, between = TensorSpec("state.values", (8, 5)), TensorSpec("between", (4, 2))
    return (
        Piece("first", values, between),
        Piece("second", between, TensorSpec("actions", (4, 2))),
    )


def test_stage_b_that_is_queued_before_its_envelope_is_there_has_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AnyRows()
    robots, _ = serve("device", tmp_path, monkeypatch, 5, 0, 0, 0, gather_ms=30_000, policy=policy)
    assert robots.wrong == []
    assert set(policy.given) == {ROBOTS}
