"""GrootServer: GR00T's ZeroMQ wire, on which its clients ask for actions and get them.

Every request is answered, also with an error map that says why there are no actions: these clients
wait for ever. A client is known by the address that ZeroMQ gives its connection, and is a robot
from its first observation until that ends or it is silent. A client that chose its address is
refused: whoever comes with the same one, before any token is read, could get its answer. So is who
comes through a proxy of ZeroMQ, whose one connection has several clients. Requests wait on the
event loop, and in threads for what may take long.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import socket as sockets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ppstream.config.gateway_rules import is_loopback, listen_address, listen_of
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PpstreamError, ProtocolError, SpecError
from ppstream.gateway.groot_messages import ModalityRequest, modalities
from ppstream.gateway.groot_messages import describe as describe
from ppstream.gateway.request_log import UNNAMED, CountedRequest, RequestCounts
from ppstream.gateway.session import (
    AT_ONCE_BYTES,
    GatewaySession,
    NoAnswerError,
    Reply,
    gateway_keys,
    reason_of,
)
from ppstream.gateway.wires import Access
from ppstream.wire.groot import decode, encode
from ppstream.wire.zmq_socket import HANDSHAKE_MS, silent_for

logger = logging.getLogger("ppstream")

PONG: Final = {"status": "ok", "message": "Server is running"}
UNAUTHORIZED: Final = "Unauthorized: Invalid API token"  # as GR00T's own server says it
CHOSEN: Final = "this client has set zmq.IDENTITY: leave that unset, others could get its actions"
RELAYED: Final = (
    "this request came through a proxy, which makes one robot of several: "
    "connect to the gateway itself"
)
GIVEN_BYTES: Final = 5  # of an address that ZeroMQ gives: a zero, which no client may begin with
ROBOT_CHARACTERS: Final = 64
NUMBER_BYTES: Final = 4  # of a request, which a client with REQ_CORRELATE puts in front of it
ENVELOPE_MAX: Final = 8  # frames in front of a request: so many come back with its answer
TOLD_MAX: Final = 16  # reasons of refusals in the log
SPARE_CLIENTS: Final = 8  # beyond the rows: those that have just left, and refused ones
WAITING_MAX: Final = 4  # requests, and replies, of one client that ZeroMQ keeps
READ_FACTOR: Final = 2  # a message so many times too large is still read, to be answered
SWEEP_S: Final = 1.0
SILENT_MIN_S: Final = 2  # the kernel's least
UNREAD_MAX: Final = 1000  # requests that are still answered when the gateway ends
END_LIMIT_S: Final = 1.0  # for the last replies to leave
MS_PER_S: Final = 1000
BYTES_PER_MB: Final = 1_000_000

T = TypeVar("T")


class _Robot:
    """One client that has a session."""

    def __init__(self, name: str, session: GatewaySession, descriptor: int) -> None:
        self.name, self.session = name, session
        self.descriptor = descriptor  # of its connection
        self.turn = asyncio.Lock()  # its session does one thing at a time
        self.seen_ns = now_ns()


class _Request(NamedTuple):
    """One message, as it came."""

    envelope: list[bytes]  # back to its client
    body: bytes
    descriptor: int
    peer: str
    counted: CountedRequest
    is_relayed: bool  # by a proxy: the connection may have other clients, too

    @property
    def client(self) -> bytes:
        """Address of its client."""
        return self.envelope[0]

    @property
    def has_own_address(self) -> bool:
        """False: the client chose one, which another may have chosen, too."""
        return len(self.client) == GIVEN_BYTES and self.client[0] == 0

    @property
    def refusal(self) -> str | None:
        """Why its client cannot be told from others; None: it can."""
        if not self.has_own_address:
            return CHOSEN
        return RELAYED if self.is_relayed else None


class GrootServer:
    """One ``[[gateway]]`` of wire ``groot``, as ``WireServer``."""

    def __init__(
        self,
        config: PipelineConfig,
        gateway: GatewayConfig,
        access: Access,
        requests: RequestCounts,
    ) -> None:
        self._config, self._gateway, self._token = config, gateway, access.api_key
        self._requests = requests
        self._keys = gateway_keys(gateway)
        self._clients_max = config.batch.rows + SPARE_CLIENTS
        self._threads = ThreadPoolExecutor(self._clients_max + 1, "ppstream-gateway")
        self._robots: dict[bytes, _Robot] = {}
        self._work: dict[bytes, tuple[asyncio.Task[None], _Request]] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._numbers = itertools.count(1)
        self._told: set[str] = set()
        self._modalities = modalities(config, gateway)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._context.socket(zmq.PAIR)

    @property
    def address(self) -> str:
        """As ``WireServer``."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    async def __aenter__(self) -> GrootServer:
        address = listen_address(listen_of(self._gateway))
        assert address is not None, "checked with the configuration"
        try:
            _bind(self._socket, self._gateway, *address)
            self._monitor.set(zmq.RCVHWM, 0)  # a full one would stop the socket's own thread
            name = f"inproc://connections-{id(self)}"
            self._socket.monitor(name, zmq.Event.DISCONNECTED)
            self._monitor.connect(name)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from error
        if not is_loopback(address[0]):
            logger.warning("%s: this wire is not encrypted, the token neither", self.address)
        self._loops = [asyncio.create_task(self._serve()), asyncio.create_task(self._sweep())]
        for loop in self._loops:
            loop.add_done_callback(_log_failure)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Answer whoever waits, give the rows back, and let the last replies leave."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.wait(self._loops)
        unread: list[_Request] = []
        with suppress(zmq.Again):
            while len(unread) < UNREAD_MAX:
                unread.append(await self._receive(zmq.NOBLOCK))
        waiting = [request for task, request in self._work.values() if task.cancel()]
        for request in (*waiting, *unread):
            request.counted.failed("gateway_ends")
            self._send(request, {"error": "the gateway ends"})
        closing = [asyncio.to_thread(robot.session.close) for robot in self._robots.values()]
        if pending := [*self._ends, *map(asyncio.ensure_future, closing)]:
            await asyncio.wait(pending, timeout=END_LIMIT_S)
        self._threads.shutdown(wait=False)
        self._socket.disable_monitor()
        self._context.destroy(linger=round(END_LIMIT_S * MS_PER_S))

    # ---- the socket -----------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            try:
                request = await self._receive()
                await self._end_disconnected()  # one of them may be this client, before
            except zmq.ZMQError:
                raise  # of the socket itself: nobody can be served
            except Exception:
                logger.exception("a message could not be read")
                continue
            if (refusal := request.refusal) is not None:
                request.counted.failed("refused")
                self._log_once(request, refusal)
                self._send(request, {"error": refusal})
            elif request.client in self._work:
                request.counted.failed("busy")
                self._send(request, {"error": "a request of this client is not answered yet"})
            elif len(self._work) >= self._clients_max:
                request.counted.failed("busy")
                self._send(request, {"error": "too many clients ask at once; ask again"})
            else:
                self._work[request.client] = (asyncio.create_task(self._answer(request)), request)

    async def _receive(self, flags: int = 0) -> _Request:
        """Raises zmq.Again: with NOBLOCK, there is none."""
        frames = await self._socket.recv_multipart(flags, copy=False)
        received_ns, last = now_ns(), frames[-1]
        envelope = [frame.bytes for frame in frames[:-1]]
        is_relayed = _is_relayed(envelope[1:])
        if len(envelope) > ENVELOPE_MAX:
            envelope = [envelope[0], b""]
        try:
            descriptor, peer = int(last.get(zmq.SRCFD)), str(last.get("Peer-Address"))
        except zmq.ZMQError:
            descriptor, peer = -1, "unknown"
        counted = self._requests.received(self._known_name(envelope[0]), received_ns)
        return _Request(envelope, last.bytes, descriptor, peer, counted, is_relayed)

    def _send(self, request: _Request, reply: Any) -> bool:
        """Answer; False: it cannot be written, or its client is gone or reads nothing."""
        try:
            frames = [*request.envelope, encode(reply)]
            sent = asyncio.ensure_future(self._socket.send_multipart(frames, zmq.NOBLOCK))
            return sent.exception() is None  # with NOBLOCK it is done at once
        except ProtocolError as error:
            logger.error("a reply cannot be written: %s", error)
            return self._send(request, {"error": str(error)})

    async def _end_disconnected(self) -> None:
        """Give back the rows of clients whose connection has ended."""
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(await self._monitor.recv_multipart(zmq.NOBLOCK))
                for client, robot in list(self._robots.items()):
                    if robot.descriptor == event["value"]:
                        self._end(client, "its connection has ended")

    async def _sweep(self) -> None:
        silence_ns = round(self._gateway.silence_s * NS_PER_S)
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._end_disconnected()
            for client, robot in list(self._robots.items()):
                if client not in self._work and now_ns() - robot.seen_ns >= silence_ns:
                    self._end(client, f"it asked nothing for {self._gateway.silence_s:g} s")

    def _end(self, client: bytes, why: str) -> None:
        robot = self._robots.pop(client)
        logger.info("robot %s has left: %s", robot.name, why)
        task = asyncio.create_task(self._close(robot))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _close(self, robot: _Robot) -> None:
        async with robot.turn:
            await self._in_thread(robot.session.close)

    # ---- one request ----------------------------------------------------------------------------

    async def _answer(self, request: _Request) -> None:
        reply: Any
        given: Reply | None = None
        try:
            reply, given = await self._reply(request)
        except (NoAnswerError, SpecError) as error:
            request.counted.failed(reason_of(error))
            reply = {"error": str(error)}
        except PpstreamError as error:
            request.counted.failed(reason_of(error))
            self._log_once(request, str(error))
            reply = {"error": str(error)}
        except Exception as error:
            request.counted.failed(reason_of(error))
            logger.exception("a request could not be answered")
            reply = {"error": f"the gateway failed: {error}"}
        finally:
            self._work.pop(request.client, None)
        robot = self._robots.get(request.client)
        is_sent = self._send(request, reply)
        if given is not None:
            if is_sent:
                request.counted.answered()
            else:
                request.counted.failed("gone")
        if robot is not None and not is_sent:
            self._end(request.client, "it reads no replies")
        elif robot is not None and given is not None:
            robot.session.handed_over(given, now_ns())

    async def _reply(self, request: _Request) -> tuple[Any, Reply | None]:
        """The message, and the actions in it.

        Raises:
            PpstreamError: there is no reply but this error.
        """
        if len(request.body) > self._gateway.message_mb * BYTES_PER_MB:
            raise ProtocolError(
                f"got a message of {len(request.body)} bytes, want at most "
                f"gateway.message_mb = {self._gateway.message_mb:g}"
            )
        body = request.body
        is_short = len(body) <= AT_ONCE_BYTES
        message = decode(body) if is_short else await self._in_thread(decode, body)
        found = str(message.get("api_token")).encode(errors="replace")
        if self._token is not None and not hmac.compare_digest(found, self._token.encode()):
            request.counted.failed("refused")
            raise ProtocolError(UNAUTHORIZED)
        endpoint, data = message.get("endpoint", "get_action"), message.get("data")
        if endpoint == "ping":
            return PONG, None
        if endpoint == "get_modality_config":
            return self._modalities, None
        if endpoint == "kill":
            raise ProtocolError("kill is not offered here: who started the run ends it")
        if endpoint not in ("get_action", "reset"):
            raise ProtocolError(f"Unknown endpoint: {str(endpoint)[:64]}")
        robot = await self._robot(request)
        async with robot.turn:
            if endpoint == "reset":
                robot.session.reset()
                return {}, None
            request.counted.begin(robot.name)
            asked = ModalityRequest.of(data)
            given = await robot.session.answer(asked.observation, request.counted.received_ns)
        parts = asked.parts(given.actions, self._gateway.action_keys)
        timing = given.timing(now_ns() - request.counted.received_ns)
        return [parts, timing] if asked.is_newer else parts, given

    async def _robot(self, request: _Request) -> _Robot:
        """The client's session, opened by its first request.

        Raises:
            PpstreamError: there is no row for it.
        """
        robot = self._robots.get(request.client)
        if robot is None:
            if len(self._robots) >= self._clients_max:
                raise NoAnswerError("too many clients", "refused")
            name = f"groot-{next(self._numbers)}-{request.peer}{_port_of(request.descriptor)}"
            name = name[:ROBOT_CHARACTERS]
            parts = (self._config, self._gateway, self._keys, name)
            session = GatewaySession(*parts, in_thread=self._in_thread)
            robot = self._robots[request.client] = _Robot(name, session, request.descriptor)
            try:
                async with robot.turn:
                    await self._in_thread(session.open)
            except BaseException:  # else its next request finds one that is not open
                self._robots.pop(request.client, None)
                await self._in_thread(session.close)
                raise
            logger.info("%s is robot %s", request.peer, name)
        robot.seen_ns = now_ns()
        return robot

    def _known_name(self, client: bytes) -> str:
        """Name of a client, for the log of requests: it has one once it is a robot."""
        robot = self._robots.get(client)
        return UNNAMED if robot is None else robot.name

    def _log_once(self, request: _Request, why: str) -> None:
        """Whoever connects could fill our log, so each reason stands there once."""
        kind = why[:40]
        if kind not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(kind)
            logger.warning("%s is refused: %s (said once)", request.peer, why)

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _port_of(descriptor: int) -> str:
    """The client's own port, which tells robots of several gateways apart; none once it is gone."""
    kind = sockets.AF_INET, sockets.SOCK_STREAM
    with suppress(OSError), sockets.fromfd(descriptor, *kind) as connection:
        return f"-{connection.getpeername()[1]}"
    return ""


def _is_relayed(added: list[bytes]) -> bool:
    """Tells whether anybody but the client itself added frames in front of its request."""
    if added in ([], [b""]):
        return False
    return [len(frame) for frame in added] != [NUMBER_BYTES, 0]


def _log_failure(loop: asyncio.Task[None]) -> None:
    if not loop.cancelled() and (error := loop.exception()) is not None:
        logger.error("the gateway serves no client of GR00T any more", exc_info=error)


def build(
    config: PipelineConfig, gateway: GatewayConfig, access: Access, requests: RequestCounts
) -> GrootServer:
    """As ``Wire``."""
    return GrootServer(config, gateway, access, requests)


def _bind(socket: zmq.asyncio.Socket, gateway: GatewayConfig, host: str, port: int) -> None:
    """Raises ZMQError, or OSError: it cannot listen there."""
    options = {
        zmq.ROUTER_MANDATORY: 1,  # a client that has left is an error, not a silence
        zmq.ROUTER_HANDOVER: 0,  # nobody takes over another's address
        zmq.MAXMSGSIZE: round(READ_FACTOR * gateway.message_mb * BYTES_PER_MB),
        zmq.RCVHWM: WAITING_MAX,
        zmq.SNDHWM: WAITING_MAX,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        **silent_for(max(SILENT_MIN_S, round(gateway.silence_s))),
        zmq.IPV6: int(":" in host),
    }
    for option, value in options.items():
        socket.set(option, value)
    address = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0][4][0]
    socket.bind(f"tcp://[{address}]:{port}" if ":" in str(address) else f"tcp://{address}:{port}")
