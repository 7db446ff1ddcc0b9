"""A robot that asks a directory again when its session is lost: real sockets, real servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from robot_rig import ACTIONS, STREAMS, Server, make_config, wait_until

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import now_ns
from ppstream.core.errors import HandshakeError, PeerLostError
from ppstream.fleet.directory import Directory, PipelineReport
from ppstream.fleet.directory_server import DirectoryServer
from ppstream.robot import connection
from ppstream.robot.async_client import ask_on_loop
from ppstream.robot.client import RobotClient
from ppstream.robot.fleet_directory import FleetDirectory, FleetPlace
from ppstream.wire.keys import allow, make_pair
from ppstream.wire.robot_messages import ActionChunk

pytestmark = pytest.mark.usefixtures("either_socket")
FAR_NS = 10**15  # reports that never grow old
SAMPLE = {"joints": np.zeros(3, dtype=np.float32)}


class Pipelines:
    """Two servers and the directory that knows them."""

    def __init__(self, stack: ExitStack) -> None:
        self.directory = Directory()
        self.face = stack.enter_context(closing(DirectoryServer("127.0.0.1:0", self.directory)))
        self.servers: dict[str, Server] = {}
        for name in ("a", "b"):
            shared = make_config().service.endpoint
            own = f"{shared}-{name}" if shared.startswith("unix") else shared
            self.servers[name] = Server(make_config(own), answers=True)
            self.tell(name)
        stack.callback(self.close)

    def tell(
        self,
        name: str,
        phase: str = "ready",
        robots: int = 0,
        endpoint: str | None = None,
        server_key: str | None = None,
    ) -> None:
        endpoint = endpoint or self.servers[name].sessions.endpoint
        report = PipelineReport(
            pipeline=name,
            phase=phase,
            endpoint=endpoint,
            rows=1,
            robots=robots,
            server_key=server_key,
        )
        with self.face.lock:
            self.directory.report(report, now_ns() + FAR_NS)

    def stop(self, name: str) -> None:
        self.servers.pop(name).close()

    def fail(self, name: str) -> PipelineConfig:
        """Returns the configuration with which it may be started again."""
        config = make_config(self.servers[name].sessions.endpoint)
        self.tell(name, "failed")
        self.stop(name)
        return config

    def start(self, name: str, config: PipelineConfig) -> None:
        self.servers[name] = Server(config, answers=True)
        self.tell(name)

    def close(self) -> None:
        for name in [*self.servers]:
            self.stop(name)

    def robot(self, name: str = "arm", **options: Any) -> RobotClient:
        asks = FleetDirectory(self.face.url, name)
        wanted = {"streams": STREAMS, "actions": ACTIONS, **options}
        return RobotClient.from_fleet(asks, find_s=30, **wanted)


@pytest.fixture
def pipelines() -> Iterator[Pipelines]:
    with ExitStack() as stack:
        yield Pipelines(stack)


def push_until(client: RobotClient, done: Any) -> None:
    def pushed() -> bool:
        client.push("joints", now_ns(), np.zeros(3, dtype=np.float32))
        return bool(done())

    wait_until(pushed)


def test_a_robot_of_a_lost_pipeline_is_served_by_the_other(pipelines: Pipelines) -> None:
    chunks: list[ActionChunk] = []
    with pipelines.robot(on_chunk=chunks.append) as client:
        client.connect()
        push_until(client, lambda: chunks)
        before = client.statistics().session
        pipelines.tell("a", "failed")
        pipelines.stop("a")
        push_until(client, lambda: chunks[-1].session not in (0, before))
        found = client.statistics()
        assert found.sessions_opened == 2
        assert pipelines.servers["b"].sessions.statistics().open == 1


def test_it_moves_also_when_the_directory_has_not_noticed_yet(pipelines: Pipelines) -> None:
    chunks: list[ActionChunk] = []
    with pipelines.robot(on_chunk=chunks.append) as client:
        client.connect()
        before = client.statistics().session
        pipelines.stop("a")  # still reported as ready
        push_until(client, lambda: chunks and chunks[-1].session not in (0, before))
        assert pipelines.servers["b"].sessions.statistics().open == 1


def test_a_draining_pipeline_is_left_at_once(pipelines: Pipelines) -> None:
    with pipelines.robot() as client:
        client.connect()
        pipelines.tell("a", "draining")
        server = pipelines.servers["a"]
        server.order(lambda: server.sessions.set_phase("draining"))
        wait_until(lambda: pipelines.servers["b"].sessions.statistics().open == 1)
        wait_until(lambda: client.connected and client.phase == "ready")


def is_lost(pipelines: Pipelines) -> None:
    pipelines.stop("a")


def drains(pipelines: Pipelines) -> None:
    server = pipelines.servers["a"]
    server.order(lambda: server.sessions.set_phase("draining"))


@pytest.mark.parametrize(("happens", "failed"), [(is_lost, False), (drains, True)])
def test_only_a_pipeline_that_ends_is_given_up_before_it_was_asked_again(
    pipelines: Pipelines, happens: Callable[[Pipelines], None], *, failed: bool
) -> None:
    """A session may be lost where the pipeline is not; one that drains takes nobody."""
    asked: list[bool] = []

    class Noting(FleetDirectory):
        def find(self, *, failed: bool = False) -> FleetPlace:
            asked.append(failed)
            return super().find(failed=failed)

    asks = Noting(pipelines.face.url, "arm")
    with RobotClient.from_fleet(asks, find_s=30, streams=STREAMS, actions=ACTIONS) as client:
        client.connect()
        push_until(client, lambda: client.timeline.statistics().received)
        asked.clear()
        happens(pipelines)
        wait_until(lambda: pipelines.servers["b"].sessions.statistics().open == 1)
    assert asked[0] == failed


def test_a_robot_of_a_fleet_shows_its_key_to_the_pipeline_that_is_named(
    pipelines: Pipelines, tmp_path: Path
) -> None:
    server_key = make_pair("server", tmp_path)
    allow(tmp_path / "allowed", "arm", make_pair("arm", tmp_path))
    config = make_config("tcp://127.0.0.1:0")
    files = {
        "secret_key": str(tmp_path / "server.secret"),
        "allowed_keys": str(tmp_path / "allowed"),
    }
    service = msgspec.structs.replace(config.service, **files)
    asks = FleetDirectory(
        pipelines.face.url,
        "arm",
        secret_file=tmp_path / "arm.secret",
        server_files=[tmp_path / "server.public"],
    )
    pipelines.stop("a")
    pipelines.start("a", msgspec.structs.replace(config, service=service))
    pipelines.tell("a", server_key=server_key.decode())
    pipelines.tell("b", "ended")
    with RobotClient.from_fleet(asks, find_s=30) as client:
        client.connect()
        assert pipelines.servers["a"].sessions.statistics().open == 1


def test_a_full_pipeline_sends_it_on(pipelines: Pipelines) -> None:
    """The directory promised a row that somebody else took."""
    endpoint = pipelines.servers["a"].sessions.endpoint
    with RobotClient(endpoint, robot="other", streams=STREAMS, actions=ACTIONS) as other:
        other.connect()
        with pipelines.robot() as client:
            client.connect(60)
            assert pipelines.servers["b"].sessions.statistics().open == 1


def test_without_a_directory_it_keeps_its_pipeline(pipelines: Pipelines) -> None:
    chunks: list[ActionChunk] = []
    with pipelines.robot(on_chunk=chunks.append) as client:
        client.connect()
        pipelines.face.close()
        push_until(client, lambda: chunks)
        server = pipelines.servers["a"]
        config = make_config(server.sessions.endpoint)
        before = client.statistics().session
        pipelines.stop("a")
        wait_until(lambda: not client.connected)
        pipelines.servers["a"] = Server(config, answers=True)  # it was only restarted
        push_until(client, lambda: chunks[-1].session not in (0, before))


def test_a_robot_that_states_nothing_learns_the_contract_of_the_pipeline_it_is_given(
    pipelines: Pipelines,
) -> None:
    asks = FleetDirectory(pipelines.face.url, "arm")
    with RobotClient.from_fleet(asks, find_s=30) as client:
        pipelines.stop(asks.pipeline)
        assert client.contract is not None
        assert client.contract.actions == ACTIONS


def test_a_contract_that_differs_is_no_reason_to_wander(pipelines: Pipelines) -> None:
    with (
        pipelines.robot(actions=("others", "names")) as client,
        pytest.raises(HandshakeError, match="others"),
    ):
        client.connect(30)


def test_a_robot_that_was_served_leaves_a_pipeline_of_another_contract(
    pipelines: Pipelines,
) -> None:
    config = make_config(pipelines.servers["b"].sessions.endpoint)
    names = msgspec.structs.replace(config.actions, names=("dx", "dz"))
    pipelines.stop("b")
    pipelines.start("b", msgspec.structs.replace(config, actions=names))
    with pipelines.robot() as client:
        client.connect()
        before = pipelines.fail("a")
        wait_until(lambda: client.statistics().reconnecting.refusal == "contract")
        pipelines.start("a", before)
        wait_until(lambda: client.connected)
        assert pipelines.servers["a"].sessions.statistics().open == 1


def test_an_endpoint_that_cannot_be_one_costs_a_robot_nothing(pipelines: Pipelines) -> None:
    asks = FleetDirectory(pipelines.face.url, "arm")
    with RobotClient.from_fleet(asks, find_s=30, streams=STREAMS, actions=ACTIONS) as client:
        client.connect()
        pipelines.tell("b", endpoint="tcp://127.0.0.1:*")
        before = pipelines.fail("a")
        wait_until(lambda: asks.pipeline == "b")
        pipelines.start("a", before)
        wait_until(lambda: client.connected or client.failure)
        assert client.failure is None


def test_a_client_that_is_closed_while_it_asks_where_to_go_has_not_failed(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowDirectory(FleetDirectory):
        asked, answers = threading.Event(), threading.Event()

        def find(self, *, failed: bool = False) -> FleetPlace:
            if self.pipeline:
                self.asked.set()
                assert self.answers.wait(60)
            return super().find(failed=failed)

    monkeypatch.setattr(connection, "JOIN_S", 0.05)
    others = set(threading.enumerate())
    asks = SlowDirectory(pipelines.face.url, "arm")
    client = RobotClient.from_fleet(asks, find_s=30, streams=STREAMS, actions=ACTIONS)
    client.connect()
    (thread,) = (t for t in threading.enumerate() if t not in others and "robot" in t.name)
    pipelines.fail("a")
    assert asks.asked.wait(60)
    client.close()
    asks.answers.set()
    thread.join(60)
    assert not thread.is_alive()
    assert client.failure is None


def test_no_pipeline_at_all_is_an_error_of_the_start(pipelines: Pipelines) -> None:
    for name in ("a", "b"):
        pipelines.tell(name, "ended")
    asks = FleetDirectory(pipelines.face.url, "arm")
    with pytest.raises(PeerLostError, match="none_serves"):
        RobotClient.from_fleet(asks, find_s=0.1, streams=STREAMS, actions=ACTIONS)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:70000", "nonsense"])
def test_an_address_that_cannot_be_one_is_an_error_of_the_start(
    pipelines: Pipelines, endpoint: str
) -> None:
    for name in ("a", "b"):
        pipelines.tell(name, endpoint=endpoint)
    asks = FleetDirectory(pipelines.face.url, "arm")
    with pytest.raises(PeerLostError, match="names a, which is not trusted: got"):
        RobotClient.from_fleet(asks, find_s=0.1)


def test_ask_is_answered_by_whichever_pipeline_serves(pipelines: Pipelines) -> None:
    with pipelines.robot() as client:
        client.connect()
        assert client.ask(SAMPLE, 30.0).chunk.session
        pipelines.tell("a", "failed")
        pipelines.stop("a")

        def answered() -> bool:
            try:
                return client.ask(SAMPLE, 1.0).refusal is None
            except (PeerLostError, TimeoutError):
                return False

        wait_until(answered)
        assert pipelines.servers["b"].sessions.statistics().open == 1


def asks(client: RobotClient, timeout_s: float) -> None:
    client.ask(SAMPLE, timeout_s)


def awaits(client: RobotClient, timeout_s: float) -> None:
    asyncio.run(ask_on_loop(client, SAMPLE, timeout_s))


@pytest.mark.parametrize("wait", [asks, awaits])
def test_an_ask_ends_with_its_session_so_that_the_robot_moves(
    pipelines: Pipelines, wait: Callable[[RobotClient, float], None]
) -> None:
    server = pipelines.servers["a"]
    server.answers = False

    def fail_once_asked() -> None:
        wait_until(lambda: server.rows[0].rings["joints"].count)
        pipelines.fail("a")

    with pipelines.robot() as client:
        client.connect()
        failing = threading.Thread(target=fail_once_asked)
        failing.start()
        with pytest.raises(PeerLostError, match="the session was lost"):
            wait(client, 40.0)
        failing.join(60)
        wait_until(lambda: pipelines.servers["b"].sessions.statistics().open == 1)
