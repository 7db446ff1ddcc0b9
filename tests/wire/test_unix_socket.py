from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fuzz.frames import fuzz_packets
from hypothesis import given
from hypothesis import strategies as st
from memory_rig import SIZE, memory, reopened
from robot_rig import make_client, make_config, service_problems, serving, wait_until

from ppstream import native
from ppstream.config.schema import ImageConfig, PipelineConfig, StreamConfig
from ppstream.core.errors import ConfigError
from ppstream.wire import unix_socket
from ppstream.wire.fields import encoder
from ppstream.wire.message_memory import (
    CARRIER,
    CARRIER_BYTES,
    MAGIC,
    PAGE_BYTES,
    SEALS,
    LargeMessage,
)
from ppstream.wire.message_socket import MAX_FRAME_BYTES, Frame, MessageSocket
from ppstream.wire.robot_messages import PARTS_BYTES, Samples, in_parts
from ppstream.wire.transports import bind_server, connect_client
from ppstream.wire.unix_socket import seqpacket

HEIGHT, WIDTH = 720, 1280
FRAME_BYTES = HEIGHT * WIDTH * 3
SEND_BUFFER = 212_992  # Linux's net.core.wmem_default
LINGER_S = 8
needs_core = pytest.mark.skipif(not native.is_used, reason="there is no compiled core")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MessageSocket]:
    server = bind_server(f"unix://{tmp_path}/robot")
    yield server
    server.close()


def path_of(server: MessageSocket) -> str:
    return server.endpoint.removeprefix("unix://")


@contextmanager
def stranger(server: MessageSocket) -> Iterator[socket.socket]:
    """A raw connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(path_of(server))
        raw.settimeout(10)
        yield raw


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def serves(server: MessageSocket) -> bool:
    client = connect_client(server.endpoint)
    frames: list[Frame] = []
    try:
        assert client.send(b"hello")
        wait_until(lambda: frames.extend(server.drain()) or frames)
    finally:
        client.close()
    return [frame.body for frame in frames] == [b"hello"]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- who may connect, and where -----------------------------------------------------------------


def test_a_missing_folder_is_made_for_its_owner_alone_and_the_file_goes_with_the_server(
    tmp_path: Path,
) -> None:
    server = bind_server(f"unix://{tmp_path}/folder/robot")
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    assert serves(server)
    server.close()
    assert [*(tmp_path / "folder").iterdir()] == []


@pytest.mark.parametrize(
    ("mode", "uids", "problem"),
    [
        (0o700, (), None),
        (0o500, (), "Permission denied"),
        (0o750, (), "has mode 750; want a folder of your own with mode 700"),
        (0o701, (), "has mode 701; want a folder of your own with mode 700"),
        (0o1777, (), "has mode 1777; want a folder of your own with mode 700, such as unix:///"),
        (0o711, (os.geteuid(),), None),
        (0o755, (os.geteuid(),), None),
        (0o770, (os.geteuid(),), "has mode 770; want a folder of your own with mode 711"),
        (0o1777, (os.geteuid(),), "has mode 1777; want a folder of your own with mode 711"),
    ],
)
def test_a_folder_that_others_could_change_is_refused(
    tmp_path: Path, mode: int, uids: tuple[int, ...], problem: str | None
) -> None:
    if problem == "Permission denied" and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    endpoint = f"unix://{folder}/robot"
    if problem is None:
        server = bind_server(endpoint, allowed_uids=uids)
        assert serves(server)
        server.close()
    else:
        with pytest.raises(ConfigError, match=problem):
            bind_server(endpoint, allowed_uids=uids)


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ConfigError, match=f"belongs to user {other - 1}; want a folder of your"):
        bind_server(f"unix://{tmp_path}/robot")


def test_uid_in_a_path_is_the_number_of_the_user(tmp_path: Path) -> None:
    server = bind_server(f"unix://{tmp_path}/{{uid}}/robot")
    assert server.endpoint == f"unix://{tmp_path}/{os.geteuid()}/robot"
    client = connect_client(f"unix://{tmp_path}/{{uid}}/robot")
    assert client.send(b"hello")
    wait_until(server.drain)
    client.close()
    server.close()


def test_a_folder_without_a_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing does not exist; make it"):
        bind_server(f"unix://{tmp_path}/missing/folder/robot")


def test_a_user_who_is_not_allowed_is_turned_away_and_counted(tmp_path: Path) -> None:
    server = bind_server(f"unix://{tmp_path}/robot", allowed_uids=(os.geteuid() + 1,))
    client = connect_client(server.endpoint)
    assert client.send(b"let me in")
    wait_until(lambda: server.drain() or server.refused().get("uid"))
    wait_until(lambda: not client.drain() and server.refused()["uid"] == 1)
    assert server.drain() == []
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("endpoint", "fields", "problem"),
    [
        ("unix:///tmp/p/r", {"secret_key": "/k", "allowed_keys": "/l"}, "want a tcp:// endpoint"),
        ("tcp://127.0.0.1:0", {"allowed_uids": (0,)}, "want a unix:// endpoint"),
        ("unix:///tmp/p/r", {"allowed_uids": (0,)}, None),
        ("unix:///tmp/{uid}/r", {"allowed_uids": (os.geteuid(),)}, None),
        (
            "unix:///tmp/{uid}/r",
            {"allowed_uids": (os.geteuid(), os.geteuid() + 1)},
            f"got {os.geteuid() + 1} with 'unix:///tmp/{{uid}}/r', where each process fills in its "
            f"own user for {{uid}}; want a path that is the same for all, as unix:///tmp/{os.geteuid()}/r",
        ),
    ],
)
def test_a_configuration_that_guards_the_other_kind_is_refused(
    endpoint: str, fields: dict[str, object], problem: str | None
) -> None:
    found = service_problems(endpoint, **fields)
    assert [problem in line for line in found] == ([] if problem is None else [True])


def test_the_file_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(f"{tmp_path}/robot")
        killed.listen()
    server = bind_server(f"unix://{tmp_path}/robot")
    assert serves(server)
    server.close()


def test_the_file_of_a_server_that_has_no_time_to_accept_stays(tmp_path: Path) -> None:
    path = tmp_path / "robot"
    with ExitStack() as open_sockets:
        busy = open_sockets.enter_context(seqpacket())
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(16):
            waiting = open_sockets.enter_context(seqpacket())
            if waiting.connect_ex(str(path)) == errno.EAGAIN:
                break
        else:
            pytest.fail("the backlog takes more than it was told to")
        with pytest.raises(ConfigError, match="in use by a running server"):
            bind_server(f"unix://{path}")
        assert path.is_socket()


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    (tmp_path / "robot").write_text("precious")
    with pytest.raises(ConfigError, match="it is a file and no socket"):
        bind_server(f"unix://{tmp_path}/robot")
    assert (tmp_path / "robot").read_text() == "precious"


def test_a_server_that_closes_late_leaves_the_file_of_its_successor(tmp_path: Path) -> None:
    old = bind_server(f"unix://{tmp_path}/robot")
    (tmp_path / "robot").unlink()
    new = bind_server(f"unix://{tmp_path}/robot")
    old.close()
    assert serves(new)
    new.close()


def test_a_server_without_descriptors_waits_for_some_and_does_not_spin(
    server: MessageSocket,
) -> None:
    client = connect_client(server.endpoint)
    assert client.send(b"hello")
    with no_free_descriptor():
        wait_until(lambda: server.drain() or server.refused().get("accept"))
        server.drain()
        assert not select.select([server.fd], [], [], 0)[0]
    server.refused()  # a second is over
    wait_until(lambda: [frame.body for frame in server.drain()] == [b"hello"])
    client.close()


def test_connections_leave_half_of_the_descriptors_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket.resource, "getrlimit", lambda _: (16, 16))
    server = bind_server(f"unix://{tmp_path}/robot")
    clients = [connect_client(server.endpoint) for _ in range(5)]
    frames: list[Frame] = []
    for client in clients:
        assert client.send(b"hello")
        frames += server.drain()
    assert (len(frames), server.refused()) == (4, {"accept": 1})
    clients[0].close()
    wait_until(lambda: not server.drain() and server.refused().get("closed"))
    wait_until(lambda: not clients[4].drain() and clients[4].send(b"hello") and server.drain())
    for each in (*clients, server):
        each.close()


# ---- what strangers send ------------------------------------------------------------------------


def plain_file() -> int:
    fd = os.open(os.environ.get("TMPDIR", "/tmp"), os.O_TMPFILE | os.O_RDWR)
    os.write(fd, bytes(SIZE))
    return fd


def carrier(length: int = SIZE, at: int = 0) -> bytes:
    return CARRIER.pack(MAGIC, at, length, 1).ljust(CARRIER_BYTES, b"\0")


@pytest.mark.parametrize(
    ("body", "make"),
    [
        pytest.param(b"ping", memory, id="a message with a descriptor"),
        pytest.param(carrier().replace(MAGIC, b"\xc1"), memory, id="no carrier"),
        pytest.param(carrier()[:-1], memory, id="a short carrier"),
        pytest.param(carrier(), lambda: memory(seals=0), id="not sealed"),
        pytest.param(carrier(), lambda: memory(seals=SEALS & ~fcntl.F_SEAL_GROW), id="grows"),
        pytest.param(carrier(), lambda: memory(seals=SEALS & ~fcntl.F_SEAL_SHRINK), id="shrinks"),
        pytest.param(carrier(SIZE + 1), memory, id="shorter than announced"),
        pytest.param(carrier(1, at=SIZE), memory, id="behind its end"),
        pytest.param(carrier(1, at=(1 << 64) - 1), memory, id="far behind its end"),
        pytest.param(carrier(0), memory, id="nothing in it"),
        pytest.param(carrier(), lambda: reopened(os.O_WRONLY), id="not to be read"),
        pytest.param(carrier(), lambda: reopened(os.O_RDONLY), id="not to be written"),
        pytest.param(carrier(), lambda: reopened(3), id="neither read nor written"),
        pytest.param(carrier(), lambda: reopened(os.O_PATH), id="a place alone"),
        pytest.param(carrier(), plain_file, id="a file"),
        pytest.param(carrier(), lambda: os.pipe()[0], id="a pipe"),
        pytest.param(carrier(), lambda: os.open("/dev/zero", os.O_RDWR), id="a device"),
    ],
)
def test_memory_that_holds_no_message_is_dropped_and_its_descriptor_closed(
    server: MessageSocket, body: bytes, make: Callable[[], int]
) -> None:
    with stranger(server) as raw:
        wait_until(lambda: server.drain() == [] and not server.has_more)
        fd = make()
        before = descriptors()
        for _ in range(10):
            socket.send_fds(raw, (body,), (fd,))
        raw.send(b"still here")
        frames: list[Frame] = []
        wait_until(lambda: frames.extend(server.drain()) or frames)
        assert [frame.body for frame in frames] == [b"still here"]
        assert server.malformed == 10
        wait_until(lambda: descriptors() == before)
        os.close(fd)


def test_descriptors_beyond_one_are_closed(server: MessageSocket) -> None:
    with stranger(server) as raw:
        wait_until(lambda: server.drain() == [] and not server.has_more)
        fds = [memory() for _ in range(20)]
        before = descriptors()
        socket.send_fds(raw, (carrier(),), fds[:1])
        socket.send_fds(raw, (b"ping",), fds)
        socket.send_fds(raw, (carrier(),), fds)
        frames: list[Frame] = []
        wait_until(lambda: frames.extend(server.drain()) or server.malformed == 2)
        assert [frame.body for frame in frames] == [bytes(SIZE)]
        frames.clear()
        wait_until(lambda: descriptors() == before + 1)  # the memory of this connection
        for fd in fds:
            os.close(fd)


@contextmanager
def lingering() -> Iterator[socket.socket]:
    """A connection whose last descriptor takes ``LINGER_S`` to close, or until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with far:
        made.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                made.send(bytes(65_536))
        made.setblocking(True)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
        yield made


@pytest.mark.parametrize("reader", ["python", pytest.param("core", marks=needs_core)])
@pytest.mark.parametrize("where", ["alone", "behind another", "unread"])
def test_a_descriptor_that_takes_long_to_close_keeps_nobody_waiting(
    server: MessageSocket, where: str, reader: str
) -> None:
    before = descriptors()
    with lingering() as slow, stranger(server) as raw:
        raw.send(b"hello")
        frames: list[Frame] = []
        wait_until(lambda: frames.extend(server.drain()) or frames)
        source = server.packets_of(frames[0].peer)
        assert source is not None
        if where == "unread":
            for _ in range(20):  # more than the core reads at once
                raw.send(b"")
        fds = [0] * (where == "behind another") + [slow.fileno()]
        socket.send_fds(raw, (b"a packet",), fds)
        slow.close()  # the packet has the last one
        begun = time.monotonic()
        if reader == "core":
            source.messages(native.receive(source.fileno(), (), 0, 16)[2])
        for _ in range(4):
            server.drain()
        assert time.monotonic() - begun < LINGER_S / 2
        assert server.malformed == (where != "unread")
        assert serves(server)
    wait_until(lambda: server.drain() == [] and descriptors() == before)


@pytest.mark.parametrize(
    "send",
    [
        pytest.param(lambda raw: raw.send(b""), id="an empty packet"),
        pytest.param(lambda raw: raw.send(bytes(300_000)), id="a packet that wants a carrier"),
        pytest.param(
            lambda raw: socket.send_fds(raw, (carrier(MAX_FRAME_BYTES + 1),), (memory(),)),
            id="more than the largest frame",
        ),
    ],
)
def test_what_is_too_much_or_nothing_loses_its_sender_the_connection(
    server: MessageSocket, send: Callable[[socket.socket], None]
) -> None:
    with stranger(server) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        send(raw)
        wait_until(lambda: server.drain() == [] and server.refused().get("closed") == 1)
        with suppress(ConnectionResetError):
            assert raw.recv(1) == b""
        assert serves(server)


@given(st.lists(st.binary(max_size=5000), max_size=5))
def test_any_packets_arrive_as_they_are_or_end_their_connection(packets: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder, seqpacket() as listener:
        listener.bind(f"{folder}/server")
        listener.listen()
        client = unix_socket.UnixClient(f"unix://{folder}/server")
        assert client.send(b"connects")
        listener.setblocking(True)
        theirs, _ = listener.accept()
        assert theirs.recv(8) == b"connects"
        for packet in packets:
            theirs.send(packet)
        theirs.close()
        until = packets.index(b"") if b"" in packets else len(packets)
        assert [frame.body for frame in client.drain()] == packets[:until]
        client.close()


def test_thousands_of_fuzzed_packets_leave_no_descriptor_and_the_endpoint_serves() -> None:
    counts = fuzz_packets(3000, seed=2)  # raises when something stayed, or nobody is served
    assert counts["sent"] == 3000
    assert min(counts["frames"], counts["malformed"], counts["closed"]) > 100


# ---- large frames -------------------------------------------------------------------------------


def camera_config(endpoint: str, height: int, width: int) -> PipelineConfig:
    config = make_config(endpoint)
    front = StreamConfig(
        name="front",
        dim=height * width * 3,
        rate_hz=30.0,
        dtype="uint8",
        image=ImageConfig(height=height, width=width),
    )
    return msgspec.structs.replace(config, streams=(*config.streams, front))


def send_buffers(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """From now on sockets are made with so many bytes of SO_SNDBUF."""
    seqpacket = unix_socket.seqpacket

    def with_buffer() -> socket.socket:
        made = seqpacket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size // 2)  # Linux doubles it
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == size
        return made

    monkeypatch.setattr(unix_socket, "seqpacket", with_buffer)


def test_a_message_that_a_small_buffer_does_not_take_travels_as_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_buffers(monkeypatch, 32_768)
    server = bind_server(f"unix://{tmp_path}/robot")
    client = connect_client(server.endpoint)
    assert client.send(b"x" * 100_000)
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    assert isinstance(frames[0].message, LargeMessage)
    assert frames[0].body == b"x" * 100_000
    client.close()
    server.close()


def test_samples_in_parts_are_those_of_the_encoder() -> None:
    sizes = (PARTS_BYTES, 65_535, 65_536)
    for values in (*(np.zeros(size, np.uint8) for size in sizes), np.ones((3, 20_000), np.float32)):
        message = Samples(2**40, 3, np.arange(3).data, values.data)
        head, tail = in_parts(message)
        assert head + tail.tobytes() == encoder.encode(message)


@pytest.mark.parametrize(
    ("frame_bytes", "frames"), [(96 * 96 * 3, 6), (224 * 224 * 3, 40), (FRAME_BYTES, 40)]
)
def test_frames_of_several_cameras_at_once_find_room_before_any_is_read(
    server: MessageSocket, monkeypatch: pytest.MonkeyPatch, frame_bytes: int, frames: int
) -> None:
    send_buffers(monkeypatch, SEND_BUFFER)
    client = connect_client(server.endpoint)
    frame = bytes(frame_bytes)
    assert [client.send(frame) for _ in range(frames)] == [True] * frames
    taken: list[int] = []
    wait_until(
        lambda: taken.extend(len(one.body) for one in server.drain()) or len(taken) == frames
    )
    assert taken == [frame_bytes] * frames
    client.close()


@pytest.mark.parametrize(
    ("height", "width", "is_packet"),
    [(48, 48, True), (96, 96, False), (224, 224, False), (HEIGHT, WIDTH, False)],
    ids=["7 KB", "27 KB", "150 KB", "2.8 MB"],
)
def test_a_frame_is_copied_twice_between_array_and_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, height: int, width: int, is_packet: bool
) -> None:
    """The array itself is sent or written to the memory that travels; the other one is the ring's.

    A packet is copied once on arrival, where memory that travels is read into its place.
    """
    given: list[int] = []  # addresses of what the kernel copies from or to
    frame_bytes = height * width * 3

    def noting(name: str, owner: Any) -> None:
        function = getattr(owner, name)

        def noted(first: Any, *rest: Any) -> Any:
            buffers = next(one for one in (first, *rest) if isinstance(one, tuple))
            given.extend(np.frombuffer(one, np.uint8).ctypes.data for one in buffers)
            return function(first, *rest)

        monkeypatch.setattr(owner, name, noted)

    send_buffers(monkeypatch, SEND_BUFFER)
    noting("pwritev", os)
    noting("preadv", os)
    noting("sendmsg", socket.socket)
    config = camera_config(f"unix://{tmp_path}/robot", height, width)
    image = np.random.default_rng(0).integers(0, 256, frame_bytes, np.uint8)
    streams = (("joints", 3), ("imu", 2, "float64"), ("front", frame_bytes, "uint8"))
    with (
        serving(config, ring_samples=2) as server,
        make_client(server.sessions.endpoint, streams=streams) as client,
    ):
        client.connect()
        ring = server.rows[0].rings["front"]
        client.push("front", 1, image)
        wait_until(lambda: ring.count == 1)
        given.clear()
        tracemalloc.start()
        try:
            client.push("front", 2, image)
            wait_until(lambda: ring.count == 2)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    taken = ring.bank.values[0, 1].numpy()
    assert image.ctypes.data in given, "a copy before it is sent"
    assert is_packet or taken.ctypes.data in given, "a copy before the ring"
    arrived = frame_bytes if is_packet else 0
    assert arrived <= most < arrived + max(frame_bytes / 10, 20_000), "a copy in between"
    np.testing.assert_array_equal(taken, image)


def test_one_drain_takes_all_that_is_there_and_in_turn(server: MessageSocket) -> None:
    clients = [connect_client(server.endpoint) for _ in range(2)]
    for client in clients:  # in this order they are accepted
        assert client.send(b"0")
    first: list[Frame] = []
    wait_until(lambda: first.extend(server.drain()) or len(first) == 2)
    sent = [(0, b"a"), (0, b"b"), (0, b"c"), (1, b"d")]
    for client, body in sent:
        assert clients[client].send(body)
    bodies = [bytes(frame.body) for frame in server.drain()]
    assert sorted(bodies) == [body for _, body in sent]
    assert bodies.index(b"d") < bodies.index(b"b") < bodies.index(b"c")
    for client in clients:
        client.close()


def test_frames_that_nobody_reads_do_not_fill_the_memory(server: MessageSocket) -> None:
    client = connect_client(server.endpoint)
    sent = 0
    while client.send(b"head", tail=memoryview(bytes(FRAME_BYTES))):
        sent += 1
        assert sent < 100
    assert 8 < sent < 64
    client.close()


def test_a_robot_whose_reader_stands_hears_what_is_refused_and_its_newest_sample_gets_in_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel keeps the oldest: what it refuses is told, so that the next sample takes over."""
    send_buffers(monkeypatch, 16_384)
    stands, may_go = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert may_go.wait(30)

    with (
        serving(make_config(f"unix://{tmp_path}/robot")) as server,
        make_client(server.sessions.endpoint) as client,
    ):
        client.connect()
        assert client.wait_ready(10)
        wait_until(lambda: server.sessions.reports)  # nothing else is sent for a while
        standing = threading.Thread(target=server.order, args=(stand,))
        standing.start()
        assert stands.wait(60)
        taken = [client.push("joints", stamp_ns, [1, 2, 3]) for stamp_ns in range(1, 101)]
        sent = sum(taken)
        assert 0 < sent < 100
        assert taken == sorted(taken, reverse=True)
        assert (client.statistics().sent, client.statistics().unsent) == (sent, 100 - sent)
        may_go.set()
        standing.join(10)
        ring = server.rows[0].rings["joints"]
        wait_until(lambda: ring.accepted == sent)
        assert ring.newest_ns == sent
        assert client.push("joints", 101, [1, 2, 3])
        wait_until(lambda: ring.newest_ns == 101)
        assert client.statistics().sessions_opened == 1


def test_a_connection_has_one_memory_each_way_and_gives_it_back(server: MessageSocket) -> None:
    client = connect_client(server.endpoint)
    large = b"x" * 1_000_000
    frames: list[Frame] = []
    for number in (1, 2):
        assert client.send(b"", tail=memoryview(large))
        wait_until(lambda n=number: frames.extend(server.drain()) or len(frames) == n)
    assert open_memories() == 2  # the sender's descriptor and the receiver's
    assert [frame.body for frame in frames] == [large] * 2
    answers: list[Frame] = []
    assert server.send(large, frames[0].peer)
    wait_until(lambda: answers.extend(client.drain()) or answers)
    assert answers[0].body == large
    assert open_memories() == 4
    frames.clear()
    client.close()
    answers.clear()
    wait_until(lambda: not server.drain() and server.refused().get("closed"))
    wait_until(lambda: open_memories() == 0)


def test_a_server_that_closes_gives_all_memory_back(server: MessageSocket) -> None:
    clients = [connect_client(server.endpoint) for _ in range(2)]
    frames: list[Frame] = []
    for number, client in enumerate(clients):
        assert client.send(bytes(1_000_000))
        wait_until(lambda n=number: frames.extend(server.drain()) or len(frames) == n + 1)
    source = server.packets_of(frames[0].peer)
    assert server.send(bytes(1_000_000), frames[0].peer)
    frames.pop()
    server.close()
    for client in clients:
        client.close()
    wait_until(lambda: open_memories() == 1 and "ppstream-close" not in threads())
    assert frames.pop().body == bytes(1_000_000)
    assert open_memories() == 0
    assert source is not None


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("reader", ["python", pytest.param("core", marks=needs_core)])
def test_a_memory_whose_descriptor_found_no_room_ends_the_connection_and_the_next_brings_one(
    server: MessageSocket, reader: str
) -> None:
    client = connect_client(server.endpoint)
    frames: list[Frame] = []
    assert client.send(b"hello")
    wait_until(lambda: frames.extend(server.drain()) or frames)
    source = server.packets_of(frames[0].peer)
    assert source is not None
    assert client.send(bytes(1_000_000))
    with no_free_descriptor():
        if reader == "core":
            assert source.messages(native.receive(source.fileno(), (), 0, 16)[2]) == []
        else:
            assert server.drain() == []
    assert (server.malformed, server.refused()) == (1, {"closed": 1})
    assert select.select([client.fd], [], [], 10)[0]  # it is hung up on
    assert client.drain() == []
    assert client.send(bytes(1_000_000))
    wait_until(lambda: frames.extend(server.drain()) or len(frames) == 2)
    assert frames.pop().body == bytes(1_000_000)
    client.close()


def test_a_client_that_gets_no_memory_for_want_of_a_descriptor_connects_anew(
    server: MessageSocket,
) -> None:
    client = connect_client(server.endpoint)
    frames: list[Frame] = []
    for _ in range(2):
        assert client.send(b"hello")
        wait_until(lambda: frames.extend(server.drain()) or frames)
        peer = frames.pop().peer
        assert server.send(bytes(1_000_000), peer)
        if not client.malformed:
            with no_free_descriptor():
                assert client.drain() == []
            assert client.malformed == 1
    wait_until(lambda: frames.extend(client.drain()) or frames)
    assert frames.pop().body == bytes(1_000_000)
    client.close()


@pytest.mark.parametrize(("knows_memory", "flags"), [(True, socket.MSG_CTRUNC), (False, 0)])
def test_a_carrier_without_its_memory_ends_the_connection(
    server: MessageSocket, flags: int, *, knows_memory: bool
) -> None:
    client = connect_client(server.endpoint)
    assert client.send(bytes(1_000_000 if knows_memory else 1))
    frames: list[Frame] = []
    wait_until(lambda: frames.extend(server.drain()) or frames)
    source = server.packets_of(frames[0].peer)
    assert source is not None
    told = CARRIER.pack(MAGIC, PAGE_BYTES, SIZE, 1).ljust(CARRIER_BYTES, b"\0")
    if knows_memory:
        assert source.messages([(told, (), 0)])[0].body == bytes(SIZE)
    assert source.messages([(told, (), int(flags))]) == []
    assert (server.malformed, server.refused()) == (1, {"closed": 1})
    client.close()


def test_a_new_connection_brings_new_memory(server: MessageSocket) -> None:
    for number in range(2):
        client = connect_client(server.endpoint)
        for part in range(2):
            body = bytes([number, part]) * 50_000
            assert client.send(body)
            frames: list[Frame] = []
            wait_until(lambda found=frames: found.extend(server.drain()) or found)
            assert [frame.body for frame in frames] == [body]
        client.close()
        wait_until(lambda n=number: not server.drain() and server.refused().get("closed") == n + 1)


def open_memories() -> int:
    """Counts this process's descriptors of messages."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the look itself
            found += "ppstream-message" in str(fd.readlink())
    return found


def test_a_robot_on_rank_0s_host_loads_no_zeromq(tmp_path: Path) -> None:
    code = (
        "import sys; from ppstream import RobotClient\n"
        f"endpoint, streams = 'unix://{tmp_path}/robot', [('s', 1)]\n"
        "client = RobotClient(endpoint, robot='r', streams=streams, actions='a')\n"
        "try: client.connect(0.01)\n"
        "except Exception as error: assert 'no answer' in str(error)\n"
        "assert 'zmq' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(not native.is_used, reason="there is no compiled core")
def test_messages_of_packets_that_the_core_has_read_are_those_of_a_drain(
    server: MessageSocket,
) -> None:
    client = connect_client(server.endpoint)
    assert client.send(b"first")
    first: list[Frame] = []
    wait_until(lambda: first.extend(server.drain(limit=2)) or first)
    peer = first[0].peer
    source = server.packets_of(peer)
    assert source is not None
    assert server.packets_of(b"nobody") is None
    sent = [b"small", bytes(FRAME_BYTES), b"more"]
    for body in sent:
        assert client.send(body)
    client.close()
    open_before = len(os.listdir("/proc/self/fd"))
    taken, frames, others = native.receive(source.fileno(), (), 0, 16)
    assert (taken, frames, len(others)) == (0, 0, 4)  # the end, too
    found = source.messages(others)
    assert [(frame.peer, bytes(frame.body)) for frame in found] == [(peer, body) for body in sent]
    assert server.refused()["closed"] == 1
    assert (server.packets_of(peer), source.fileno()) == (None, -1)
    del found  # the memory goes with the connection and its messages
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == open_before - 1)
    assert not server.drain()


@pytest.mark.skipif(not native.is_used, reason="there is no compiled core")
def test_descriptors_behind_an_empty_packet_that_the_core_has_read_are_closed(
    server: MessageSocket,
) -> None:
    with stranger(server) as raw:
        raw.send(b"hello")
        frames: list[Frame] = []
        wait_until(lambda: frames.extend(server.drain()) or frames)
        source, fd = server.packets_of(frames[0].peer), memory()
        assert source is not None
        before = descriptors()
        raw.send(b"")
        for body in (carrier(), b"ping") * 3:
            socket.send_fds(raw, (body,), (fd,))
        assert source.messages(native.receive(source.fileno(), (), 0, 16)[2]) == []
        wait_until(lambda: descriptors() == before - 1)  # of the connection, too
        os.close(fd)
