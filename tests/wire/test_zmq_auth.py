from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq
from fuzz.frames import HUGE, fuzz_connections, handshake
from robot_rig import ANY_PORT, make_client, make_config, service_problems, serving, wait_until
from zmq.auth.thread import ThreadAuthenticator

from ppstream.config.rules import problems
from ppstream.core.errors import PeerLostError
from ppstream.wire.keys import ClientKeys, ServerKeys, allow, client_keys, make_pair
from ppstream.wire.message_socket import MAX_FRAME_BYTES, MessageSocket
from ppstream.wire.transports import bind_server, connect_client
from ppstream.wire.zmq_auth import EVENTS_PER_LOOK

ANYWHERE = "tcp://0.0.0.0:*"
FLOODED = Path(__file__).parents[1] / "support" / "flooded_server.py"
SERVER, ARM, STRANGER = (zmq.curve_keypair() for _ in range(3))
ALLOWED = ServerKeys(SERVER[1], {ARM[0]: "arm"})
GOOD = ClientKeys(ARM[1], SERVER[0])


@contextmanager
def guarded(keys: ServerKeys | None = ALLOWED, endpoint: str = ANYWHERE) -> Iterator[MessageSocket]:
    server = bind_server(endpoint, keys)
    try:
        yield server
    finally:
        server.close()


def near(server: MessageSocket) -> str:
    return server.endpoint.replace("0.0.0.0", "127.0.0.1")


def refused(server: MessageSocket, reason: str) -> bool:
    return server.refused().get(reason, 0) > 0


def wait_for_hang_up(raw: socket.socket) -> None:
    with suppress(ConnectionError):
        while raw.recv(4096):
            pass


def serves(server: MessageSocket, keys: ClientKeys | None = GOOD) -> bool:
    client = connect_client(near(server), keys)
    try:
        wait_until(lambda: client.send(b"hello"))
        wait_until(lambda: [frame.body for frame in server.drain()] == [b"hello"])
    finally:
        client.close()
    return True


def test_an_allowed_robot_is_served_encrypted() -> None:
    with guarded() as server:
        assert serves(server)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        pytest.param(ClientKeys(STRANGER[1], SERVER[0]), "key", id="key that is not allowed"),
        pytest.param(ClientKeys(ARM[1], STRANGER[0]), "handshake", id="server of another key"),
        pytest.param(None, "handshake", id="plain peer"),
    ],
)
def test_whoever_has_no_right_key_is_refused_and_counted(
    keys: ClientKeys | None, reason: str
) -> None:
    with guarded() as server:
        intruder = connect_client(near(server), keys)
        wait_until(lambda: refused(server, reason))
        assert not intruder.send(b"samples")
        assert server.drain() == []
        intruder.close()
        assert serves(server)


def test_when_the_authenticator_is_gone_nobody_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ThreadAuthenticator] = []
    start = ThreadAuthenticator.start
    monkeypatch.setattr(ThreadAuthenticator, "start", lambda one: made.append(one) or start(one))
    with guarded() as server:
        made[0].stop()
        client = connect_client(near(server), GOOD)
        wait_until(lambda: refused(server, "handshake"))
        assert not client.send(b"samples")
        client.close()


def test_a_connection_that_does_not_say_who_it_is_ends() -> None:
    with guarded(endpoint=ANY_PORT) as server:
        port = int(server.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
            wait_for_hang_up(silent)
        wait_until(lambda: refused(server, "handshake"))


def test_two_gigabytes_announced_end_the_connection_before_memory_is_taken() -> None:
    with guarded(None, ANY_PORT) as server:
        port = int(server.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            raw.sendall(handshake(b"NULL") + HUGE + b"x" * 4096)
            wait_for_hang_up(raw)
        wait_until(lambda: refused(server, "closed"))
        assert server.drain() == []
        assert serves(server, None)


@pytest.mark.parametrize(("size", "arrives"), [(-1, True), (0, True), (1, False)])
def test_the_largest_frame_is_exact(size: int, arrives: bool) -> None:
    with guarded(None, ANY_PORT) as server:
        client = connect_client(server.endpoint)
        wait_until(lambda: client.send(bytes(MAX_FRAME_BYTES + size)))
        if arrives:
            wait_until(lambda: [len(f.body) for f in server.drain()] == [MAX_FRAME_BYTES + size])
        else:
            wait_until(lambda: refused(server, "closed"))
            assert server.drain() == []
        client.close()


def test_hundreds_of_broken_connections_are_counted_and_robots_still_served() -> None:
    counts = fuzz_connections(400, seed=1)  # raises when the endpoint serves no more
    assert counts["sent"] == 400
    assert counts["handshake"] > 100


def test_a_flood_of_events_leaves_no_backlog_and_what_comes_behind_it_is_counted() -> None:
    """No descriptor is left, so each try to accept a connection tells that it failed, for ever."""
    found = subprocess.run(
        [sys.executable, str(FLOODED)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    flood = json.loads(found.stdout)
    assert flood["refused"]["accept"] > 0
    assert flood["refused"]["uncounted"] > 1
    assert flood["backlog"] <= EVENTS_PER_LOOK
    assert flood["grown_mib"] < 24  # 1 s of it are 30 MiB and more that nobody reads
    assert flood["counted_behind_it"] == 1


def make_keys(folder: Path) -> dict[str, str]:
    make_pair("server", folder)
    allow(folder / "allowed", "arm", make_pair("arm", folder))
    return {
        "secret_key": str(folder / "server.secret"),
        "allowed_keys": str(folder / "allowed"),
    }


def test_a_robot_client_with_keys_is_served_on_a_network_address(tmp_path: Path) -> None:
    config = make_config(ANYWHERE)
    service = msgspec.structs.replace(config.service, **make_keys(tmp_path))
    config = msgspec.structs.replace(config, service=service)
    assert [line for line in problems(config) if "service" in line] == []
    keys = client_keys(tmp_path / "arm.secret", tmp_path / "server.public")
    with serving(config) as server:
        endpoint = server.sessions.endpoint.replace("0.0.0.0", "127.0.0.1")
        with make_client(endpoint, keys=keys) as client:
            client.connect(10)
            client.push("joints", 1, [1, 2, 3])
            wait_until(lambda: server.rows[0].rings["joints"].count == 1)
        with (
            make_client(endpoint) as plain,
            pytest.raises(PeerLostError, match=r"0\.3 s: .*, or it .*key"),
        ):
            plain.connect(0.3)


@pytest.mark.parametrize(
    ("endpoint", "fields", "problem"),
    [
        (ANYWHERE, {}, "which other hosts can reach"),
        ("tcp://robots.example.org:5870", {}, "which other hosts can reach"),
        (ANYWHERE, {"secret_key": "/k"}, "both or neither"),
        (ANY_PORT, {"allowed_keys": "/k"}, "both or neither"),
        (ANYWHERE, {"secret_key": "/k", "allowed_keys": "/l"}, None),
        (ANY_PORT, {}, None),
    ],
)
def test_a_configuration_without_its_keys_is_refused(
    endpoint: str, fields: dict[str, str], problem: str | None
) -> None:
    found = service_problems(endpoint, **fields)
    assert [problem in line for line in found] == ([] if problem is None else [True])
