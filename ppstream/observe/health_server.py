"""One rank's door for Prometheus and probes: ``/metrics``, ``/healthz``, ``/readyz`` on loopback.

``/`` links to them, for a browser. Each request has a thread and a time limit in all, and of too
many at once the oldest is hung up on, so requests that do not end keep nobody who asks and reads.
One thread makes all answers, one at a time and for nobody who has gone: neither what they cost the
rank nor the memory that the C library keeps of each thread that ever made one grows with the number
of requests. Nothing can be changed through it. Other hosts reach it through a collector of this
one, or a tunnel.
"""

from __future__ import annotations

import json
import logging
import select
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socket import SHUT_RDWR, socket
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError
from ppstream.wire.robot_messages import SERVING

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

logger = logging.getLogger("ppstream")
T = TypeVar("T")

HOST: Final = "127.0.0.1"
REQUEST_LIMIT_S: Final = 2.0
REQUESTS_MAX: Final = 16  # at once
LOOK_S: Final = 0.2  # between two looks at what is over its limit
#: For a person with a browser.
INDEX: Final = b"""<!doctype html><meta charset="utf-8"><title>ppstream</title>
<p>One rank of a ppstream run; <code>ppstream top</code> shows all of them.</p>
<ul><li><a href="/healthz">/healthz</a>: phase, verdict, counts
<li><a href="/readyz">/readyz</a>: 200 when it serves, else 503
<li><a href="/metrics">/metrics</a>: for Prometheus</ul>
"""


class HealthServer:
    """Serves from construction until ``close``.

    Args:
        port: 0 for any free one.
        collector: asked at every scrape of ``/metrics``.
        health: what ``/healthz`` says, as JSON; its ``phase`` decides ``/readyz``.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(
        self, port: int, collector: Collector, health: Callable[[], Mapping[str, Any]]
    ) -> None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(collector)
        self._maker = ThreadPoolExecutor(1, "answers")
        own = {"registry": registry, "health": staticmethod(health), "maker": self._maker}
        handler = type("Handler", (_Handler,), own)
        try:
            self._server = LimitedServer((HOST, port), handler)
        except OSError as error:
            raise ConfigError(
                [
                    f"metrics.port: cannot listen on {HOST}:{port}: {error.strerror}; "
                    "set metrics.port elsewhere, or to 0 for any free port"
                ]
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_S,), name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_LIMIT_S)
        self._maker.shutdown(wait=False)


class LimitedServer(ThreadingTCPServer):
    """A thread for each request, limited in number and time; who takes longer is hung up on."""

    allow_reuse_address = True  # a restarted rank takes its port again at once
    daemon_threads = True  # none keeps the rank
    request_queue_size = 128  # connections that wait to be accepted: that is soon

    def __init__(self, *where: Any) -> None:
        self._open: dict[socket, int] = {}  # since when, oldest first
        super().__init__(*where)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hang up on the oldest when there are too many."""
        for oldest in [*self._open][: 1 - REQUESTS_MAX]:  # all but so many
            self._hang_up(oldest)
        self._open[request] = now_ns()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hang up when the limit is over, also on a client that sends a byte now and then."""
        late_ns = now_ns() - round(REQUEST_LIMIT_S * NS_PER_S)
        for request, since_ns in [*self._open.items()]:
            if since_ns < late_ns:
                self._hang_up(request)

    def server_close(self) -> None:
        """Free the port, and hang up on everybody."""
        super().server_close()
        for request in [*self._open]:
            self._hang_up(request)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def _hang_up(self, request: socket) -> None:
        self._open.pop(request, None)
        with suppress(OSError):  # it has ended by itself
            request.shutdown(SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        if isinstance(sys.exception(), ConnectionError):
            return  # the client is gone: its own affair
        logger.error("the request of %s failed:\n%s", client_address, traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    health: Callable[[], Mapping[str, Any]]
    maker: ThreadPoolExecutor
    server_version = "ppstream"
    sys_version = ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, kind, self._made(lambda: encode(self.registry)))
        elif path in ("/healthz", "/readyz"):
            found = self._made(lambda: dict(self.health()))
            ok = path == "/healthz" or found["phase"] in SERVING
            body = json.dumps(found, indent=1).encode() + b"\n"
            self._answer(200 if ok else 503, "application/json", body)
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", INDEX)
        else:
            self._answer(404, "text/plain", b"/metrics /healthz /readyz\n")

    do_HEAD = do_GET

    def _made(self, make: Callable[[], T]) -> T:
        """Returns what ``make`` does on the thread that makes answers; it never makes None.

        Raises:
            ConnectionError: nobody is there any more, or the server was closed.
        """
        try:
            asked = self.maker.submit(lambda: None if has_ended(self.connection) else make())
        except RuntimeError as closed:
            raise ConnectionAbortedError("the server was closed") from closed
        made = asked.result()
        if made is None:
            raise ConnectionAbortedError("nobody waits for the answer")
        return made

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A scrape is no event."""


def has_ended(connection: socket) -> bool:
    """True when it was reset, or closed in both directions; a client may close its own alone."""
    ended = select.poll()
    ended.register(connection, 0)
    return bool(ended.poll(0))
