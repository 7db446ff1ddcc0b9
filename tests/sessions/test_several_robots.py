"""Several robots as rows of one batch: real sessions, rings, loops and link, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pipeline_in_process import Collector, NewestValues, PipelineInProcess, small_config
from robot_rig import make_client, wait_until

from ppstream.config.schema import PolicyConfig
from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.simulated_delay import Delay
from ppstream.core.specs import TensorSpec
from ppstream.ingest.intake import build_intake
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.decode import CopyDecoder
from ppstream.pipeline.flight import Flight, Owner
from ppstream.pipeline.pacing import OnTick
from ppstream.pipeline.stage_c import StageC
from ppstream.robot.client import RobotClient
from ppstream.sessions.server import Sessions
from ppstream.sessions.table import SILENCE_NS
from ppstream.wire.robot_messages import ActionChunk

STREAMS = (("joints", 3), ("imu", 2))
TICK_HZ = 200.0
PUSH_S = 0.003


class Instructed(NewestValues):
    """Also keeps the texts it is told, and which ids its rows named."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (*self.inputs, TensorSpec("instruction_id", (), "int64"))
        self.texts: dict[int, str] = {}
        self.followed: list[list[str]] = []
        self.told_at = 0  # calls before it

    def instruct(self, number: int, text: str) -> None:
        if text == "?":
            raise ValueError("no such word")
        self.texts[number] = text
        self.told_at = self.calls

    def __call__(self, window: Any, out: Any) -> None:
        ids = window["instruction_id"].tolist() if "instruction_id" in window else []
        self.followed.append([self.texts[number] if number else "" for number in ids])
        super().__call__(window, out)


class Robot:
    """A client that pushes its number from a thread of its own until it is told to pause."""

    def __init__(self, endpoint: str, number: int) -> None:
        self.chunks: list[ActionChunk] = []
        self.pauses = False
        self.client: RobotClient = make_client(
            endpoint,
            robot=f"robot{number}",
            streams=STREAMS,
            actions=("a", "b"),
            on_chunk=self.chunks.append,
        )
        self._value = number / 10
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._push, daemon=True)

    def start(self) -> None:
        self.client.connect(10)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(10)
        self.client.close()

    def values(self) -> set[float]:
        """All values it was ever told to execute."""
        return {
            round(float(value), 4)
            for chunk in [*self.chunks]
            for value in np.frombuffer(chunk.actions, np.float32)
        }

    def _push(self) -> None:
        while not self._stopped.wait(PUSH_S):
            if not self.pauses:
                self.client.push("joints", now_ns(), [self._value] * 3)
                self.client.push("imu", now_ns(), [self._value] * 2)


class Crew:
    """Two robots, a pipeline, and the thread that runs its rank 0."""

    def __init__(self, folder: Path, policy: NewestValues, *, instructed: bool) -> None:
        policy_config = PolicyConfig(target="nobody:asks", instructions=instructed)
        endpoint = f"service.endpoint=unix://{folder}/robots"
        self.config = small_config("batch.rows=2", endpoint, policy=policy_config)
        self.pipeline = PipelineInProcess(self.config, policy, folder)
        self.rank0 = self.pipeline.rank0
        rows = self.pipeline.intake.rows
        self.sessions = Sessions(self.config, rows)
        self.sessions.set_wake(self.rank0.waiter.wake)
        self.sessions.set_phase("ready")
        self.sessions.requests.attach(self.rank0.instruct, self.rank0.log.event)
        self.robots = [Robot(self.sessions.endpoint, number) for number in (1, 2)]
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        for robot in self.robots:
            robot.start()
        wait_until(lambda: all(len(robot.chunks) > 5 for robot in self.robots))

    def give_up(self, robot: Robot) -> None:
        """Rank 0's time runs ahead, but less than ``SILENCE_NS`` between frames of the other."""
        drain, late_ns, known = self.sessions.drain, 0, self._received()

        def drain_late(now_ns: int) -> int:
            nonlocal late_ns, known
            if (received := self._received()) > known:
                known, late_ns = received, late_ns + SILENCE_NS // 2
            return drain(now_ns + late_ns)

        robot.pauses = True
        self.sessions.drain = drain_late  # type: ignore[method-assign]
        wait_until(lambda: self.sessions.statistics().closed.get("silent"))
        self.sessions.drain = drain  # type: ignore[method-assign]
        robot.pauses = False

    def _received(self) -> int:
        return self.sessions.statistics().frames_received

    def has_received_all(self) -> bool:
        """Whether no action chunk is on its way to a robot."""
        came = sum(
            robot.client.timeline.statistics().received
            + sum(robot.client.statistics().dropped.values())
            for robot in self.robots
        )
        return came == self.sessions.statistics().chunks_sent

    def close(self) -> None:
        for robot in self.robots:
            robot.close()
        self.rank0.request_stop("test over")
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.sessions.close()
        if self._failure:
            raise self._failure[0]

    def _run(self) -> None:
        pacing = OnTick(self.pipeline.intake.rows, TICK_HZ, now_ns())
        try:
            self.rank0.enter(
                "ready",
                intake=self.pipeline.intake,
                source=self.sessions,
                pacing=pacing,
                emitter=self.sessions,
            )
            self.rank0.run()
        except BaseException as error:  # noqa: BLE001 - raised by close
            self._failure.append(error)


@contextmanager
def working(
    folder: Path, policy: NewestValues | None = None, *, instructed: bool = False
) -> Iterator[Crew]:
    crew = Crew(folder, policy or NewestValues(), instructed=instructed)
    with crew.pipeline:
        try:
            crew.start()
            yield crew
        finally:
            crew.close()


def more(robot: Robot, count: int = 10) -> None:
    """Wait until so many further chunks came."""
    before = len(robot.chunks)
    wait_until(lambda: len(robot.chunks) >= before + count)


def test_each_robot_is_answered_from_its_own_row(tmp_path: Path) -> None:
    with working(tmp_path) as crew:
        one, two = crew.robots
        more(one)
        assert one.values() == {0.1}
        assert two.values() == {0.2}


def test_a_reset_drops_its_own_row_and_resets_that_row_of_the_policy(tmp_path: Path) -> None:
    policy = NewestValues()
    with working(tmp_path, policy) as crew:
        one, two = crew.robots
        policy.resets.clear()
        one.client.reset()
        more(one)
        epochs = [chunk.session_epoch for chunk in one.chunks]
        assert epochs == sorted(epochs)
        assert epochs[-1] == 1
        assert {chunk.session_epoch for chunk in two.chunks} == {0}
        assert policy.resets == [[True, False]]
        dropped = crew.rank0.stage_c.rows_dropped
        assert set(dropped) <= {"session_reset", "episode"}


def test_a_result_on_its_way_when_a_robot_resets_reaches_the_others_alone(tmp_path: Path) -> None:
    inside, may_go = threading.Event(), threading.Event()

    def hold(call: int) -> None:
        if call == 50:
            inside.set()
            assert may_go.wait(60)

    with working(tmp_path, NewestValues(hold)) as crew:
        one, two = crew.robots
        assert inside.wait(60)
        wait_until(lambda: crew.rank0.finished == 50 and crew.has_received_all())
        one.client.reset()
        wait_until(lambda: crew.pipeline.intake.rows[0].session_epoch == 1)
        received, before = len(two.chunks), len(one.chunks)
        may_go.set()
        wait_until(lambda: len(two.chunks) > received)
        more(one)
        assert {chunk.session_epoch for chunk in one.chunks[before:]} == {1}
        assert one.client.statistics().dropped == {}  # none was sent: rank 0 itself held it back


def test_a_robot_that_falls_silent_is_not_told_the_same_again_and_delays_nobody(
    tmp_path: Path,
) -> None:
    with working(tmp_path) as crew:
        one, two = crew.robots
        one.pauses = True
        wait_until(lambda: crew.rank0.stage_c.emitted > 0)
        more(two)  # whatever of it was on its way is there
        silent = len(one.chunks)
        more(two, 20)
        assert len(one.chunks) == silent
        ends = [chunk.window_end_ns for chunk in one.chunks]
        assert len(set(ends)) == len(ends)
        one.pauses = False
        more(one)


def test_a_row_whose_robot_reset_meanwhile_is_dropped_and_the_others_are_emitted() -> None:
    config = small_config("batch.rows=2")
    intake = build_intake(config)
    for session, row in enumerate(intake.rows, 1):
        row.open(session)
    stage_c, collector = StageC(config, CopyDecoder(), Delay(0)), Collector()
    stage_c.intake = intake
    now = now_ns()
    flight = Flight(0, 0, 0, EnvelopeRecord(), received_ns=now)
    flight.owners = [Owner(True, (session, 0), now, now + 1, now) for session in (1, 2)]
    intake.rows[0].new_episode()
    rows = stage_c.decode(flight, {"actions": np.zeros((2, 4, 2), np.float32)})
    assert stage_c.emit(flight, rows, collector) is None
    assert len(collector.chunks) == 1
    assert stage_c.rows_dropped == {"session_reset": 1}


def test_the_lease_of_each_row_is_its_own() -> None:
    config = small_config("batch.rows=2")
    intake = build_intake(config)
    for session, row in enumerate(intake.rows, 1):
        row.open(session)
    stage_c, collector = StageC(config, CopyDecoder(), Delay(0)), Collector()
    stage_c.intake = intake
    now, lease_ns = now_ns(), round(config.actions.lease_ms * NS_PER_MS)
    flight = Flight(0, 0, 0, EnvelopeRecord(), received_ns=now, emit_ns=now)
    flight.owners = [
        Owner(True, (1, 0), now, now + lease_ns, now - lease_ns),
        Owner(True, (2, 0), now, now + lease_ns, now),
    ]
    rows = stage_c.decode(flight, {"actions": np.zeros((2, 4, 2), np.float32)})
    assert stage_c.emit(flight, rows, collector) is None
    assert len(collector.chunks) == 1
    assert stage_c.rows_dropped == {"expired": 1}
    # the same windows again, in another robot's envelope: one is answered, one still expired
    rows = stage_c.decode(flight, {"actions": np.zeros((2, 4, 2), np.float32)})
    assert rows == [0]
    assert stage_c.emit(flight, rows, collector) == "expired"


def test_a_window_that_ends_where_one_of_the_old_episode_did_has_no_answer_yet() -> None:
    """As of a simulator whose clock begins anew with each episode."""
    config = small_config("batch.rows=2")
    intake = build_intake(config)
    row = intake.rows[0]
    row.open(1)
    stage_c = StageC(config, CopyDecoder(), Delay(0))
    stage_c.intake = intake
    answered = []
    for episode in (0, 0, 1):
        if episode > row.session_epoch:
            row.new_episode()
        flight = Flight(0, 0, 0, EnvelopeRecord(), received_ns=1, emit_ns=1)
        flight.owners = [Owner(True, (1, episode), 7, 8), Owner(False, (0, 0), 0, 0)]
        rows = stage_c.decode(flight, {"actions": np.zeros((2, 4, 2), np.float32)})
        answered.append(stage_c.emit(flight, rows, Collector()))
    assert answered == [None, "answered", None]


def test_an_instruction_reaches_its_row_and_the_log_and_outlives_a_reconnect(
    tmp_path: Path,
) -> None:
    policy = Instructed()
    with working(tmp_path, policy, instructed=True) as crew:
        one, _two = crew.robots
        assert one.client.instruct("pick up the cube") == 1
        wait_until(lambda: one.client.conditioned is not None)
        wait_until(lambda: policy.followed[-1] == ["pick up the cube", ""])
        assert one.client.instruct("?") == 2
        wait_until(lambda: one.client.conditioned.conditioning_epoch == 2)  # type: ignore
        assert "no such word" in one.client.conditioned.fault  # type: ignore
        more(one)
        assert policy.followed[-1] == ["pick up the cube", ""]
        one.client.instruct("put it down")
        wait_until(lambda: policy.followed[-1] == ["put it down", ""])
        before = one.client.statistics().session
        crew.give_up(one)
        wait_until(lambda: one.client.statistics().session not in (0, before))
        wait_until(lambda: policy.followed[-1] == ["put it down", ""])
        wait_until(lambda: crew.sessions.statistics().instructions == 3)
    events = [line for line in crew.pipeline.lines() if line.get("name") == "instruction"]
    assert [(e["conditioning_epoch"], e["text"], bool(e["fault"])) for e in events] == [
        (1, "pick up the cube", False),
        (2, "?", True),
        (3, "put it down", False),
        (3, "put it down", False),
    ]
    assert policy.texts == {1: "pick up the cube", 3: "put it down"}


def test_a_text_reaches_the_policy_though_envelopes_never_let_up(tmp_path: Path) -> None:
    known: list[int] = []

    def act(call: int) -> None:
        time.sleep(0.002)  # rank 0 is faster: the next envelope always waits
        if call == 20:
            pipeline.rank0.instruct(1, "pick", lambda number, fault: known.append(number))

    policy = Instructed()
    policy.inputs, policy.act = policy.inputs[:1], act
    policy_config = PolicyConfig(target="nobody:asks", instructions=True)
    config = small_config(policy=policy_config)
    with PipelineInProcess(config, policy, tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(80)
        assert policy.texts == {1: "pick"}
        assert known == [1]
        assert policy.told_at < 40  # not only when nothing else was to be done
