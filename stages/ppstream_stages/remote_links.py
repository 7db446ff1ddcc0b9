"""One row's connection to a policy server, by the wire of openpi and by that of GR00T."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import zmq

from ppstream.config.field_types import Index
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PpstreamError
from ppstream.wire import groot, openpi

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

# H=horizon D=value

Array: TypeAlias = np.ndarray[Any, Any]
Slice: TypeAlias = tuple[Index, Index]
Generation: TypeAlias = Literal["n1.5", "n1.6"]

ANSWER_MAX: Final = 64_000_000  # bytes
NUMBERS: Final = "biuf"  # kinds of dtype that actions may have
SAID_MAX: Final = 300  # characters of what a server says
CLOSE_S: Final = 0.1  # for a server's goodbye
UNREAD: Final = "the server did not read the request within policy.options.timeout_ms"


class ServerError(PpstreamError):
    """The server gave no actions; the message says why."""


class Link(Protocol):
    """One row's connection; what its methods raise, ``FAILURES`` lists."""

    def is_open(self) -> bool:
        """False: the server has closed it; only a new connection can ask.

        Raises:
            ServerError: an answer is there, and nobody waits for one.
        """

    def ask(self, request: Mapping[str, Any], until_ns: int) -> None:
        """Send a request."""

    def answer(self, until_ns: int) -> Array:
        """Actions ``[H, D]`` of the request before."""

    def reset(self, until_ns: int) -> bool:
        """Begin a new episode; False: only a new connection does."""

    def close(self) -> None:
        """Let go of it, at once."""


FAILURES: Final = (PpstreamError, OSError, zmq.ZMQError)


def reason_of(error: BaseException) -> str:
    """Reason of a failure, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer within policy.options.timeout_ms"
    return _cut(error) or type(error).__name__


class OpenpiLink:
    """A connection to a server of openpi."""

    def __init__(self, url: str, key: str | None, until_ns: int) -> None:
        from websockets.sync.client import connect

        opening = connect(
            url,
            compression=None,
            max_size=ANSWER_MAX,
            proxy=None,
            open_timeout=_left_s(until_ns),
            close_timeout=CLOSE_S,
            additional_headers={} if key is None else {"Authorization": f"Api-Key {key}"},
        )
        self._stack = ExitStack()
        with _as_server_errors():
            self._connection: ClientConnection = self._stack.enter_context(opening)
        try:
            self._receive(until_ns)  # its metadata
        except FAILURES:
            self.close()
            raise

    def is_open(self) -> bool:
        """As ``Link``."""
        from websockets.exceptions import ConnectionClosed
        from websockets.protocol import State

        try:
            self._connection.recv(timeout=0)
        except TimeoutError:  # closed it may be all the same: the server has said so
            return self._connection.protocol.state is State.OPEN
        except ConnectionClosed:
            return False
        raise ServerError("the server sent an answer that nobody asked for")

    def ask(self, request: Mapping[str, Any], until_ns: int) -> None:
        """As ``Link``."""
        frame = openpi.encode(_nested(request))
        with self._limited(until_ns), _as_server_errors():
            self._connection.send(frame)

    def answer(self, until_ns: int) -> Array:
        """As ``Link``."""
        frame = self._receive(until_ns)
        if isinstance(frame, str):
            raise ServerError(f"the server says: {_cut(frame)}")
        reply = openpi.decode_reply(frame)
        if isinstance(reply, Mapping) and reply.get("type") == "error":  # vLLM-Omni's
            raise ServerError(f"the server says: {_cut(reply.get('message'))}")
        actions = _array(reply.get("actions") if isinstance(reply, Mapping) else reply, "actions")
        return actions[0] if actions.ndim == 3 and len(actions) == 1 else actions

    def reset(self, until_ns: int) -> bool:
        """As ``Link``."""
        return False

    def close(self) -> None:
        """As ``Link``."""
        with suppress(ServerError), self._limited(now_ns() + round(CLOSE_S * NS_PER_S)):
            self._stack.close()

    @contextmanager
    def _limited(self, until_ns: int) -> Iterator[None]:
        """End the connection when the body still sends at ``until_ns``: it would without a limit.

        Raises:
            ServerError: it was ended.
        """
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            with suppress(OSError):
                self._connection.socket.shutdown(socket.SHUT_RDWR)

        ending = threading.Timer(_left_s(until_ns), end)
        ending.daemon = True  # an interpreter that ends does not wait for it
        ending.start()
        try:
            yield
        except ServerError:
            if not is_late.is_set():
                raise
        finally:
            ending.cancel()
        if is_late.is_set():
            raise ServerError(UNREAD)

    def _receive(self, until_ns: int) -> str | bytes:
        with _as_server_errors():
            return self._connection.recv(_left_s(until_ns))


class GrootLink:
    """A connection to a server of GR00T."""

    def __init__(
        self, url: str, token: str | None, parts: Mapping[str, Slice], generation: Generation
    ) -> None:
        self._token, self._parts, self._generation = token, parts, generation
        self._action_dim = max(end for _, end in parts.values())
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, ANSWER_MAX)
        self._socket.connect(url)

    def is_open(self) -> bool:
        """As ``Link``: ZeroMQ connects again, and drops what came without a request."""
        return True

    def ask(self, request: Mapping[str, Any], until_ns: int) -> None:
        """As ``Link``."""
        older = {
            key: [value] if isinstance(value, str) else value[None]
            for key, value in request.items()
        }
        self._send("get_action", older if self._is_old() else _newer(older))

    def answer(self, until_ns: int) -> Array:
        """As ``Link``."""
        reply = self._receive(until_ns)
        if not self._is_old():
            reply = reply[0] if isinstance(reply, list) and reply else None
        if not isinstance(reply, Mapping):
            raise ServerError(f"got an answer that does not have the form of {self._generation}")
        prefix = "action." if self._is_old() else ""
        parts: dict[str, Array] = {}
        for key, (first, end) in self._parts.items():
            part = _array(reply.get(prefix + key), prefix + key)
            parts[key] = _steps(part, end - first, prefix + key)
        steps = min(len(part) for part in parts.values())
        found = np.empty((steps, self._action_dim), np.float32)
        for key, (first, end) in self._parts.items():
            found[:, first:end] = parts[key][:steps]
        return found

    def reset(self, until_ns: int) -> bool:
        """As ``Link``; servers until N1.5 know no episodes."""
        if not self._is_old():
            self._send("reset", {"options": None})
            self._receive(until_ns)
        return True

    def close(self) -> None:
        """As ``Link``."""
        self._socket.close()

    def _is_old(self) -> bool:
        return self._generation == "n1.5"

    def _send(self, endpoint: str, data: Any) -> None:
        request = {"endpoint": endpoint, "data": data}
        if self._token is not None:
            request["api_token"] = self._token
        self._socket.send(groot.encode(request), zmq.NOBLOCK)

    def _receive(self, until_ns: int) -> Any:
        if not self._socket.poll(max(1, round(1e3 * _left_s(until_ns)))):
            raise TimeoutError
        reply = groot.decode_reply(self._socket.recv(zmq.NOBLOCK))
        if isinstance(reply, Mapping) and "error" in reply:
            raise ServerError(f"the server says: {_cut(reply['error'])}")
        return reply


def _nested(request: Mapping[str, Any]) -> dict[str, Any]:
    """``request`` with what stands before the dots of its keys as maps."""
    found: dict[str, Any] = {}
    for key, value in request.items():
        *above, last = key.split(".")
        place = found
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    return found


def _newer(older: Mapping[str, Any]) -> dict[str, Any]:
    """The request as N1.6 has it, batched and nested."""
    found: dict[str, Any] = {"video": {}, "state": {}, "language": {}}
    for key, value in older.items():
        modality, _, name = key.partition(".")
        if isinstance(value, list):
            found["language"][key] = [value]
        else:
            found[modality][name] = value[None]
    return {"observation": found, "options": None}


def _array(value: Any, key: str) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in NUMBERS:
        raise ServerError(f"{key}: got {type(value).__name__}, want an array of numbers")
    return value


def _steps(part: Array, width: int, key: str) -> Array:
    """``part`` as ``[H, width]``: it may be the only one of a batch, or have lost a dimension."""
    found = part
    while found.ndim > 2 and len(found) == 1:
        found = found[0]
    if found.ndim == 1:  # squeezed, as until N1.5
        found = found[:, None] if width == 1 else found[None]
    if found.ndim != 2 or found.shape[1] != width:
        raise ServerError(
            f"{key}: got {list(part.shape)}, want [steps, {width}]: see policy.options.action_keys"
        )
    return found


def _left_s(until_ns: int) -> float:
    return max(0.0, (until_ns - now_ns()) / NS_PER_S)


def _cut(text: object) -> str:
    return str(text)[:SAID_MAX]


@contextmanager
def _as_server_errors() -> Iterator[None]:
    """Failures of the WebSocket become a ``ServerError``."""
    from websockets.exceptions import WebSocketException

    try:
        yield
    except WebSocketException as error:
        raise ServerError(_cut(error) or type(error).__name__) from error
