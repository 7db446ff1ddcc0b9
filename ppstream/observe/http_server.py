"""Serves small HTTP answers from one thread: to scrapers, probes, robots and people.

The thread accepts, reads, answers and sends for everybody, and waits for no client, so neither
threads nor the memory that the C library keeps of each grow with the number of requests. It makes
one answer at a time, takes in new connections before the next, and makes none for who has gone. A
request has a time limit in all. Of clients that wait for their answer the newest 16 are kept, and
as many of those that still ask or read: no flood of either kind gets one of the other hung up on.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, NamedTuple

from ppstream.core.clock import NS_PER_S, now_ns

logger = logging.getLogger("ppstream")

REQUEST_LIMIT_S: Final = 2.0
REQUESTS_MAX: Final = 16  # at once: that wait for their answer, and as many that ask or read
HEAD_MAX: Final = 16384  # bytes of a request
BACKLOG: Final = 1024  # connections that wait to be accepted while an answer is made
NO_ROOM_S: Final = 0.1  # between two tries to accept when there are no descriptors
END: Final = b"\r\n\r\n"  # of a request's head


class HttpRequest(NamedTuple):
    """A question to the server; names of ``headers`` are in lower case."""

    path: str
    query: str
    headers: dict[str, str]


class HttpResponse(NamedTuple):
    """An answer whose ``body`` is of the media type ``kind``."""

    status: int
    body: bytes
    kind: str = "application/json"


class _Connection:
    """A client: what it has asked so far, and what is left to send of its answer."""

    __slots__ = ("head", "left", "since_ns", "socket", "waits")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.since_ns = now_ns()
        self.head = b""
        self.waits = False  # for the answer to be made
        self.left: memoryview | None = None  # once it is made


class HttpServer:
    """Serves GET and HEAD from construction until ``close``.

    Args:
        address: host and port; port 0 for any free one.
        answer: called on the server's thread; what it raises is logged, and the client hung up on.
        name: of the thread.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self, address: tuple[str, int], answer: Callable[[HttpRequest], HttpResponse], name: str
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=BACKLOG)
        self._listener.settimeout(0)
        self.port: int = self._listener.getsockname()[1]
        self._answer = answer
        self._open: dict[_Connection, None] = {}  # oldest first
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody and free the port, once an answer that is being made is made."""
        if not self._closed.is_set():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it then
            self._closed.set()
        self._thread.join(REQUEST_LIMIT_S)

    def _serve(self) -> None:
        with self._selector, self._listener:
            while not self._closed.is_set():
                self._take_turn()
            for connection in [*self._open]:
                self._hang_up(connection)

    def _take_turn(self) -> None:
        """Move on everybody who can, hang up on who is late, and make one answer."""
        keys = [key for key, _ in self._selector.select(self._patience_s())]
        for key in keys:
            if key.data is not None:
                self._move_on(key.data)
        if any(key.data is None for key in keys):  # last: who has asked is known
            self._accept()
        late_ns = now_ns() - round(REQUEST_LIMIT_S * NS_PER_S)
        for connection in [one for one in self._open if one.since_ns <= late_ns]:
            self._hang_up(connection)
        if waiting := next((one for one in self._open if one.waits), None):
            self._reply(waiting)

    def _patience_s(self) -> float | None:
        """Returns how long nothing is to be done if nobody sends anything."""
        if not self._open:
            return None
        if any(one.waits for one in self._open):
            return 0.0
        oldest = next(iter(self._open))
        return max(0.0, REQUEST_LIMIT_S - (now_ns() - oldest.since_ns) / NS_PER_S)

    def _accept(self) -> None:
        """Take in all who came, and of too many only the newest."""
        for _ in range(BACKLOG):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # closed, or the process has no descriptor left
                self._closed.wait(NO_ROOM_S)
                return
            accepted.settimeout(0)
            connection = _Connection(accepted)
            self._open[connection] = None
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._move_on(connection)  # most have asked already
            for waits in (False, True):
                alike = [one for one in self._open if one.waits is waits]
                for oldest in alike[:-REQUESTS_MAX]:
                    self._hang_up(oldest)

    def _move_on(self, connection: _Connection) -> None:
        """Read or send what can be now."""
        try:
            if connection.left:
                self._send(connection, connection.left)
            else:
                self._read(connection)
        except BlockingIOError:
            pass
        except OSError:  # the client is gone: its own affair
            self._hang_up(connection)

    def _read(self, connection: _Connection) -> None:
        received = connection.socket.recv(HEAD_MAX)
        if connection.left is None and not connection.waits:
            connection.head += received
            connection.waits = END in connection.head or len(connection.head) > HEAD_MAX
        if not received and not connection.waits:
            self._hang_up(connection)

    def _send(self, connection: _Connection, left: memoryview) -> None:
        """Send what can be; behind it wait for the client to close, so that it may read all."""
        connection.left = left[connection.socket.send(left) :]
        if not connection.left:
            connection.socket.shutdown(socket.SHUT_WR)
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _reply(self, connection: _Connection) -> None:
        """Make the answer, unless nobody is there any more, and begin to send it."""
        connection.waits = False
        if connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._hang_up(connection)
            return
        try:
            connection.left = memoryview(self._reply_to(connection.head))
        except Exception:
            logger.exception("a request failed: %r", connection.head.partition(b"\r")[0])
            self._hang_up(connection)
            return
        self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
        self._move_on(connection)

    def _reply_to(self, head: bytes) -> bytes:
        lines, ended, _ = head.partition(END)
        first, *fields = lines.decode("latin-1").split("\r\n")
        method, target, version = [*first.split(" "), "", ""][:3]
        if not ended:
            answer = HttpResponse(431, b"", "text/plain")
        elif not version.startswith("HTTP/1."):
            answer = HttpResponse(400, b"", "text/plain")
        elif method not in ("GET", "HEAD"):
            answer = HttpResponse(501, b"", "text/plain")
        else:
            path, _, query = target.partition("?")
            pairs = (field.partition(":") for field in fields)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            answer = self._answer(HttpRequest(path, query, headers))
        begin = (
            f"HTTP/1.0 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
            f"Server: ppstream\r\nDate: {formatdate(usegmt=True)}\r\n"
            f"Content-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n\r\n"
        )
        return begin.encode() + (b"" if method == "HEAD" else answer.body)

    def _hang_up(self, connection: _Connection) -> None:
        del self._open[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()
