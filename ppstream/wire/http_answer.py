"""GET of a small document over HTTP, whole and in time; of the standard library alone.

A socket's own limit is that of each read: a server that sends a byte now and then keeps its client
for hours. Here the limit is that of the answer, to its last byte.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final, NamedTuple
from urllib.parse import urlsplit

SCHEMES: Final = {"http": HTTPConnection, "https": HTTPSConnection}
HTTP_OK: Final = 200


class HttpAnswer(NamedTuple):
    """An answer of any status."""

    status: int
    reason: str
    body: bytes


def get_whole(url: str, headers: Mapping[str, str], limit_s: float, bytes_max: int) -> HttpAnswer:
    """One answer; a proxy of the environment is for the web, not for robots.

    Args:
        url: ``http://HOST:PORT/PATH?QUERY``, or ``https``.
        headers: of the question.
        limit_s: until there is a connection, and then until the answer is whole.
        bytes_max: of its body; what is behind is not read.

    Raises:
        OSError: nobody answers, or the answer is not whole within ``limit_s``.
        HTTPException: what answers does not speak HTTP.
    """
    parts = urlsplit(url)
    connection = SCHEMES[parts.scheme](parts.hostname or "", parts.port, timeout=limit_s)
    is_late = threading.Event()
    with closing(connection):
        connection.connect()
        connected = connection.sock  # which the connection hands to its answer

        def end() -> None:
            is_late.set()
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

        ending = threading.Timer(limit_s, end)
        ending.daemon = True  # an interpreter that ends does not wait for it
        ending.start()
        try:
            path = parts._replace(scheme="", netloc="").geturl()
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(bytes_max)
        except (OSError, HTTPException):
            if not is_late.is_set():
                raise
        finally:
            ending.cancel()
    if is_late.is_set():  # what was read may be a part
        raise TimeoutError(f"not within {limit_s:g} s")
    return HttpAnswer(answer.status, answer.reason, body)
