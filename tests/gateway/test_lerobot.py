"""LeRobot's wire by raw bytes: answers, refusals, and what others notice of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gateway_rig import LONG_LIVED, LONG_NS, SHAPE, Gateway, emit, gated, gateway_to, slow_config
from lerobot_rig import (
    BEGIN,
    FEATURES,
    MAP,
    Robot,
    data_field,
    instance,
    instructed,
    observed,
    piece,
    pieces,
    refused,
    robot_at,
    rows_of,
    timed_actions,
    values,
)
from robot_rig import Server, serving, wait_until

from ppstream.config.load import read
from ppstream.core.clock import NS_PER_S
from ppstream.gateway import lerobot, lerobot_robot
from ppstream.gateway.session import GatewaySession
from ppstream.wire.lerobot import OBSERVATION, decode_instructions

ESTABLISHED = "01"  # as /proc/net/tcp has it
WIRE = {"wire": "lerobot", "map": MAP}


@contextmanager
def lerobot_gated(**changes: Any) -> Iterator[tuple[Server, Gateway]]:
    fields = WIRE | changes
    if changes.get("instructions"):
        fields["map"] = MAP | {"prompt": "task"}
    with gated(**fields) as found:
        yield found


def robot_of(gateway: Gateway, *, shares: bool = False) -> Any:
    return robot_at(gateway.server.address, shares=shares)


def robot_in(gateway: Gateway) -> Any:
    """The only robot that the gateway knows."""
    (robot,) = gateway.server.robots.values()
    return robot


def leave(robot: Robot, gateway: Gateway) -> None:
    """Close the channel while a call for actions waits, as a client does."""
    waiting = robot.actions_call.future(b"")
    wait_until(lambda: robot_in(gateway).connection.calls)
    robot.channel.close()
    assert waiting.done()


def error_of(call: Any, *args: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **more)
    return refused(caught.value)


def test_each_observation_gets_actions_with_its_steps_and_times() -> None:
    with lerobot_gated() as (rank0, gateway), robot_of(gateway) as robot:
        robot.start()
        for step in (0, 7):
            found = robot.ask(timestep=step, timestamp=1.7e9 + step)
            assert [one.timestep for one in found] == [step, step + 1, step + 2, step + 3]
            wanted = [1.7e9 + step + k * 0.01 for k in range(4)]
            assert [one.timestamp for one in found] == pytest.approx(wanted, abs=1e-6)
            assert rows_of(found).shape == SHAPE
        wait_until(lambda: rank0.emitted == 2)  # counted behind the send
        rings = rank0.rows[0].rings
        assert rings["joints"].newest_ns == rings["imu"].newest_ns
        assert rank0.rows[0].robot.startswith("lerobot-1-127-0-0-1-")


def test_no_more_actions_come_than_were_asked_for() -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start(actions_per_chunk=3)
        assert len(robot.ask()) == 3


def test_a_robot_that_is_a_new_one_gets_no_more_actions_than_its_client_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lerobot_robot, "ASKS_WITHIN_S", 0.1)
    with lerobot_gated() as (_, gateway):
        with robot_of(gateway) as robot:
            robot.start(actions_per_chunk=3)
            robot.ask()
            wait_until(lambda: not gateway.server.robots)  # silent
            assert len(robot.ask(timestep=9)) == 3
        wait_until(lambda: not gateway.server.robots)
        with robot_of(gateway) as robot:  # as behind a tunnel that was restarted
            assert len(robot.ask(timestep=12)) == 3
            assert len(robot.ask(timestep=13)) == 3
            robot.start(actions_per_chunk=4)
            assert len(robot.ask()) == 4
    told = [one.getMessage() for one in caplog.records if "connected anew" in one.getMessage()]
    assert len(told) == 1
    assert "gets 3 of 4 actions" in told[0]


def test_a_client_that_never_said_how_many_actions_it_takes_gets_all() -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        assert len(robot.ask()) == 4


def test_an_observation_in_many_pieces_is_one() -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        more = {"observation": values() | {"note": "x" * 50_000}}
        robot.send(most=1000, **more)
        assert robot.actions()


def test_without_new_actions_a_reply_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "WAIT_S", 0.05)
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        assert robot.actions() == []  # of a peer that nobody knows
        robot.start()
        assert robot.actions() == []
        robot.ask()
        assert robot.actions() == []  # each once


def test_a_call_for_actions_that_comes_before_its_robot_gets_them_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a client that connects anew, also where its first observation is refused."""
    monkeypatch.setattr(lerobot, "WAIT_S", 60.0)
    with lerobot_gated() as (rank0, gateway), robot_of(gateway) as robot:
        with robot_of(gateway) as other:
            other.start()
            waiting = robot.actions_call.future(b"")
            assert error_of(robot.send)[0] == "RESOURCE_EXHAUSTED"
            leave(other, gateway)
        wait_until(lambda: not rank0.rows[0].session)
        robot.send(timestep=3)
        assert timed_actions(waiting.result(timeout=20))[0].timestep == 3


def test_only_the_newest_of_several_answers_is_handed_over() -> None:
    with lerobot_gated(answers=False) as (rank0, gateway), robot_of(gateway) as robot:
        robot.start()
        joints = rank0.rows[0].rings["joints"]
        stamps = [0]
        for step in range(3):
            robot.send(timestep=step)
            wait_until(lambda: joints.newest_ns > stamps[-1])
            stamps.append(joints.newest_ns)
        for seq, stamp_ns in enumerate(stamps[1:3]):
            emit(rank0, seq, end_ns=stamp_ns, expires_ns=stamp_ns + LONG_NS)
        client = robot_in(gateway).session.client
        wait_until(lambda: client.statistics().timeline.received == 2)
        assert robot.actions()[0].timestep == 1
        emit(rank0, 2)
        assert robot.actions()[0].timestep == 2


def test_actions_past_their_lease_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "WAIT_S", 0.2)
    with lerobot_gated(answers=False) as (rank0, gateway), robot_of(gateway) as robot:
        robot.start()
        robot.send()
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        end_ns = rank0.rows[0].rings["joints"].newest_ns
        emit(rank0, 0, expires_ns=end_ns + 1)
        assert robot.actions() == []
        emit(rank0, 1)
        assert robot.actions()


CAMERA = {"dtype": "image", "shape": (8, 6, 3), "names": ["height", "width", "channels"]}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"lerobot_features": {}},
            [f"{key}: the robot has no such motor" for keys in MAP.values() for key in keys],
        ),
        (
            {"lerobot_features": FEATURES | {"observation.images.front": CAMERA}},
            ["'front': the robot sends it, no stream wants it"],
        ),
        ({"actions_per_chunk": 5}, ["actions_per_chunk: got 5, want 4 at most"]),
        ({"actions_per_chunk": 0}, ["a RemotePolicyConfig that is none"]),
        ({"lerobot_features": np.zeros(2)}, ["a RemotePolicyConfig that is none: an array"]),
        ({"lerobot_features": {"observation.state": 3}}, ["a RemotePolicyConfig that is none"]),
    ],
)
def test_a_client_whose_contract_differs_is_told_each_difference(
    changes: dict[str, Any], lines: list[str]
) -> None:
    with lerobot_gated() as (rank0, gateway), robot_of(gateway) as robot:
        code, said = error_of(robot.start, **changes)
        assert code == "INVALID_ARGUMENT"
        assert len(said.splitlines()) == len(lines)
        assert all(map(str.startswith, said.splitlines(), lines))
        wait_until(lambda: not rank0.rows[0].session)
        robot.start()  # what fits is served, on the same channel


SO101 = str(Path(__file__).parents[1] / "support" / "so101.toml")


@pytest.mark.parametrize(
    ("cameras", "setting", "lines"),
    [
        ({"front": [8, 6, 3]}, "name=a", []),
        ({"front": [3, 8, 6]}, "name=a", []),
        (
            {"front": [3, 8, 6]},
            "gateway.0.map.front={key='front', layout='hwc'}",
            ["front: got frames [3, 8, 6], stream front wants [8, 6, 3]"],
        ),
        (
            {"front": [480, 640, 3]},
            "name=a",
            ["front: got frames [480, 640, 3], stream front wants [8, 6, 3] or [3, 8, 6]"],
        ),
        (
            {"top\nall is well": [8, 6, 3]},
            "name=a",
            [
                "front: the robot has no such camera, stream front wants it",
                "'top\\nall is well': the robot sends it, no stream wants it",
            ],
        ),
        ({}, "gateway.0.map.front={key='front', optional=true}", []),
    ],
)
def test_cameras_of_a_contract_have_the_streams_names_and_sizes(
    cameras: dict[str, list[int]], setting: str, lines: list[str]
) -> None:
    config = read(SO101, [setting])
    motors = [
        *("shoulder_pan.pos", "shoulder_lift.pos", "elbow_flex.pos"),
        *("wrist_flex.pos", "wrist_roll.pos", "gripper.pos"),
    ]
    features = {"observation.state": {"dtype": "float32", "shape": [6], "names": motors}}
    for name, shape in cameras.items():
        features[f"observation.images.{name}"] = {"dtype": "image", "shape": shape, "names": None}
    message = data_field(1, instructed(lerobot_features=features))
    wanted = decode_instructions(message)
    assert lerobot.differences(config, config.gateway[0], wanted) == lines


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_a_program_is_refused_and_logged_with_its_global(
    protocol: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "ppstream")
    attack = pickle.dumps(Attack(), protocol)
    with lerobot_gated(rows=2) as (_, gateway), robot_of(gateway) as other:
        other.start()
        for call in (Robot.instruct, Robot.send):
            with robot_of(gateway) as robot:
                code, said = error_of(call, robot, attack)
                assert code == "INVALID_ARGUMENT"
                assert "the global 'posix.system' is not taken" in said
        assert other.ask()
    assert list(tmp_path.iterdir()) == []
    told = [one.getMessage() for one in caplog.records if "posix.system" in one.getMessage()]
    assert len(told) == 2
    assert not any(one.exc_info for one in caplog.records)


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (observed(values(j2_pos=None)), "j2.pos is missing, want a number each"),
        (observed(values(roll="left")), "roll, pitch: got roll str, want a number each"),
        (observed(values(roll=np.zeros(2))), "roll, pitch: got roll float64 [2]"),
        (observed(values(j1_pos=float("nan"))), "got j1.pos nan"),
        (observed(values(j1_pos=1e300)), "numbers that no float32 holds"),
        (observed({"a": 1}), "got the keys 'a'"),
        (observed([1]), "a TimedObservation that is none"),
        (observed(np.zeros(2)), "a TimedObservation that is none: an array in the place of a map"),
        (instance(OBSERVATION, {}), "missing required field"),
        (pickle.dumps(values()), "got a dict, want a lerobot"),
        (b"junk", "not a pickle of plain data"),
    ],
)
def test_a_bad_observation_is_told_to_its_robot_which_goes_on(pickled: bytes, said: str) -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        code, details = error_of(robot.send, pickled)
        assert code == "INVALID_ARGUMENT"
        assert said in details
        assert robot.ask()


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [piece(BEGIN, b"x")],
        [piece(0, b"x")],
        [b"\xff" * 30],
        [piece(BEGIN, bytes(6000)), piece(2, bytes(6000)), piece(3, bytes(6000))],
        [piece(3, bytes(5 << 20))],
    ],
)
def test_pieces_that_make_no_observation_are_refused(messages: list[bytes]) -> None:
    with lerobot_gated(message_mb=0.01) as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        code, _ = error_of(robot.observations_call, iter(messages), timeout=20)
        assert code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
        assert robot.ask()


def test_an_observation_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "STREAM_LIMIT_S", 0.2)
    held = threading.Event()

    def slowly() -> Iterator[bytes]:
        yield piece(BEGIN, b"x")
        held.wait(20)

    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        try:
            code, said = error_of(robot.observations_call, slowly(), timeout=20)
        finally:
            held.set()
        assert (code, said) == (
            "FAILED_PRECONDITION",
            "an observation that takes longer than 0.2 s",
        )
        assert robot.ask()


def test_a_second_observation_of_a_robot_does_not_come_beside_the_first() -> None:
    held = threading.Event()

    def slowly() -> Iterator[bytes]:
        yield piece(BEGIN, b"x")
        held.wait(20)

    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        first = robot.observations_call.future(slowly(), timeout=20)
        try:
            found: list[Any] = []

            def refuses() -> bool:
                try:
                    robot.send()
                except grpc.RpcError as error:
                    found.append(refused(error))
                return bool(found)

            wait_until(refuses)
        finally:
            held.set()
            first.cancel()
        assert found == [
            ("RESOURCE_EXHAUSTED", "an observation of this robot is being read already")
        ]


def test_an_observation_whose_call_was_cancelled_is_taken_in_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, held = threading.Event(), threading.Event()
    observe = GatewaySession.observe

    def slowly(session: GatewaySession, *of: Any) -> None:
        entered.set()
        assert held.wait(20)
        observe(session, *of)

    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        monkeypatch.setattr(GatewaySession, "observe", slowly)
        first = robot.observations_call.future(iter(pieces(observed())), timeout=20)
        assert entered.wait(20)
        first.cancel()
        wait_until(lambda: not robot_in(gateway).connection.calls)
        try:
            with pytest.raises(grpc.RpcError) as caught:
                robot.send()
            assert refused(caught.value) == (
                "RESOURCE_EXHAUSTED",
                "an observation of this robot is being read already",
            )
        finally:
            held.set()

        def is_taken() -> bool:
            with suppress(grpc.RpcError):
                robot.send()
                return True
            return False

        wait_until(is_taken)


def test_unknown_methods_and_services_are_refused() -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        for name in ("/transport.AsyncInference/Kill", "/transport.LearnerService/Ready"):
            assert error_of(robot.channel.unary_unary(name), b"")[0] == "UNIMPLEMENTED"


def test_junk_on_the_socket_costs_nobody_anything() -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for sent in (b"GET / HTTP/1.1\r\n\r\n", bytes(5000), preface + b"\xff" * 99):
            with socket.create_connection(("127.0.0.1", gateway.port)) as hostile:
                hostile.sendall(sent)
        assert robot.ask()


def test_a_client_that_closes_its_channel_gives_its_row_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lerobot_robot, "ASKS_WITHIN_S", 1000.0)
    with lerobot_gated() as (rank0, gateway):
        for _ in range(2):
            with robot_of(gateway) as robot:
                robot.start()
                robot.ask()
                leave(robot, gateway)
            wait_until(lambda: not rank0.rows[0].session)


def test_a_robot_that_calls_no_more_gives_its_row_back() -> None:
    with lerobot_gated(silence_s=0.4) as (rank0, gateway), robot_of(gateway) as robot:
        robot.start()
        robot.ask()
        wait_until(lambda: not rank0.rows[0].session)
        assert robot.ask()  # it is a robot anew, without being started again


def test_a_client_that_asks_no_more_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_robot, "ASKS_WITHIN_S", 0.3)
    with lerobot_gated() as (rank0, gateway), robot_of(gateway) as robot:
        robot.start()
        robot.ask()
        wait_until(lambda: not rank0.rows[0].session)


def test_a_client_that_closes_its_channel_between_two_calls_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC tells nobody; one that is only slow stays."""
    monkeypatch.setattr(lerobot_robot, "ASKS_WITHIN_S", 1000.0)
    with lerobot_gated(rows=2) as (rank0, gateway), robot_of(gateway) as slow:
        slow.start()
        slow.ask()
        with robot_of(gateway) as robot:
            robot.start()
            robot.ask()
        wait_until(lambda: not rank0.rows[1].session, seconds=20)
        time.sleep(lerobot.SWEEP_S + lerobot_robot.QUIET_S)
        assert rank0.rows[0].session


def connected_to(port: int) -> int:
    """How many connections the system holds open at a port of ours."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(row[3] == ESTABLISHED and int(row[1][-4:], 16) == port for row in rows)


FROZEN = """
import sys
sys.path[:0] = sys.argv[2:]
from lerobot_rig import Robot
robot = Robot(sys.argv[1])
robot.start()
waiting = robot.actions_call.future(b"")
print("asked", flush=True)
waiting.result()
"""


def test_a_half_open_connection_gives_its_row_back() -> None:
    with lerobot_gated(silence_s=2.0) as (rank0, gateway):
        words = [sys.executable, "-c", FROZEN, gateway.server.address, *sys.path]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"asked\n"
                wait_until(lambda: rank0.rows[0].session)
                assert connected_to(gateway.port) == 1
                process.send_signal(signal.SIGSTOP)  # its kernel still takes what is sent
                wait_until(lambda: not rank0.rows[0].session, seconds=30)
                wait_until(lambda: not connected_to(gateway.port), seconds=30)
            finally:
                process.kill()


def test_a_robot_without_a_row_is_refused_with_the_reason() -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as first, robot_of(gateway) as second:
        first.start()
        code, said = error_of(second.start)
        assert code == "RESOURCE_EXHAUSTED"
        assert "the only row is taken" in said
        assert first.ask()


def test_more_robots_than_rows_can_come_to_serve_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lerobot, "SPARE_SESSIONS", 0)
    with lerobot_gated() as (_, gateway), robot_of(gateway) as first, robot_of(gateway) as second:
        first.start()
        assert error_of(second.start) == ("RESOURCE_EXHAUSTED", "too many connections")
        assert first.ask()


def test_ready_on_the_same_channel_begins_a_new_episode() -> None:
    with lerobot_gated() as (rank0, gateway), robot_of(gateway) as robot:
        robot.start()
        robot.ask()
        session = rank0.rows[0].session
        robot.start()
        wait_until(lambda: rank0.rows[0].session_epoch == 1)
        assert rank0.rows[0].session == session
        assert robot.ask()


def test_a_run_that_is_not_ready_is_named_by_its_phase() -> None:
    with (
        lerobot_gated(phase="warming", timeout_ms=50.0) as (rank0, gateway),
        robot_of(gateway) as robot,
    ):
        said = "the run is warming; start the client once it is ready"
        assert error_of(robot.start) == ("FAILED_PRECONDITION", said)
        wait_until(lambda: not rank0.rows[0].session)
        rank0.order(lambda: rank0.sessions.set_phase("ready"))
        robot.start()
        assert robot.ask()


def test_a_run_that_is_gone_is_told_and_found_again() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        config = slow_config(f"tcp://127.0.0.1:{probe.getsockname()[1]}")
    with ExitStack() as stack:
        with serving(config, answers=True, **LONG_LIVED) as rank0:
            gateway = stack.enter_context(gateway_to(rank0, config, timeout_ms=300.0, **WIRE))
            robot = stack.enter_context(robot_of(gateway))
            robot.start()
            assert robot.ask()
        codes: list[str] = []

        def is_told() -> bool:
            try:
                robot.send()
            except grpc.RpcError as error:
                codes.append(refused(error)[0])
            return bool(codes)

        wait_until(is_told)
        assert set(codes) == {"FAILED_PRECONDITION"}
        with serving(config, answers=True, **LONG_LIVED):

            def is_answered() -> bool:
                try:
                    robot.send(timestep=9)
                except grpc.RpcError:
                    return False
                return bool(robot.actions())

            wait_until(is_answered)


def test_a_task_is_what_the_policy_follows() -> None:
    told: list[str] = []

    def teach(number: int, text: str, done: Any) -> None:
        told.append(text)
        done(number, "too long" if text == "sing" else "")

    with lerobot_gated(instructions=True) as (rank0, gateway), robot_of(gateway) as robot:
        rank0.order(lambda: rank0.sessions.requests.attach(teach, lambda *_, **__: None))
        robot.start()
        assert robot.ask()
        assert robot.ask(observation=values(task="place"))
        assert rank0.rows[0].conditioning_epoch == 2
        code, said = error_of(robot.send, observed(values(task="sing")))
        assert code == "FAILED_PRECONDITION"
        assert "cannot follow this prompt: too long" in said
        assert told == ["pick", "place", "sing"]


def test_actions_of_the_task_before_are_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "WAIT_S", 0.2)
    with (
        lerobot_gated(instructions=True, answers=False) as (rank0, gateway),
        robot_of(gateway) as robot,
    ):
        done = lambda number, _, done: done(number, "")  # noqa: E731
        rank0.order(lambda: rank0.sessions.requests.attach(done, lambda *_, **__: None))
        robot.start()
        robot.send()
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        before_ns = rank0.rows[0].rings["joints"].newest_ns
        robot.send(observation=values(task="place"), timestep=5)
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > before_ns)
        emit(rank0, 0, end_ns=before_ns, expires_ns=before_ns + LONG_NS)
        assert robot.actions() == []
        emit(rank0, 1)
        assert robot.actions()[0].timestep == 5


@pytest.mark.parametrize(("fps", "is_told"), [(100, False), (110, False), (200, True)])
def test_a_client_that_executes_faster_than_the_actions_are_made_for_is_told_once(
    fps: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        for step in range(0, 400, 20):
            robot.ask(timestep=step, timestamp=1.7e9 + step / fps)
    told = [one.getMessage() for one in caplog.records if "actions/s" in one.getMessage()]
    assert len(told) == is_told
    assert all("200.0 actions/s, and they are made for 100.0: start" in one for one in told)


def test_two_robots_are_answered_with_their_own() -> None:
    with (
        lerobot_gated(rows=2) as (rank0, gateway),
        robot_of(gateway) as one,
        robot_of(gateway) as other,
    ):
        one.start()
        other.start()
        for step in range(5):
            assert one.ask(timestep=step)[0].timestep == step
            assert other.ask(timestep=100 + step)[0].timestep == 100 + step
        assert all(row.session for row in rank0.rows)


OWN_CONNECTION = "('grpc.use_local_subchannel_pool', 1), or a process of its own"


@contextmanager
def sharing(gateway: Gateway) -> Iterator[tuple[Robot, Robot]]:
    """Two clients of one process, as gRPC connects them; the first has started."""
    with robot_of(gateway, shares=True) as one, robot_of(gateway, shares=True) as other:
        one.start()
        yield one, other
        assert len(gateway.server.robots) <= 1, "they do not share"


def is_told_of_two(call: Any, *args: Any, **more: Any) -> bool:
    code, said = error_of(call, *args, **more)
    return code == "FAILED_PRECONDITION" and OWN_CONNECTION in said


def test_a_client_on_the_connection_of_another_is_refused_at_its_start() -> None:
    with lerobot_gated(rows=2) as (_, gateway), sharing(gateway) as (one, other):
        assert is_told_of_two(other.start)  # one has called nothing since
        one.ask()
        waiting = one.actions_call.future(b"")
        wait_until(lambda: robot_in(gateway).connection.calls)
        starting = other.ready_call.future(b"")
        assert is_told_of_two(other.start)  # a Ready is pending
        one.send(timestep=3)
        assert timed_actions(waiting.result())[0].timestep == 3
        assert is_told_of_two(starting.result)
        assert one.ask(timestep=4)[0].timestep == 4


def test_two_clients_that_ask_for_actions_on_one_connection_get_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lerobot_robot, "SHARED_S", 1.0)
    monkeypatch.setattr(lerobot, "WAIT_S", 0.8)
    with lerobot_gated() as (rank0, gateway), sharing(gateway) as (one, other):
        first = one.actions_call.future(b"")
        wait_until(lambda: robot_in(gateway).connection.calls)
        second = other.actions_call.future(b"")
        time.sleep(0.1)  # both wait, and nobody has told them apart
        with suppress(grpc.RpcError):
            other.send(timestep=100)
        assert is_told_of_two(first.result)
        assert is_told_of_two(second.result)
        assert is_told_of_two(one.send)
        assert is_told_of_two(other.start)
        assert gateway.server.robots == {}
        wait_until(lambda: not rank0.rows[0].session)

        def is_served_again() -> bool:
            with suppress(grpc.RpcError):
                return bool(one.ask(timestep=7)[0].timestep == 7)
            return False

        wait_until(is_served_again)  # the other has gone


def test_two_clients_of_a_robot_that_nobody_knows_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lerobot, "WAIT_S", 0.8)
    with (
        lerobot_gated() as (_, gateway),
        robot_of(gateway, shares=True) as one,
        robot_of(gateway, shares=True) as other,
    ):
        calls = [robot.actions_call.future(b"") for robot in (one, other)]
        assert sum(is_told_of_two(call.result) for call in calls if call.exception()) >= 1
        assert is_told_of_two(one.send)


def test_a_step_of_another_clients_queue_is_not_taken() -> None:
    with lerobot_gated() as (_, gateway), sharing(gateway) as (one, other):
        one.ask(timestep=500)
        one.ask(timestep=497)  # of a chunk that came late
        found = error_of(other.send, observed(timestep=3))
        assert "timestep 3 comes after 497, without Ready: two clients share" in found[1]
        assert is_told_of_two(one.send, timestep=501)


def test_a_client_that_goes_on_behind_the_start_of_another_is_not_answered_for_it() -> None:
    with lerobot_gated() as (_, gateway), sharing(gateway) as (one, other):
        one.ask(timestep=500)
        other.start()  # one is between two calls
        other.ask(timestep=0)
        assert is_told_of_two(one.send, timestep=501)


def test_two_clients_in_turn_whose_clocks_differ_are_told_apart() -> None:
    """As those of two hosts behind one proxy; no two of their calls are beside each other."""
    with lerobot_gated() as (_, gateway), sharing(gateway) as (one, other):
        one.ask(timestep=1, timestamp=1.7e9)
        other.ask(timestep=0, timestamp=1.7e9 - 0.3)
        one.ask(timestep=2, timestamp=1.7e9 + 0.1)
        found = error_of(other.send, observed(timestep=1, timestamp=1.7e9 - 0.2))
        assert found[0] == "FAILED_PRECONDITION"
        assert "time stamps go back again, by 0.3 s: two clients share" in found[1]
        assert is_told_of_two(one.send, timestep=3)


def test_a_clients_clock_may_be_set_back() -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        for step, second in enumerate((9, 10, 3, 4, 5)):
            assert robot.ask(timestep=step, timestamp=1.7e9 + second)


def test_a_call_that_its_client_cancelled_keeps_no_client_from_its_actions() -> None:
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot:
        robot.start()
        for step in range(20):
            with pytest.raises(grpc.RpcError):
                robot.actions_call(b"", timeout=0.02)
            robot.send(timestep=step)
            assert timed_actions(robot.actions_call(b""))[0].timestep == step
        with pytest.raises(grpc.RpcError):
            robot.actions_call(b"", timeout=0.05)
        robot.start()
        assert robot.ask()


@pytest.mark.parametrize("turns", range(6))
def test_a_call_that_is_cancelled_just_as_actions_come_ends(turns: int) -> None:
    """Else it would be taken for that of a second client on the connection."""

    async def cancelled() -> bool:
        robot = lerobot_robot.ServedRobot("arm", lerobot_robot.Connection())
        waiting = asyncio.create_task(robot.wait(20 * NS_PER_S))
        await asyncio.sleep(0)
        robot.arrived.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        is_pending = waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled() == is_pending

    assert asyncio.run(cancelled())


def test_ready_waits_for_the_end_of_the_calls_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lerobot, "WAIT_S", 0.5)
    with lerobot_gated() as (rank0, gateway), robot_of(gateway) as robot:
        robot.start()
        robot.ask(timestep=500)
        session = rank0.rows[0].session
        waiting = robot.actions_call.future(b"")
        wait_until(lambda: robot_in(gateway).connection.calls)
        robot.start()
        assert timed_actions(waiting.result()) == []
        assert rank0.rows[0].session == session
        assert robot.ask(timestep=0)[0].timestep == 0


def test_what_is_kept_of_connections_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_robot, "ASKS_WITHIN_S", 0.1)
    kinds = (lerobot_robot.Connection, lerobot_robot.ServedRobot)

    def kept() -> int:
        gc.collect()
        return sum(type(one) in kinds for one in gc.get_objects())

    before = kept()
    with lerobot_gated(silence_s=0.4) as (_, gateway):
        for _ in range(4):
            with robot_of(gateway) as robot:
                robot.start()
                robot.ask()
        wait_until(lambda: kept() - before <= 4)  # a stranger, and the last that were looked at


def test_replies_count_as_executed_for_reports_and_ages() -> None:
    with lerobot_gated() as (rank0, gateway):
        with robot_of(gateway) as robot:
            robot.start()
            robot.ask()
            leave(robot, gateway)
        wait_until(lambda: not rank0.rows[0].session)
        (report,) = [one for one in rank0.sessions.reports if hasattr(one, "executed")]
        assert report.executed > 0


def test_connections_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "SPARE_CONNECTIONS", 4)
    with lerobot_gated() as (_, gateway), robot_of(gateway) as robot, ExitStack() as stack:
        robot.start()
        bound = 1 + lerobot.SPARE_SESSIONS + 4
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            for _ in range(bound + 10)
        ]
        wait_until(lambda: sum(map(has_ended, idle)) >= 11)
        assert robot.ask()


def has_ended(connection: socket.socket) -> bool:
    try:
        while found := connection.recv(4096, socket.MSG_DONTWAIT):
            assert found
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_an_empty_reply_has_no_bytes() -> None:
    assert timed_actions(b"") == []
