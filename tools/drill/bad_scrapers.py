"""Clients of ``/metrics`` that misbehave: silent, unread, gone in the middle, many, or endless."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from urllib.request import urlopen

from drill.faults import Recovering, Seen
from drill.scene import Failed, Scene

REQUEST: Final = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
HALF: Final = REQUEST[:9]
DYING: Final = 20
MANY: Final = 200
HALVES: Final = 44
SCRAPE_S: Final = 2.0  # a good scraper waits so long: it is answered in some ms
UNDISTURBED_TICKS: Final = 100  # of the robot
DRIP_S: Final = 0.5  # a byte each: always in time for a limit on single reads
TINY: Final = 1  # byte of a receive buffer; the kernel makes it its least
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing forgets what was not sent yet
OPEN: Final[list[socket.socket]] = []  # until ``leave``


def silent(scene: Scene) -> None:
    """Connects, and never asks."""
    OPEN.append(_connected(_port(scene, 0)))


def unread(scene: Scene) -> None:
    """Asks, and reads nothing."""
    client = _connected(_port(scene, 0))
    client.sendall(REQUEST)
    OPEN.append(client)


def dying(scene: Scene) -> None:
    """Half a request, or a whole one, and then a reset instead of reading."""
    for _ in range(DYING):
        for request in (HALF, REQUEST):
            client = _connected(_port(scene, 0))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.sendall(request)
            client.close()


def many(scene: Scene) -> None:
    """All at once, without waiting for their turn; each leaves by itself after a while."""
    for _ in range(MANY):
        client = socket.socket()
        client.settimeout(0)
        with suppress(BlockingIOError):
            client.connect(("127.0.0.1", _port(scene, 0)))
        OPEN.append(client)
    leaving = threading.Timer(1.0, leave, (scene,))
    leaving.daemon = True
    leaving.start()


def half_requests(scene: Scene) -> None:
    """Each begins to ask, and goes no further."""
    for _ in range(HALVES):
        client = _connected(_port(scene, 0))
        client.sendall(HALF)
        OPEN.append(client)


def leave(_scene: Scene) -> None:
    while OPEN:
        OPEN.pop().close()


def dripping(scene: Scene) -> None:
    """A request that never ends, a byte at a time."""
    _start_dripping(scene, 0)


def drip_on_both(scene: Scene) -> None:
    """Such a request to each rank."""
    for rank in (0, 1):
        _start_dripping(scene, rank)
    time.sleep(DRIP_S)  # each is being served by now


def scraped(scene: Scene, since_ns: int) -> Seen:
    """A good scraper is answered beside the bad one, and the robot has moved all the time."""
    began = time.monotonic()
    try:
        with urlopen(f"http://127.0.0.1:{_port(scene, 0)}/metrics", timeout=SCRAPE_S) as answer:
            size = len(answer.read())
    except OSError as error:
        raise Failed(f"a good scraper was not answered: {error}") from None
    took_s = time.monotonic() - began

    def moved() -> int | None:
        ticks = scene.ticks(since_ns)
        if held := [tick for tick in ticks if not tick.moved]:
            raise Failed(f"the robot held {len(held)} times")
        return len(ticks) if len(ticks) >= UNDISTURBED_TICKS else None

    ticks = scene.wait("ticks of the robot", 5.0, moved)
    return f"a good scraper got {size} bytes after {took_s:.1f} s; the robot moved {ticks} times"


def _start_dripping(scene: Scene, rank: int) -> None:
    client = _connected(_port(scene, rank))
    threading.Thread(target=_drip, args=(client,), daemon=True).start()


def _drip(client: socket.socket) -> None:
    with client, suppress(OSError):
        client.sendall(HALF)
        while True:
            client.sendall(b"a")
            time.sleep(DRIP_S)


def _connected(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY)
    client.connect(("127.0.0.1", port))
    return client


def _port(scene: Scene, rank: int) -> int:
    found = next(line for line in scene.lines(rank) if line.get("name") == "metrics")
    port: int = found["port"]
    return port


def _scraper(name: str, does: str, inject: Callable[[Scene], None]) -> Recovering:
    return Recovering(name, "F44", does, inject, scraped, 20.0, undo=leave)


SCRAPERS: Final = (
    _scraper("scraper-silent", "it connects to /metrics, and never asks", silent),
    _scraper("scraper-drips", "it asks for /metrics, a byte each half second, for ever", dripping),
    _scraper("scraper-never-reads", "it asks for /metrics, and never reads", unread),
    _scraper("scraper-dies", "40 requests for /metrics that end in a reset", dying),
    _scraper("scrapers-half", "44 begin to ask for /metrics, and go no further", half_requests),
    _scraper("scrapers-many", "200 connect to /metrics at once, say nothing, leave", many),
)
