"""One rank's door for Prometheus and probes: ``/metrics``, ``/healthz``, ``/readyz`` on loopback.

``/`` links to them, for a browser. Nothing can be changed through it. Other hosts reach it through
a collector of this one, or a tunnel. ``http_server`` has the limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from ppstream.core.errors import ConfigError
from ppstream.core.phases import SERVING
from ppstream.observe.http_server import HttpRequest, HttpResponse, HttpServer

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

HOST: Final = "127.0.0.1"
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
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(collector)
        self._health = health
        try:
            self._server = HttpServer((HOST, port), self._answer, name="health")
        except OSError as error:
            raise ConfigError(
                [
                    f"metrics.port: cannot listen on {HOST}:{port}: {error.strerror}; "
                    "set metrics.port elsewhere, or to 0 for any free port"
                ]
            ) from error
        self.port = self._server.port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.close()

    def _answer(self, asked: HttpRequest) -> HttpResponse:
        if asked.path == "/metrics":
            encode, kind = choose_encoder(asked.headers.get("accept", ""))
            return HttpResponse(200, encode(self._registry), kind)
        if asked.path in ("/healthz", "/readyz"):
            found = dict(self._health())
            ok = asked.path == "/healthz" or found["phase"] in SERVING
            return HttpResponse(200 if ok else 503, json.dumps(found, indent=1).encode() + b"\n")
        if asked.path == "/":
            return HttpResponse(200, INDEX, "text/html; charset=utf-8")
        return HttpResponse(404, b"/metrics /healthz /readyz\n", "text/plain")
