"""Hearts on sockets of their own: what they hear, whatever the loops beside them do."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from peers import WAIT_NS, PairOfPeers, pump_until, repeat, tcp_pair, two_peers, unix_pair
from robot_rig import wait_until

from ppstream.control.heartbeat import HeartbeatThread
from ppstream.control.peer import Peer
from ppstream.control.peer_process import HeldProcess
from ppstream.core.clock import NS_PER_MS, NS_PER_S, ManualClock, now_ns
from ppstream.core.errors import (
    MAX_TEXT,
    PeerFrozenError,
    PeerLeftError,
    PeerLostError,
    WatchdogError,
)
from ppstream.core.waiter import Waiter
from ppstream.wire.rank_messages import Goodbye, Measured, PhaseChange

#: A rank that beats its heart until somebody ends it; told to fork, it leaves a child its sockets.
BEATING_RANK = """
import os, socket, sys, time
from ppstream.control.peer import Peer
from ppstream.control.heartbeat import HeartbeatThread
peer, peer.heart = (Peer(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
if "forks" not in sys.argv or os.fork():
    HeartbeatThread(peer, 10_000_000, lambda: 7).start()
time.sleep(60)
"""


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"])
def peers(request: pytest.FixtureRequest) -> Iterator[PairOfPeers]:
    near, far = two_peers(request.param)
    yield near, far
    near.close()
    far.close()


@contextlib.contextmanager
def beating_rank(*how: str) -> Iterator[tuple[subprocess.Popen[bytes], Peer]]:
    """A rank in a session of its own, which ends with the block; its heart has beaten once."""
    pairs = [socket.socketpair() for _ in range(2)]
    fds = [far.fileno() for _, far in pairs]
    process = subprocess.Popen(
        [sys.executable, "-c", BEATING_RANK, *map(str, fds), *how],
        pass_fds=fds,
        start_new_session=True,
    )
    peer, peer.heart = (Peer(near) for near, _ in pairs)
    for _, far in pairs:
        far.close()
    try:
        pump_until(peer.heart, lambda: peer.heart.peer_progress == 7)
        yield process, peer
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        peer.close()


@contextlib.contextmanager
def beating(peer: Peer, interval_ns: int, *more: Any, **kinds: Any) -> Iterator[HeartbeatThread]:
    heartbeat = HeartbeatThread(peer, interval_ns, *more, **kinds)
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        heartbeat.stop()


@pytest.mark.alone
@pytest.mark.parametrize("how", ["alone", "forks"])
def test_a_killed_process_is_noticed_within_half_a_second(how: str) -> None:
    """Also when a child holds its sockets open: the process itself is watched."""
    with beating_rank(how) as (process, peer):
        told = threading.Event()
        held = HeldProcess.of(process.pid)
        with beating(peer, 10 * NS_PER_S, lambda: 0, told.set, held):
            began = now_ns()
            process.send_signal(signal.SIGKILL)
            assert told.wait(0.5), "the owner is busy: only the heartbeat can notice"
            with pytest.raises(PeerLostError):
                pump_until(peer, lambda: False)
            assert now_ns() - began < 0.5 * NS_PER_S
            assert peer.lost_ns is not None
            assert peer.lost_ns >= began


def test_what_a_killed_process_said_can_be_read_though_its_child_holds_the_socket() -> None:
    near, far = two_peers()
    far.send(PhaseChange("warming"))
    near.hang_up()
    assert near.receive(WAIT_NS) == PhaseChange("warming")
    with pytest.raises(PeerLostError):
        near.receive(WAIT_NS)
    near.close()
    far.close()


def test_a_stopped_process_is_noticed_by_its_silence() -> None:
    frozen_ns = 300 * NS_PER_MS
    with beating_rank() as (process, peer), beating(peer, 10 * NS_PER_MS, lambda: 0):
        waiter = Waiter()

        def wait_for_it() -> None:
            peer.pump()
            peer.check_alive(now_ns(), frozen_ns)
            waiter.wait(5 * NS_PER_MS)

        process.send_signal(signal.SIGSTOP)
        began = now_ns()
        with pytest.raises(PeerLostError, match="silent for"):
            repeat(wait_for_it)
        assert frozen_ns * 0.9 < now_ns() - began < 4 * frozen_ns
        waiter.close()


def test_heartbeats_carry_progress_and_stop_at_once(peers: PairOfPeers) -> None:
    near, far = peers
    done = iter(range(1, 10**6))
    heartbeat = HeartbeatThread(near, NS_PER_MS, lambda: next(done))
    heartbeat.start()
    with beating(far, NS_PER_MS, lambda: 0):
        wait_until(lambda: far.peer_progress >= 5)
        began = now_ns()
        heartbeat.stop()
        heartbeat.stop()
    assert now_ns() - began < NS_PER_S
    assert near.lost_ns is None


def test_a_heartbeat_notices_that_the_peer_hung_up(peers: PairOfPeers) -> None:
    near, far = peers
    told = threading.Event()
    with beating(far, 10 * NS_PER_S, lambda: 3, told.set):
        pump_until(near.heart, lambda: near.heart.peer_progress == 3)
        assert not told.is_set()
        near.close()
        assert told.wait(60)
        assert far.lost_ns is not None


def test_a_loop_that_stands_is_no_dead_peer_and_costs_it_no_frame(peers: PairOfPeers) -> None:
    """Nobody reads either control socket; the hearts beat, and hear each other all the same."""
    near, far = peers
    lost = threading.Event()
    with beating(near, NS_PER_MS, lambda: 1, lost.set), beating(far, NS_PER_MS, lambda: 2):
        heard_ns = near.last_heard_ns
        wait_until(lambda: near.last_heard_ns > heard_ns and near.peer_progress == 2)
        far.ring(7)
        near.check_alive(now_ns(), NS_PER_S)
        with pytest.raises(WatchdogError, match="though its heartbeats arrive"):
            near.receive(20 * NS_PER_MS)
        assert list(near.bells) == [7]
        assert not lost.is_set()


def test_a_heart_that_nobody_hears_drops_its_beats_and_nothing_is_lost() -> None:
    """As when the other interpreter is held for minutes: its socket runs full."""
    near, far = two_peers()
    lost, beats = threading.Event(), itertools.count()
    with beating(near, 1000, lambda: next(beats), lost.set):
        wait_until(lambda: next(beats) > 5000)  # a socket holds some hundred
        assert not lost.is_set()
        far.send(Goodbye(0, "all is well"))
        wait_until(lambda: near.goodbye is not None)
    pump_until(far.heart, lambda: far.heart.peer_progress > 0)
    near.close()
    far.close()


def test_time_in_which_this_process_stood_is_no_silence_of_the_peer() -> None:
    clock = ManualClock()
    near, far = two_peers(clock=clock)
    heartbeat = HeartbeatThread(near, 200 * NS_PER_MS, lambda: 0, clock=clock)
    for _ in range(4):
        clock.advance(200 * NS_PER_MS)
        heartbeat.listen()
    clock.advance(3600 * NS_PER_S)  # both were stopped: a virtual machine that paused
    near.check_alive(clock(), NS_PER_S)
    for _ in range(4):
        clock.advance(100 * NS_PER_MS)
        heartbeat.listen()
    with pytest.raises(PeerFrozenError, match=r"silent for 1\.20 s"):
        near.check_alive(clock(), NS_PER_S)
    heartbeat.stop()
    near.close()
    far.close()


def test_a_goodbye_is_heard_by_the_heart_while_both_loops_stand(peers: PairOfPeers) -> None:
    near, far = peers
    with beating(near, NS_PER_S, lambda: 0):
        far.send(Goodbye(21, "x" * (2 * MAX_TEXT)))
        wait_until(lambda: near.goodbye is not None)
        assert near.goodbye == Goodbye(21, "x" * MAX_TEXT)
        with pytest.raises(PeerLeftError, match="21 WATCHDOG: xxx"):  # the loop is told, too
            near.receive(WAIT_NS)


def test_a_full_socket_is_waited_for_while_the_heart_beats() -> None:
    near, far = two_peers(send_limit_ns=50 * NS_PER_MS)
    frame = Measured(tuple(range(50_000)))
    sent = []

    def send_all() -> None:
        for _ in range(4):
            near.send(frame)
            sent.append(frame)

    with beating(near, 5 * NS_PER_MS, lambda: 0), beating(far, 5 * NS_PER_MS, lambda: 0):
        thread = threading.Thread(target=send_all)
        thread.start()
        thread.join(0.4)  # eight times the limit
        assert thread.is_alive()
        with pytest.raises(PeerLostError, match="took nothing"):
            near.send(Goodbye(21, "leaving: it must not wait for the thread that waits"))
        near.lost_ns = None
        pump_until(far, lambda: len(far.inbox) == 4)
        thread.join(WAIT_NS / NS_PER_S)
        assert sent == [frame] * 4
    near.close()
    far.close()
