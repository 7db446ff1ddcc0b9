"""The directory's face: real HTTP on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, PeerLostError
from ppstream.fleet import status
from ppstream.fleet.directory import Directory, PipelineReport
from ppstream.fleet.directory_server import DirectoryServer
from ppstream.robot.fleet_directory import FleetDirectory
from ppstream.wire.keys import make_pair

HERE = "127.0.0.1:0"


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def server(directory: Directory) -> Iterator[DirectoryServer]:
    with closing(DirectoryServer(HERE, directory)) as made:
        yield made


def serve(directory: Directory, endpoint: str = "unix:///run/a", key: str | None = None) -> None:
    report = PipelineReport(pipeline="a", phase="ready", endpoint=endpoint, rows=1, server_key=key)
    directory.report(report, now_ns())


def test_a_robot_is_told_its_pipeline(directory: Directory, server: DirectoryServer) -> None:
    serve(directory)
    asks = FleetDirectory(server.url, "arm")
    place = asks.find()
    assert (place.pipeline, place.endpoint, place.keys) == ("a", "unix:///run/a", None)
    assert asks.pipeline == "a"
    with pytest.raises(PeerLostError, match="full: no row is free in 1 pipelines that serve"):
        FleetDirectory(server.url, "another").find()


def test_a_robot_waits_until_one_serves(directory: Directory, server: DirectoryServer) -> None:
    asks = FleetDirectory(server.url, "arm")
    with pytest.raises(PeerLostError, match="none_serves: none of 0 pipelines serves"):
        asks.wait(0.3)
    serve(directory)
    assert asks.wait(60).pipeline == "a"


def test_a_robot_is_told_beside_many_who_connect_and_do_not_ask(
    directory: Directory, server: DirectoryServer
) -> None:
    serve(directory)
    parts = urlsplit(server.url)
    with ExitStack() as stack:
        for begin in (b"", b"GET /v1/resol"):
            for _ in range(44):
                client = socket.create_connection((parts.hostname, parts.port), 10)
                stack.enter_context(client).sendall(begin)
        assert FleetDirectory(server.url, "arm").find().pipeline == "a"


def ask_as_robot(url: str) -> None:
    with pytest.raises(PeerLostError, match="no directory answers: not within 1 s"):
        FleetDirectory(url, "arm").find()


def ask_as_operator(url: str) -> None:
    with pytest.raises(ConfigError, match="no directory answers: not within 2 s"):
        status.ask(url, None)


@pytest.mark.parametrize("ask", [ask_as_robot, ask_as_operator])
@pytest.mark.parametrize("begin", [b"", b"HTTP/1.0 200 OK\r\nContent-Length: 60000\r\n\r\n"])
def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(
    begin: bytes, ask: Callable[[str], None]
) -> None:
    """A robot's link that waited would neither look for another pipeline nor end."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        over = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(begin)
                while not over.wait(0.1):
                    connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        began_ns = now_ns()
        ask(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert now_ns() - began_ns < 60 * NS_PER_S


def test_no_directory_is_said_as_such(server: DirectoryServer) -> None:
    server.close()
    with pytest.raises(PeerLostError, match="no directory answers"):
        FleetDirectory(server.url, "arm").find()


def test_only_a_server_key_that_the_robot_has_itself_is_trusted(
    directory: Directory, server: DirectoryServer, tmp_path: Path
) -> None:
    own, other = (make_pair(name, tmp_path) for name in ("server", "stranger"))
    make_pair("arm", tmp_path)
    asks = FleetDirectory(
        server.url,
        "arm",
        secret_file=tmp_path / "arm.secret",
        server_files=[tmp_path / "server.public"],
    )
    serve(directory, "tcp://192.0.2.7:5870", own.decode())
    keys = asks.find().keys
    assert keys is not None
    assert keys.server == own
    serve(directory, "tcp://192.0.2.7:5870", other.decode())
    with pytest.raises(PeerLostError, match=r"not trusted: its key .* is in none of server_files"):
        asks.find()
    serve(directory, "tcp://192.0.2.7:5870")
    with pytest.raises(PeerLostError, match="is on another host and has no key"):
        asks.find()
    serve(directory, "nonsense")
    with pytest.raises(PeerLostError, match="not trusted: got 'nonsense'"):
        asks.find()


@pytest.mark.parametrize("endpoint", ["unix:///run/a", "tcp://127.0.0.1:5870"])
def test_a_directory_of_another_host_names_no_address_of_this_one(
    directory: Directory, server: DirectoryServer, endpoint: str
) -> None:
    serve(directory, endpoint)
    assert FleetDirectory(server.url, "arm").find().endpoint == endpoint
    elsewhere = server.url.replace("127.0.0.1", "0.0.0.0")  # reaches this host, and is no loopback
    with pytest.raises(PeerLostError, match="address of this host, the directory is on another"):
        FleetDirectory(elsewhere, "arm").find()


def test_an_address_may_end_in_a_slash(directory: Directory, server: DirectoryServer) -> None:
    serve(directory)
    assert FleetDirectory(f"{server.url}/", "arm").find().pipeline == "a"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "no directory answers"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "no directory answers"),
        (b"HTTP/1.0 503 Busy\r\n\r\n<html>", "HTTP 503 Busy"),
        (b"SSH-2.0-server\r\n", "no directory answers"),
    ],
)
def test_a_server_that_is_no_directory_is_said_as_such(answer: bytes, said: str) -> None:
    def reply() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(PeerLostError, match=said):
            FleetDirectory(f"http://127.0.0.1:{listener.getsockname()[1]}", "arm").find()
        thread.join()


def test_a_token_is_asked_of_everybody(directory: Directory, tmp_path: Path) -> None:
    serve(directory)
    (tmp_path / "right").write_text("secret\n")
    (tmp_path / "wrong").write_text("guess\n")
    with closing(DirectoryServer(HERE, directory, "secret")) as server:
        assert FleetDirectory(server.url, "arm", token_file=tmp_path / "right").find()
        for name in (None, tmp_path / "wrong"):
            with pytest.raises(PeerLostError, match="HTTP 401"):
                FleetDirectory(server.url, "arm", token_file=name).find()
        with pytest.raises(ConfigError, match=r"HTTP 401 .*token_file is not"):
            status.ask(server.url, None)
        (row,) = status.ask(server.url, "secret").pipelines
        assert row.report.pipeline == "a"


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
def test_it_listens_on_ipv6(directory: Directory) -> None:
    serve(directory)
    with closing(DirectoryServer("[::1]:0", directory)) as server:
        assert server.url.startswith("http://[::1]:")
        assert FleetDirectory(server.url, "arm").find().pipeline == "a"


def test_others_reach_it_with_a_token_alone(directory: Directory) -> None:
    with pytest.raises(ConfigError, match=r"got '0\.0\.0\.0:0', which others reach; want"):
        DirectoryServer("0.0.0.0:0", directory)
    for none in ("nowhere", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="want HOST:PORT"):
            DirectoryServer(none, directory)


def test_a_taken_port_is_said(directory: Directory, server: DirectoryServer) -> None:
    listen = server.url.removeprefix("http://")
    with pytest.raises(ConfigError, match="cannot listen on"):
        DirectoryServer(listen, directory)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/resolve", 400),
        ("/v1/resolve?robot=" + "x" * 1000, 400),
        ("/v1/resolve?robot=arm", 503),
        ("/v1/status", 200),
        ("/healthz", 200),
        ("/", 404),
    ],
)
def test_each_path_has_its_answer(server: DirectoryServer, path: str, code: int) -> None:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), 10) as asks:
        asks.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        answer = asks.makefile("rb").read()
    assert answer.split()[1] == str(code).encode()


@pytest.mark.parametrize(
    "url",
    [
        "unix:///run/directory",
        "http://host:99999",
        "http://[::1",
        "http://fleet..local:5871",
        f"http://{'a' * 64}:5871",
        "http://host:5871/ä",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="want a directory's http://HOST:PORT"):
        FleetDirectory(url, "arm")


def test_a_name_of_a_robot_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match="want a name that UTF-8 can encode"):
        FleetDirectory("http://127.0.0.1:1", "arm\ud800")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b" \n", b"two\nlines", b"a\x07b"])
def test_a_token_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes) -> None:
    token = tmp_path / "token"
    with pytest.raises(ConfigError, match="token: cannot be read: No such file"):
        FleetDirectory("http://127.0.0.1:1", "arm", token_file=token)
    token.write_bytes(content)
    with pytest.raises(ConfigError, match="want one line of printable characters"):
        FleetDirectory("http://127.0.0.1:1", "arm", token_file=token)


@pytest.mark.parametrize("one", [{"secret_file": "arm.secret"}, {"server_files": ["a.public"]}])
def test_a_robot_s_own_key_and_those_of_servers_come_together(one: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="want both, or neither"):
        FleetDirectory("http://127.0.0.1:1", "arm", **one)


def test_status_says_which_pipelines_serve_other_weights(
    directory: Directory, server: DirectoryServer
) -> None:
    def told(**weights: str) -> str | None:
        for name, digest in weights.items():
            phase = "ended" if name == "gone" else "ready"
            report = PipelineReport(
                pipeline=name, phase=phase, endpoint="unix:///run/a", rows=1, weights=digest
            )
            directory.report(report, now_ns())
        return status.other_weights(status.ask(server.url, None))

    assert told(a="", b="") is None
    assert told(a="3fa1", b="3fa1", gone="9bc2") is None
    line = told(b="9bc2", c="3fa1")
    assert line is not None
    assert "serve different policy.weights (3fa1: a, c; 9bc2: b): a robot that changes" in line
