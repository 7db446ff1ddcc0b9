"""FleetDirectory: the robot's questions to a fleet's directory. Standard library's HTTP, no Ray.

The directory chooses a pipeline; trust stays with the robot: a server's key that is not among its
own files is refused, whoever names it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from ppstream.core.clock import limit_ns, now_ns
from ppstream.core.errors import ConfigError, PeerLostError
from ppstream.wire.directory_messages import ANSWER_BYTES_MAX, RESOLVE, Resolved, Unresolved
from ppstream.wire.endpoints import bracketed, endpoint_problem, is_local
from ppstream.wire.http_answer import HTTP_OK, SCHEMES, HttpAnswer, get_whole
from ppstream.wire.keys import ClientKeys, client_keys

ANSWER_LIMIT_S: Final = 1.0  # of one question, to the last byte: the link's thread asks
LOOK_S: Final = 0.2  # between two questions of a robot that has no pipeline yet
HTTP_UNAVAILABLE: Final = 503


class FleetPlace(NamedTuple):
    """A pipeline to connect to, and the keys for it; None: it is on this host."""

    pipeline: str
    endpoint: str
    keys: ClientKeys | None


class FleetDirectory:
    """Asks one directory for one robot.

    ``pipeline`` is the one that it named last.

    Args:
        url: of the directory, such as ``http://127.0.0.1:5871``.
        robot: name of the robot, as in its Hello.
        secret_file: the robot's ``.secret`` file, where pipelines are on other hosts.
        server_files: ``.public`` files of all servers that may move this robot.
        token_file: file with the directory's token, where it wants one.

    Raises:
        ConfigError: the address or the name is none, or a file cannot be used.
    """

    def __init__(
        self,
        url: str,
        robot: str,
        *,
        secret_file: str | Path | None = None,
        server_files: Sequence[str | Path] = (),
        token_file: str | Path | None = None,
    ) -> None:
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in SCHEMES
            port = parts.port or 80
            (parts.hostname or "").encode("idna")
            parts.path.encode("ascii")
        except ValueError:  # a port that is no number, or above 65535; a name that no host has
            is_address = False
        if not is_address or not parts.hostname:
            raise ConfigError([f"got {url!r}, want a directory's http://HOST:PORT"])
        try:
            robot.encode()
        except UnicodeEncodeError:
            raise ConfigError([f"got robot {robot!r}, want a name that UTF-8 can encode"]) from None
        if (secret_file is None) != (not server_files):
            raise ConfigError(["secret_file and server_files: want both, or neither"])
        self._url, self.robot = url.rstrip("/"), robot
        self._is_here = is_local(f"tcp://{bracketed(parts.hostname)}:{port}")
        self._keys = {} if secret_file is None else _trusted(secret_file, server_files)
        self._headers = {} if token_file is None else bearer(token_file)
        self.pipeline = ""  # that was named last

    def find(self, *, failed: bool = False) -> FleetPlace:
        """One question; ``failed``: the pipeline that was named last does not serve this robot.

        Raises:
            PeerLostError: no directory answers, no pipeline has a row, or what it names may not
                be trusted; the message says which.
        """
        words = {"robot": self.robot} | (
            {"avoid": self.pipeline} if failed and self.pipeline else {}
        )
        try:
            question = f"{self._url}{RESOLVE}?{urlencode(words)}"
            answer = get_whole(question, self._headers, ANSWER_LIMIT_S, ANSWER_BYTES_MAX)
            if answer.status != HTTP_OK:
                raise PeerLostError(f"{self._url}: {_refusal(answer)}")
            found = msgspec.json.decode(answer.body, type=Resolved)
        except (OSError, HTTPException, msgspec.DecodeError) as error:
            raise PeerLostError(f"{self._url}: no directory answers: {error}") from None
        self.pipeline = found.pipeline
        return FleetPlace(found.pipeline, found.endpoint, self._keys_for(found))

    def wait(self, limit_s: float) -> FleetPlace:
        """Ask until a pipeline is named.

        Raises:
            PeerLostError: none is within ``limit_s``; the message has the last answer.
        """
        until_ns = now_ns() + limit_ns(limit_s)
        while True:
            try:
                return self.find()
            except PeerLostError:
                if now_ns() >= until_ns:
                    raise
            time.sleep(LOOK_S)

    def _keys_for(self, found: Resolved) -> ClientKeys | None:
        """Keys for the pipeline; raises PeerLostError where it may not move this robot."""
        problem = endpoint_problem(found.endpoint)
        if problem is None and found.endpoint.startswith("tcp:") and found.endpoint.endswith(":*"):
            problem = f"got {found.endpoint!r}, want the port at which it listens"
        if problem is None and found.server_key is not None:
            if keys := self._keys.get(found.server_key.encode()):
                return keys
            problem = f"its key {found.server_key!r} is in none of server_files"
        elif problem is None and not is_local(found.endpoint):
            problem = f"{found.endpoint} is on another host and has no key"
        elif problem is None and not self._is_here:
            problem = f"{found.endpoint} is an address of this host, the directory is on another"
        if problem is None:
            return None
        raise PeerLostError(f"{self._url} names {found.pipeline}, which is not trusted: {problem}")


def bearer(token_file: str | Path) -> dict[str, str]:
    """The header that shows a directory its token.

    Raises:
        ConfigError: there is no such file, or nothing in it.
    """
    try:
        token = Path(token_file).read_text(errors="replace").strip()
    except OSError as error:
        raise ConfigError([f"{token_file}: cannot be read: {error.strerror}"]) from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError([f"{token_file}: want one line of printable characters, the token"])
    return {"Authorization": f"Bearer {token}"}


def _trusted(
    secret_file: str | Path, server_files: Sequence[str | Path]
) -> dict[bytes, ClientKeys]:
    pairs = [client_keys(secret_file, server) for server in server_files]
    return {keys.server: keys for keys in pairs}


def _refusal(answer: HttpAnswer) -> str:
    if answer.status == HTTP_UNAVAILABLE:
        with suppress(msgspec.DecodeError):
            found = msgspec.json.decode(answer.body, type=Unresolved)
            return f"{found.reason}: {found.details}"
    return f"HTTP {answer.status} {answer.reason}"
