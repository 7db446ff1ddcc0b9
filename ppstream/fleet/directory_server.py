"""The directory's face for robots and people: HTTP with JSON answers, so that nobody needs Ray.

``/v1/resolve``, ``/v1/status``, ``/healthz``. On loopback, or elsewhere with a token. Nothing can
be changed through it but which rows are promised.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.fleet.directory import Directory, PipelineStatus
from ppstream.observe.health_server import LOOK_S, LimitedServer
from ppstream.wire.directory_messages import RESOLVE, STATUS, Resolved
from ppstream.wire.endpoints import LOCAL_NAMES, is_local
from ppstream.wire.fields import MAX_NAME

JOIN_S: Final = 2.0


class DirectoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v1/status``."""

    pipelines: list[PipelineStatus]
    resolved: int
    unresolved: int


class DirectoryServer:
    """Serves ``directory`` from construction until ``close``; ``lock`` guards it.

    Args:
        listen: ``HOST:PORT``; 0 for any free port.
        token: asked of everybody; None on loopback alone.

    Raises:
        ConfigError: the address cannot be bound, or is for others and there is no token.
    """

    def __init__(self, listen: str, directory: Directory, token: str | None = None) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        if not port.isdecimal() or not host:
            raise ConfigError([f"directory.listen: got {listen!r}, want HOST:PORT"])
        if token is None and not is_local(f"tcp://{listen}"):
            raise ConfigError(
                [f"directory.listen: got {listen!r}, which others reach; want directory.token_file"]
            )
        self.lock = threading.Lock()
        own = {
            "directory": directory,
            "lock": self.lock,
            "token": None if token is None else f"Bearer {token}".encode(),
        }
        address = "127.0.0.1" if host in LOCAL_NAMES else host
        try:
            self._server = LimitedServer((address, int(port)), type("Face", (_Face,), own))
        except OSError as error:
            raise ConfigError(
                [f"directory.listen: cannot listen on {listen}: {error.strerror}"]
            ) from error
        self.url = f"http://{address}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_S,), name="directory", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(JOIN_S)


class _Face(BaseHTTPRequestHandler):
    directory: Directory
    lock: threading.Lock
    token: bytes | None
    server_version = "ppstream"
    sys_version = ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        answers: dict[str, Callable[[dict[str, list[str]]], tuple[int, bytes]]] = {
            RESOLVE: self._resolve,
            STATUS: self._status,
            "/healthz": lambda _: (200, b"{}"),
        }
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if self.token is not None and not hmac.compare_digest(given, self.token):
            self._answer(401, b'{"reason": "token", "details": "want Authorization: Bearer TOKEN"}')
        elif parts.path not in answers:
            self._answer(404, " ".join(answers).encode())
        else:
            self._answer(*answers[parts.path](parse_qs(parts.query)))

    def _resolve(self, query: dict[str, list[str]]) -> tuple[int, bytes]:
        robot, avoid = (query.get(name, [""])[0] for name in ("robot", "avoid"))
        if not 1 <= len(robot) <= MAX_NAME:
            text = f"robot: got {len(robot)} characters, want 1 to {MAX_NAME}"
            return 400, msgspec.json.encode({"reason": "robot", "details": text})
        with self.lock:
            found = self.directory.resolve(robot, avoid, now_ns())
        return 200 if isinstance(found, Resolved) else 503, msgspec.json.encode(found)

    def _status(self, _: dict[str, list[str]]) -> tuple[int, bytes]:
        with self.lock:
            found = DirectoryStatus(
                pipelines=self.directory.status(now_ns()),
                resolved=self.directory.resolved,
                unresolved=self.directory.unresolved,
            )
        return 200, msgspec.json.encode(found)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A question is no event."""
