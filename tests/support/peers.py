"""Two ranks' ends of a control socket in one process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from ppstream.control.peer import Peer
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.waiter import Waiter

PairOfPeers = tuple[Peer, Peer]
WAIT_NS = 5 * NS_PER_S


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def two_peers(
    pair: Callable[[], tuple[socket.socket, socket.socket]] = unix_pair, **kinds: Any
) -> PairOfPeers:
    """Two ranks that have met: each with a heart."""
    near, far = (Peer(sock, **kinds) for sock in pair())
    near.heart, far.heart = (Peer(sock, **kinds) for sock in pair())
    return near, far


def pump_until(peer: Peer, done: Callable[[], bool], within_ns: int = 4 * WAIT_NS) -> None:
    waiter = Waiter()
    waiter.register(peer.fileno())
    deadline_ns = now_ns() + within_ns
    try:
        while not done():
            assert now_ns() < deadline_ns
            waiter.wait(deadline_ns - now_ns())
            peer.pump()
    finally:
        waiter.close()


def repeat(action: Callable[[], None]) -> None:
    """Until it raises, or for long enough."""
    until_ns = now_ns() + WAIT_NS
    while now_ns() < until_ns:
        action()
