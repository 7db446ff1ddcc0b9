from __future__ import annotations

import select
import threading
from pathlib import Path

import pytest
import zmq
from robot_rig import ANY_PORT, wait_until

from ppstream.core.errors import ConfigError
from ppstream.core.waiter import Waiter
from ppstream.wire.zmq_socket import (
    MAX_DRAIN,
    MAX_DRAIN_BYTES,
    MAX_FRAME_BYTES,
    Frame,
    bind_server,
    connect_client,
)


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ANY_PORT if request.param == "tcp" else f"ipc://{tmp_path}/robot"


def test_two_threads_send_while_the_owner_receives(endpoint: str) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    waiter = Waiter()
    waiter.register(client.fd)
    client.wake = waiter.wake
    count = 2000

    def send(first: int) -> None:
        for number in range(first, first + count):
            body = number.to_bytes(4, "little")
            wait_until(lambda body=body: client.send(body))

    threads = [threading.Thread(target=send, args=(first,)) for first in (0, count)]
    for thread in threads:
        thread.start()
    echoed: list[int] = []
    seen: list[Frame] = []
    while len(echoed) < 2 * count:
        for frame in server.drain():
            seen.append(frame)
            wait_until(lambda frame=frame: server.send(frame.body, frame.peer))
        waiter.wait(100_000)
        echoed += [int.from_bytes(frame.body, "little") for frame in client.drain()]
    for thread in threads:
        thread.join()
    assert sorted(echoed) == list(range(2 * count))
    for first in (0, count):  # each sender's own order survives
        own = [number for number in echoed if first <= number < first + count]
        assert own == sorted(own)
    client.close()
    server.close()
    waiter.close()


def test_a_send_that_swallows_the_edge_of_a_message_wakes_the_owner(endpoint: str) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    woken = threading.Event()
    server.wake = woken.set
    wait_until(lambda: client.send(b"hello"))
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    for number in range(20):
        woken.clear()
        assert client.send(b"sample")
        assert select.select([server.fd], [], [], 10)[0]
        assert server.send(b"chunk", frames[0].peer)
        assert select.select([server.fd], [], [], 0)[0] == [], "the send left the edge alone"
        assert woken.is_set(), f"message {number} waits and nobody says so"
        assert [frame.body for frame in server.drain()] == [b"sample"]
    client.close()
    server.close()


def test_a_drain_that_hits_its_limit_asks_to_be_called_again() -> None:
    server = bind_server(ANY_PORT)
    client = connect_client(server.endpoint)
    woken = threading.Event()
    server.wake = woken.set
    for _ in range(MAX_DRAIN + 10):
        wait_until(lambda: client.send(b"x"))
    taken = 0
    while taken < MAX_DRAIN + 10:
        woken.clear()
        frames = server.drain(limit=20)
        taken += len(frames)
        assert woken.is_set() == (len(frames) == 20)
    client.close()
    server.close()


def test_a_drain_of_large_frames_ends_with_the_one_that_reaches_its_bytes() -> None:
    server = bind_server(ANY_PORT)
    client = connect_client(server.endpoint)
    for _ in range(6):
        wait_until(lambda: client.send(bytes(MAX_DRAIN_BYTES // 2)))
    sizes: list[int] = []
    while sum(sizes) < 6:
        select.select([server.fd], [], [], 0.1)
        sizes.append(len(server.drain()))
        assert sizes[-1] <= 2
        assert server.has_more or sizes[-1] < 2
    client.close()
    server.close()


def test_a_large_frame_is_handed_over_where_it_arrived_and_stays_whole() -> None:
    server = bind_server(ANY_PORT)
    client = connect_client(server.endpoint)
    sent = [bytes([number]) * MAX_DRAIN_BYTES for number in range(3)]
    frames: list[Frame] = []
    for body in sent:
        wait_until(lambda body=body: client.send(body))
    wait_until(lambda: frames.extend(server.drain()) or len(frames) == 3)
    assert all(isinstance(frame.body, memoryview) for frame in frames)
    client.close()
    server.close()
    assert [bytes(frame.body) for frame in frames] == sent


def test_a_message_of_several_frames_is_counted_and_the_next_one_read() -> None:
    server = bind_server(ANY_PORT)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(server.endpoint)
    stranger.send_multipart([b"one", b"two", b"three"])
    stranger.send(b"whole")
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    assert [frame.body for frame in frames] == [b"whole"]
    assert server.malformed == 1
    context.destroy(linger=0)
    server.close()


def test_an_oversized_frame_never_arrives_and_others_still_do() -> None:
    server = bind_server(ANY_PORT)
    big, small = connect_client(server.endpoint), connect_client(server.endpoint)
    wait_until(lambda: big.send(bytes(MAX_FRAME_BYTES + 1)))
    wait_until(lambda: small.send(b"small"))
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    assert [frame.body for frame in frames] == [b"small"]
    for shared in (big, small, server):
        shared.close()


def test_sending_to_nobody_is_refused_and_never_waits() -> None:
    server = bind_server(ANY_PORT)
    assert not server.send(b"chunk", b"stranger")
    endpoint = server.endpoint
    server.close()
    client = connect_client(endpoint)
    assert not client.send(b"samples")
    client.close()
    assert not client.send(b"samples")
    assert client.drain() == []
    client.close()


def test_an_endpoint_in_use_is_a_configuration_error() -> None:
    server = bind_server(ANY_PORT)
    with pytest.raises(ConfigError, match="in use"):
        bind_server(server.endpoint)
    with pytest.raises(ConfigError, match="cannot connect to 'nonsense'"):
        connect_client("nonsense")
    server.close()
