"""OpenpiServer: openpi's WebSocket, on which its clients send observations and get actions.

The server tells its metadata, then answers each observation in turn; a text frame is an error. What
asking again may mend leaves the connection open, everything else closes it. Requests wait on the
event loop, and in threads for what may take long: a slow run, robot or reader delays nobody else.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import itertools
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from ppstream.analysis.records import RequestError
from ppstream.config.gateway_rules import listen_address, listen_of, rank0_endpoint
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import PpstreamError, ProtocolError, SpecError
from ppstream.core.phases import SERVING
from ppstream.gateway.key_map import KeyMap, source_of
from ppstream.gateway.request_log import CountedRequest, RequestCounts
from ppstream.gateway.session import (
    AT_ONCE_BYTES,
    GatewaySession,
    NoAnswerError,
    Reply,
    gateway_keys,
    reason_of,
)
from ppstream.gateway.shared_server import BoundedListener, Room, listen, process_count, share_of
from ppstream.gateway.wires import Access, sessions_max, sockets_max
from ppstream.robot.contract import ask_contract
from ppstream.wire.endpoints import bracketed
from ppstream.wire.openpi import decode, encode

logger = logging.getLogger("ppstream")
library_logger = logging.getLogger("ppstream.gateway.websockets")
library_logger.setLevel(logging.CRITICAL)  # whoever connects could fill our log

HEALTH: Final = "/healthz"
ROBOTS: Final = "/robots/"  # the robot's name follows
ROBOT_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
UNNAMED: Final = f"a name behind {ROBOTS} has 1 to 64 letters, digits, '-' and '_'"
ROBOT_CHARACTERS: Final = 64  # of a name
KEY_SCHEME: Final = "Api-Key "
ENDPOINT: Final = "endpoint"  # a request that is no observation, in dialects of the wire
EPISODE: Final = "session_id"  # of a request, in the same dialects: another one is a new episode
OMNI_PATH: Final = "/v1/realtime/robot/openpi"  # vLLM-Omni's: bare actions, errors as maps
RESET_DONE: Final = {"status": "reset successful"}
OPEN_LIMIT_S: Final = 10.0
SEND_LIMIT_S: Final = 5.0  # a reader that takes no reply for so long is gone
CLOSE_LIMIT_S: Final = 2.0
PROBE_EVERY_NS: Final = NS_PER_S
PROBE_LIMIT_S: Final = 2.0
REASON_BYTES: Final = 120  # of a close frame, which has room for 123
BYTES_PER_MB: Final = 1_000_000

T = TypeVar("T")


class OpenpiServer:
    """One ``[[gateway]]`` of wire ``openpi``, as ``WireServer``: ``wss://`` with TLS, else ``ws://``."""

    def __init__(
        self,
        config: PipelineConfig,
        gateway: GatewayConfig,
        access: Access,
        requests: RequestCounts,
    ) -> None:
        self._config, self._gateway, self._requests = config, gateway, requests
        self._api_key, self._tls, self._connections = access
        self._keys = gateway_keys(gateway)
        self._sockets_max = sockets_max(config)
        sharing = 1 if self._connections is None else process_count(config, gateway)
        self._sessions_max = share_of(sessions_max(config), sharing)
        self._threads = ThreadPoolExecutor(self._sessions_max + 1, "ppstream-gateway")
        self._sessions: set[GatewaySession] = set()
        self._sockets = 0
        self._numbers = itertools.count(1)
        self._probing = asyncio.Lock()
        self._probed = ("connecting", 0)  # phase, and when
        self._metadata = encode(metadata(config, gateway))
        self._servers: list[Server] = []  # one for each address
        self._closed_because: RequestError = "gone"

    @property
    def address(self) -> str:
        """As ``WireServer``."""
        assert self._servers, "entered"
        if self._connections is not None:
            return "connections of another process"
        host, port = next(iter(self._servers[0].sockets)).getsockname()[:2]
        return f"{'ws' if self._tls is None else 'wss'}://{bracketed(host)}:{port}"

    async def __aenter__(self) -> OpenpiServer:
        address = listen_address(listen_of(self._gateway))
        assert address is not None, "checked with the configuration"
        listeners: list[socket.socket] = []
        if self._connections is not None:
            listeners.append(self._connections)
        else:
            room = Room(self._sockets_max)
            listeners += [BoundedListener(one, room) for one in listen(*address)]
        for listener in listeners:
            self._servers.append(await self._serve_at(listener))
        return self

    async def _serve_at(self, listener: socket.socket) -> Server:
        more: dict[str, Any] = {}
        if self._tls is not None:
            more = {"ssl": self._tls, "ssl_handshake_timeout": OPEN_LIMIT_S}
        return await serve(
            self._serve,
            sock=listener,
            process_request=self._request,
            create_connection=_counted(self._accept_socket, self._leave_socket),
            origins=[None],  # a page in a browser names one, and may ask any port of its host
            compression=None,
            max_size=round(self._gateway.message_mb * BYTES_PER_MB),
            max_queue=1,  # frames read ahead of the one in work
            open_timeout=OPEN_LIMIT_S,
            close_timeout=CLOSE_LIMIT_S,
            ping_interval=self._gateway.silence_s / 2,
            ping_timeout=self._gateway.silence_s / 2,
            server_header=None,
            logger=library_logger,
            **more,
        )

    async def __aexit__(self, *_: object) -> None:
        self._closed_because = "gateway_ends"
        for server in self._servers:
            server.close()
        for server in self._servers:
            await server.wait_closed()
        self._threads.shutdown(wait=False)

    # ---- before a connection is one ---------------------------------------------------------

    def _accept_socket(self) -> bool:
        self._sockets += 1
        return self._sockets <= self._sockets_max

    def _leave_socket(self) -> None:
        self._sockets -= 1

    async def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer health, and whoever has no key; None: go on with the handshake."""
        if request.path == HEALTH:
            phase = await self._phase()
            if phase in SERVING:
                return connection.respond(http.HTTPStatus.OK, "OK\n")
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{phase}\n")
        if self._api_key is None:
            return None
        found = request.headers.get_all("Authorization")
        wanted = (KEY_SCHEME + self._api_key).encode()
        if len(found) == 1 and hmac.compare_digest(found[0].encode(errors="replace"), wanted):
            return None
        return connection.respond(
            http.HTTPStatus.UNAUTHORIZED, "want the header Authorization: Api-Key KEY\n"
        )

    async def _phase(self) -> str:
        """The run's phase, as a session tells it; where there is none, rank 0 is asked for it."""
        for session in self._sessions:
            if session.client.connected:
                return session.client.phase
        async with self._probing:
            phase, then_ns = self._probed
            if not then_ns or now_ns() - then_ns >= PROBE_EVERY_NS:
                phase = await self._in_thread(self._probe)
                self._probed = phase, now_ns()
            return phase

    def _probe(self) -> str:
        endpoint = rank0_endpoint(self._config, self._gateway)
        assert endpoint is not None, "checked with the configuration"
        try:
            return ask_contract(endpoint, self._keys, PROBE_LIMIT_S).phase
        except PpstreamError as error:
            return str(error)

    # ---- one robot --------------------------------------------------------------------------

    async def _serve(self, connection: ServerConnection) -> None:
        if len(self._sessions) >= self._sessions_max:
            await _refuse(connection, "too many connections")
            return
        robot = self._name(connection)
        if robot is None:
            await _refuse(connection, UNNAMED)
            return
        parts = (self._config, self._gateway, self._keys, robot)
        session = GatewaySession(*parts, in_thread=self._in_thread)
        self._sessions.add(session)
        assert isinstance(connection, _Counted), "it was accepted"
        connection.place.hold()  # until its session has ended, too
        try:
            await self._in_thread(session.open)
            logger.info("%s is robot %s", connection.remote_address, robot)
            await self._send(connection, self._metadata)
            await self._answer_all(connection, session, robot)
        except ConnectionClosed:
            pass  # openpi's clients say no goodbye
        except PpstreamError as error:
            logger.info("%s is refused: %s", connection.remote_address, error)
            await _refuse(connection, _last_line(str(error)))
        except Exception:
            logger.exception("%s: the gateway failed", connection.remote_address)
            raise  # the library closes with 1011
        finally:
            await self._in_thread(session.close)
            self._sessions.discard(session)
            connection.place.release()

    async def _answer_all(self, connection: _Counted, session: GatewaySession, robot: str) -> None:
        total_ns: int | None = None  # of the request before, from its receipt to its reply
        is_omni = _path(connection) == OMNI_PATH
        async for frame in connection:
            request = self._requests.received(robot, now_ns())
            try:
                if isinstance(frame, str):
                    raise ProtocolError("got a text frame, want a binary one")
                async with connection.until_lost():
                    reply = await self._answer(session, frame, request)
            except TimeoutError:  # its client has left: the row is another's, or its own again
                request.failed(self._closed_because)
                return
            except NoAnswerError as error:
                request.failed(error.reason)
                await self._send(connection, _error(str(error), is_omni=is_omni))
                continue
            except (SpecError, ProtocolError) as error:
                request.failed("bad_request")
                if not is_omni:
                    await self._fail(connection, str(error))
                    return
                await self._send(connection, _error(str(error), is_omni=True))
                continue
            except Exception as error:
                request.failed(reason_of(error))
                logger.exception("a request could not be answered")
                await self._fail(connection, f"the gateway failed: {error}")
                return
            if isinstance(reply, Reply):
                infer_ns = now_ns() - request.received_ns
                answer = reply.actions if is_omni else message(reply, infer_ns, total_ns)
                try:
                    await self._send(connection, encode(answer))
                except ConnectionClosed:
                    request.failed(self._closed_because)
                    raise
                request.answered()
                session.handed_over(reply, now_ns())
            else:
                await self._send(connection, encode(reply))
            total_ns = now_ns() - request.received_ns

    async def _answer(
        self, session: GatewaySession, frame: bytes, request: CountedRequest
    ) -> Reply | Mapping[str, Any]:
        is_short = len(frame) <= AT_ONCE_BYTES
        asked = decode(frame) if is_short else await self._in_thread(decode, frame)
        endpoint = asked.get(ENDPOINT, "infer")
        if not isinstance(endpoint, str):
            raise ProtocolError(f"endpoint: got {type(endpoint).__name__}, want a text")
        if endpoint == "reset":
            session.reset()
            return RESET_DONE
        if endpoint != "infer":
            raise ProtocolError(f"endpoint: got {endpoint[:64]!r}, want 'infer' or 'reset'")
        request.begin()
        if (episode := asked.get(EPISODE)) is not None:
            if not isinstance(episode, str | bytes | int):
                kind = type(episode).__name__
                raise ProtocolError(f"{EPISODE}: got {kind}, want a text or a whole number")
            if isinstance(episode, bytes):
                episode = episode.decode(errors="surrogateescape")  # to be compared, never shown
            session.follow_episode(str(episode))
        return await session.answer(asked, request.received_ns)

    async def _fail(self, connection: ServerConnection, text: str) -> None:
        """Say what is wrong, and close as openpi's own server does."""
        logger.info("%s is sent away: %s", connection.remote_address, text)
        await self._send(connection, text)
        await connection.close(1011, "the error stands in the frame before")

    async def _send(self, connection: ServerConnection, frame: bytes | str) -> None:
        try:
            async with asyncio.timeout(SEND_LIMIT_S):
                await connection.send(frame)
        except TimeoutError:
            logger.info("%s reads no replies: closed", connection.remote_address)
            connection.transport.abort()
            await connection.wait_closed()
            await connection.send(b"")  # raises how it was closed

    def _name(self, connection: ServerConnection) -> str | None:
        """Name of a robot; None: its path has one that cannot be."""
        if (path := _path(connection)).startswith(ROBOTS):
            name = path.removeprefix(ROBOTS)
            return name if ROBOT_NAME.fullmatch(name) else None
        return f"openpi-{next(self._numbers)}-{_peer(connection)}"[:ROBOT_CHARACTERS]

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def build(
    config: PipelineConfig, gateway: GatewayConfig, access: Access, requests: RequestCounts
) -> OpenpiServer:
    """As ``Wire``."""
    return OpenpiServer(config, gateway, access, requests)


class _Place:
    """Room that a connection takes, until both it and its session have ended."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave, self._holders = leave, 1

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._leave()


class _Counted(ServerConnection):
    """A connection that counts from its first byte on, and ends at once when refused."""

    take: Callable[[], bool]
    leave: Callable[[], None]
    place: _Place
    is_lost = False
    _patience: asyncio.Timeout | None = None

    @asynccontextmanager
    async def until_lost(self) -> AsyncIterator[None]:
        """Wait inside no longer than the connection lasts. Raises TimeoutError: it has ended."""
        try:
            async with asyncio.timeout(0 if self.is_lost else None) as self._patience:
                yield
        finally:
            self._patience = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.place = _Place(self.leave)
        if not self.take():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._patience is not None:
            self._patience.reschedule(0)
        self.place.release()
        super().connection_lost(exc)


def _counted(take: Callable[[], bool], leave: Callable[[], None]) -> type[_Counted]:
    """Connections of one server, which ``take`` and ``leave`` count."""
    return type("Counted", (_Counted,), {"take": staticmethod(take), "leave": staticmethod(leave)})


def metadata(config: PipelineConfig, gateway: GatewayConfig) -> dict[str, Any]:
    """The first message to each robot: what is configured, and the contract under ``ppstream``."""
    actions = config.actions
    keys = {key: wanted for key, _, wanted in KeyMap(config, gateway).rows()}
    contract = {
        "run": config.name,
        "observation": keys,
        "actions": list(actions.names),
        "horizon": actions.horizon,
        "dt_ms": actions.dt_ms,
        "lease_ms": actions.lease_ms,
        "answer": gateway.answer,
    }
    return {"ppstream": contract, **gateway.metadata}


def message(reply: Reply, infer_ns: int, total_ns: int | None) -> dict[str, Any]:
    """A reply as openpi's clients read it.

    The actions are its only array: their broker cuts every array of a reply step by step.
    """
    timing = reply.timing(infer_ns)
    if total_ns is not None:
        timing["prev_total_ms"] = total_ns / NS_PER_MS
    found: dict[str, Any] = {"actions": reply.actions, "server_timing": timing}
    if reply.policy_ms is not None:
        found["policy_timing"] = {"infer_ms": reply.policy_ms}
    return found


def describe(config: PipelineConfig, gateway: GatewayConfig) -> str:
    """As ``Wire``."""
    key_map, actions = KeyMap(config, gateway), config.actions
    lines = [f"openpi on {listen_of(gateway)}, answer = {gateway.answer}", ""]
    lines += [f"  {key}: {wanted} -> {stream}" for key, stream, wanted in key_map.rows()]
    shape = f"float32 [{actions.horizon}, {len(actions.names)}]"
    lines += [f"  actions: {shape} = {', '.join(actions.names)}, {actions.dt_ms:g} ms apart", ""]
    host, port = listen_address(listen_of(gateway)) or ("127.0.0.1", 8000)
    lines += [
        "import numpy as np",
        "from openpi_client.websocket_client_policy import WebsocketClientPolicy",
        "",
        f'client = WebsocketClientPolicy("{bracketed(host)}", {port})',
        "observation = " + source_of(key_map.example()),
        'actions = client.infer(observation)["actions"]',
    ]
    return "\n".join(lines)


async def _refuse(connection: ServerConnection, reason: str) -> None:
    """Close before the metadata: a text would be taken for them."""
    short = reason.encode()[:REASON_BYTES].decode(errors="ignore")
    await connection.close(1013, short)


def _path(connection: ServerConnection) -> str:
    return "" if connection.request is None else connection.request.path


def _error(text: str, *, is_omni: bool) -> str | bytes:
    return encode({"type": "error", "message": text}) if is_omni else text


def _last_line(text: str) -> str:
    return text.splitlines()[-1].strip() if text else "refused"


def _peer(connection: ServerConnection) -> str:
    address = connection.remote_address
    return f"{address[0]}-{address[1]}" if isinstance(address, tuple) else "unknown"
