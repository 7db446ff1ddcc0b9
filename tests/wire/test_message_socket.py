from __future__ import annotations

import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import zmq
from robot_rig import ANY_PORT, wait_until

from ppstream.core.errors import ConfigError
from ppstream.core.waiter import Waiter
from ppstream.wire.message_memory import LargeMessage
from ppstream.wire.message_socket import MAX_DRAIN_BYTES, MAX_FRAME_BYTES, Frame, MessageSocket
from ppstream.wire.transports import bind_server, connect_client
from ppstream.wire.unix_socket import PACKET_BYTES_MAX, TAILED_BYTES_MAX


@pytest.fixture(params=["tcp", "unix"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ANY_PORT if request.param == "tcp" else f"{request.param}://{tmp_path}/robot"


def is_readable(shared: MessageSocket) -> bool:
    return bool(select.select([shared.fd], [], [], 0)[0])


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


def test_what_came_while_the_owner_sends_is_announced(endpoint: str) -> None:
    """A send may swallow the edge of ZeroMQ's descriptor; then it must wake the owner."""
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
        assert woken.is_set() or is_readable(server), f"message {number} waits, nobody says so"
        assert [frame.body for frame in server.drain()] == [b"sample"]
    client.close()
    server.close()


FLOODED_SERVER = """
import time
from ppstream.wire import zmq_socket
from ppstream.wire.transports import bind_server, connect_client
server = bind_server("tcp://127.0.0.1:*")
client = connect_client(server.endpoint)
frames, count, until = [], 0, time.monotonic() + 20
while not frames and time.monotonic() < until:
    client.send(b"hello")
    frames = server.drain(1)
while count < 4 * zmq_socket.SERVER_RECEIVE_FRAMES and time.monotonic() < until:
    count += client.send(bytes(4096))
client.close()
for _ in range(20):  # nobody reads; what is sent to the one that left breaks the connection
    server.send(b"chunk", frames[0].peer)
    time.sleep(0.1)  # and what ZeroMQ does by its clock it does meanwhile
print(count, len(server.drain(1)))
server.close()
"""


def test_a_client_that_floods_and_leaves_ends_nobody_who_does_not_read() -> None:
    command = [sys.executable, "-c", FLOODED_SERVER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1024 1\n"), done.stderr


def test_what_a_limit_left_is_announced(endpoint: str) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    woken = threading.Event()
    server.wake = woken.set
    for _ in range(110):
        wait_until(lambda: client.send(b"x"))
    taken = most = 0
    while taken < 110:
        woken.clear()
        found = len(server.drain(limit=20))
        taken, most = taken + found, max(most, found)
        if server.has_more and taken < 110:
            assert woken.is_set() or is_readable(server)
    assert most == 20
    client.close()
    server.close()


def test_a_drain_of_large_frames_ends_with_the_one_that_reaches_its_bytes(endpoint: str) -> None:
    server = bind_server(endpoint)
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


def test_a_large_frame_is_handed_over_where_it_arrived_and_stays_whole(endpoint: str) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    sent = [bytes([number]) * MAX_DRAIN_BYTES for number in range(3)]
    frames: list[Frame] = []
    for body in sent:
        wait_until(lambda body=body: client.send(body[:7], tail=memoryview(body)[7:]))
    wait_until(lambda: frames.extend(server.drain()) or len(frames) == 3)
    assert all(isinstance(frame.message, memoryview | LargeMessage) for frame in frames)
    client.close()
    server.close()
    assert [bytes(frame.body) for frame in frames] == sent


@pytest.mark.parametrize(
    "size", [1, 65_535, TAILED_BYTES_MAX, TAILED_BYTES_MAX + 1, PACKET_BYTES_MAX, 1_000_000]
)
def test_a_body_and_a_tail_arrive_as_one_message_in_both_directions(
    endpoint: str, size: int
) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    whole = np.random.default_rng(size).bytes(size)
    wait_until(lambda: client.send(whole[:1], tail=memoryview(whole)[1:]))
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    assert bytes(frames[0].body) == whole
    assert server.send(whole, frames[0].peer)
    wait_until(lambda: frames.extend(client.drain()) or len(frames) == 2)
    assert bytes(frames[1].body) == whole
    client.close()
    server.close()


def test_as_many_frames_of_a_small_camera_wait_as_of_a_large_one(tmp_path: Path) -> None:
    waiting = []
    for size in (3 * 96 * 96, 1_000_000):
        server = bind_server(f"unix://{tmp_path}/robot")
        client = connect_client(server.endpoint)
        frame, sent = memoryview(bytes(size)), 0
        while client.send(b"head", tail=frame):
            sent += 1
        waiting.append(sent)
        client.close()
        server.close()
    assert waiting[0] >= waiting[1] > 10


@pytest.mark.parametrize("rows", [1000, 10_000])
def test_a_tail_of_numbers_travels_as_its_bytes(endpoint: str, rows: int) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    values = np.random.default_rng(0).random((rows, 20), np.float32)
    wait_until(lambda: client.send(b"head", tail=values.data))
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    assert bytes(frames[0].body) == b"head" + values.tobytes()
    client.close()
    server.close()


def test_after_a_restart_of_the_server_messages_go_both_ways_again(endpoint: str) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    wait_until(lambda: client.send(b"before") and server.drain())
    server.close()
    wait_until(lambda: not client.drain() and not client.send(b"nobody"))
    again = bind_server(server.endpoint)
    frames: list[Frame] = []
    wait_until(lambda: client.send(b"after"))
    wait_until(lambda: frames.extend(again.drain()) or frames)
    assert again.send(b"answer", frames[0].peer)
    answers: list[Frame] = []
    wait_until(lambda: answers.extend(client.drain()) or answers)
    assert answers[0].body == b"answer"
    client.close()
    again.close()


def test_what_was_sent_before_a_goodbye_arrives_though_its_sender_read_nothing(
    endpoint: str,
) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    wait_until(lambda: client.send(b"hello"))
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    assert server.send(b"chunk", frames[0].peer)
    select.select([client.fd], [], [], 10)
    assert client.send(b"goodbye")
    client.close()
    wait_until(lambda: frames.extend(server.drain()) or len(frames) == 2)
    assert frames[1] == Frame(frames[0].peer, b"goodbye")
    server.close()


KILLED = """
import os, signal, sys
from ppstream.wire.transports import connect_client
client = connect_client(sys.argv[1])
while not client.send(b"doomed"):
    pass
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_robot_that_is_killed_costs_others_nothing_and_is_nobody_from_then_on(
    endpoint: str,
) -> None:
    server = bind_server(endpoint)
    client = connect_client(server.endpoint)
    doomed = subprocess.Popen(
        [sys.executable, "-c", KILLED, server.endpoint], stdin=subprocess.PIPE, text=True
    )
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    assert server.send(b"chunk", frames[0].peer)
    doomed.communicate("now\n", timeout=20)
    assert doomed.returncode == -signal.SIGKILL
    wait_until(lambda: client.send(b"alive"))

    def is_nobody() -> bool:
        frames.extend(server.drain())
        return not server.send(b"chunk", frames[0].peer)

    wait_until(is_nobody)
    wait_until(lambda: frames.extend(server.drain()) or len(frames) == 2)
    assert frames[1].body == b"alive"
    assert server.send(b"chunk", frames[1].peer)
    client.close()
    server.close()


def test_a_reader_that_does_not_read_loses_its_own_messages_alone(endpoint: str) -> None:
    server = bind_server(endpoint)
    slow, quick = connect_client(server.endpoint), connect_client(server.endpoint)
    names: dict[bytes, bytes] = {}
    for client, body in ((slow, b"slow"), (quick, b"quick")):
        wait_until(lambda client=client, body=body: client.send(body))
    wait_until(lambda: names.update({f.body: f.peer for f in server.drain()}) or len(names) == 2)
    received: list[int] = []
    refused = 0
    for number in range(1500):
        body = number.to_bytes(4, "little") + bytes(16_000)
        refused += not server.send(body, names[b"slow"])
        assert server.send(body, names[b"quick"])
        while len(received) <= number:
            select.select([quick.fd], [], [], 10)
            received += [int.from_bytes(f.body[:4], "little") for f in quick.drain()]
    assert received == [*range(1500)]
    assert refused > 0
    late: list[int] = []
    wait_until(
        lambda: (
            late.extend(int.from_bytes(f.body[:4], "little") for f in slow.drain())
            or len(late) == 1500 - refused
        )
    )
    assert late == sorted(late)
    for each in (slow, quick, server):
        each.close()


def test_a_message_of_several_zeromq_frames_is_counted_and_the_next_one_read() -> None:
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


def test_an_oversized_frame_never_arrives_and_others_still_do(endpoint: str) -> None:
    server = bind_server(endpoint)
    big, small = connect_client(server.endpoint), connect_client(server.endpoint)
    wait_until(lambda: big.send(bytes(MAX_FRAME_BYTES + 1)))
    wait_until(lambda: small.send(b"small"))
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    assert [frame.body for frame in frames] == [b"small"]
    for shared in (big, small, server):
        shared.close()


def test_sending_to_nobody_is_refused_and_never_waits(endpoint: str) -> None:
    server = bind_server(endpoint)
    assert not server.send(b"chunk", b"stranger")
    endpoint = server.endpoint
    server.close()
    client = connect_client(endpoint)
    assert not client.send(b"samples")
    client.close()
    assert not client.send(b"samples")
    assert client.drain() == []
    client.close()


def test_an_endpoint_in_use_is_a_configuration_error(endpoint: str) -> None:
    server = bind_server(endpoint)
    with pytest.raises(ConfigError, match="in use"):
        bind_server(server.endpoint)
    server.close()


def test_no_connection_gets_the_name_of_another(endpoint: str) -> None:
    server = bind_server(endpoint)
    names: list[bytes] = []
    for number in range(3):
        client = connect_client(server.endpoint)
        wait_until(lambda client=client: client.send(b"hello"))
        wait_until(lambda n=number: names.extend(f.peer for f in server.drain()) or len(names) > n)
        client.close()
        server.drain()
    assert len({*names}) == 3
    server.close()
