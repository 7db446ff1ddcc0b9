"""Rank 0's GPU and its replicas: in turn, in order, in bounds; losses; over a driver of threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_in_process import GPUS, DevicePipeline, assert_in_bounds
from pipeline_in_process import NewestValues, small_config
from robot_rig import wait_until

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.errors import PeerLostError
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.links.device_link import AHEAD
from ppstream.links.device_replicas import DeviceReplicas
from ppstream.links.slots import INDEX
from ppstream.pipeline.bringup import time_isolated_stages
from ppstream.pipeline.device import executor
from ppstream.pipeline.pacing import Saturated

LIMIT_S = 60.0
RUN = 30
MANY = 1500  # kernels of a stage that is not queued ahead


class Named(NewestValues):
    """Says in every action which replica it is; ``act`` gets the number of the call."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __call__(self, window: Any, out: Any) -> None:
        super().__call__(window, out)
        out["actions"][:, :, 0] = self.rank / 10


Build = Callable[..., DevicePipeline]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    def make(replicas: int, *overrides: str, **more: Any) -> DevicePipeline:
        config = small_config(*GPUS, f"placement.replicas={replicas}", *overrides)
        policies = [Named(rank) for rank in range(1, replicas + 1)]
        return DevicePipeline(config, policies, tmp_path, monkeypatch, **more)

    return make


def who_answered(pipeline: DevicePipeline) -> list[tuple[int, int]]:
    """Of each chunk its envelope, and the replica whose actions it has."""
    return [(seq, round(10 * float(values[0]))) for _, seq, _, values in pipeline.collector.chunks]


def events(pipeline: DevicePipeline, name: str) -> list[dict[str, Any]]:
    return [line for line in pipeline.lines() if line.get("name") == name]


WAYS: list[dict[str, Any]] = [
    {},
    {"puts": True},
    {"spins": True},
    {"spins": True, "puts": True},
    {"runs_ahead": False},
    {"stamps": True},  # of the replicas; rank 0 takes its times by events
    {"graphs": True},
    {"credit": "after_window"},
]


@pytest.mark.parametrize(
    ("way", "replicas", "depth"),  # each way with two and with three, and with few and with many
    [
        (way, *shape)
        for number, way in enumerate(WAYS)
        for shape in ([(2, 1), (3, 4)], [(2, 3), (3, 2)])[number % 2]
    ],
    ids=str,
)
def test_envelopes_go_out_in_turn_and_are_answered_in_order_and_in_bounds(
    build: Build, replicas: int, depth: int, way: dict[str, Any]
) -> None:
    way = {"credit": "before_window"} | way
    credit = way.pop("credit")
    settings = (f"pipeline.d_in={depth}", f"pipeline.d_out={depth}", f"pipeline.credit={credit}")
    with build(replicas, *settings, **way) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(RUN)
        for policy_rank in pipeline.executor.policy_ranks:
            policy_rank.newest_b(0)
        answered, envelopes = who_answered(pipeline), pipeline.envelopes()
        own = [
            [line["seq"] for line in pipeline.lines(rank) if line["kind"] == "stage1"]
            for rank in range(1, replicas + 1)
        ]
        assert_in_bounds(pipeline, depth, credit)
    assert answered == [(seq, seq % replicas + 1) for seq in range(RUN)]
    assert [line["replica"] for line in envelopes] == [rank for _, rank in answered]
    assert own == [list(range(k, RUN, replicas)) for k in range(replicas)]


def test_replicas_work_at_the_same_time(build: Build) -> None:
    both = threading.Barrier(2)
    with build(2, "pipeline.d_in=2") as pipeline:
        for policy in pipeline.policies:
            policy.act = lambda call: call < 10 and both.wait(LIMIT_S)  # nobody goes on alone
        pipeline.saturate()
        pipeline.rank0.run(20)
        answered = who_answered(pipeline)
    assert [seq for seq, _ in answered] == list(range(20))


def test_a_result_waits_for_those_before_it(build: Build) -> None:
    """The other replica has long answered: nothing of it is emitted sooner."""
    later = threading.Event()
    with build(2, "pipeline.d_in=3", "pipeline.d_out=3") as pipeline:
        slow, quick = pipeline.ranks
        pipeline.policies[0].act = lambda call: call == 5 and later.wait(LIMIT_S)

        def let_go() -> None:
            chunks = pipeline.collector.chunks
            # the quick one has answered envelopes 1, 3 ... 11, the slow one 0, 2 ... 8: each
            # rank's host books what is over when it looks, which may be behind rank 0
            wait_until(
                lambda: (slow.loop.progress, quick.loop.progress) == (5, 6) and len(chunks) >= 10
            )
            emitted.append(len(chunks))
            later.set()

        emitted: list[int] = []
        thread = threading.Thread(target=let_go)
        thread.start()
        pipeline.saturate()
        pipeline.rank0.run(20)
        thread.join()
        answered = who_answered(pipeline)
    assert emitted == [10]
    assert [seq for seq, _ in answered] == list(range(20))


def test_a_fault_on_a_replica_drops_its_envelope_and_no_other(build: Build) -> None:
    with build(3, "pipeline.d_in=3") as pipeline:
        pipeline.ranks[1].queued.refuse = {15}  # behind those that are queued already
        pipeline.saturate()
        pipeline.rank0.run(2 * RUN)
        drops = {line["seq"]: line["drop"] for line in pipeline.envelopes() if line.get("drop")}
        faults = events(pipeline, "fault")
    index = 3 * 15 + 1
    assert drops == {index: "policy_error"}
    assert [(line["rank"], line["index"]) for line in faults] == [(2, index)]


def test_nothing_of_a_cut_epoch_is_emitted_behind_the_cut(build: Build) -> None:
    with build(2) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(10)
        pipeline.rank0.request_cut("test")
        pipeline.rank0.run(RUN)
        epochs = [epoch for epoch, *_ in pipeline.collector.chunks]
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}


def test_an_idle_replica_has_nothing_queued_that_a_load_could_stand_behind(build: Build) -> None:
    """Bells tell each one of its own envelopes alone."""
    with build(3, runs_ahead=False) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(RUN)
        for policy_rank in pipeline.executor.policy_ranks:
            policy_rank.newest_b(0)
        assert all(rank.link.receiving.is_idle() for rank in pipeline.ranks)


def test_standalone_times_are_of_each_replica(build: Build) -> None:
    with build(3) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(5)
        told = time_isolated_stages(pipeline.rank0, 4)
        pipeline.rank0.run(5)
    assert len(told["replicas_ns"]) == 3
    assert min(told["replicas_ns"]) <= told["B_mean_ns"] <= max(told["replicas_ns"])
    assert [seq for seq, _ in who_answered(pipeline)] == list(range(5 + 6 + 5))


def test_rank_0_leaves_with_waits_queued_for_every_replica(build: Build) -> None:
    with build(3) as pipeline:
        pass  # leaving releases them: see __exit__
    assert not pipeline.failure


# ---- losses --------------------------------------------------------------------------------------


def vanish(pipeline: DevicePipeline, rank: int, call: int, begun: int = 0) -> threading.Event:
    """That replica ends in its n-th call, which is answered once what is returned is set.

    Not before so many envelopes have begun.
    """
    lost, named = pipeline.ranks[rank - 1], pipeline.policies[rank - 1]
    act = named.act

    def leave(number: int) -> None:
        if number < call:
            act(number)
        else:
            wait_until(lambda: pipeline.rank0.started >= begun)
            lost.loop.drain_reason = "vanished"
            lost.back.close()
            gone.wait(LIMIT_S)  # what it has queued stands behind it

    gone = threading.Event()
    named.act = leave
    pipeline.on_exit.append(gone.set)
    return gone


@pytest.mark.parametrize(
    ("way", "replicas", "lost"),
    [
        (way, *loss)
        for number, way in enumerate(WAYS)
        for loss in ([(2, 2), (3, 1)], [(3, 2)])[number % 2]
    ],
    ids=str,
)
def test_the_others_go_on_without_a_lost_replica(
    build: Build, replicas: int, lost: int, way: dict[str, Any]
) -> None:
    way = {"credit": "before_window"} | way
    settings = ("placement.replicas_min=1", f"pipeline.credit={way.pop('credit')}")
    with build(replicas, *settings, **way) as pipeline:
        vanish(pipeline, lost, 4)
        pipeline.saturate()
        pipeline.rank0.run(2 * RUN)
        pipeline.rank0.run(RUN)  # as if nothing had been
        answered, envelopes = who_answered(pipeline), pipeline.envelopes()
        told = events(pipeline, "replica_lost")
        assert pipeline.rank0.phase == "degraded"
        assert [found.rank for found in pipeline.executor.policy_ranks] == [
            rank for rank in range(1, replicas + 1) if rank != lost
        ]
    dropped = [line["seq"] for line in envelopes if line.get("drop")]
    assert {line["drop"] for line in envelopes if line.get("drop")} == {"replica_lost"}
    assert {line["replica"] for line in envelopes if line.get("drop")} == {lost}
    assert dropped[0] <= 4 * replicas + lost - 1  # of those before a result may be on its way
    queued = 1 + replicas + AHEAD  # credits, and stages A that wait for one
    assert 0 < len(dropped) <= -(-queued // replicas)
    assert sorted([*dropped, *(seq for seq, _ in answered)]) == list(range(3 * RUN))
    by_seq = {line["seq"]: line["replica"] for line in envelopes}
    assert all(by_seq[seq] == rank for seq, rank in answered)
    for before, behind in pairwise(envelopes):  # in turn, but for the lost one
        steps = (behind["replica"] - before["replica"] - 1) % replicas
        assert {(before["replica"] + n) % replicas + 1 for n in range(steps)} <= {lost}
    assert [(line["rank"], line["left"]) for line in told] == [(lost, replicas - 1)]
    assert pipeline.let_go == [lost]


def test_a_long_stage_a_awaits_its_credit_behind_a_loss_as_before_it(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "EARLY_NS", 5 * NS_PER_MS)
    settings = ("placement.replicas_min=1", "pipeline.d_in=2", "pipeline.d_out=2")
    awaited: list[int] = []
    with build(2, *settings, a_kernels=MANY) as pipeline:
        begin, link = pipeline.executor.begin, pipeline.executor.link
        assert isinstance(link, DeviceReplicas)
        behind: list[int] = []  # envelopes begun behind the loss

        def watched(flight: Any, ends_ns: Any) -> None:
            if pipeline.let_go:
                behind.append(flight.index)
                giver = flight.index - 2
                header = link.into[giver % len(link.into)].header
                if giver in behind and header[INDEX] != link.turn(giver).at:
                    awaited.append(giver)
            begin(flight, ends_ns)

        pipeline.executor.begin = watched  # type: ignore[method-assign]
        pause = threading.Event()
        for policy in pipeline.policies:
            policy.act = lambda call: pause.wait(0.01)
        vanish(pipeline, 2, 4)
        pipeline.saturate()
        pipeline.rank0.run(2 * RUN)
    assert pipeline.let_go == [2]
    assert awaited


def test_one_after_the_other_may_be_lost_down_to_the_fewest(build: Build) -> None:
    with build(3, "placement.replicas_min=1") as pipeline:
        vanish(pipeline, 2, 3)
        vanish(pipeline, 3, 12)
        pipeline.saturate()
        pipeline.rank0.run(3 * RUN)
        envelopes = pipeline.envelopes()
    assert pipeline.let_go == [2, 3]
    assert {line["replica"] for line in envelopes[-RUN:]} == {1}
    assert not any(line.get("drop") for line in envelopes[-RUN:])
    assert [line["seq"] for line in envelopes] == list(range(3 * RUN))


def test_a_loss_while_nothing_is_under_way_is_borne_too(build: Build) -> None:
    with build(2, "placement.replicas_min=1") as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(RUN)
        pipeline.ranks[0].loop.drain_reason = "vanished"
        pipeline.ranks[0].back.close()
        wait_until(lambda: pipeline.executor.wait(worked=False) or pipeline.let_go == [1])
        pipeline.rank0.run(RUN)
        envelopes = pipeline.envelopes()
    assert [line["replica"] for line in envelopes[-RUN:]] == [2] * RUN
    assert not any(line.get("drop") for line in envelopes)


def test_a_lost_replica_whose_device_still_counts_holds_nobody_up(build: Build) -> None:
    """It takes the release of the waits for it back: they are released again."""
    settings = ("placement.replicas_min=1", "pipeline.d_in=5", "pipeline.d_out=5")
    with build(2, *settings, runs_ahead=False) as pipeline:
        lost, answered = pipeline.ranks[0], threading.Event()
        gone = vanish(pipeline, 1, 4, begun=13)  # it has queued two of its three
        pipeline.policies[1].act = lambda call: call < 4 or answered.wait(LIMIT_S)

        def count(rank: int) -> None:
            gone.set()
            wait_until(lambda: lost.link.sending.is_idle() and lost.b.is_idle())
            answered.set()  # behind it rank 0 waits for the lost one again

        pipeline.on_let_go.append(count)
        pipeline.saturate()
        pipeline.rank0.run(RUN)
        envelopes = pipeline.envelopes()
    dropped = [line["seq"] for line in envelopes if line.get("drop")]
    assert dropped[:3] == [8, 10, 12]
    assert len(envelopes) == RUN


def test_a_result_is_owed_by_the_replica_whose_turn_it_is_alone(build: Build) -> None:
    with build(2, "pipeline.d_in=2") as pipeline:
        asked: list[tuple[int, int]] = []
        for policy_rank in pipeline.executor.policy_ranks:
            check = policy_rank.check

            def watched(
                now: int,
                oldest: Any,
                limit_ns: int,
                rank: int = policy_rank.rank,
                check: Any = check,
            ) -> None:
                if oldest is not None:
                    asked.append((rank, oldest.index % 2 + 1))
                check(now, oldest, limit_ns)

            policy_rank.check = watched  # type: ignore[method-assign]
        pause = threading.Event()
        for policy in pipeline.policies:
            policy.act = lambda call: pause.wait(0.02)
        pipeline.saturate()
        pipeline.rank0.run(20)
    assert {rank for rank, _ in asked} == {1, 2}
    assert all(rank == owner for rank, owner in asked)


@pytest.mark.parametrize("fewest", ["2", "none"])
def test_too_few_replicas_end_the_run(build: Build, fewest: str) -> None:
    setting = f"placement.replicas_min={fewest}" if fewest != "none" else "service.duration_s=none"
    with build(2, setting) as pipeline:
        vanish(pipeline, 2, 4)
        pipeline.saturate()
        with pytest.raises(PeerLostError):
            pipeline.rank0.run(1000)
    assert pipeline.let_go == []


@pytest.mark.flaky(reruns=2)  # a busy machine stamps the stand-in devices' events late
@pytest.mark.parametrize("stamps", [False, True])
def test_every_audit_holds(build: Build, tmp_path: Path, stamps: bool) -> None:
    replicas, depth = 2, 3
    ranks = [
        {"rank": k, "link": "peer", "stamp_source": "device", "device": f"cuda:{k}", "boot_id": "b"}
        for k in range(1 + replicas)
    ]
    shape = {"world_size": 1 + replicas, "d_in": depth, "d_out": depth, "threads": "split"}
    form = {"order": "send_first", "credit": "before_window", "pacing": "saturated"}
    topology = shape | form | {"replicas": replicas, "ranks": ranks}
    about = {"schema": "ppstream.log/1", "run_id": "r", "topology": topology}
    (tmp_path / "run.json").write_text(json.dumps(about))
    settings = (f"pipeline.d_in={depth}", f"pipeline.d_out={depth}")
    pause = threading.Event()
    with build(replicas, *settings, a_s=0.002, stamps=stamps) as pipeline:
        for policy in pipeline.policies:
            policy.act = lambda call: pause.wait(0.004)
        rows = pipeline.intake.rows
        source = SyntheticSource(pipeline.config, rows[0], seed=1, start_ns=now_ns())
        pipeline.enter(source, Saturated(rows), "bring-up")
        pipeline.rank0.run(150)
        for policy_rank in pipeline.executor.policy_ranks:
            policy_rank.newest_b(0)
        pipeline.rank0.write_ledger()
        for rank in range(1 + replicas):
            pipeline.lines(rank)
    report = judge(read_run(tmp_path))
    assert {name for name, audit in report.audits.items() if audit.ok is False} == set()
    assert report.audits["outstanding"].ok
    assert np.isfinite([ns or 0.0 for ns in report.places[1].replicas_ns]).all()
    assert len([ns for ns in report.places[1].replicas_ns if ns]) == replicas
