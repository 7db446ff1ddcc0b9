"""A robot that asks a directory again when its session is lost: real sockets, real servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from robot_rig import ACTIONS, STREAMS, Server, make_config, wait_until

from ppstream.core.clock import now_ns
from ppstream.core.errors import HandshakeError, PeerLostError
from ppstream.fleet.directory import Directory, PipelineReport
from ppstream.fleet.directory_server import DirectoryServer
from ppstream.robot.client import RobotClient
from ppstream.robot.fleet_directory import FleetDirectory
from ppstream.wire.robot_messages import ActionChunk

pytestmark = pytest.mark.usefixtures("either_socket")
FAR_NS = 10**15  # reports that never grow old


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

    def tell(self, name: str, phase: str = "ready", robots: int = 0) -> None:
        endpoint = self.servers[name].sessions.endpoint
        report = PipelineReport(
            pipeline=name, phase=phase, endpoint=endpoint, rows=1, robots=robots
        )
        with self.face.lock:
            self.directory.report(report, now_ns() + FAR_NS)

    def stop(self, name: str) -> None:
        self.servers.pop(name).close()

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


def test_a_contract_that_differs_is_no_reason_to_wander(pipelines: Pipelines) -> None:
    with (
        pipelines.robot(actions=("others", "names")) as client,
        pytest.raises(HandshakeError, match="others"),
    ):
        client.connect(30)


def test_no_pipeline_at_all_is_an_error_of_the_start(pipelines: Pipelines) -> None:
    for name in ("a", "b"):
        pipelines.tell(name, "ended")
    asks = FleetDirectory(pipelines.face.url, "arm")
    with pytest.raises(PeerLostError, match="none_serves"):
        RobotClient.from_fleet(asks, find_s=0.1, streams=STREAMS, actions=ACTIONS)


def test_ask_is_answered_by_whichever_pipeline_serves(pipelines: Pipelines) -> None:
    with pipelines.robot() as client:
        client.connect()
        assert client.ask({"joints": np.zeros(3, dtype=np.float32)}, 30.0).chunk.session
        pipelines.tell("a", "failed")
        pipelines.stop("a")

        def answered() -> bool:
            try:
                return client.ask({"joints": np.zeros(3, dtype=np.float32)}, 1.0).refusal is None
            except (PeerLostError, TimeoutError):
                return False

        wait_until(answered)
        assert pipelines.servers["b"].sessions.statistics().open == 1
