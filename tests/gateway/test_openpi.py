"""openpi's wire with plain WebSocket clients: answers, refusals, and what others notice of them."""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from gateway_rig import (
    LONG_LIVED,
    SHAPE,
    Gateway,
    certificate,
    emit,
    gated,
    gateway_to,
    has_ended,
    observation,
    slow_config,
)
from robot_rig import Server, make_client, serving, wait_until
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from ppstream.gateway import openpi, wires
from ppstream.wire.openpi import decode, encode
from ppstream.wire.robot_messages import ChunkReport

KEY = "0123456789abcdef0123"
OPENING = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def health(gateway: Gateway) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{gateway.port}/healthz", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def closing(robot: Any) -> ConnectionClosed:
    with pytest.raises(ConnectionClosed) as caught:
        robot.receive()
    return caught.value


def test_a_robot_hears_metadata_and_then_an_answer_to_each_observation() -> None:
    with gated(metadata={"reset_pose": [0, -1.5]}) as (rank0, gateway), gateway.robot() as robot:
        assert robot.metadata["reset_pose"] == [0, -1.5]
        assert robot.metadata["ppstream"]["actions"] == ["dx", "dy"]
        first, second = robot.ask(), robot.ask()
        assert first["actions"].shape == SHAPE
        assert first["actions"].dtype == np.float32
        assert (second["actions"] != first["actions"]).any()
        timing = second["server_timing"]
        assert {"infer_ms", "age_ms", "lease_ms", "epoch", "prev_total_ms"} == set(timing)
        assert "prev_total_ms" not in first["server_timing"]
        assert 0 < timing["age_ms"] <= timing["infer_ms"]
        wait_until(lambda: rank0.emitted == 2)


def test_all_samples_of_an_observation_have_one_stamp_and_its_values() -> None:
    with gated() as (rank0, gateway), gateway.robot() as robot:
        robot.ask(observation(0.75))
        rings = rank0.rows[0].rings
        assert rings["joints"].newest_ns == rings["imu"].newest_ns


def test_a_path_names_the_robot_and_a_new_connection_is_a_new_session() -> None:
    with gated() as (rank0, gateway):
        sessions = []
        for _ in range(2):
            with gateway.robot("/robots/arm-7") as robot:
                assert robot.ask()["actions"].shape == SHAPE
                assert rank0.rows[0].robot == "arm-7"
                sessions.append(rank0.rows[0].session)
            wait_until(lambda: not rank0.rows[0].session)
        assert len(set(sessions)) == 2


def test_a_reset_begins_a_new_episode() -> None:
    with gated() as (rank0, gateway), gateway.robot() as robot:
        robot.ask()
        assert robot.ask({"endpoint": "reset"}) == {"status": "reset successful"}
        wait_until(lambda: rank0.rows[0].session_epoch == 1)
        assert robot.ask(observation(endpoint="infer"))["actions"].shape == SHAPE


@pytest.mark.parametrize("names", [("a", "b", "c"), (1, 2, 3), (b"a", b"b", b"c")])
def test_another_session_id_is_a_new_episode_and_the_same_one_is_not(names: tuple[Any]) -> None:
    with gated() as (rank0, gateway), gateway.robot() as robot:
        for name, episodes in zip((names[0], *names), (0, 0, 1, 2), strict=True):
            robot.ask(observation(session_id=name))
            wait_until(lambda wanted=episodes: rank0.rows[0].session_epoch == wanted)
        robot.ask({"endpoint": "reset"})
        robot.ask(observation(session_id="d"))
        assert rank0.rows[0].session_epoch == 3


def test_a_session_id_behind_observations_without_one_is_a_new_episode() -> None:
    with gated(answer="newest") as (rank0, gateway), gateway.robot() as robot:
        robot.ask()
        for name, episodes in (("a", 1), (None, 1), ("a", 1), ("b", 2)):
            robot.ask(observation(session_id=name))
            assert rank0.rows[0].session_epoch == episodes


def test_a_session_id_in_bytes_is_the_text_of_them() -> None:
    with gated() as (rank0, gateway), gateway.robot() as robot:
        for name, episodes in (("a", 0), (b"a", 0), (b"\xff", 1), ("a", 2)):
            robot.ask(observation(session_id=name))
            assert rank0.rows[0].session_epoch == episodes


def test_clients_of_vllm_omni_get_bare_actions_and_errors_that_leave_the_connection() -> None:
    with gated() as (_, gateway), gateway.robot("/v1/realtime/robot/openpi") as robot:
        robot.send(observation())
        bare = bytes(robot.connection.recv(20))
        actions = decode(b"\x81\xa7actions" + bare)["actions"]
        assert (actions.dtype, actions.shape) == (np.float32, SHAPE)
        for message, said in (({"a": 1}, "it is missing"), (b"", "not a message of openpi")):
            error = robot.ask(message)
            assert error["type"] == "error"
            assert said in error["message"]
        assert robot.ask({"endpoint": "reset"}) == {"status": "reset successful"}
        assert robot.ask({"endpoint": "kill"})["type"] == "error"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"a": 1}, "state/joints: it is missing, want numbers [3]"),
        (observation(imu=None), "imu.values: it is missing"),
        (observation(**{"state/joints": np.zeros(4)}), "state/joints: got float64 [4]"),
        (observation(imu={"values": np.zeros((2, 2))}), "imu.values: got float64 [2, 2]"),
        (observation(**{"state/joints": "abc"}), "state/joints: got str"),
        ({"endpoint": "kill"}, "endpoint: got 'kill', want 'infer' or 'reset'"),
        ({"endpoint": np.zeros(2)}, "endpoint: got ndarray, want a text"),
        (b"\xc1", "not a message of openpi"),
        (b"", "not a message of openpi"),
        ("text", "got a text frame"),
    ],
)
def test_bad_input_is_told_to_its_robot_alone(message: Any, said: str) -> None:
    with gated(rows=2) as (rank0, gateway), gateway.robot() as other:
        other.ask()
        with gateway.robot() as robot:
            assert said in robot.ask(message)
            assert closing(robot).rcvd.code == 1011
        assert other.ask()["actions"].shape == SHAPE
        wait_until(lambda: [row.session != 0 for row in rank0.rows] == [True, False])


def test_an_oversized_message_ends_its_connection_alone() -> None:
    with gated(rows=2, message_mb=0.01) as (_, gateway), gateway.robot() as other:
        with gateway.robot() as robot:
            robot.send(bytes(20_000))
            assert closing(robot).rcvd.code == 1009
        assert other.ask()["actions"].shape == SHAPE


def test_a_robot_without_a_row_is_refused_with_the_reason() -> None:
    with gated() as (_, gateway), gateway.robot() as first:
        with pytest.raises(ConnectionClosed) as caught, gateway.robot():
            pass
        assert caught.value.rcvd.code == 1013
        assert "the only row is taken" in caught.value.rcvd.reason
        assert first.ask()["actions"].shape == SHAPE


@pytest.mark.parametrize("name", ["", "arm%202", "x" * 65, "arm/2", "arm2?x=1"])
def test_a_name_that_a_robot_cannot_have_is_refused_not_replaced(name: str) -> None:
    with (
        gated() as (_, gateway),
        pytest.raises(ConnectionClosed) as caught,
        gateway.robot(f"/robots/{name}"),
    ):
        pass
    closed = caught.value.rcvd
    assert closed is not None
    assert closed.code == 1013
    assert closed.reason == "a name behind /robots/ has 1 to 64 letters, digits, '-' and '_'"


def test_a_robot_that_leaves_within_a_request_gives_its_row_and_name_back() -> None:
    with gated(answers=False) as (rank0, gateway):  # nobody answers for 10 s
        with gateway.robot("/robots/arm") as robot:
            robot.send(observation())
            wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
            before = rank0.rows[0].session
        with gateway.robot("/robots/arm") as robot:
            assert rank0.rows[0].session != before
            robot.send(observation())
            wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
            emit(rank0, 0)
            assert robot.receive()["actions"].shape == SHAPE


def test_more_connections_than_rows_can_come_to_serve_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wires, "SPARE_SESSIONS", 0)
    with gated() as (_, gateway), gateway.robot() as first:
        with pytest.raises(ConnectionClosed) as caught, gateway.robot():
            pass
        assert caught.value.rcvd.reason == "too many connections"
        assert first.ask()["actions"].shape == SHAPE


def test_sockets_that_say_nothing_are_bounded_and_delay_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wires, "SPARE_SOCKETS", 4)
    with gated() as (_, gateway), gateway.robot() as robot, ExitStack() as stack:
        bound = 1 + wires.SPARE_SESSIONS + 4
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            for _ in range(bound + 10)
        ]
        wait_until(lambda: sum(map(has_ended, idle)) == 11)  # the robot has one of the places
        assert robot.ask()["actions"].shape == SHAPE
        for one in idle:
            one.close()

        def serves() -> bool:  # once it has seen them leave
            with suppress(OSError):
                return health(gateway)[0] == 200
            return False

        wait_until(serves)


def test_a_half_open_connection_gives_its_row_back() -> None:
    with gated(silence_s=0.4) as (rank0, gateway):
        address = ("127.0.0.1", gateway.port)
        with socket.create_connection(address) as silent:
            silent.sendall(OPENING)
            wait_until(lambda: rank0.sessions.statistics().opened)
            wait_until(lambda: not rank0.rows[0].session)
        with gateway.robot() as robot:
            assert robot.ask()["actions"].shape == SHAPE


def test_a_reader_that_takes_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openpi, "SEND_LIMIT_S", 0.2)
    with (
        gated(metadata={"pad": "x" * 30_000_000}) as (rank0, gateway),
        socket.create_connection(("127.0.0.1", gateway.port)) as slow,
    ):
        slow.sendall(OPENING)
        wait_until(lambda: rank0.sessions.statistics().opened)
        wait_until(lambda: not rank0.rows[0].session)


def test_no_answer_in_time_is_told_and_the_connection_stays() -> None:
    with gated(answers=False, timeout_ms=50.0) as (rank0, gateway), gateway.robot() as robot:
        assert "gateway.timeout_ms is 50" in robot.ask()
        assert "no actions came" in robot.ask()
        assert rank0.rows[0].session


def test_actions_past_their_lease_are_never_sent() -> None:
    with gated(answers=False) as (rank0, gateway), gateway.robot() as robot:
        robot.send(observation())
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        end_ns = rank0.rows[0].rings["joints"].newest_ns
        emit(rank0, 0, expires_ns=end_ns + 1)
        assert "may not be executed: expired" in robot.receive()


def test_newest_answers_at_once_with_the_chunk_in_force() -> None:
    with gated(answers=False, answer="newest") as (rank0, gateway), gateway.robot() as robot:
        robot.send(observation())
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        emit(rank0, 7)
        first = robot.receive()
        again = robot.ask()  # nothing else was emitted
        assert (again["actions"] == first["actions"]).all()
        assert again["server_timing"]["age_ms"] > first["server_timing"]["age_ms"]


def test_a_run_that_is_not_ready_is_named_by_its_phase() -> None:
    with gated(phase="warming", timeout_ms=50.0) as (rank0, gateway):
        assert health(gateway) == (503, "warming\n")
        wait_until(lambda: not rank0.rows[0].session)
        with gateway.robot() as robot:
            assert "the run is warming" in robot.ask()
            assert health(gateway) == (503, "warming\n")
            rank0.order(lambda: rank0.sessions.set_phase("ready"))
            assert robot.ask()["actions"].shape == SHAPE
            assert health(gateway) == (200, "OK\n")


def test_a_run_that_is_gone_is_told_and_found_again() -> None:
    config = slow_config(f"tcp://127.0.0.1:{free_port()}")
    with ExitStack() as stack:
        with serving(config, answers=True, **LONG_LIVED) as rank0:
            gateway = stack.enter_context(gateway_to(rank0, config, timeout_ms=300.0))
            robot = stack.enter_context(gateway.robot())
            assert robot.ask()["actions"].shape == SHAPE
        assert isinstance(robot.ask(), str)
        old = "; the run was ready when it was last heard, and cannot be reached now"
        wait_until(lambda: old in robot.ask())
        with serving(config, answers=True, **LONG_LIVED):
            wait_until(lambda: not isinstance(robot.ask(), str))


def test_a_request_whose_session_is_lost_does_not_wait_any_longer() -> None:
    config = slow_config(f"tcp://127.0.0.1:{free_port()}")
    with ExitStack() as stack:
        with serving(config, **LONG_LIVED) as rank0:
            gateway = stack.enter_context(gateway_to(rank0, config, timeout_ms=120_000.0))
            robot = stack.enter_context(gateway.robot())
            robot.send(observation())
            wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        assert robot.receive(60).endswith(": the session was lost before a chunk came; ask again")


def test_newest_is_no_chunk_of_the_run_before() -> None:
    config = slow_config(f"tcp://127.0.0.1:{free_port()}")
    with ExitStack() as stack:
        with serving(config, **LONG_LIVED) as rank0:
            gateway = stack.enter_context(gateway_to(rank0, config, answer="newest"))
            robot = stack.enter_context(gateway.robot())
            robot.send(observation())
            wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
            emit(rank0, 7)
            before = robot.receive()["actions"]
        with serving(config, answers=True, **LONG_LIVED) as rank0:
            wait_until(lambda: rank0.rows[0].session)
            after = robot.ask()["actions"]
    assert not (after == before).all()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_answer_waits_until_the_policy_follows_a_new_prompt() -> None:
    told: list[str] = []

    def teach(number: int, text: str, done: Any) -> None:
        told.append(text)
        traceback = 'Traceback (most recent call last):\n  File "policy.py"\nValueError: too long\n'
        done(number, traceback if text == "sing" else "")

    with gated(instructions=True) as (rank0, gateway), gateway.robot() as robot:
        rank0.order(lambda: rank0.sessions.requests.attach(teach, lambda *_, **__: None))
        first = robot.ask(observation(prompt="pick"))
        assert first["server_timing"]["epoch"] == 1
        assert rank0.rows[0].conditioning_epoch == 1
        assert robot.ask(observation(prompt="pick"))["server_timing"]["epoch"] == 1
        assert robot.ask(observation(prompt=b"place"))["server_timing"]["epoch"] == 2
        said = robot.ask(observation(prompt="sing"))
        assert said == "the policy cannot follow this prompt: ValueError: too long"
        assert robot.ask()["actions"].shape == SHAPE
        assert told == ["pick", "place", "sing"]


def test_a_prompt_too_long_for_the_wire_is_told_and_not_logged_as_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with gated(instructions=True) as (_, gateway), gateway.robot() as robot:
        told = "an instruction of 5000 characters, want at most 1024"
        assert told == robot.ask(observation(prompt="x" * 5000))
        assert closing(robot).rcvd.code == 1011
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_run_that_began_anew_is_told_the_prompt_before_it_answers() -> None:
    config = slow_config(f"tcp://127.0.0.1:{free_port()}", instructions=True)

    def attach(rank0: Server) -> None:
        def teach(number: int, text: str, done: Any) -> None:
            done(number, "")

        rank0.order(lambda: rank0.sessions.requests.attach(teach, lambda *_, **__: None))

    pick = observation(prompt="pick")
    with ExitStack() as stack:
        with serving(config, answers=True, **LONG_LIVED) as rank0:
            attach(rank0)
            gateway = stack.enter_context(gateway_to(rank0, config, timeout_ms=500.0))
            robot = stack.enter_context(gateway.robot())
            assert robot.ask(pick)["server_timing"]["epoch"] == 1
        with serving(config, answers=True, **LONG_LIVED) as rank0:  # whose policy cannot follow any
            answers: list[Any] = []
            wait_until(lambda: answers.append(robot.ask(pick)) or "cannot follow" in answers[-1])
            assert all(isinstance(answer, str) for answer in answers)


def test_a_run_that_began_anew_follows_the_prompt_before_it_gets_an_observation() -> None:
    config = slow_config(f"tcp://127.0.0.1:{free_port()}", instructions=True)
    late: list[Any] = []
    pick = observation(prompt="pick")
    with ExitStack() as stack:
        with serving(config, answers=True, **LONG_LIVED) as rank0:
            teach = lambda number, _, done: done(number, "")  # noqa: E731
            rank0.order(lambda: rank0.sessions.requests.attach(teach, lambda *_, **__: None))
            gateway = stack.enter_context(gateway_to(rank0, config))
            robot = stack.enter_context(gateway.robot())
            assert robot.ask(pick)["server_timing"]["epoch"] == 1
        with serving(config, answers=True, phase="warming", **LONG_LIVED) as rank0:
            wait = lambda number, _, done: late.append(lambda: done(number, ""))  # noqa: E731
            rank0.order(lambda: rank0.sessions.requests.attach(wait, lambda *_, **__: None))
            rank0.order(lambda: rank0.sessions.set_phase("ready"))
            wait_until(lambda: rank0.rows[0].session and late)

            def is_kept_waiting() -> bool:
                robot.send(pick)
                with suppress(TimeoutError):
                    robot.receive(0.3)  # it had no session yet
                    return False
                return True

            wait_until(is_kept_waiting)
            assert rank0.rows[0].rings["joints"].newest_ns < 0
            rank0.order(late[0])
            assert robot.receive()["server_timing"]["epoch"] == 2  # told again, for this request


def test_a_reply_counts_as_executed_for_reports_and_ages() -> None:
    with gated() as (rank0, gateway):
        with gateway.robot() as robot:
            robot.ask()
            robot.ask()
        wait_until(lambda: not rank0.rows[0].session)
        reports = [one for one in rank0.sessions.reports if isinstance(one, ChunkReport)]
        assert [report.executed > 0 for report in reports] == [True, True]


def test_a_prompt_that_nobody_confirms_is_not_answered() -> None:
    with (
        gated(instructions=True, timeout_ms=100.0) as (rank0, gateway),
        gateway.robot() as robot,
    ):
        rank0.order(lambda: rank0.sessions.requests.attach(lambda *_: None, lambda *_, **__: None))
        assert "does not follow the new prompt yet" in robot.ask(observation(prompt="pick"))
        assert rank0.emitted == 0


@pytest.mark.parametrize("given", ["hold still", None])
def test_a_prompt_that_is_followed_too_late_never_answers_for_another_one(
    given: str | None,
) -> None:
    """The next request is answered for its own prompt; without one, for the last that was told."""
    numbers: dict[str, int] = {}
    late: list[Any] = []

    def teach(number: int, text: str, done: Any) -> None:
        numbers[text] = number
        if text == "hold still":
            done(number, "")
        else:
            late.append(lambda: done(number, ""))

    with (
        gated(instructions=True, timeout_ms=1000.0) as (rank0, gateway),
        gateway.robot() as robot,
    ):
        rank0.order(lambda: rank0.sessions.requests.attach(teach, lambda *_, **__: None))
        assert robot.ask(observation(prompt="hold still"))["server_timing"]["epoch"] == 1
        assert "does not follow the new prompt" in robot.ask(observation(prompt="open the gripper"))
        if given is None:
            assert "does not follow the new prompt" in robot.ask(observation())
            assert rank0.emitted == 1
        told = rank0.rows[0].conditioning_epoch
        rank0.order(late[0])
        wait_until(lambda: rank0.rows[0].conditioning_epoch > told)
        answer = robot.ask(observation(prompt=given))
        assert answer["server_timing"]["epoch"] == rank0.rows[0].conditioning_epoch
        assert rank0.rows[0].instruction_id == numbers[given or "open the gripper"]


@pytest.mark.parametrize("said", [None, "Bearer " + KEY, "Api-Key " + KEY[1:], "Api-Key ü"])
def test_a_robot_without_the_key_is_refused_before_it_is_one(said: str | None) -> None:
    headers = {} if said is None else {"Authorization": said}
    with gated(api_key=KEY) as (rank0, gateway):
        with (
            pytest.raises((InvalidStatus, UnicodeEncodeError)),
            gateway.robot(additional_headers=headers),
        ):
            pass
        assert not rank0.rows[0].session
        assert health(gateway)[0] == 200
        with gateway.robot(additional_headers={"Authorization": f"Api-Key {KEY}"}) as robot:
            assert robot.ask()["actions"].shape == SHAPE


def test_a_page_in_a_browser_is_refused() -> None:
    with (
        gated() as (_, gateway),
        pytest.raises(InvalidStatus),
        gateway.robot(origin="http://localhost"),
    ):
        pass


@pytest.mark.flaky(reruns=2, only_rerun=["TimeoutError"])  # once unanswered for 10 s; not found why
def test_tls_serves_who_trusts_the_certificate(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*files)
    with gated(tls=tls) as (_, gateway):
        trusting = ssl.create_default_context(cafile=files[0])
        with gateway.robot(ssl=trusting) as robot:
            assert robot.ask()["actions"].shape == SHAPE
        with pytest.raises((ssl.SSLError, InvalidHandshake)), gateway.robot():
            pass


def test_sockets_that_begin_no_tls_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openpi, "OPEN_LIMIT_S", 600.0)  # only the bound closes any
    bound = wires.sockets_max(slow_config())
    files = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*files)
    with gated(tls=tls) as (_, gateway), ExitStack() as stack:
        address = ("127.0.0.1", gateway.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(3 * bound)]
        wait_until(lambda: sum(map(has_ended, silent)) == 2 * bound)
        assert not any(map(has_ended, silent[:bound]))
        stack.close()  # then there is room again
        trusting = ssl.create_default_context(cafile=files[0])

        def serves() -> bool:
            with suppress(OSError, InvalidHandshake), gateway.robot(ssl=trusting) as robot:
                return robot.ask()["actions"].shape == SHAPE
            return False

        wait_until(serves)


def test_two_robots_are_answered_beside_a_native_one() -> None:
    with gated(rows=3) as (rank0, gateway), make_client(rank0.sessions.endpoint) as native:
        native.connect()
        with gateway.robot() as one, gateway.robot() as other:
            for _ in range(5):
                one.send(observation(0.1))
                assert one.receive()["actions"].shape == SHAPE
                assert other.ask(observation(0.2))["actions"].shape == SHAPE
        assert native.connected


def test_the_end_of_the_gateway_is_a_goodbye() -> None:
    with ExitStack() as stack:
        with gated() as (_, gateway):
            robot = stack.enter_context(gateway.robot())
            robot.ask()
        assert closing(robot).rcvd.code == 1001


def test_garbage_before_a_handshake_costs_nobody_anything() -> None:
    with gated() as (_, gateway), gateway.robot() as robot:
        with socket.create_connection(("127.0.0.1", gateway.port)) as hostile:
            hostile.sendall(b"\x16\x03\x01" + bytes(1000) + encode({"a": 1}))
        assert robot.ask()["actions"].shape == SHAPE
