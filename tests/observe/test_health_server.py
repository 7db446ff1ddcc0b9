"""The door for scrapers and probes, and clients that misbehave at it."""

import logging
import os
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from urllib.request import urlopen

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ppstream.observe import http_server
from ppstream.observe.health_server import HealthServer

LIMIT_S = 0.3
RESET = struct.pack("ii", 1, 0)


class Nothing(Collector):
    def collect(self):
        return []


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_LIMIT_S", LIMIT_S)
    server = HealthServer(0, Nothing(), lambda: {"phase": "ready"})
    yield server
    close(server)


def close(server):
    """Whether it could be closed within a bound."""
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(20 * LIMIT_S)
    return not closing.is_alive()


def drip(server):
    """A request that never ends, a byte well within any limit on one read."""

    def send():
        with client, suppress(OSError):
            client.sendall(b"GET /metrics")
            while True:
                client.sendall(b"a")
                time.sleep(LIMIT_S / 10)

    client = socket.create_connection(("127.0.0.1", server.port))
    dripping = threading.Thread(target=send, daemon=True)
    dripping.start()
    assert asked(server) == 200  # whoever came before is being served
    return dripping


def test_a_request_that_never_ends_is_hung_up_on(server):
    dripping = drip(server)
    assert asked(server) == 200
    dripping.join(20 * LIMIT_S)
    assert not dripping.is_alive()


def test_the_door_closes_while_a_request_does_not_end_and_hangs_up(monkeypatch, server):
    monkeypatch.setattr(http_server, "REQUEST_LIMIT_S", 3600)
    dripping = drip(server)
    assert close(server)
    dripping.join(20 * LIMIT_S)
    assert not dripping.is_alive()


def asked(server, path="healthz"):
    with urlopen(f"http://127.0.0.1:{server.port}/{path}", timeout=20 * LIMIT_S) as answer:
        return answer.status


def ended(client):
    with suppress(ConnectionError):
        while client.recv(4096):
            pass
    return True


def test_many_requests_that_do_not_end_keep_nobody_who_asks_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_LIMIT_S", 3600)  # no time ends them
    server = HealthServer(0, Nothing(), lambda: {"phase": "ready"})
    halves = []
    for _ in range(44):
        halves.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        halves[-1].sendall(b"GET /metr")
        assert asked(server) == 200
    assert asked(server, "metrics") == 200
    assert all(map(ended, halves[: 44 - http_server.REQUESTS_MAX]))
    newest = halves[-1]
    newest.sendall(b"ics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert newest.recv(12) == b"HTTP/1.0 200"
    assert close(server)
    for half in halves:
        half.close()


def test_answers_are_made_one_at_a_time_by_one_thread():
    inside, most, makers = [], [], set()

    def slow():
        makers.add(threading.current_thread())
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return {"phase": "ready"}

    server = HealthServer(0, Nothing(), slow)
    threads = [threading.Thread(target=asked, args=(server,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert close(server)
    assert most == [1] * 8
    assert len(makers) == 1  # what the allocator keeps of a thread grows by no answer more


def test_no_answer_is_made_for_who_was_hung_up_on(holding):
    server, may_go_on, made = holding
    clients = [ask(server) for _ in range(43)]
    newest = len(clients) - http_server.REQUESTS_MAX
    may_go_on.set()
    assert all(map(ended, clients[:newest]))
    assert all(client.recv(12) == b"HTTP/1.0 200" for client in clients[newest:])
    assert len(made) <= 1 + http_server.REQUESTS_MAX
    for client in clients:
        client.close()


def test_a_client_that_dies_is_its_own_affair_and_a_broken_answer_is_told(server, caplog):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.sendall(b"GET /me")
    with urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=20 * LIMIT_S):
        pass
    assert caplog.records == []
    broken = HealthServer(0, Nothing(), dict)
    try:
        with caplog.at_level(logging.ERROR), pytest.raises(ConnectionError):
            urlopen(f"http://127.0.0.1:{broken.port}/readyz", timeout=20 * LIMIT_S)
    finally:
        close(broken)
    assert "KeyError" in caplog.text


def test_an_error_of_ours_is_logged_and_a_client_that_leaves_is_not(caplog):
    def missing():
        raise FileNotFoundError(2, "no such file", "run.json")

    server = HealthServer(0, Nothing(), missing)
    with suppress(OSError):
        urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=5)
    assert close(server)
    assert "run.json" in caplog.text


@pytest.fixture
def holding(monkeypatch):
    """A door whose first answer is being made until the event is set; no time ends a request."""
    monkeypatch.setattr(http_server, "REQUEST_LIMIT_S", 3600)
    made, is_made, may_go_on = [], threading.Event(), threading.Event()

    def held():
        made.append(1)
        is_made.set()
        assert may_go_on.wait(20)
        return {"phase": "ready"}

    server = HealthServer(0, Nothing(), held)
    with ask(server) as first:
        assert is_made.wait(20)
        yield server, may_go_on, made
        assert first.recv(12) == b"HTTP/1.0 200"
    assert close(server)


def ask(server, request=b"GET /healthz HTTP/1.1\r\n\r\n"):
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    client.sendall(request)
    return client


def test_who_waits_for_an_answer_is_not_hung_up_on_for_many_who_say_nothing(holding):
    server, may_go_on, _ = holding
    with ExitStack() as stack:
        good = stack.enter_context(ask(server))
        silent = [stack.enter_context(ask(server, b"")) for _ in range(200)]
        may_go_on.set()
        assert good.recv(12) == b"HTTP/1.0 200"
        assert all(map(ended, silent[: -http_server.REQUESTS_MAX]))


def test_no_answer_is_made_for_who_has_gone(holding):
    server, may_go_on, made = holding
    for _ in range(3):
        with ask(server) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    may_go_on.set()
    assert asked(server) == 200
    assert len(made) == 2


def test_an_answer_larger_than_the_kernel_takes_at_once_comes_whole_and_in_order():
    class Large(Collector):
        def collect(self):
            yield GaugeMetricFamily("large", "x" * 20_000_000, 1)

    server = HealthServer(0, Large(), dict)
    with ask(server, b"GET /metr") as slow:
        slow.sendall(b"ics HTTP/1.1\r\n\r\n")
        assert slow.recv(12) == b"HTTP/1.0 200"
        assert asked(server, "") == 200  # others are answered while it does not read
        head, _, body = slow.makefile("rb").read().partition(b"\r\n\r\n")
    assert close(server)
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    assert body.endswith(b"\nlarge 1.0\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /metrics?name=x HTTP/1.1\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"x" * 100_000, 431),
        (b"\xff\xfe\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 1\r\n\r\n", 501),
    ],
)
def test_what_is_no_request_is_refused_and_said(server, request_, status):
    with ask(server, request_) as client:
        answer = client.makefile("rb").read()
    assert answer.startswith(f"HTTP/1.0 {status} ".encode())


def test_a_request_for_the_head_gets_no_body(server):
    with ask(server, b"HEAD /healthz HTTP/1.1\r\n\r\n") as client:
        head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert (b"Content-Length: 0" in head, body) == (False, b"")


def test_who_comes_while_the_process_has_no_descriptor_left_is_answered_once_it_has(server):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        free = os.dup(client.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            client.settimeout(LIMIT_S)
            with pytest.raises(TimeoutError):
                client.recv(12)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.settimeout(20)
        assert client.recv(12) == b"HTTP/1.0 200"


def test_requests_need_no_thread(server):
    before = threading.active_count()
    clients = [ask(server, b"GET /me") for _ in range(http_server.REQUESTS_MAX)]
    assert asked(server) == 200  # whoever came before is being served
    assert threading.active_count() == before
    for client in clients:
        client.close()
