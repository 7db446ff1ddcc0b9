"""A policy behind another server's wire: an openpi server of thirty lines, and our own gateways."""

from __future__ import annotations

import socket
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from documents import BOOKS, FENCE
from gateway_rig import SHAPE, gated
from policy_server import PolicyServer, echo, policy_server
from ranks import Ranks
from robot_rig import wait_until
from torch import Tensor
from websockets.server import ServerProtocol

from ppstream import ConfigError, RobotClient
from ppstream.config.load import read
from ppstream.core.errors import ExitCode
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import build_parts, policy_problems
from ppstream.policy.parts import specs_of
from ppstream.wire import groot
from ppstream.wire.openpi import encode
from ppstream_stages.remote import RemotePolicy, ServerError, build

CPU = torch.device("cpu")
DIM, HORIZON = 8, 10
LIMIT_MS = 20_000.0
CAMERA = {"name": "wrist", "height": 4, "width": 6}
OPTIONS: dict[str, Any] = {
    "wire": "openpi",
    "numbers": {"observation/joint_position": [0, 7], "gripper": [7, 8]},
    "cameras": {"images.wrist": CAMERA},
    "steps": 2,
    "dim": DIM,
    "horizon": HORIZON,
    "action_dim": DIM,
    "timeout_ms": LIMIT_MS,
    "prompt": "prompt",
    "text": "wait",
}
GROOT: dict[str, Any] = {
    "wire": "groot",
    "numbers": {"state.arm": [0, 3], "state.imu": [3, 5]},
    "steps": 1,
    "dim": 5,
    "horizon": SHAPE[0],
    "action_dim": SHAPE[1],
    "timeout_ms": LIMIT_MS,
    "action_keys": {"x": [0, 1], "y": [1, 2]},
}


def window_of(rows: int, *, steps: int = 2, dim: int = DIM) -> dict[str, Tensor]:
    """Row r's newest values are r, r + 1/16, ...; its frames are of one shade, its text is r."""
    newest = torch.arange(rows)[:, None] + torch.arange(dim) / 16
    shades = torch.arange(rows).view(rows, 1, 1, 1, 1) / 255
    return {
        "state.values": torch.stack([torch.zeros(rows, dim)] * (steps - 1) + [newest], 1),
        "wrist.frames": shades.expand(rows, 1, 3, 4, 6).contiguous(),
        "instruction_id": torch.arange(rows),
        "present": torch.ones(rows, dtype=torch.bool),
    }


def called(policy: RemotePolicy, window: dict[str, Tensor]) -> Tensor:
    rows = len(window["present"])
    out = {"actions": torch.full((rows, *policy.outputs[0].shape), float("nan"))}
    policy(window, out)
    return out["actions"]


@contextmanager
def built(**options: Any) -> Iterator[RemotePolicy]:
    with closing(build(options, CPU)) as policy:
        yield policy


def remote(server: PolicyServer, **changes: Any) -> AbstractContextManager[RemotePolicy]:
    return built(**{**OPTIONS, "url": server.url, **changes})


def reset(policy: RemotePolicy, *rows: bool) -> None:
    policy.reset(torch.tensor(rows))


def test_each_row_is_a_connection_and_gets_the_actions_of_its_own_request() -> None:
    with policy_server() as server, remote(server, instructions=True) as policy:
        policy.instruct(1, "pick")
        window = window_of(2)
        for _ in range(3):
            actions = called(policy, window)
            wanted = window["state.values"][:, -1:].expand(2, HORIZON, DIM)
            assert torch.equal(actions, wanted)
        assert server.connections == 2
        first, second = sorted(server.seen[:2], key=lambda one: float(one["gripper"][0]))
        assert (first["prompt"], second["prompt"]) == ("wait", "pick")
        pixels = second["images"]["wrist"]
        assert (pixels.dtype, pixels.shape, pixels.max()) == (np.uint8, (4, 6, 3), 1)


def test_a_row_without_a_robot_asks_nothing() -> None:
    with policy_server() as server:
        window = window_of(3)
        window["present"][1] = False
        with remote(server) as policy:
            actions = called(policy, window)
        assert server.connections == 2
        assert not actions[1].any()


def test_a_new_episode_of_a_row_is_a_new_connection_of_that_row_alone() -> None:
    with policy_server() as server, remote(server) as policy:
        reset(policy, True, True)
        called(policy, window_of(2))
        reset(policy, True, False)
        called(policy, window_of(2))
        assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("CUDA error", "the server says: CUDA error (row 0)"),
        ({"actions": np.zeros((9, DIM))}, "got actions float64 [9, 8], want [10, 8] or more"),
        ({"actions": np.zeros((10, 7))}, "got actions float64 [10, 7], want [10, 8]"),
        ({"actions": [0.0]}, "actions: got list, want an array of numbers"),
        ({"other": 1}, "actions: got NoneType"),
        ({"type": "error", "message": "no GPU"}, "the server says: no GPU (row 0)"),
    ],
)
def test_an_answer_without_actions_is_a_fault_that_says_why(answer: Any, said: str) -> None:
    answers = [answer]
    with (
        policy_server(lambda seen: answers.pop() if answers else echo(seen)) as server,
        remote(server) as policy,
    ):
        with pytest.raises(ServerError) as caught:
            called(policy, window_of(1))
        assert said in str(caught.value)
        assert server.url in str(caught.value)
        assert called(policy, window_of(1)).isfinite().all()
        assert server.connections == 2


def test_a_late_answer_is_a_fault_and_never_that_of_a_later_request() -> None:
    hold = threading.Event()
    values = iter((1.0, 2.0))

    def slowly(_: dict[str, Any]) -> dict[str, Any]:
        value = next(values)
        if value == 1.0:
            hold.wait(20)
        return {"actions": np.full((12, DIM), value)}

    with policy_server(slowly) as server, remote(server, timeout_ms=1500.0) as policy:
        with pytest.raises(ServerError, match=r"no answer within policy.options.timeout_ms"):
            called(policy, window_of(1))
        hold.set()
        assert (called(policy, window_of(1)) == 2.0).all()


def test_an_answer_that_nobody_asked_for_is_a_fault_and_ends_its_connection() -> None:
    """Else every later answer of that connection would be that of the request before."""
    with policy_server(spare=[2]) as server, remote(server) as policy:
        window = window_of(1)
        said = ""

        def answered() -> bool:
            nonlocal said
            window["state.values"] += 1
            try:
                return torch.equal(called(policy, window)[:, 0], window["state.values"][:, -1])
            except ServerError as error:
                said = str(error)
                return False

        assert answered()
        wait_until(lambda: not answered() and said)
        assert "the server sent an answer that nobody asked for (row 0)" in said
        assert all(answered() for _ in range(3))
        assert server.connections == 2


def test_a_connection_that_the_server_closed_meanwhile_is_opened_again_without_a_fault() -> None:
    with policy_server() as server, remote(server) as policy:
        called(policy, window_of(1))
        server.hang_up()
        assert called(policy, window_of(1)).isfinite().all()
        assert server.connections == 2


class DeafServer:
    """A server of openpi that opens each connection, tells its metadata and then reads nothing."""

    def __init__(self, stack: ExitStack) -> None:
        self.connections: list[socket.socket] = []
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}"
        thread = threading.Thread(target=self._accept)
        stack.callback(thread.join)
        stack.callback(self._listener.shutdown, socket.SHUT_RDWR)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection = self._stack.enter_context(self._listener.accept()[0])
                self.connections.append(connection)
                request = b""
                while not request.endswith(b"\r\n\r\n"):
                    request += connection.recv(4096)
                protocol = ServerProtocol()
                protocol.receive_data(request)
                protocol.send_response(protocol.accept(protocol.events_received()[0]))
                protocol.send_binary(encode({}))
                connection.sendall(b"".join(protocol.data_to_send()))


def test_a_request_that_the_server_does_not_read_is_a_fault_in_time() -> None:
    with ExitStack() as stack:
        server = DeafServer(stack)
        policy = stack.enter_context(built(**OPTIONS | {"url": server.url, "timeout_ms": 400.0}))
        window = window_of(1)
        window["wrist.frames"] = torch.zeros(1, 1, 3, 2000, 1500)  # more than the kernel buffers
        for times in (1, 2):
            began = time.monotonic()
            with pytest.raises(ServerError, match="the server did not read the request within"):
                called(policy, window)
            assert time.monotonic() - began < 3.0
            assert len(server.connections) == times  # the one before is not used again
        with pytest.raises(ServerError, match="no answer within"):
            called(policy, window_of(1))


def test_a_row_that_the_server_refuses_has_no_actions_and_the_others_have_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def pick(seen: dict[str, Any]) -> Any:
        return "unknown task" if seen["gripper"][0] < 1 else echo(seen)

    with policy_server(pick) as server, remote(server) as policy:
        window = window_of(3)
        began = time.monotonic()
        for _ in range(10):
            actions = called(policy, window)
            assert actions[0].isnan().all()
            assert torch.equal(actions[1:, 0], window["state.values"][1:, -1])
        assert server.connections == 2 + 10
        lines = [record.getMessage() for record in caplog.records]
        assert lines[0] == f"{server.url}: the server says: unknown task (row 0)"
        assert len(lines) <= 1 + time.monotonic() - began
        window["present"][1:] = False
        with pytest.raises(ServerError, match=r"unknown task \(row 0\)"):
            called(policy, window)


def test_a_row_whose_answer_is_late_takes_nothing_from_a_row_whose_answer_is_there() -> None:
    hold = threading.Event()

    def pick(seen: dict[str, Any]) -> Any:
        if seen["gripper"][0] < 1:
            hold.wait(20)
        return echo(seen)

    with policy_server(pick) as server, remote(server, timeout_ms=1500.0) as policy:
        actions = called(policy, window_of(2))
        hold.set()
        assert actions[0].isnan().all()
        window = window_of(2)
        assert torch.equal(actions[1, 0], window["state.values"][1, -1])
        window["state.values"] += 0.5
        assert torch.equal(called(policy, window)[:, 0], window["state.values"][:, -1])


def test_a_row_that_cannot_connect_again_takes_nothing_from_those_that_are_connected() -> None:
    """A server that is full accepts a connection, and says nothing on it."""

    def pick(seen: dict[str, Any]) -> Any:
        return "unknown task" if seen["gripper"][0] < 1 else echo(seen)

    with (
        policy_server(pick, silent=[4, 5, 6, 7, 8]) as server,
        remote(server, timeout_ms=600.0) as policy,
    ):
        window = window_of(3)
        called(policy, window)
        times = []
        for _ in range(4):
            began = time.monotonic()
            window["state.values"] += 1
            actions = called(policy, window)
            assert actions[0].isnan().all()
            assert torch.equal(actions[1:, 0], window["state.values"][1:, -1])
            times.append(time.monotonic() - began)
        assert max(times[1:]) < 0.6 <= times[0]  # it is not tried in each envelope
        assert server.connections == 3 + 1


def test_a_row_that_connects_in_each_envelope_ends_no_pause_of_one_that_cannot() -> None:
    def pick(seen: dict[str, Any]) -> Any:
        return "unknown task" if seen["gripper"][0] < 2 else echo(seen)

    with (
        policy_server(pick, silent=[4]) as server,
        remote(server, timeout_ms=600.0) as policy,
    ):
        window = window_of(3)
        for _ in range(5):  # row 2 stays, row 1 is refused, and row 0 takes the limit once
            window["state.values"] += 1 / 16
            assert torch.equal(called(policy, window)[2, 0], window["state.values"][2, -1])
        assert server.connections == 3 + 1 + 3


# ---- rows whose server closes each connection behind its answer, or takes some alone:
#
#   those that connect each time | those that cannot         | who is tried
#   one                          | one, the whole limit      | it is once, then pauses
#   one, most of the limit       | one, what that leaves     | it is twice, then pauses
#   all but for once             | one, once                 | each in the next envelope
#   none                         | all, until it is back     | each in its first envelope
#   those that stay connected    | one                       | it is once, then pauses; see above


def served(policy: RemotePolicy, rows: int) -> list[bool]:
    """Which rows have actions of their own request."""
    window = window_of(rows)
    actions = called(policy, window)
    given = actions.isfinite().all(dim=2).all(dim=1)
    assert torch.equal(actions[given, 0], window["state.values"][given, -1])
    return given.tolist()


def test_a_row_that_always_connects_ends_no_pause_of_one_that_never_does() -> None:
    with policy_server(silent=[2]) as server, remote(server, timeout_ms=600.0) as policy:
        for _ in range(6):
            assert served(policy, 2) == [True, False]
            server.hang_up()
        assert server.connections == 6 + 1


def test_a_row_pauses_that_never_connects_in_what_another_leaves_of_each_limit() -> None:
    with (
        policy_server(silent=[2, 4], opens_in_s=0.5) as server,
        remote(server, timeout_ms=1500.0) as policy,
    ):
        for _ in range(5):
            assert served(policy, 2) == [True, False]
            server.hang_up()
        assert server.connections == 5 + 2


def test_rows_that_always_connect_do_so_again_after_a_time_when_one_could_not() -> None:
    with policy_server(silent=[3]) as server, remote(server, timeout_ms=600.0) as policy:
        assert served(policy, 2) == [True, True]
        server.hang_up()
        with pytest.raises(ServerError):
            called(policy, window_of(2))
        for _ in range(3):
            assert served(policy, 2) == [True, True]
            server.hang_up()


def test_a_server_that_is_back_has_every_row_at_once_also_those_that_were_not_tried() -> None:
    with policy_server(silent=[1, 2]) as server, remote(server, timeout_ms=600.0) as policy:
        for _ in range(2):
            with pytest.raises(ServerError):
                called(policy, window_of(3))
        assert served(policy, 3) == [True, True, True]


def test_rows_that_connect_together_come_behind_none_that_cannot_for_ever() -> None:
    with policy_server(silent=[1, 4]) as server, remote(server, timeout_ms=600.0) as policy:
        with pytest.raises(ServerError):
            called(policy, window_of(3))
        window = window_of(3)
        actions = called(policy, window)
        assert torch.equal(actions[1:, 0], window["state.values"][1:, -1])


def test_a_row_that_had_only_what_others_left_of_the_limit_connects_next() -> None:
    """Its try is no reason to pause: the server is slow to open a connection, and takes each."""
    with policy_server(opens_in_s=0.6) as server, remote(server, timeout_ms=1000.0) as policy:
        assert called(policy, window_of(2))[:, 0, 0].isfinite().tolist() == [True, False]
        assert called(policy, window_of(2)).isfinite().all()


def test_a_server_that_let_nobody_connect_for_a_while_has_every_row_again_at_once() -> None:
    with policy_server(silent=[1, 2, 3]) as server, remote(server, timeout_ms=400.0) as policy:
        for _ in range(3):
            with pytest.raises(ServerError):
                called(policy, window_of(2))
        assert called(policy, window_of(2)).isfinite().all()


def test_a_row_that_connects_behind_its_pause_ends_that_of_the_others() -> None:
    with policy_server(silent=[2, 3]) as server, remote(server, timeout_ms=300.0) as policy:
        found: list[bool] = []

        def is_back() -> bool:
            found[:] = called(policy, window_of(3))[:, 0, 0].isfinite().tolist()
            return found[1]

        assert not is_back()
        assert not is_back()
        assert server.connections == 3
        wait_until(is_back)
        assert found == [True, True, True]


def test_the_next_robot_of_a_row_does_not_wait_for_the_one_before() -> None:
    with policy_server(silent=[2]) as server, remote(server, timeout_ms=600.0) as policy:
        for _ in range(2):
            assert called(policy, window_of(2))[1].isnan().all()
        assert server.connections == 2
        reset(policy, False, True)
        assert called(policy, window_of(2)).isfinite().all()


def test_a_server_that_comes_back_is_found_again() -> None:
    with ExitStack() as stack:
        with policy_server() as server:
            policy, port = stack.enter_context(remote(server)), server.port
            called(policy, window_of(1))
        with pytest.raises(ServerError, match=f"127.0.0.1:{port}"):
            called(policy, window_of(1))
        with policy_server(port=port):
            assert called(policy, window_of(1)).isfinite().all()


def test_the_key_is_said(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    with policy_server() as server, remote(server, api_key_file=str(file)) as policy:
        called(policy, window_of(1))
        assert server.headers[0]["Authorization"] == "Api-Key 0123456789abcdef"


@pytest.mark.parametrize("generation", ["n1.5", "n1.6"])
def test_either_generation_of_groot_is_asked_in_its_own_form(generation: str) -> None:
    wire: dict[str, Any] = {
        "wire": "groot",
        "map": {"joints": "state.arm", "imu": "state.imu"},
        "action_keys": {"x": (0, 1), "y": (1, 2)},
    }
    with ExitStack() as stack:
        rank0, gateway = stack.enter_context(gated(rows=2, generation=generation, **wire))
        url = f"tcp://127.0.0.1:{gateway.port}"
        policy = stack.enter_context(built(**{**GROOT, "url": url, "generation": generation}))
        window = window_of(2, steps=1, dim=5)
        actions = called(policy, window)
        assert torch.allclose(actions[:, :, 0], torch.arange(4.0), atol=2e-3)
        assert torch.allclose(actions[:, :, 1], -torch.arange(4.0), atol=2e-3)
        reset(policy, True, False)
        wanted = 0 if generation == "n1.5" else 1
        wait_until(lambda: sum(row.session_epoch for row in rank0.rows) == wanted)
        window["state.values"] *= float("inf")
        with pytest.raises(ServerError, match=r"the server says: [^$]*state.arm: got numbers"):
            called(policy, window)
        assert called(policy, window_of(2, steps=1, dim=5)).isfinite().all()


@pytest.mark.parametrize("path", ["", "/v1/realtime/robot/openpi"])  # the second is vLLM-Omni's
def test_our_own_gateway_of_openpi_is_a_policy_server_like_any_other(path: str) -> None:
    with gated(map={"joints": "arm.joints", "imu": "imu"}) as (_, gateway):
        url = gateway.server.address + path
        options = {**GROOT, "wire": "openpi", "url": url, "action_keys": {}}
        options["numbers"] = {"arm.joints": [0, 3], "imu": [3, 5]}
        with built(**options) as policy:
            actions = called(policy, window_of(1, steps=1, dim=5))
            window = window_of(1, steps=1, dim=5)
            window["state.values"] += float("inf")
            with pytest.raises(ServerError, match=r"the server says: [^$]*not finite"):
                called(policy, window)
        assert torch.allclose(actions[0, :, 1], -torch.arange(4.0), atol=2e-3)


def test_a_server_of_groot_that_is_not_there_is_a_fault_in_time() -> None:
    with policy_server() as server:
        url = f"tcp://127.0.0.1:{server.port}"  # speaks another protocol
        options = {**GROOT, "url": url, "timeout_ms": 100.0}
        with built(**options) as policy, pytest.raises(ServerError, match="no answer within"):
            called(policy, window_of(1, steps=1, dim=5))


@contextmanager
def groot_server(answer: Any) -> Iterator[str]:
    """A server of GR00T that gives everybody the same answer; its address."""
    server: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    has_ended = threading.Event()

    def serve() -> None:
        while not has_ended.is_set():
            if server.poll(20):
                server.recv()
                server.send(groot.encode(answer))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        has_ended.set()
        thread.join()
        server.close(0)


ARM = {"action_dim": 2, "action_keys": {"arm": [0, 2]}}
WRIST = {"action_dim": 1, "action_keys": {"wrist": [0, 1]}}
STEPS = np.arange(SHAPE[0], dtype=np.float32)


@pytest.mark.parametrize(
    ("keys", "shape"), [(ARM, (1, -1, 2)), (ARM, (-1, 2)), (WRIST, (1, -1, 1)), (WRIST, (-1,))]
)
def test_actions_of_groot_come_with_a_batch_of_one_or_squeezed(
    keys: dict[str, Any], shape: tuple[int, ...]
) -> None:
    width = keys["action_dim"]
    part = np.repeat(STEPS, width).reshape(shape)
    (key,) = keys["action_keys"]
    with groot_server([{key: part}, {}]) as url, built(**{**GROOT, **keys, "url": url}) as policy:
        actions = called(policy, window_of(1, steps=1, dim=5))
    assert (actions[0].numpy() == STEPS[:, None]).all()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([{"arm": np.zeros((1, 8, 4))}, {}], "arm: got [1, 8, 4], want [steps, 2]: see policy"),
        ([{"arm": np.zeros((8, 1))}, {}], "arm: got [8, 1], want [steps, 2]"),
        ([{"arm": np.zeros(8)}, {}], "arm: got [8], want [steps, 2]"),
        ([{"arm": np.zeros((2, 8, 2))}, {}], "arm: got [2, 8, 2], want [steps, 2]"),
        ([{"arm": np.zeros((0, 2))}, {}], "got actions float32 [0, 2], want"),
        ([], "got an answer that does not have the form of n1.6"),
    ],
)
def test_an_answer_of_groot_in_another_form_is_a_fault_that_says_why(
    answer: Any, said: str
) -> None:
    with groot_server(answer) as url, built(**{**GROOT, **ARM, "url": url}) as policy:
        with pytest.raises(ServerError) as caught:
            called(policy, window_of(1, steps=1, dim=5))
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {**OPTIONS, "url": "ws://a", "numbers": {"a.b": [0, 7], "a": [7, 8]}},
            "a, a.b: the first is a map",
        ),
        (
            {**OPTIONS, "url": "ws://a", "prompt": "images"},
            "images, images.wrist: the first is a map",
        ),
        ({**OPTIONS, "url": "ws://a", "prompt": "gripper"}, "gripper: it is the key of two of"),
        ({**GROOT, "url": "tcp://a", "prompt": "state.arm"}, "state.arm: it is the key of two"),
        ({**OPTIONS, "url": "http://a"}, "url: got 'http://a', want ws:// or wss://HOST:PORT"),
        ({**GROOT, "url": "ws://a"}, "url: got 'ws://a', want tcp://HOST:PORT"),
        ({**OPTIONS, "url": "ws://a", "numbers": {"a": [3, 9]}}, "numbers.a: got [3, 9]"),
        ({**OPTIONS, "url": "ws://a", "prompt": None, "instructions": True}, "prompt: missing"),
        ({**OPTIONS, "url": "ws://a", "action_keys": {"a": [0, 8]}}, "action_keys: got some"),
        ({**GROOT, "url": "tcp://a", "numbers": {"arm": [0, 3]}}, "arm: want state.NAME"),
        ({**GROOT, "url": "tcp://a", "cameras": {"state.a": CAMERA}}, "state.a: want video.NAME"),
        ({**GROOT, "url": "tcp://a", "action_keys": {"x": [0, 1]}}, "action_keys: want each"),
        ({**GROOT, "url": "tcp://a", "action_keys": {"x": [0, 2], "y": [2, 2]}}, "want each"),
        ({**OPTIONS, "url": "ws://a", "api_key_file": "/nowhere"}, "api_key_file: [Errno 2]"),
        ({**OPTIONS, "url": "ws://a", "weights": "a.safetensors"}, "weights"),
    ],
)
def test_options_that_disagree_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(options, CPU)
    assert said in str(caught.value)


def test_a_gpu_has_nothing_to_do_here() -> None:
    with pytest.raises(ConfigError, match=r"want placement.policy = 'cpu'"):
        build({**OPTIONS, "url": "ws://a"}, torch.device("cuda:0"))


@pytest.mark.multirank
def test_a_run_with_the_shipped_configuration_serves_the_policy_of_another_server(
    tmp_path: Path,
) -> None:
    def droid(seen: dict[str, Any]) -> dict[str, Any]:
        return echo({**seen, "gripper": seen["observation/gripper_position"]})

    with policy_server(droid) as server:
        cameras = [
            f"'observation/{key}' = {{name='{name}', height=8, width=6}}"
            for key, name in (("exterior_image_1_left", "exterior"), ("wrist_image_left", "wrist"))
        ]
        settings = [
            f"policy.options.url={server.url}",
            "policy.options.timeout_ms=4000",
            f"policy.options.cameras={{{', '.join(cameras)}}}",
            "streams.exterior.image={height=8, width=6, dtype='float32'}",
            "streams.wrist.image={height=8, width=6, dtype='float32'}",
            f"service.endpoint=unix://{tmp_path}/r",
        ]
        config = read("remote_droid", settings)
        file = Path(__file__).parents[2] / "stages/ppstream_stages/remote_droid.toml"
        with Ranks(tmp_path, *settings, config=file, world_size=1) as ranks:
            ranks.wait_for_event("phase", phase="ready")
            streams = [(one.name, one.dim, one.dtype) for one in config.streams]
            with RobotClient(
                f"unix://{tmp_path}/r", robot="arm", streams=streams, actions=config.actions.names
            ) as robot:
                robot.connect()
                values = np.arange(8, dtype=np.float32) / 8
                frame = np.zeros(config.streams[-1].dim, np.uint8)
                samples = {"exterior": frame, "wrist": frame}
                samples |= {"gripper": values[7:], "joints": values[:7]}
                answer = robot.ask(samples, 20.0)
                actions = robot.timeline.actions_of(answer.chunk)
                assert (actions == values).all()
            ranks.processes[0].terminate()
            assert ranks.wait() == [ExitCode.DRAINED]


def test_a_camera_that_is_normalised_here_is_no_picture_there() -> None:
    config = read("remote_droid", ["streams.wrist.image.std=[0.2, 0.2, 0.2]"])
    parts = specs_of(build_parts(config, CPU))
    (problem,) = policy_problems(config, input_specs(config), parts)
    assert "streams.wrist.image has mean [0.0, 0.0, 0.0] and std [0.2, 0.2, 0.2]" in problem


def test_the_run_book_shows_the_shipped_configuration() -> None:
    page = (BOOKS / "policy-server.md").read_text()
    (block,) = (one for one in FENCE.findall(page) if "ppstream_stages.remote" in one)
    shown = tomllib.loads(block)["policy"]
    assert shown["options"] == read("remote_droid").policy.options
