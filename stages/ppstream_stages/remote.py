"""A policy that another server runs: an unmodified server of openpi or GR00T as stage B.

Stage B is that server's client, with a connection for each row, so rows are apart there, too. What
the window holds at its end goes into one request a row; all are sent before the first answer is
waited for. An answer that is late, an error or of another shape fails the envelope, and its
connection is not used again: a late answer is never taken for a later one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import zmq

from ppstream import ConfigError, TensorSpec
from ppstream.config.field_types import Count, Index, Positive
from ppstream.config.schema import CHANNELS
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import PpstreamError
from ppstream.wire import groot, openpi
from ppstream_stages.building import options_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from websockets.sync.client import ClientConnection

# B=row T=step of the window D=value H=horizon

Array: TypeAlias = np.ndarray[Any, Any]
Slice: TypeAlias = tuple[Index, Index]

ANSWER_MAX: Final = 64_000_000  # bytes
WHITE: Final = 255.0
SCHEMES: Final = {"openpi": ("ws://", "wss://"), "groot": ("tcp://",)}
NUMBERS: Final = "biuf"  # kinds of dtype that actions may have
SAID_MAX: Final = 300  # characters of what a server says
CLOSE_S: Final = 0.1  # for a server's goodbye
UNREAD: Final = "the server did not read the request within policy.options.timeout_ms"


class ServerCamera(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A camera stream as the server wants it; its stream has mean 0, std 1 and dtype float32."""

    name: str
    height: Count
    width: Count
    frames: Count = 1  # of the stream's; the newest is sent
    layout: Literal["hwc", "chw"] = "hwc"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``; keys of GR00T are as N1.5 has them: ``state.NAME``, ``video.NAME``."""

    wire: Literal["openpi", "groot"]
    url: str  # ws://HOST:PORT, tcp://HOST:PORT
    numbers: dict[str, Slice]  # by key of the request: first and behind-last value of the group
    cameras: dict[str, ServerCamera] = {}  # by key of the request
    steps: Count  # of the window; the last one is sent
    dim: Count  # values of the group, all its streams together
    group: str = "state"
    horizon: Count  # at most what the server answers
    action_dim: Count
    timeout_ms: Positive = 1000.0  # for the answers to one envelope
    prompt: str | None = None  # key of the text
    text: str = ""  # without an instruction
    instructions: bool = False  # as policy.instructions
    api_key_file: str | None = None
    action_keys: dict[str, Slice] = {}  # of GR00T: by key of the answer the actions it has
    generation: Literal["n1.5", "n1.6"] = "n1.6"  # of GR00T
    weights: None = None  # the server has them


class ServerError(PpstreamError):
    """The server gave no actions; the message says why."""


class Link(Protocol):
    """One row's connection; what its methods raise, ``FAILURES`` lists."""

    def ask(self, request: Mapping[str, Any], until_ns: int) -> None:
        """Send a request."""

    def answer(self, until_ns: int) -> Array:
        """Actions ``[H, D]`` of the request before."""

    def reset(self, until_ns: int) -> bool:
        """Begin a new episode; False: only a new connection does."""

    def close(self) -> None:
        """Let go of it, at once."""


FAILURES: Final = (PpstreamError, OSError, zmq.ZMQError)


class RemotePolicy:
    """As ``Policy``, on the CPU: a client of a policy server."""

    def __init__(self, options: Options, open_link: Callable[[int], Link]) -> None:
        self.inputs = tuple(_inputs(options))
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        self._options, self._open = options, open_link
        self._links: dict[int, Link] = {}
        self._texts = {0: options.text}
        if options.instructions:
            self.instruct = self._instruct

    def reset(self, rows: Tensor) -> None:
        """Begin a new episode of each row at the server, within the time of one call."""
        until_ns = self._until()
        for row in rows.nonzero().flatten().tolist():
            link = self._links.get(row)
            try:
                if link is None or link.reset(until_ns):
                    continue
            except FAILURES:
                pass  # a new connection begins one, too
            self._drop(row)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        until_ns = self._until()
        rows = window["present"].nonzero().flatten().tolist()
        actions = out["actions"].zero_()
        waiting = set(rows)
        try:
            for row in rows:
                self._link(row, until_ns).ask(self._request(row, window), until_ns)
            for row in rows:
                found = self._links[row].answer(until_ns)
                actions[row].numpy()[:] = self._fitting(found)
                waiting.discard(row)
        except FAILURES as error:
            text = f"{self._options.url}: {_reason_of(error)} (row {row})"
            raise ServerError(text) from error
        finally:
            for row in waiting:  # an answer of theirs may still come
                self._drop(row)

    def close(self) -> None:
        """End every connection; a later call opens them again."""
        for row in list(self._links):
            self._drop(row)

    def _instruct(self, number: int, text: str) -> None:
        self._texts[number] = text

    def _until(self) -> int:
        return now_ns() + round(self._options.timeout_ms * NS_PER_MS)

    def _link(self, row: int, until_ns: int) -> Link:
        if row not in self._links:
            self._links[row] = self._open(until_ns)
        return self._links[row]

    def _drop(self, row: int) -> None:
        link = self._links.pop(row, None)
        if link is not None:
            link.close()

    def _request(self, row: int, window: Mapping[str, Tensor]) -> dict[str, Any]:
        """Values, frames and text at the end of a row's window, by the keys of the server."""
        options = self._options
        values = window[f"{options.group}.values"][row, -1].numpy()
        found: dict[str, Any] = {
            key: values[first:end] for key, (first, end) in options.numbers.items()
        }
        for key, camera in options.cameras.items():
            frame = (window[f"{camera.name}.frames"][row, -1].numpy() * WHITE).round()
            pixels = frame.clip(0, WHITE).astype(np.uint8)
            found[key] = pixels.transpose(1, 2, 0) if camera.layout == "hwc" else pixels
        if options.prompt is not None:
            number = int(window["instruction_id"][row]) if options.instructions else 0
            found[options.prompt] = self._texts[number]
        return found

    def _fitting(self, actions: Array) -> Array:
        wanted = self.outputs[0].shape
        if actions.ndim != 2 or len(actions) < wanted[0] or actions.shape[1] != wanted[1]:
            raise ServerError(
                f"got actions {actions.dtype} {list(actions.shape)}, want {list(wanted)} or more "
                "steps: see policy.options.horizon and action_dim"
            )
        return actions[: wanted[0]]


class OpenpiLink:
    """A connection to a server of openpi."""

    def __init__(self, options: Options, key: str | None, until_ns: int) -> None:
        from websockets.sync.client import connect

        opening = connect(
            options.url,
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

    def __init__(self, options: Options, key: str | None) -> None:
        self._options, self._token = options, key
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, ANSWER_MAX)
        self._socket.connect(options.url)

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
        actions = reply if self._is_old() else (reply[0] if isinstance(reply, list) else None)
        if not isinstance(actions, Mapping):
            raise ServerError(
                f"got an answer that does not have the form of {self._options.generation}"
            )
        options, prefix = self._options, "action." if self._is_old() else ""
        parts: dict[str, Array] = {}
        for key, (first, end) in options.action_keys.items():
            part = _array(actions.get(prefix + key), prefix + key)
            if part.size == 0 or part.size % (end - first):
                raise ServerError(f"{key}: got {list(part.shape)}, want {end - first} numbers")
            parts[key] = part.reshape(-1, end - first)
        steps = min(len(part) for part in parts.values())
        found = np.empty((steps, options.action_dim), np.float32)
        for key, (first, end) in options.action_keys.items():
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
        return self._options.generation == "n1.5"

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


def build(config: Mapping[str, Any], device: torch.device) -> RemotePolicy:
    """A client of a policy server, with the given ``Options``; it connects when it is first called.

    Raises:
        ConfigError: an option is missing, unknown or not allowed, or the device is no CPU.
    """
    options = options_of(config, Options)
    if found := [f"policy.options.{problem}" for problem in _problems(options, device)]:
        raise ConfigError(found)
    key = None
    if options.api_key_file is not None:
        try:
            key = Path(options.api_key_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"policy.options.api_key_file: {error}"]) from error

    def open_link(until_ns: int) -> Link:
        if options.wire == "groot":
            return GrootLink(options, key)
        return OpenpiLink(options, key, until_ns)

    return RemotePolicy(options, open_link)


def _inputs(options: Options) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{options.group}.values", (options.steps, options.dim))
    for camera in options.cameras.values():
        shape = (camera.frames, CHANNELS, camera.height, camera.width)
        yield TensorSpec(f"{camera.name}.frames", shape)
    if options.instructions:
        yield TensorSpec("instruction_id", (), "int64")
    yield TensorSpec("present", (), "bool")


def _problems(options: Options, device: torch.device) -> Iterator[str]:
    """Every disagreement of the options, each with its name."""
    is_groot = options.wire == "groot"
    if device.type != "cpu":
        yield f"wire: got {options.wire!r} on {device}, want placement.policy = 'cpu'"
    if not is_groot and find_spec("websockets") is None:
        yield "wire: 'openpi' needs websockets: pip install 'ppstream[gateway]'"
    if not options.url.startswith(SCHEMES[options.wire]):
        yield f"url: got {options.url!r}, want {' or '.join(SCHEMES[options.wire])}HOST:PORT"
    for key, (first, end) in options.numbers.items():
        if not first < end <= options.dim:
            yield f"numbers.{key}: got [{first}, {end}], want a part of the {options.dim} values"
    if options.instructions and options.prompt is None:
        yield "prompt: missing, want the key of the instruction"
    if not is_groot:
        if options.action_keys:
            yield "action_keys: got some, want none: openpi answers with 'actions'"
        return
    for keys, prefix in ((options.numbers, "state."), (options.cameras, "video.")):
        yield from (f"{key}: want {prefix}NAME" for key in keys if not key.startswith(prefix))
    parts = sorted(options.action_keys.values())
    ends = [0, *(end for _, end in parts)]
    is_whole = [first for first, _ in parts] == ends[:-1] and ends[-1] == options.action_dim
    if not is_whole or any(first == end for first, end in parts):
        yield (
            f"action_keys: want each of the {options.action_dim} actions in one key, such as "
            f"{{ arm = [0, {options.action_dim}] }}"
        )


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


def _left_s(until_ns: int) -> float:
    return max(0.0, (until_ns - now_ns()) / NS_PER_S)


def _reason_of(error: BaseException) -> str:
    """Reason of a failure, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer within policy.options.timeout_ms"
    return _cut(error) or type(error).__name__


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
