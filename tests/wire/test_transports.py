from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest
from robot_rig import wait_until

from ppstream.core.errors import ConfigError
from ppstream.wire.endpoints import UNIX_PATH_MAX_BYTES
from ppstream.wire.keys import ClientKeys, ServerKeys
from ppstream.wire.transports import bind_server, connect_client


def test_what_cannot_be_an_endpoint_is_refused_with_what_can(tmp_path: Path) -> None:
    for nonsense, want in (
        ("nonsense", "want 'unix://PATH' or 'tcp://ADDRESS:PORT'"),
        (f"ipc://{tmp_path}/robot", f"want 'unix://{tmp_path}/robot' on both sides"),
    ):
        with pytest.raises(ConfigError, match=f"cannot connect to '{nonsense}': .*{want}"):
            connect_client(nonsense)
        with pytest.raises(ConfigError, match=f"cannot listen on '{nonsense}': .*{want}"):
            bind_server(nonsense)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/" + "x" * UNIX_PATH_MAX_BYTES, "got 108 bytes of path, want at most 107: use a shorter"),
        ("relative/robot", "want that of a file, from the root"),
        ("/tmp/", "want that of a file, from the root"),
        ("", "want that of a file, from the root"),
    ],
)
def test_a_path_that_cannot_be_one_is_refused_on_both_sides(path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        bind_server(f"unix://{path}")
    with pytest.raises(ConfigError, match=problem):
        connect_client(f"unix://{path}")


def test_keys_are_of_tcp_alone(tmp_path: Path) -> None:
    endpoint = f"unix://{tmp_path}/robot"
    with pytest.raises(ConfigError, match="keys are of tcp:// endpoints alone"):
        bind_server(endpoint, ServerKeys(b"", {}))
    with pytest.raises(ConfigError, match="keys are of tcp:// endpoints alone"):
        connect_client(endpoint, ClientKeys(b"", b""))


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:*", "tcp://*:5870", "tcp://[::]:*", "tcp://eth0:1"]
)
def test_nothing_that_other_hosts_reach_is_bound_without_keys(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="ppstream keys"):
        bind_server(endpoint)


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
def test_an_ipv6_address_of_this_host_is_bound_and_reached() -> None:
    with (
        closing(bind_server("tcp://[::1]:*")) as server,
        closing(connect_client(server.endpoint)) as client,
    ):
        wait_until(lambda: client.send(b"hello"))
        found: list[bytes] = []
        wait_until(lambda: found.extend(bytes(frame.body) for frame in server.drain()) or found)
        assert found == [b"hello"]


def test_a_robot_does_not_try_another_host_without_keys() -> None:
    with pytest.raises(ConfigError, match="there are no keys"):
        connect_client("tcp://192.0.2.1:5870")
