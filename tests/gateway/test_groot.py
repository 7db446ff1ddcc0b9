"""GR00T's wire with plain ZeroMQ clients: whatever they send, each of them gets an answer."""

from __future__ import annotations

import random
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import zmq
from gateway_rig import LONG_LIVED, SHAPE, Gateway, emit, gated, gateway_to, slow_config
from robot_rig import Server, make_client, serving, wait_until

from ppstream.gateway import groot
from ppstream.gateway.groot_socket import PARTS_MAX
from ppstream.gateway.wires import sockets_max
from ppstream.wire.groot import decode_reply, encode
from ppstream.wire.robot_messages import ChunkReport

TOKEN = "0123456789abcdef0123"
GROOT: dict[str, Any] = {
    "wire": "groot",
    "map": {"joints": "state.arm", "imu": "state.imu"},
    "action_keys": {"x": (0, 1), "y": (1, 2)},
}
PROMPTED = {**GROOT, "map": GROOT["map"] | {"prompt": "annotation.human.task_description"}}
HORIZON = SHAPE[0]


def older(value: float = 0.5, **changes: Any) -> dict[str, Any]:
    """Data of ``get_action`` as N1.5 has them; ``changes`` replace or, with None, take away."""
    found = {"state.arm": np.full((1, 3), value), "state.imu": np.full((1, 2), value), **changes}
    return {key: one for key, one in found.items() if one is not None}


def newer(value: float = 0.5, **more: Any) -> dict[str, Any]:
    """Data of ``get_action`` as N1.6 has them."""
    state = {"arm": np.full((1, 1, 3), value, "f4"), "imu": np.full((1, 1, 2), value, "f4")}
    return {"observation": {"video": {}, "state": state, **more}, "options": None}


def asked(data: Any = None, **more: Any) -> dict[str, Any]:
    return {"endpoint": "get_action", "data": older() if data is None else data, **more}


class Client:
    """Asks as GR00T's clients do, but does not wait for ever."""

    def __init__(
        self,
        gateway: Gateway,
        kind: int = zmq.REQ,
        port: int | None = None,
        **options: int | bytes,
    ) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.set(zmq.RCVTIMEO, 20_000)
        for name, value in options.items():
            self.socket.set(getattr(zmq, name), value)
        self.socket.connect(f"tcp://127.0.0.1:{gateway.port if port is None else port}")

    def ask(self, message: Any = None) -> Any:
        self.send(message)
        return self.receive()

    def send(self, message: Any = None) -> None:
        message = asked() if message is None else message
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    def receive(self) -> Any:
        return decode_reply(self.socket.recv_multipart()[-1])

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def client(
    gateway: Gateway, kind: int = zmq.REQ, port: int | None = None, **options: int | bytes
) -> Iterator[Client]:
    robot = Client(gateway, kind, port, **options)
    try:
        yield robot
    finally:
        robot.close()


def shapes(reply: Any) -> dict[str, tuple[int, ...]]:
    assert all(one.dtype == np.float32 for one in reply.values())
    return {key: one.shape for key, one in reply.items()}


def refusal(reply: Any) -> str:
    assert list(reply) == ["error"], reply
    return str(reply["error"])


def test_both_generations_get_actions_in_their_own_form() -> None:
    with gated(**GROOT) as (rank0, gateway), client(gateway) as robot:
        assert robot.ask({"endpoint": "ping"}) == {"status": "ok", "message": "Server is running"}
        assert shapes(robot.ask()) == {"action.x": (HORIZON, 1), "action.y": (HORIZON, 1)}
        actions, info = robot.ask(asked(newer()))
        assert shapes(actions) == {"x": (1, HORIZON, 1), "y": (1, HORIZON, 1)}
        assert np.allclose(actions["y"], -np.arange(4).reshape(1, 4, 1), atol=2e-3)
        assert {"infer_ms", "age_ms", "lease_ms", "epoch"} == set(info)
        assert 0 < info["age_ms"] <= info["infer_ms"]
        flat = {"observation": {key: one[None] for key, one in older().items()}}
        actions, _ = robot.ask(asked(flat))
        assert shapes(actions) == {"action.x": (1, HORIZON, 1), "action.y": (1, HORIZON, 1)}
        batched = robot.ask(asked({key: one[None] for key, one in older().items()}))
        assert shapes(batched) == {"action.x": (1, HORIZON, 1), "action.y": (1, HORIZON, 1)}
        wait_until(lambda: rank0.emitted == 4)


def test_all_samples_of_a_request_have_one_stamp_and_the_values_of_its_newest_step() -> None:
    with gated(**GROOT) as (rank0, gateway), client(gateway) as robot:
        robot.ask(asked(older(**{"state.arm": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])})))
        rings = rank0.rows[0].rings
        assert rings["joints"].newest_ns == rings["imu"].newest_ns
        assert rings["joints"].bank.values[0].max() == 6.0


def test_the_modalities_are_those_of_the_map_in_the_form_of_the_generation() -> None:
    with gated(instructions=True, **PROMPTED) as (_, gateway), client(gateway) as robot:
        found = robot.ask({"endpoint": "get_modality_config"})
        keys = {key: one["as_json"]["modality_keys"] for key, one in found.items()}
        assert keys == {
            "state": ["arm", "imu"],
            "action": ["x", "y"],
            "language": ["annotation.human.task_description"],
        }
        assert found["action"]["as_json"]["delta_indices"] == list(range(HORIZON))
    with gated(generation="n1.5", **GROOT) as (_, gateway), client(gateway) as robot:
        found = robot.ask({"endpoint": "get_modality_config"})
        assert '"state.arm"' in found["state"]["as_json"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (asked(older(**{"state.arm": None})), "state.arm: it is missing, want numbers [3]"),
        (asked(older(**{"state.arm": np.zeros((1, 4))})), "state.arm: got float64 [4]"),
        (asked(older(**{"state.arm": np.zeros((2, 1, 3))})), "want B = 1: one robot a connection"),
        (asked(older(**{"state.arm": np.zeros((0, 3))})), "want a step at least"),
        (asked(older(**{"state.arm": np.full((1, 3), np.nan)})), "not finite"),
        (asked(newer(state={})), "state.arm: it is missing"),
        (asked(newer(**{"state.arm": np.ones((1, 1, 3))})), "state.arm: it is there twice"),
        (asked(newer(language={"state.arm": "go"})), "state.arm: it is there twice"),
        (asked({"observation": 3}), "data: got int, want the map of an observation"),
        (asked(7), "data: got int"),
        (asked({1: 2}), "keys that are no text"),
        ({}, "data: got NoneType"),
        ({"endpoint": "kill"}, "kill is not offered here"),
        ({"endpoint": "x" * 200}, "Unknown endpoint: " + 64 * "x"),
        ({"endpoint": 3}, "endpoint: got int, want a text"),
        ({"endpoint": np.zeros(2)}, "endpoint: got ndarray, want a text"),
        (b"", "not a message of GR00T"),
        (b"\xc1", "not a message of GR00T"),
        (b"\x80\x04\x95", "nothing is unpickled here"),
        (bytes(5000), "want at most gateway.message_mb = 0.004"),
    ],
)
def test_bad_input_is_told_and_the_client_goes_on(message: Any, said: str) -> None:
    with gated(message_mb=0.004, **GROOT) as (_, gateway), client(gateway) as robot:
        assert said in refusal(robot.ask(message))
        assert "action.x" in robot.ask()


def test_a_pickled_request_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    with gated(**GROOT) as (_, gateway), client(gateway) as robot:
        for _ in range(3):
            robot.ask(b"\x80\x04\x95")
    told = [record.message for record in caplog.records if "pickled" in record.message]
    assert len(told) == 1
    assert told[0].startswith("127.0.0.1 is refused")


def test_a_message_far_too_large_ends_its_connection_alone() -> None:
    with (
        gated(message_mb=0.004, **GROOT) as (_, gateway),
        client(gateway) as robot,
        client(gateway, zmq.DEALER) as hostile,
    ):
        ends = hostile.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        hostile.send(bytes(9000))
        assert ends.poll(10_000)
        assert "action.x" in robot.ask()
        hostile.socket.disable_monitor()


def test_junk_in_any_number_of_frames_is_answered_behind_its_own_envelope() -> None:
    junk = random.Random(7)
    with gated(**GROOT) as (_, gateway), client(gateway) as good:
        with client(gateway, zmq.DEALER) as hostile:
            for number in range(200):
                frames = [junk.randbytes(junk.randrange(40)) for _ in range(1 + number % 12)]
                hostile.socket.send_multipart(frames)
                answer = hostile.socket.recv_multipart()
                sizes = [len(frame) for frame in frames[:-1]]
                is_own = sizes in ([], [0], [4, 0])  # else others may stand behind its connection
                said = "not a message of GR00T" if is_own else "came through a proxy"
                assert said in refusal(decode_reply(answer[-1]))
                assert answer[:-1] == (frames[:-1] if len(frames) < 9 else [b""])
        assert "action.x" in good.ask()


GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\5READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"


def raw_client(gateway: Gateway) -> socket.socket:
    """A connection that has said who it is, in the bytes of ZeroMQ's protocol."""
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=20)
    with suppress(OSError):  # it may be closed already
        connection.sendall(GREETING + bytes([4, len(READY)]) + READY)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Reads what has come; True: the gateway has ended it."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_message_of_too_many_parts_ends_its_connection_alone() -> None:
    with (
        gated(**GROOT) as (_, gateway),
        client(gateway) as robot,
        client(gateway, zmq.DEALER) as fitting,
        closing(raw_client(gateway)) as hostile,
    ):
        fitting.socket.send_multipart([b""] * (PARTS_MAX - 1))  # ZeroMQ adds the address
        assert "came through a proxy" in refusal(fitting.receive())
        hostile.sendall(b"\1\0" * 300_000 + b"\0\0")
        assert "action.x" in robot.ask()
        wait_until(lambda: is_closed(hostile))
        ends = fitting.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        fitting.socket.send_multipart([b""] * PARTS_MAX)
        assert ends.poll(10_000)
        fitting.socket.disable_monitor()
        assert "action.x" in robot.ask()


def test_the_newest_of_too_many_connections_are_closed() -> None:
    bound = sockets_max(slow_config())
    with gated(**GROOT) as (_, gateway), client(gateway) as robot, ExitStack() as stack:
        assert "action.x" in robot.ask()
        others = [stack.enter_context(closing(raw_client(gateway))) for _ in range(bound + 30)]
        kept = bound - 1  # beside the robot's
        wait_until(lambda: all(map(is_closed, others[kept:])))
        assert not any(map(is_closed, others[:kept]))
        assert "action.x" in robot.ask()
        stack.close()  # then there is room again
        with client(gateway) as late:
            assert late.ask({"endpoint": "ping"})["status"] == "ok"


def test_a_request_in_work_is_the_only_one_of_its_client() -> None:
    with (
        gated(answers=False, **GROOT) as (rank0, gateway),
        client(gateway, zmq.DEALER) as robot,
    ):
        for _ in range(2):
            robot.socket.send_multipart([b"", encode(asked())])
        assert "is not answered yet" in refusal(robot.receive())
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        emit(rank0, 0)
        assert "action.x" in robot.receive()


def test_the_number_that_a_client_puts_before_its_request_comes_back() -> None:
    with gated(**GROOT) as (_, gateway), client(gateway, REQ_CORRELATE=1) as robot:
        assert "action.x" in robot.ask()


@contextmanager
def proxy_to(gateway: Gateway) -> Iterator[int]:
    """The port of ZeroMQ's own proxy in front of a gateway."""
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back.connect(f"tcp://127.0.0.1:{gateway.port}")

    def relay() -> None:
        with suppress(zmq.ContextTerminated):
            zmq.proxy(front, back)
        for end in (front, back):
            end.close(linger=0)

    relaying = threading.Thread(target=relay)
    relaying.start()
    try:
        yield port
    finally:
        context.term()
        relaying.join()


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_clients_behind_a_proxy_are_refused(kind: int, caplog: pytest.LogCaptureFixture) -> None:
    """The gateway sees one connection of theirs, and would mix their observations."""
    with gated(rows=2, **GROOT) as (rank0, gateway), proxy_to(gateway) as port:
        with client(gateway, kind, port) as one, client(gateway, kind, port) as other:
            for robot in (one, other, one):
                assert "connect to the gateway itself" in refusal(robot.ask())
        assert not any(row.session for row in rank0.rows)
    assert sum("through a proxy" in record.message for record in caplog.records) == 1


def test_who_reads_nothing_loses_its_row_and_delays_nobody() -> None:
    many = {f"{'k' * 1_000_000}{index}": (index, index + 1) for index in range(2)}
    with (
        gated(rows=2, **{**GROOT, "action_keys": many}) as (rank0, gateway),
        client(gateway, zmq.DEALER, RCVHWM=1) as slow,
        client(gateway) as robot,
    ):
        slow.socket.send_multipart([b"", encode(asked())])
        wait_until(lambda: rank0.sessions.statistics().opened == 1)
        for _ in range(40):
            slow.socket.send_multipart([b"", encode({"endpoint": "get_modality_config"})])
            assert len(robot.ask()) == 2
        wait_until(lambda: [bool(row.session) for row in rank0.rows] == [False, True])


def test_a_client_without_a_row_is_told_the_reason_and_gets_one_when_it_is_free() -> None:
    with gated(**GROOT) as (rank0, gateway), client(gateway) as second:
        with client(gateway) as first:
            assert "action.x" in first.ask()
            assert "the only row is taken" in refusal(second.ask())
        wait_until(lambda: not rank0.rows[0].session)
        assert "action.x" in second.ask()


def test_a_client_that_starts_again_gets_its_row_at_once() -> None:
    with gated(**GROOT) as (rank0, gateway):
        sessions = []
        for _ in range(3):
            with client(gateway) as robot:
                assert "action.x" in robot.ask()
                sessions.append(rank0.rows[0].session)
        assert len(set(sessions)) == 3


def test_a_client_that_gives_up_a_request_gets_its_row_again_with_a_new_socket() -> None:
    with gated(answers=False, **GROOT) as (rank0, gateway):  # nobody answers for 10 s
        joints = rank0.rows[0].rings["joints"]
        with client(gateway) as robot:
            robot.send()
            wait_until(lambda: joints.newest_ns > 0)
            before_ns, before = joints.newest_ns, rank0.rows[0].session
        with client(gateway) as robot:
            robot.send()
            wait_until(lambda: joints.newest_ns > before_ns, seconds=5)
            assert rank0.rows[0].session != before
            emit(rank0, 0)
            assert "action.x" in robot.receive()
    assert sum(row.errors.get("gone", 0) for row in gateway.requests.drain()) == 1


def test_more_clients_than_rows_can_come_to_serve_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groot, "SPARE_CLIENTS", 0)
    with (
        gated(answers=False, **GROOT) as (rank0, gateway),
        client(gateway) as first,
        client(gateway) as second,
    ):
        first.send()
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        assert "too many clients ask at once" in refusal(second.ask())
        emit(rank0, 0)
        assert "action.x" in first.receive()
        assert refusal(second.ask()) == "too many clients"


def test_silence_ends_a_session_and_the_next_request_begins_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groot, "SWEEP_S", 0.02)
    with gated(silence_s=2.0, **GROOT) as (rank0, gateway), client(gateway) as robot:
        robot.ask()
        before = rank0.rows[0].session
        wait_until(lambda: not rank0.rows[0].session)
        assert "action.x" in robot.ask()
        assert rank0.rows[0].session not in (0, before)


@pytest.mark.parametrize("chosen", [b"arm-7", b"x" * 5, b"\1" * 255])
def test_a_client_that_chose_its_address_is_refused_whatever_it_asks(chosen: bytes) -> None:
    """Another one could come with the same address, and would get its actions."""
    with (
        gated(rows=2, **GROOT) as (rank0, gateway),
        client(gateway, IDENTITY=chosen) as named,
        client(gateway) as other,
    ):
        for endpoint in ("ping", "get_action", "reset"):
            assert "leave that unset" in refusal(named.ask({"endpoint": endpoint, "data": older()}))
        with client(gateway, IDENTITY=chosen) as same:
            assert "leave that unset" in refusal(same.ask())
        assert "action.x" in other.ask()
        assert re.fullmatch(r"groot-1-127\.0\.0\.1-\d+", rank0.rows[0].robot)
        assert not rank0.rows[1].robot


def test_two_gateways_of_one_run_serve_clients_of_one_host() -> None:
    """Both count their robots from 1, and rank 0 takes each name once."""
    config = slow_config(rows=2)
    with (
        serving(config, answers=True, phase="ready", **LONG_LIVED) as rank0,
        gateway_to(rank0, config, **GROOT) as one,
        gateway_to(rank0, config, **GROOT) as other,
        client(one) as first,
        client(other) as second,
    ):
        for robot in (first, second):
            assert "action.x" in robot.ask()
        assert len({row.robot for row in rank0.rows}) == 2


def test_a_program_that_starts_again_is_answered_for_what_it_asked_itself() -> None:
    with gated(answers=False, **GROOT) as (rank0, gateway):
        with client(gateway, zmq.DEALER) as before:
            before.send()
            wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
            session = rank0.rows[0].session
        with client(gateway, zmq.DEALER) as after:
            wait_until(lambda: rank0.rows[0].session == 0)
            after.send()
            wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
            assert rank0.rows[0].session not in (0, session)
            emit(rank0, 0)
            assert "action.x" in after.receive()


def test_a_message_that_breaks_its_reader_breaks_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with gated(**GROOT) as (_, gateway), client(gateway, zmq.DEALER) as robot:
        last = zmq.Frame.get
        failing = [ValueError("broken")]

        def get(frame: zmq.Frame, option: Any) -> Any:
            if failing:
                raise failing.pop()
            return last(frame, option)

        monkeypatch.setattr(zmq.Frame, "get", get)
        for _ in range(2):
            robot.socket.send_multipart([b"", encode({"endpoint": "ping"})])
        assert robot.receive()["status"] == "ok"
    assert [record.message for record in caplog.records if record.exc_info] == [
        "a message could not be read"
    ]


def test_a_connection_whose_descriptor_is_a_socket_of_this_host_by_now_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a session's to rank 0 may be, when a client has left before its request is read."""
    last = zmq.Frame.get
    ours, theirs = socket.socketpair()

    def get(frame: zmq.Frame, option: Any) -> Any:
        return ours.fileno() if option == zmq.SRCFD else last(frame, option)

    monkeypatch.setattr(zmq.Frame, "get", get)
    with ours, theirs, gated(**GROOT) as (_, gateway), client(gateway, zmq.DEALER) as robot:
        robot.socket.send_multipart([b""] * (PARTS_MAX + 1))
        robot.socket.send_multipart([b"", encode(asked())])
        assert "action.x" in robot.receive()
        assert not is_closed(theirs)
    assert [record.message for record in caplog.records if record.exc_info] == []


def test_a_reset_begins_a_new_episode() -> None:
    with gated(**GROOT) as (rank0, gateway), client(gateway) as robot:
        robot.ask()
        assert robot.ask({"endpoint": "reset", "data": {"options": None}}) == {}
        wait_until(lambda: rank0.rows[0].session_epoch == 1)
        assert "action.x" in robot.ask()


@pytest.mark.parametrize("said", [{}, {"api_token": TOKEN[1:]}, {"api_token": 3}])
def test_a_client_without_the_token_is_refused_everything(said: dict[str, Any]) -> None:
    with gated(api_key=TOKEN, **GROOT) as (rank0, gateway), client(gateway) as robot:
        for endpoint in ("ping", "get_action", "get_modality_config", "reset", "kill"):
            found = refusal(robot.ask({"endpoint": endpoint, "data": older(), **said}))
            assert found == "Unauthorized: Invalid API token"
        assert not rank0.rows[0].session
        assert "action.x" in robot.ask(asked(api_token=TOKEN))


def test_no_answer_in_time_is_told_and_the_session_stays() -> None:
    with (
        gated(answers=False, timeout_ms=50.0, **GROOT) as (rank0, gateway),
        client(gateway) as robot,
    ):
        assert "gateway.timeout_ms is 50" in refusal(robot.ask())
        assert "no actions came" in refusal(robot.ask())
        assert rank0.rows[0].session


def test_actions_past_their_lease_are_never_sent() -> None:
    with gated(answers=False, **GROOT) as (rank0, gateway), client(gateway) as robot:
        robot.send()
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        end_ns = rank0.rows[0].rings["joints"].newest_ns
        emit(rank0, 0, expires_ns=end_ns + 1)
        assert "may not be executed: expired" in refusal(robot.receive())


def test_a_run_that_is_not_ready_is_named_by_its_phase() -> None:
    with (
        gated(phase="warming", timeout_ms=50.0, **GROOT) as (_, gateway),
        client(gateway) as robot,
    ):
        assert "the run is warming" in refusal(robot.ask())


def test_the_end_of_the_run_amid_a_request_is_told_and_a_new_one_is_found() -> None:
    config = slow_config("tcp://127.0.0.1:0")
    with ExitStack() as stack:
        with serving(config, **LONG_LIVED) as rank0:
            endpoint = rank0.sessions.endpoint
            gateway = stack.enter_context(gateway_to(rank0, config, timeout_ms=300.0, **GROOT))
            robot = stack.enter_context(client(gateway))
            robot.send()
            wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        assert "the run is" in refusal(robot.receive())
        assert refusal(robot.ask())
        with serving(slow_config(endpoint), answers=True, **LONG_LIVED):
            wait_until(lambda: "action.x" in robot.ask())


def test_the_end_of_the_gateway_is_told_to_whoever_waits() -> None:
    with ExitStack() as stack:
        with gated(answers=False, rows=2, **GROOT) as (rank0, gateway):
            robots = [stack.enter_context(client(gateway)) for _ in range(2)]
            for robot in robots:
                robot.send()
            wait_until(lambda: all(row.rings["joints"].newest_ns > 0 for row in rank0.rows))
        for robot in robots:
            assert refusal(robot.receive()) == "the gateway ends"


def test_the_end_of_the_gateway_is_told_to_a_robot_that_asks_when_its_row_was_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groot, "END_LIMIT_S", 15.0)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        with gated(**GROOT) as (rank0, gateway):
            robot = stack.enter_context(client(gateway))
            assert "action.x" in robot.ask()

            def ask_late() -> str:
                wait_until(lambda: rank0.rows[0].session == 0)
                return refusal(robot.ask())

            told = pool.submit(ask_late)
        assert told.result() == "the gateway ends"


@pytest.mark.parametrize(
    "given",
    [
        newer(language={"task": [["place"]]}),
        newer(language=[["place"]]),
        older(**{"annotation.human.action.task_description": ["place"]}),
    ],
)
def test_a_prompt_at_another_key_is_refused_not_left_out(given: dict[str, Any]) -> None:
    with gated(instructions=True, **PROMPTED) as (_, gateway), client(gateway) as robot:
        said = refusal(robot.ask(asked(given)))
        assert said.startswith("annotation.human.task_description: it is missing, want the prompt")
        assert "got language at '" in said


def test_a_prompt_in_either_form_is_followed_before_the_answer() -> None:
    told: list[str] = []

    def teach(number: int, text: str, done: Any) -> None:
        told.append(text)
        done(number, "too long" if text == "sing" else "")

    key = "annotation.human.task_description"
    with gated(instructions=True, **PROMPTED) as (rank0, gateway), client(gateway) as robot:
        rank0.order(lambda: rank0.sessions.requests.attach(teach, lambda *_, **__: None))
        assert "action.x" in robot.ask(asked(older(**{key: ["pick"]})))
        _, info = robot.ask(asked(newer(language={key: [["place"]]})))
        assert info["epoch"] == 2
        assert "cannot follow this prompt" in refusal(robot.ask(asked(older(**{key: "sing"}))))
        assert "got list, want text" in refusal(robot.ask(asked(older(**{key: ["a", "b"]}))))
        assert told == ["pick", "place", "sing"]


def test_a_reply_counts_as_executed_and_a_native_robot_is_served_beside() -> None:
    with gated(rows=2, **GROOT) as (rank0, gateway), make_client(rank0.sessions.endpoint) as native:
        native.connect()
        with client(gateway) as robot:
            robot.ask()
            robot.ask()
        wait_until(lambda: sum(row.session != 0 for row in rank0.rows) == 1)
        wait_until(lambda: executed(rank0) == 2)
        assert native.connected


def executed(rank0: Server) -> int:
    reports = [one for one in rank0.sessions.reports if isinstance(one, ChunkReport)]
    return sum(report.executed > 0 for report in reports)
