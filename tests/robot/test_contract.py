"""``RobotClient(address)``: a client that asks the server for the contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from pathlib import Path

import msgspec
import pytest
from robot_rig import ACTIONS, MS, STREAMS, make_client, make_config, serving, wait_until
from session_desk import STREAMS as DECLARED
from session_desk import open_desk

from ppstream.config.schema import ImageConfig, StreamConfig
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError, HandshakeError, PeerLostError, PpstreamError
from ppstream.robot.client import RobotClient
from ppstream.robot.connection import RobotLink
from ppstream.robot.contract import streams_of
from ppstream.robot.session import RobotSession
from ppstream.robot.told_wait import wait_open
from ppstream.sessions.contract import description
from ppstream.wire import keys as wire_keys
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import WIRE_MAJOR, WIRE_MINOR
from ppstream.wire.keys import client_keys

pytestmark = pytest.mark.usefixtures("either_socket")
PHASES = ("starting", "warming", "bring-up", "ready", "degraded", "draining", "stopped")


@pytest.mark.parametrize("phase", PHASES)
def test_an_address_is_enough_to_learn_the_contract_in_every_phase(phase: str) -> None:
    with serving(phase=phase) as server:
        client = RobotClient(server.sessions.endpoint)
        assert client.contract == description(make_config(), phase)
        assert client.timeline.statistics().received == 0
    assert server.sessions.statistics().opened == 0  # no row was taken


def test_a_client_that_was_told_the_contract_is_served_by_it() -> None:
    with serving(answers=True) as server, RobotClient(server.sessions.endpoint) as client:
        client.connect()
        assert client.wait_ready(10)
        answer = client.ask({"imu": [1, 2], "joints": [1, 2, 3]}, 10)
        assert answer.actions.shape == (4, len(ACTIONS))
        assert server.rows[0].robot == "robot"


def test_a_camera_is_learned_with_its_shape() -> None:
    config = make_config()
    wrist = StreamConfig(name="wrist", rate_hz=30.0, image=ImageConfig(height=4, width=2))
    run = description(msgspec.structs.replace(config, streams=(*config.streams, wrist)))
    assert streams_of(run) == (
        ("joints", (3,), "float32"),
        ("imu", (2,), "float64"),
        ("wrist", (4, 2, 3), "uint8"),
    )


def test_a_client_that_states_everything_does_not_ask(tmp_path: Path) -> None:
    client = make_client(f"unix://{tmp_path}/nobody")
    assert client.contract is None


def test_what_is_stated_is_compared_with_what_was_learned_a_line_for_each_difference() -> None:
    with serving() as server:
        endpoint = server.sessions.endpoint
        with pytest.raises(HandshakeError) as refused:
            RobotClient(endpoint, streams=[("joints", 4), ("tail", 1)]).connect()
        assert str(refused.value).splitlines() == [
            f"{endpoint}: another contract",
            "  stream 'joints': expected [3] float32, got [4] float32",
            "  stream 'imu': expected [2] float64, got none",
            "  stream 'tail': the pipeline has none of this name",
        ]
        with pytest.raises(HandshakeError, match=r"action 0: expected 'dx', got 'dy'"):
            assert RobotClient(endpoint, actions=("dy", "dx")).contract
        assert RobotClient(endpoint, streams=STREAMS).contract is not None
        assert RobotClient(endpoint, actions=ACTIONS).contract is not None
    assert server.sessions.statistics().refused == {}


@pytest.mark.parametrize("encoding", [(), ("jpeg",)])
def test_a_camera_declared_with_its_axes_turned_is_refused(encoding: tuple[str, ...]) -> None:
    """As many values: nothing but the shape tells, and its robot asks for no description."""
    config = make_config()
    wrist = StreamConfig(name="wrist", rate_hz=30.0, image=ImageConfig(height=4, width=2))
    wrist = msgspec.structs.replace(wrist, dim=24, dtype="uint8")
    with serving(msgspec.structs.replace(config, streams=(*config.streams, wrist))) as server:
        endpoint = server.sessions.endpoint
        turned = [*STREAMS, ("wrist", (2, 4, 3), "uint8", *encoding)]
        with (
            make_client(endpoint, streams=turned) as client,
            pytest.raises(
                HandshakeError, match=r"expected \[4, 2, 3\] uint8, got \[2, 4, 3\] uint8"
            ),
        ):
            client.connect()
        upright = [*STREAMS, ("wrist", (4, 2, 3), "uint8", *encoding)]
        with make_client(endpoint, streams=upright) as client:
            client.connect()


@pytest.fixture
def without_describe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers decode what they did before there was Describe."""
    known = [one for one in m.FromRobot.__args__ if one is not m.Describe]
    decoder = msgspec.msgpack.Decoder(reduce(or_, known))
    monkeypatch.setattr("ppstream.sessions.server.from_robot", decoder)


@pytest.mark.usefixtures("without_describe")
def test_an_old_server_is_one_clear_error_long_before_the_limit() -> None:
    with serving(answers=True) as server:
        endpoint = server.sessions.endpoint
        began = now_ns()
        with pytest.raises(HandshakeError) as told:
            RobotClient(endpoint, contract_s=60.0)
        assert now_ns() - began < 30_000 * MS
        remedy = "upgrade ppstream there, or state streams and actions"
        assert str(told.value) == f"{endpoint}: rank 0 knows no Describe; {remedy}"
        with make_client(endpoint) as client:  # the remedy
            client.connect()
            client.ask({"imu": [1, 2], "joints": [1, 2, 3]}, 10)


def test_a_version_that_the_server_does_not_serve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppstream.robot.contract.WIRE_MINOR", 9)
    with serving() as server, pytest.raises(HandshakeError) as told:
        RobotClient(server.sessions.endpoint).connect()
    first, second = str(told.value).splitlines()
    assert first.endswith("no contract: version")
    assert "got 1.9; upgrade ppstream on rank 0" in second


def test_no_server_is_an_error_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppstream.robot.client.CONTRACT_S", 0.1)
    endpoint = f"unix://{tmp_path}/nobody"
    asks: tuple[Callable[[], object], ...] = (
        lambda: RobotClient(endpoint, contract_s=0.1),
        lambda: RobotClient(endpoint).contract,
        lambda: RobotClient(endpoint).connect(0.1),
    )
    for ask in asks:
        with pytest.raises(PeerLostError) as told:
            ask()
        assert "no contract: no connection within 0.1 s; start the run" in str(told.value)
        assert "load for longer allow more, as connect(600) does, or state" in str(told.value)
    with pytest.raises(ConfigError, match="and there are no keys"):
        RobotClient("tcp://192.0.2.1:5870").connect()


def test_connect_waits_for_a_contract_as_long_as_it_is_told(tmp_path: Path) -> None:
    endpoint, said = f"unix://{tmp_path}/robot", list[str]()
    with RobotClient(endpoint) as client:
        with pytest.raises(PpstreamError, match=r"call connect\(\) first"):
            client.push("joints", now_ns(), [1, 2, 3])
        with pytest.raises(PeerLostError):
            client.connect(0.1)
        waiting = threading.Thread(target=client.connect, args=(60,), kwargs={"say": said.append})
        waiting.start()
        wait_until(lambda: said)
        assert said[0].startswith(
            f"waiting for {endpoint}: no connection, its ranks may still start ("
        )
        with serving(make_config(endpoint), answers=True):
            waiting.join(60)
            assert client.contract == description(make_config(), "ready")
            assert client.wait_ready(10)
            answer = client.ask({"imu": [1, 2], "joints": [1, 2, 3]}, 10)
            assert answer.refusal is None
            assert answer.actions.shape == (4, len(ACTIONS))


def test_a_client_that_is_closed_waits_for_no_contract(tmp_path: Path) -> None:
    client, said, errors = RobotClient(f"unix://{tmp_path}/nobody"), list[str](), list[str]()

    def connect() -> None:
        try:
            client.connect(60, say=said.append)
        except PpstreamError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=connect)
    waiting.start()
    wait_until(lambda: said)
    client.close()
    waiting.join(20)
    assert errors == ["this client was closed; make another"]
    with pytest.raises(PpstreamError, match="was closed"):
        assert client.contract


def test_a_server_that_stands_is_an_error_within_the_limit() -> None:
    with open_desk() as desk, pytest.raises(PeerLostError, match=r"no answer within 0\.3 s"):
        RobotClient(desk.sessions.endpoint, contract_s=0.3)


def test_a_key_that_is_not_allowed_learns_nothing(tmp_path: Path) -> None:
    for name in ("server", "arm", "stranger"):
        public = wire_keys.make_pair(name, tmp_path)
        if name == "arm":
            wire_keys.allow(tmp_path / "allowed", name, public)
    config = make_config("tcp://127.0.0.1:0")
    service = msgspec.structs.replace(
        config.service,
        secret_key=str(tmp_path / "server.secret"),
        allowed_keys=str(tmp_path / "allowed"),
    )
    with serving(msgspec.structs.replace(config, service=service)) as server:
        endpoint = server.sessions.endpoint
        keys = {
            name: client_keys(tmp_path / f"{name}.secret", tmp_path / "server.public")
            for name in ("arm", "stranger")
        }
        assert RobotClient(endpoint, keys=keys["arm"]).contract is not None
        received = server.sessions.statistics().frames_received
        for refused in (keys["stranger"], None):
            with pytest.raises(PeerLostError, match="no connection within"):
                RobotClient(endpoint, keys=refused, contract_s=0.3)
        assert server.sessions.statistics().frames_received == received


def test_an_answer_on_an_open_session_disturbs_nothing() -> None:
    with serving() as server:
        session = RobotSession("arm", DECLARED, ACTIONS)
        link = RobotLink(
            server.sessions.endpoint, session, lambda chunk: None, lambda now: None, str
        )
        link.start()
        wait_open(link, 10)
        assert link.send(m.Describe(WIRE_MAJOR, WIRE_MINOR))
        assert link.send(m.Instruct(session.session, 1, "after it"))
        with link.changed:
            assert link.changed.wait_for(lambda: session.conditioned, 10)
        assert link.failure is None
        link.close()
