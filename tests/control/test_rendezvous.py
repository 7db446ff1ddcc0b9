from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from ppstream.control import rendezvous
from ppstream.control.rendezvous import ADDRESS_KEY, KEEPALIVE_S, Listener, connect
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError, PeerLostError
from ppstream.wire.rank_messages import Drain

STRANGER = """
import os, socket, sys
os.seteuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect(chr(0) + sys.argv[1])
print("connected", flush=True)
print("let in" if connection.recv(1) else "turned away", flush=True)
"""


class Strings:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str, timeout_s: float) -> str:
        return self.values[key]


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost"])
def test_ranks_meet_at_the_published_address(host: str | None) -> None:
    store = Strings()
    before = len(os.listdir("/proc/self/fd"))
    listener = Listener(store, host=host)
    first, second = connect(store, 5.0), connect(store, 5.0)
    for number, peer in enumerate((first, second)):
        accepted = listener.accept(5.0)
        assert (accepted.local_host is None) == (host is None)
        peer.send(Drain(str(number)))
        assert accepted.receive(5 * NS_PER_S) == Drain(str(number))
        accepted.send(Drain("answer"))
        assert peer.receive(5 * NS_PER_S) == Drain("answer")
        accepted.close()
        peer.close()
    listener.close()
    listener.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_unix_socket_has_no_file_that_a_kill_could_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = Strings()
    listener = Listener(store)
    name = store.values[ADDRESS_KEY].removeprefix("unix:")
    assert f"@{name}" in Path("/proc/net/unix").read_text()
    assert list(tmp_path.iterdir()) == []
    listener.close()
    with pytest.raises(PeerLostError, match="does not answer"):
        connect(store, 1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_let_in_and_keeps_nobody_out() -> None:
    store = Strings()
    listener = Listener(store)
    name = store.values[ADDRESS_KEY].removeprefix("unix:")
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, name], stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "connected\n"
        mine = connect(store, 5.0)
        mine.send(Drain("it is me"))
        accepted = listener.accept(5.0)
        assert accepted.receive(5 * NS_PER_S) == Drain("it is me")
        assert stranger.stdout.read() == "turned away\n"
    for thing in (mine, accepted, listener):
        thing.close()


def test_strangers_do_not_make_the_limit_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "user_at_end_of", lambda connection: os.geteuid() + 1)
    store = Strings()
    listener = Listener(store)
    peers = [connect(store, 1.0) for _ in range(8)]
    with pytest.raises(PeerLostError, match=r"within 0\.2 s"):
        listener.accept(0.2)
    for thing in (*peers, listener):
        thing.close()


def test_a_connection_between_hosts_is_kept_in_use() -> None:
    store = Strings()
    listener = Listener(store, host="127.0.0.1")
    near = connect(store, 5.0)
    far = listener.accept(5.0)
    for peer in (near, far):
        with socket.socket(fileno=os.dup(peer.fileno())) as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_S
    for thing in (near, far, listener):
        thing.close()


def test_a_limit_of_months_is_not_cut_to_what_an_int_holds() -> None:
    store = Strings()
    listener = Listener(store)
    late = threading.Timer(0.05, lambda: connect(store, 5.0).close())
    late.start()
    listener.accept((2**32 + 2) / 1000).close()  # its lower 32 bits are 2 ms
    late.join()
    listener.close()


def test_a_signal_that_another_thread_receives_ends_the_wait() -> None:
    """As of a process that was stopped: whichever thread goes on first receives it."""

    class HeardError(Exception):
        pass

    def hear(_number: int, _frame: object) -> None:
        raise HeardError

    def receive() -> None:
        time.sleep(0.3)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, hear)
    began = time.monotonic()
    thread = threading.Thread(target=receive)
    try:
        thread.start()
        with closing(Listener(Strings())) as listener, pytest.raises(HeardError):
            listener.accept(20.0)
        assert time.monotonic() - began < 15
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_absent_rank_is_an_error_within_the_limit() -> None:
    listener = Listener(Strings())
    with pytest.raises(PeerLostError, match="no policy rank connected within"):
        listener.accept(0.02)
    listener.close()


def test_an_address_of_another_host_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Listener(Strings(), host="192.0.2.1")
