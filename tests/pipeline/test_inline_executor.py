"""One rank whose policy takes long: robots are heard meanwhile, by real sockets."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from robot_rig import wait_until

from ppstream import ActionChunk, RobotClient
from ppstream.config.schema import ServiceConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.observe.run_folder import Run
from ppstream.pipeline.pacing import Saturated
from ppstream.pipeline.service import Service

LIMIT_S = 60.0
STREAMS = (("joints", 3), ("imu", 2))
CALLS = 3  # that a test may hold open
WAITING_MAX = 400  # more samples than a socket keeps of a robot that nobody reads
LONG_NS = 200 * NS_PER_MS  # of a first call: usual ones count as long from then on


QUEUED_NS = 10 * NS_PER_MS  # of a usual call that is waited for as a GPU is


class Device:
    """A GPU that is done when ``is_done`` is set."""

    def __init__(self, is_done: threading.Event) -> None:
        self.query = is_done.is_set
        self._is_done = is_done

    def synchronize(self) -> None:
        assert self._is_done.wait(LIMIT_S)


class HeldPolicy(NewestValues):
    """Call k lasts from ``begun[k]`` to ``may_end[k]``; ``told`` says during which calls.

    ``rank0`` is told of a call that has queued its work on a device; None: it holds the thread.
    """

    rank0: Any = None

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.begun = [threading.Event() for _ in range(CALLS)]
        self.may_end = [threading.Event() for _ in range(CALLS)]
        self.is_in_call = False
        self.told: list[tuple[str, bool]] = []

    def instruct(self, number: int, text: str) -> None:
        self.told.append((text, self.is_in_call))

    def _hold(self, call: int) -> None:
        if call < CALLS:
            self.is_in_call, device = True, Device(self.may_end[call])
            self.begun[call].set()
            if self.rank0 is None:
                device.synchronize()
            else:
                self.rank0.executor.await_device(device)
            self.is_in_call = False


class OneRank:
    """A service of one rank, on a thread of its own."""

    def __init__(self, folder: Path, *settings: str, queues: bool = False) -> None:
        folder.chmod(0o700)
        self.endpoint = f"unix://{folder}/robots"
        lasting = "actions.dt_ms=20000"  # steps of a chunk that comes late are still to come
        service = ServiceConfig(endpoint=self.endpoint)
        self._config = small_config(lasting, *settings, service=service)
        self._folder = folder
        self.policy = HeldPolicy()
        self._queues = queues
        self.pipeline: PipelineInProcess
        self.failure: BaseException | None = None
        self.is_up = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with (
                PipelineInProcess(self._config, self.policy, self._folder, inline=True) as made,
                Service(self._config, Run(self._folder), made.rank0) as service,
            ):
                self.pipeline = made
                if self._queues:
                    self.policy.rank0, made.rank0.usual_b_ns = made.rank0, QUEUED_NS
                self.is_up.set()
                service.run()
        except BaseException as error:  # noqa: BLE001 - looked at where the test ends
            self.failure = error
            self.is_up.set()

    @contextmanager
    def robot(self, name: str) -> Iterator[tuple[RobotClient, list[ActionChunk]]]:
        """It has its session, and the chunks that it will be sent."""
        chunks: list[ActionChunk] = []
        declared: dict[str, Any] = {"streams": STREAMS, "actions": ("a", "b")}
        with RobotClient(self.endpoint, robot=name, on_chunk=chunks.append, **declared) as client:
            client.connect(LIMIT_S)
            assert client.wait_ready(LIMIT_S)
            yield client, chunks

    def hear(self) -> None:
        """Returns once rank 0 has read all that was sent before: it has answered twice since."""
        for _ in range(2):
            with RobotClient(self.endpoint, robot="asks", contract_s=LIMIT_S) as asking:
                assert asking.contract is not None


@pytest.fixture(params=[False, True], ids=["holds the thread", "has queued its work"])
def one_rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OneRank]:
    run = OneRank(tmp_path, "policy.instructions=true", queues=request.param)
    run.thread.start()
    assert run.is_up.wait(LIMIT_S)
    yield run
    for event in run.policy.may_end:
        event.set()
    run.pipeline.rank0.request_stop("the test is over")
    run.thread.join(LIMIT_S)
    assert not run.thread.is_alive()
    assert run.failure is None


def push(robot: RobotClient, value: float = 0.5) -> int:
    """One sample of each stream, as soon as rank 0 has room for it; returns its stamp."""
    stamp = now_ns()
    for name, dim in reversed(STREAMS):
        wait_until(partial(robot.push, name, stamp, np.full(dim, value, np.float32)))
    return stamp


def test_samples_are_taken_while_the_policy_takes_long(one_rank: OneRank) -> None:
    """They find room, are not judged by when the policy was done, and the next window has them."""
    policy, rank0 = one_rank.policy, one_rank.pipeline.rank0
    with one_rank.robot("arm") as (arm, chunks):
        push(arm)
        for call in range(2):  # of the first nothing is known yet
            assert policy.begun[call].wait(LIMIT_S)
            turns, until_ns = rank0.mark.turns, now_ns() + LONG_NS
            newest_ns = [push(arm) for _ in range(WAITING_MAX)][-1]
            one_rank.hear()
            wait_until(lambda until_ns=until_ns: now_ns() > until_ns)
            assert rank0.mark.turns == turns, "the watchdog has to see that the policy stands"
            others = [each.name for each in threading.enumerate() if "input" in each.name]
            assert len(others) == (policy.rank0 is None), "it waits for what it has queued itself"
            policy.may_end[call].set()
        policy.may_end[2].set()
        wait_until(lambda: len(chunks) > 2)
        assert chunks[2].window_end_ns == newest_ns
        (row,) = rank0.intake.rows
        assert "stale" not in row.reference.ledger.dropped


def test_a_robot_that_gets_its_row_meanwhile_gets_no_chunk_of_the_one_before(
    one_rank: OneRank,
) -> None:
    policy = one_rank.policy
    with one_rank.robot("first") as (first, _):
        push(first, 0.25)
        assert policy.begun[0].wait(LIMIT_S)
    with one_rank.robot("second") as (second, chunks):
        push(second, 0.75)
        one_rank.hear()
        for event in policy.may_end:
            event.set()
        wait_until(lambda: chunks)
        actions = {float(a) for chunk in chunks for a in np.frombuffer(chunk.actions, np.float32)}
        assert 0.25 not in actions
        assert 0.75 in actions
    lines = [line for line in one_rank.pipeline.envelopes() if line["seq"] == 0]
    assert [line["drop"] for line in lines] == ["session_reset"]


def test_a_text_waits_until_the_policy_is_done(one_rank: OneRank) -> None:
    policy = one_rank.policy
    with one_rank.robot("arm") as (arm, _):
        push(arm)
        assert policy.begun[0].wait(LIMIT_S)
        epoch = arm.instruct("to the left")
        one_rank.hear()
        policy.may_end[0].set()
        answer = arm.wait_conditioned(epoch, LIMIT_S)
        assert answer is not None
        assert not answer.fault
    assert policy.told == [("to the left", False)]


def test_robots_are_told_of_the_end_while_the_policy_takes_long(one_rank: OneRank) -> None:
    with one_rank.robot("arm") as (arm, _):
        push(arm)
        assert one_rank.policy.begun[0].wait(LIMIT_S)
        one_rank.pipeline.rank0.request_stop("SIGTERM")
        wait_until(lambda: arm.phase == "draining")
        assert not arm.ready


@pytest.mark.parametrize("one_rank", [True], indirect=True, ids=["has queued its work"])
def test_the_thread_that_waits_for_a_device_takes_in_and_gets_ready(one_rank: OneRank) -> None:
    """Before the result is due, what it takes is gone through."""
    ready: list[bool] = []
    rank0, policy = one_rank.pipeline.rank0, one_rank.policy
    rehearse = rank0.stage_c.rehearse
    rank0.stage_c.rehearse = lambda: (ready.append(policy.is_in_call), rehearse())
    with one_rank.robot("arm") as (arm, _):
        push(arm)
        assert policy.begun[0].wait(LIMIT_S)
        newest_ns = push(arm)
        one_rank.hear()
        assert rank0.intake.rows[0].reference.newest_ns == newest_ns
        wait_until(lambda: True in ready)
        assert policy.is_in_call


def test_rank_0_knows_how_long_it_read_nothing(tmp_path: Path) -> None:
    """While a call holds the interpreter no thread of rank 0 can read."""
    held_us = 500_000
    found: list[int] = []

    def hold(call: int) -> None:
        ctypes.PyDLL(None).usleep(held_us)  # it is called with the interpreter held

    with PipelineInProcess(small_config(), NewestValues(hold), tmp_path, inline=True) as pipeline:
        rank0 = pipeline.rank0
        rank0.on_second.append(lambda _now: found.append(rank0.unread_ns))
        pipeline.saturate()
        while len(found) < 2:
            rank0.run(1)
        rank0.log.flush()
    assert found[1] >= held_us * 1000


class Breaking:
    """Samples that fail as they are taken in, once ``is_broken`` is set."""

    fds: tuple[int, ...] = ()
    exhausted = False

    def __init__(self) -> None:
        self.is_broken = threading.Event()
        self.has_broken = threading.Event()

    def drain(self, now_ns: int) -> int:
        if self.is_broken.is_set():
            self.has_broken.set()
            raise RuntimeError("no samples")
        return 0

    def next_due_ns(self) -> int | None:
        return now_ns() - NS_PER_S  # overdue: it is asked again soon, and not without a pause


@pytest.mark.parametrize("queues", [False, True])
def test_what_fails_as_samples_are_taken_in_ends_the_run(tmp_path: Path, *, queues: bool) -> None:
    source = Breaking()
    rank0: Any = None

    def fail(call: int) -> None:
        source.is_broken.set()
        device = Device(source.has_broken)
        if queues:
            rank0.executor.await_device(device)
        else:
            device.synchronize()

    with PipelineInProcess(small_config(), NewestValues(fail), tmp_path, inline=True) as pipeline:
        rank0 = pipeline.rank0
        if queues:
            rank0.usual_b_ns = QUEUED_NS
        row = pipeline.intake.rows[0]
        row.open(1)
        row.reference.append(np.array([1]), np.zeros((1, 3), np.float32), 1)
        pipeline.enter(source, Saturated(pipeline.intake.rows))
        with pytest.raises(RuntimeError, match="no samples"):
            rank0.run(1)
        rank0.log.flush()
