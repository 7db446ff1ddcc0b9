"""A cable between a robot and rank 0 that can be cut, left hanging, slowed, or fed with noise.

A TCP proxy on a thread. What it forwards it forwards whole and in order, as TCP does: samples that
come twice or out of order are the robot's to send.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

BLOCK: Final = 1 << 16
LOOK_S: Final = 0.005
HELD_MAX: Final = 1 << 22  # bytes on their way in one direction; beyond it the sender waits


@dataclass
class _Way:
    """One direction of one connection."""

    source: socket.socket
    target: socket.socket
    held: deque[tuple[float, bytes]] = field(default_factory=deque)  # and when it may leave
    size: int = 0


class Cable:
    """Listens on ``endpoint``; one robot or several. Attributes may be set at any time.

    Attributes:
        delay_s: how long each byte is on its way.
        is_hanging: connected, but nothing passes, in either direction.
        is_cut: connections are closed, and new ones end at once.
    """

    def __init__(self, host: str, port: int) -> None:
        self.delay_s = 0.0
        self.is_hanging = False
        self.is_cut = False
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LOOK_S)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ways: list[_Way] = []
        self._noise: list[bytes] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add_noise(self, noise: bytes) -> None:
        """Have ``noise`` stand between the bytes to rank 0, once, on each connection."""
        self._noise.append(noise)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._listener.close()
        self._drop_all()

    def _run(self) -> None:
        while not self._end.is_set():
            self._accept()
            if self.is_cut:
                self._drop_all()
            else:
                self._inject()
                self._forward()
                self._pass_on()

    def _accept(self) -> None:
        if not select.select([self._listener], (), (), 0 if self._ways else LOOK_S)[0]:
            return
        robot, _ = self._listener.accept()
        if self.is_cut:
            robot.close()
            return
        try:
            rank0 = socket.create_connection(self._to, 1.0)
        except OSError:
            robot.close()
            return
        for end in (robot, rank0):
            end.settimeout(0)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ways += [_Way(robot, rank0), _Way(rank0, robot)]

    def _inject(self) -> None:
        while self._noise:
            noise = self._noise.pop()
            for way in self._ways[::2]:
                way.held.append((0.0, noise))
                way.size += len(noise)

    def _forward(self) -> None:
        if self.is_hanging or not self._ways:
            time.sleep(LOOK_S)
            return
        open_ways = {way.source: way for way in self._ways if way.size < HELD_MAX}
        for end in select.select(list(open_ways), (), (), LOOK_S)[0]:
            way = open_ways[end]
            try:
                data = end.recv(BLOCK)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._drop(way)
                return
            way.held.append((time.monotonic() + self.delay_s, data))
            way.size += len(data)

    def _pass_on(self) -> None:
        if self.is_hanging:
            return
        for way in list(self._ways):
            while way.held and way.held[0][0] <= time.monotonic():
                due, data = way.held.popleft()
                try:
                    sent = way.target.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    self._drop(way)
                    return
                way.size -= sent
                if sent < len(data):
                    way.held.appendleft((due, data[sent:]))
                    break

    def _drop(self, way: _Way) -> None:
        """Both directions of the connection end."""
        ends = {way.source, way.target}
        self._ways = [other for other in self._ways if other.source not in ends]
        for end in ends:
            end.close()

    def _drop_all(self) -> None:
        while self._ways:
            self._drop(self._ways[0])
