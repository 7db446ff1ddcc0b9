"""The directory's face for robots and people: HTTP with JSON answers, so that nobody needs Ray.

``/v1/resolve``, ``/v1/status``, ``/healthz``. On loopback, or elsewhere with a token. Nothing can
be changed through it but which rows are promised.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from urllib.parse import parse_qs

import msgspec

from ppstream.config.gateway_rules import listen_address
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.fleet.directory import Directory, PipelineStatus
from ppstream.observe.http_server import HttpRequest, HttpResponse, HttpServer
from ppstream.wire.directory_messages import RESOLVE, STATUS, Resolved
from ppstream.wire.endpoints import LOCAL_NAMES, bracketed, is_local
from ppstream.wire.fields import MAX_NAME


class DirectoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v1/status``."""

    pipelines: list[PipelineStatus]
    resolved: int
    unresolved: int


def listen_problem(listen: str, *, has_token: bool) -> str | None:
    """Returns the reason why no directory may listen there, as ``path: got ...``; None: it may."""
    if listen_address(listen) is None:
        return f"directory.listen: got {listen!r}, want HOST:PORT"
    if not has_token and not is_local(f"tcp://{listen}"):
        return f"directory.listen: got {listen!r}, which others reach; want directory.token_file"
    return None


class DirectoryServer:
    """Serves ``directory`` from construction until ``close``; ``lock`` guards it.

    Args:
        listen: ``HOST:PORT``; 0 for any free port.
        token: asked of everybody; None on loopback alone.

    Raises:
        ConfigError: the address cannot be bound, or is for others and there is no token.
    """

    def __init__(self, listen: str, directory: Directory, token: str | None = None) -> None:
        if problem := listen_problem(listen, has_token=token is not None):
            raise ConfigError([problem])
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        self.lock = threading.Lock()
        self._directory = directory
        self._token = None if token is None else f"Bearer {token}".encode()
        self._answers: dict[str, Callable[[dict[str, list[str]]], HttpResponse]] = {
            RESOLVE: self._resolve,
            STATUS: self._status,
            "/healthz": lambda _: HttpResponse(200, b"{}"),
        }
        address = "127.0.0.1" if host in LOCAL_NAMES else host
        try:
            self._server = HttpServer((address, int(port)), self._answer, name="directory")
        except OSError as error:
            raise ConfigError(
                [f"directory.listen: cannot listen on {listen}: {error.strerror}"]
            ) from error
        self.url = f"http://{bracketed(address)}:{self._server.port}"

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.close()

    def _answer(self, asked: HttpRequest) -> HttpResponse:
        given = asked.headers.get("authorization", "").encode("utf-8", "replace")
        if self._token is not None and not hmac.compare_digest(given, self._token):
            refusal = b'{"reason": "token", "details": "want Authorization: Bearer TOKEN"}'
            return HttpResponse(401, refusal)
        if asked.path not in self._answers:
            return HttpResponse(404, " ".join(self._answers).encode())
        return self._answers[asked.path](parse_qs(asked.query))

    def _resolve(self, query: dict[str, list[str]]) -> HttpResponse:
        robot, avoid = (query.get(name, [""])[0] for name in ("robot", "avoid"))
        if not 1 <= len(robot) <= MAX_NAME:
            text = f"robot: got {len(robot)} characters, want 1 to {MAX_NAME}"
            return HttpResponse(400, msgspec.json.encode({"reason": "robot", "details": text}))
        with self.lock:
            found = self._directory.resolve(robot, avoid, now_ns())
        return HttpResponse(200 if isinstance(found, Resolved) else 503, msgspec.json.encode(found))

    def _status(self, _: dict[str, list[str]]) -> HttpResponse:
        with self.lock:
            found = DirectoryStatus(
                pipelines=self._directory.status(now_ns()),
                resolved=self._directory.resolved,
                unresolved=self._directory.unresolved,
            )
        return HttpResponse(200, msgspec.json.encode(found))
