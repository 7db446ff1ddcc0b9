from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import pytest
from peers import WAIT_NS, PairOfPeers, pump_until, repeat, tcp_pair, two_peers, unix_pair

from ppstream.control.framing import BUFFER_BYTES, FRAME_BYTES_MAX
from ppstream.control.heartbeat import HeartbeatThread
from ppstream.control.peer import UNREAD_FRAMES_MAX, Peer
from ppstream.core.clock import NS_PER_MS, NS_PER_S, ManualClock, now_ns
from ppstream.core.errors import PeerLostError, ProtocolError
from ppstream.core.waiter import Waiter
from ppstream.wire import rank_messages
from ppstream.wire.fields import encoder
from ppstream.wire.rank_messages import Bell, Drain, Goodbye, Measured, PhaseChange


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"])
def peers(request: pytest.FixtureRequest) -> Iterator[PairOfPeers]:
    near, far = two_peers(request.param)
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Peer]]:
    """A socket that says anything, and the peer that has to read it."""
    near, far = socket.socketpair()
    peer = Peer(far)
    yield near, peer
    near.close()
    peer.close()


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def test_frames_are_sorted_in_order(peers: PairOfPeers) -> None:
    near, far = peers
    near.send(PhaseChange("warming"))
    near.ring(3)
    near.send(rank_messages.Heartbeat(41))
    near.ring(4)
    near.send(Drain("done"))
    pump_until(far, lambda: len(far.inbox) == 2)
    assert list(far.bells) == [3, 4]
    assert list(far.inbox) == [PhaseChange("warming"), Drain("done")]
    assert far.peer_progress == 41


def test_frames_of_any_size_arrive_whole(peers: PairOfPeers) -> None:
    near, far = peers
    sent = [Measured(tuple(range(n))) for n in (0, 1, 20_000, 3, 100_000, 2)]

    def send_all() -> None:
        for frame in sent:
            near.send(frame)

    thread = threading.Thread(target=send_all)
    thread.start()
    pump_until(far, lambda: len(far.inbox) == len(sent))
    thread.join()
    assert list(far.inbox) == sent


def test_a_frame_may_come_byte_by_byte(raw: tuple[socket.socket, Peer]) -> None:
    sock, peer = raw
    data = framed(encoder.encode(Goodbye(20, "gone"))) * 3
    for at in range(len(data)):
        sock.send(data[at : at + 1])
        peer.pump()
    assert list(peer.inbox) == [Goodbye(20, "gone")] * 3


def test_hearing_any_frame_moves_last_heard() -> None:
    near, far = socket.socketpair()
    clock = ManualClock(100)
    peer, other = Peer(far, clock=clock), Peer(near)
    clock.advance(50)
    peer.pump()
    assert peer.last_heard_ns == 100
    other.ring(0)
    peer.pump()
    assert peer.last_heard_ns == 150
    peer.close()
    other.close()


def test_what_was_said_before_the_end_is_delivered_first(peers: PairOfPeers) -> None:
    near, far = peers
    for index in range(100):
        near.ring(index)
    near.send(Goodbye(0, "drained"))
    near.close()
    pump_until(far, lambda: bool(far.inbox))
    assert len(far.bells) == 100
    for _ in range(2):
        with pytest.raises(PeerLostError):
            pump_until(far, lambda: False)
    assert far.lost_ns is not None
    with pytest.raises(PeerLostError):
        repeat(lambda: far.send(Drain("")))  # over TCP the first after the end may still pass


def test_frames_read_together_with_the_end_are_delivered_first(
    raw: tuple[socket.socket, Peer],
) -> None:
    sock, peer = raw
    texts = ["x" * 4096] * 15 + ["y" * 3952]
    data = b"".join(framed(encoder.encode(Drain(text))) for text in texts)
    assert len(data) == BUFFER_BYTES  # so that one pump reads them all, and looks once more
    sock.sendall(data)
    sock.close()
    peer.pump()
    assert len(peer.inbox) == len(texts)
    with pytest.raises(PeerLostError):
        peer.pump()


def test_receive_delivers_every_frame_of_a_peer_that_left(peers: PairOfPeers) -> None:
    near, far = peers
    near.send(Drain("a"))
    near.send(Drain("b"))
    near.close()
    assert [far.receive(WAIT_NS), far.receive(WAIT_NS)] == [Drain("a"), Drain("b")]
    with pytest.raises(PeerLostError):
        far.receive(WAIT_NS)


def test_receive_gives_up_on_a_silent_peer(peers: PairOfPeers) -> None:
    with pytest.raises(PeerLostError, match="did not send a frame within"):
        peers[0].receive(20 * NS_PER_MS)


def test_a_limit_of_months_is_waited_for_like_any_other(peers: PairOfPeers) -> None:
    near, far = peers
    late = threading.Timer(0.05, near.send, [Drain("late")])
    late.start()
    assert far.receive(60 * 24 * 3600 * NS_PER_S) == Drain("late")
    late.join()


def test_a_connection_error_is_a_lost_peer() -> None:
    near, far = tcp_pair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer = Peer(far)
    near.close()  # answers with a reset
    with pytest.raises(PeerLostError):
        pump_until(peer, lambda: False)
    peer.close()


def test_an_oversized_frame_is_refused_by_both_ends(raw: tuple[socket.socket, Peer]) -> None:
    sock, peer = raw
    with pytest.raises(ProtocolError, match="limit 1048576"):
        peer.send(Measured(tuple(range(10**9, 10**9 + 300_000))))
    peer.send(Drain("still in step"))
    assert rank_messages.control.decode(sock.recv(100)[4:]) == Drain("still in step")
    sock.send(struct.pack("<I", FRAME_BYTES_MAX + 1))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="limit 1048576"):
            peer.pump()


def test_an_empty_frame_without_descriptors_breaks_the_contract(
    raw: tuple[socket.socket, Peer],
) -> None:
    sock, peer = raw
    sock.send(framed(b""))
    with pytest.raises(ProtocolError):
        peer.pump()


def test_a_flood_of_unread_frames_breaks_the_contract(raw: tuple[socket.socket, Peer]) -> None:
    sock, peer = raw
    data = framed(encoder.encode(Bell(1)))
    for _ in range(UNREAD_FRAMES_MAX):
        sock.send(data)
        peer.pump()
    sock.send(data)
    with pytest.raises(ProtocolError, match="unread"):
        peer.pump()


# ---- hostile bytes --------------------------------------------------------------------------


def hostile_frames(count: int) -> Iterator[bytes]:
    """Random, truncated, mutated, oversized, deeply nested and badly spelt frames."""
    draw = random.Random(20)
    good = [
        encoder.encode(frame)
        for frame in (
            Bell(2**40),
            Measured((1, 2, 3)),
            Goodbye(0, "text"),
            rank_messages.Ready({"a": [1, {"b": "c"}]}),
            rank_messages.RankHello(1, "t", 0, 1, "h", "b", 2, {"equal": {"k": None}}),
        )
    ]
    for _ in range(count):
        data = bytearray(draw.choice(good))
        match draw.randrange(7):
            case 0:
                yield framed(draw.randbytes(draw.randrange(1, 80)))
            case 1:
                yield framed(bytes(data[: draw.randrange(1, len(data))]))
            case 2:
                for _ in range(draw.randrange(1, 4)):
                    data[draw.randrange(len(data))] = draw.randrange(256)
                yield framed(bytes(data))
            case 3:
                yield struct.pack("<I", draw.randrange(2**32)) + draw.randbytes(draw.randrange(40))
            case 4:  # [4, {"a": [[[[...]]]]}]
                nest = draw.choice((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01")) * draw.randrange(9000)
                yield framed(b"\x92\x04\x81\xa1a" + nest + b"\xc0" * draw.randrange(2))
            case 5:
                yield framed(b"\x92\x0a\xa2\xff\xfe")  # not UTF-8
            case _:  # sizes that promise far more than the frame holds
                yield framed(b"\x92" + draw.choice((b"\x09", b"\x04")) + b"\xdd\xff\xff\xff\xff")


def test_hostile_bytes_raise_only_typed_errors_and_never_hang() -> None:
    raised = passed = 0
    for data in hostile_frames(12_000):
        near, far = socket.socketpair()
        peer = Peer(far)
        near.send(data)
        near.close()
        try:
            peer.pump()
            peer.pump()
            pytest.fail("the end of the stream went unnoticed")
        except ProtocolError:
            raised += 1
        except PeerLostError:
            passed += 1
        peer.close()
    assert raised > 6000
    assert passed > 400


# ---- the other side stops ---------------------------------------------------------------------


def test_a_beating_peer_is_alive_however_long_the_owner_was_busy() -> None:
    near, far = socket.socketpair()
    clock = ManualClock()
    peer, other = Peer(near, clock=clock), Peer(far)
    other.send(rank_messages.Heartbeat(1))
    clock.advance(60 * NS_PER_S)
    peer.check_alive(clock(), NS_PER_S)
    clock.advance(NS_PER_S)
    peer.check_alive(clock(), NS_PER_S)
    clock.advance(1)
    with pytest.raises(PeerLostError, match=r"limit 1\.00 s"):
        peer.check_alive(clock(), NS_PER_S)
    peer.close()
    other.close()


def test_a_peer_that_takes_nothing_is_lost_within_the_limit() -> None:
    near, far = socket.socketpair()
    peer = Peer(near, send_limit_ns=50 * NS_PER_MS)
    frame = Measured(tuple(range(50_000)))
    began = now_ns()
    with pytest.raises(PeerLostError, match="took nothing"):
        repeat(lambda: peer.send(frame))
    assert now_ns() - began < 5 * NS_PER_S
    far.recv(1 << 20)
    with pytest.raises(PeerLostError, match="took nothing"):  # half a frame went out
        peer.send(Drain(""))
    peer.close()
    far.close()


# ---- several threads --------------------------------------------------------------------------


def test_a_beat_that_was_cut_by_a_full_socket_is_completed_first() -> None:
    near, far = tcp_pair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sender, receiver = Peer(near), Peer(far)
    frame = Measured(tuple(range(200_000)))
    offered = [sender.offer(frame) for _ in range(20)]
    assert offered[0]
    assert not offered[-1], "it has to be dropped at some time"
    sent = sum(offered)

    def next_one() -> bool:
        sender.offer(rank_messages.Heartbeat(sent))
        return receiver.peer_progress == sent

    waiter = Waiter()
    while not next_one():
        waiter.wait(NS_PER_MS)
        receiver.pump()
    assert list(receiver.inbox) == [frame] * sent
    for thing in (waiter, sender, receiver):
        thing.close()


def test_frames_of_many_threads_never_mix(peers: PairOfPeers) -> None:
    near, far = peers
    heartbeat = HeartbeatThread(near, 1000, lambda: 5)  # as often as it can
    heartbeat.start()
    each = 300

    def send(thread: int) -> None:
        for count in range(each):
            near.send(Measured((thread, count) + (7,) * (count % 3 * 20_000)))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = defaultdict(list)

    def all_there() -> bool:
        while far.inbox:
            frame = far.inbox.popleft()
            assert isinstance(frame, Measured)
            thread, count, *rest = frame.durations_ns
            assert len(rest) == count % 3 * 20_000
            seen[thread].append(count)
        return sum(map(len, seen.values())) == 3 * each

    pump_until(far, all_there, 60 * NS_PER_S)
    heartbeat.stop()
    for thread in threads:
        thread.join()
    assert seen == {n: list(range(each)) for n in range(3)}
    pump_until(far.heart, lambda: far.heart.peer_progress == 5)


# ---- descriptors ------------------------------------------------------------------------------


def test_descriptors_travel_between_frames() -> None:
    near, far = socket.socketpair()
    sender, receiver = Peer(near), Peer(far, expects_fds=True)
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.write(second, b"here")
    sender.send(Drain("before"))
    sender.send_fds([first, second])
    sender.send(Drain("after"))
    got = receiver.receive_fds(2, WAIT_NS)
    assert os.pread(got[1], 10, 0) == b"here"
    assert not any(os.get_inheritable(fd) for fd in got)
    assert [receiver.receive(WAIT_NS), receiver.receive(WAIT_NS)] == [
        Drain("before"),
        Drain("after"),
    ]
    with pytest.raises(PeerLostError, match="descriptors"):
        receiver.receive_fds(1, 10 * NS_PER_MS)
    for fd in (first, second, *got):
        os.close(fd)
    sender.close()
    receiver.close()


def test_nothing_leaks_after_close() -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = counts()
    for _ in range(20):
        sender, receiver = two_peers(expects_fds=True)
        heartbeat = HeartbeatThread(sender, NS_PER_S, lambda: 0)
        heartbeat.start()
        memory = os.memfd_create("never taken")
        sender.send_fds([memory])
        os.close(memory)
        receiver.pump()
        heartbeat.stop()
        sender.close()
        receiver.close()
        receiver.close()
    assert counts() == before


def test_the_wire_of_a_bell_never_changes() -> None:
    near, far = socket.socketpair()
    peer = Peer(near)
    peer.ring(300)
    assert far.recv(100) == b"\x05\x00\x00\x00\x92\x06\xcd\x01\x2c"
    assert msgspec.msgpack.decode(b"\x92\x06\xcd\x01\x2c") == [6, 300]
    peer.close()
    far.close()
