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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import zmq

from ppstream.config.gateway_rules import is_loopback, listen_address, listen_of
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PpstreamError, ProtocolError, SpecError
from ppstream.gateway.groot_messages import ModalityRequest, modalities, prompt_key
from ppstream.gateway.groot_messages import describe as describe
from ppstream.gateway.groot_socket import GrootMessage, GrootSocket
from ppstream.gateway.request_log import UNNAMED, CountedRequest, RequestCounts
from ppstream.gateway.session import (
    AT_ONCE_BYTES,
    GatewaySession,
    NoAnswerError,
    Reply,
    gateway_keys,
    reason_of,
)
from ppstream.gateway.wires import Access, sockets_max
from ppstream.wire.groot import decode, encode

logger = logging.getLogger("ppstream")

PONG: Final = {"status": "ok", "message": "Server is running"}
UNAUTHORIZED: Final = "Unauthorized: Invalid API token"  # as GR00T's own server says it
ROBOT_CHARACTERS: Final = 64
TOLD_MAX: Final = 16  # reasons of refusals in the log
SPARE_CLIENTS: Final = 8  # beyond the rows: those that have just left, and refused ones
SWEEP_S: Final = 0.1
UNREAD_MAX: Final = 1000  # requests that are still answered when the gateway ends
END_LIMIT_S: Final = 1.0  # for robots to ask once more, and again for the last replies to leave
LOOK_S: Final = 0.01
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
    """One message, and its line in the log of requests."""

    message: GrootMessage
    counted: CountedRequest


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
        self._is_ending = False
        self._untold: set[bytes] = set()  # robots that do not know yet that the gateway ends
        self._modalities = modalities(config, gateway)
        self._prompt_key = prompt_key(gateway)
        self._socket = GrootSocket(sockets_max(config))

    @property
    def address(self) -> str:
        """As ``WireServer``."""
        return self._socket.address

    async def __aenter__(self) -> GrootServer:
        address = listen_address(listen_of(self._gateway))
        assert address is not None, "checked with the configuration"
        self._socket.bind(self._gateway, *address)
        if not is_loopback(address[0]):
            logger.warning("%s: this wire is not encrypted, the token neither", self.address)
        self._loops = [asyncio.create_task(self._serve()), asyncio.create_task(self._sweep())]
        for loop in self._loops:
            loop.add_done_callback(_log_failure)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the rows back, and answer until each robot knows, for a second at most.

        A client that asks later waits for ever.
        """
        until_ns = now_ns() + round(END_LIMIT_S * NS_PER_S)
        self._is_ending, self._untold = True, set(self._robots)
        for request in [request for task, request in self._work.values() if task.cancel()]:
            self._tell_end(request)
        closing = [asyncio.to_thread(robot.session.close) for robot in self._robots.values()]
        if pending := [*self._ends, *map(asyncio.ensure_future, closing)]:
            await asyncio.wait(pending, timeout=END_LIMIT_S)
        while self._untold and now_ns() < until_ns:
            await asyncio.sleep(LOOK_S)
        for loop in self._loops:
            loop.cancel()
        await asyncio.wait(self._loops)
        with suppress(zmq.Again):
            for _number in range(UNREAD_MAX):
                if (unread := await self._receive(zmq.NOBLOCK)) is not None:
                    self._tell_end(unread)
        self._threads.shutdown(wait=False)
        self._socket.close(round(END_LIMIT_S * MS_PER_S))

    # ---- the socket -----------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            try:
                request = await self._receive()
                self._end_disconnected()  # one of them may be this client, before
            except zmq.ZMQError:
                raise  # of the socket itself: nobody can be served
            except Exception:
                logger.exception("a message could not be read")
                continue
            if request is not None:
                self._take(request)

    def _take(self, request: _Request) -> None:
        """Begin to answer, or say why not."""
        message = request.message
        if self._is_ending:
            self._tell_end(request)
        elif (refusal := message.refusal) is not None:
            request.counted.failed("refused")
            self._log_once(request, refusal)
            self._send(request, {"error": refusal})
        elif message.client in self._work:
            request.counted.failed("busy")
            self._send(request, {"error": "a request of this client is not answered yet"})
        elif len(self._work) >= self._clients_max:
            request.counted.failed("busy")
            self._send(request, {"error": "too many clients ask at once; ask again"})
        else:
            self._work[message.client] = (asyncio.create_task(self._answer(request)), request)

    def _tell_end(self, request: _Request) -> None:
        self._untold.discard(request.message.client)
        request.counted.failed("gateway_ends")
        self._send(request, {"error": "the gateway ends"})

    async def _receive(self, flags: int = 0) -> _Request | None:
        """As ``GrootSocket.receive``."""
        message = await self._socket.receive(flags)
        if message is None:
            return None
        name = self._known_name(message.client)
        return _Request(message, self._requests.received(name, message.received_ns))

    def _send(self, request: _Request, reply: Any) -> bool:
        """Answer; False: it cannot be written, or its client is gone or reads nothing."""
        try:
            return self._socket.send([*request.message.envelope, encode(reply)])
        except ProtocolError as error:
            logger.error("a reply cannot be written: %s", error)
            return self._send(request, {"error": str(error)})

    def _end_disconnected(self) -> None:
        """Give back the rows of clients whose connection has ended."""
        for descriptor in self._socket.ended():
            for client, robot in list(self._robots.items()):
                if robot.descriptor == descriptor:
                    self._end(client, "its connection has ended")

    async def _sweep(self) -> None:
        silence_ns = round(self._gateway.silence_s * NS_PER_S)
        while True:
            await asyncio.sleep(SWEEP_S)
            self._end_disconnected()
            for client, robot in list(self._robots.items()):
                if client not in self._work and now_ns() - robot.seen_ns >= silence_ns:
                    self._end(client, f"it asked nothing for {self._gateway.silence_s:g} s")

    def _end(self, client: bytes, why: str) -> None:
        if self._is_ending:  # all sessions are being closed
            self._untold.discard(client)
            return
        robot = self._robots.pop(client)
        logger.info("robot %s has left: %s", robot.name, why)
        if client in self._work:  # nobody waits for its answer, and others may for its row
            work, request = self._work[client]
            request.counted.failed("gone")
            work.cancel()
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
            self._work.pop(request.message.client, None)
        robot = self._robots.get(request.message.client)
        is_sent = self._send(request, reply)
        if given is not None:
            if is_sent:
                request.counted.answered()
            else:
                request.counted.failed("gone")
        if robot is not None and not is_sent:
            self._end(request.message.client, "it reads no replies")
        elif robot is not None and given is not None:
            robot.session.handed_over(given, now_ns())

    async def _reply(self, request: _Request) -> tuple[Any, Reply | None]:
        """The message, and the actions in it.

        Raises:
            PpstreamError: there is no reply but this error.
        """
        if len(request.message.body) > self._gateway.message_mb * BYTES_PER_MB:
            raise ProtocolError(
                f"got a message of {len(request.message.body)} bytes, want at most "
                f"gateway.message_mb = {self._gateway.message_mb:g}"
            )
        body = request.message.body
        is_short = len(body) <= AT_ONCE_BYTES
        message = decode(body) if is_short else await self._in_thread(decode, body)
        found = str(message.get("api_token")).encode(errors="replace")
        if self._token is not None and not hmac.compare_digest(found, self._token.encode()):
            request.counted.failed("refused")
            raise ProtocolError(UNAUTHORIZED)
        endpoint, data = message.get("endpoint", "get_action"), message.get("data")
        if not isinstance(endpoint, str):
            raise ProtocolError(f"endpoint: got {type(endpoint).__name__}, want a text")
        if endpoint == "ping":
            return PONG, None
        if endpoint == "get_modality_config":
            return self._modalities, None
        if endpoint == "kill":
            raise ProtocolError("kill is not offered here: who started the run ends it")
        if endpoint not in ("get_action", "reset"):
            raise ProtocolError(f"Unknown endpoint: {endpoint[:64]}")
        robot = await self._robot(request)
        async with robot.turn:
            if endpoint == "reset":
                robot.session.reset()
                return {}, None
            request.counted.begin(robot.name)
            asked = ModalityRequest.of(data)
            asked.check_prompt(self._prompt_key)
            given = await robot.session.answer(asked.observation, request.counted.received_ns)
        parts = asked.parts(given.actions, self._gateway.action_keys)
        timing = given.timing(now_ns() - request.counted.received_ns)
        return [parts, timing] if asked.is_newer else parts, given

    async def _robot(self, request: _Request) -> _Robot:
        """The client's session, opened by its first request.

        Raises:
            PpstreamError: there is no row for it.
        """
        robot = self._robots.get(request.message.client)
        if robot is None:
            if len(self._robots) >= self._clients_max:
                raise NoAnswerError("too many clients", "refused")
            name = self._new_name(request.message)
            parts = (self._config, self._gateway, self._keys, name)
            session = GatewaySession(*parts, in_thread=self._in_thread)
            robot = self._robots[request.message.client] = _Robot(
                name, session, request.message.descriptor
            )
            try:
                async with robot.turn:
                    await self._in_thread(session.open)
            except BaseException:  # else its next request finds one that is not open
                self._robots.pop(request.message.client, None)
                await self._in_thread(session.close)
                raise
            logger.info("%s is robot %s", request.message.peer, name)
        robot.seen_ns = now_ns()
        return robot

    def _new_name(self, message: GrootMessage) -> str:
        """Name of a robot; gateways of one run count alike, so it has the client's own port."""
        port = self._socket.port_of(message.descriptor)
        parts = ("groot", next(self._numbers), message.peer, *([] if port is None else [port]))
        return "-".join(map(str, parts))[:ROBOT_CHARACTERS]

    def _known_name(self, client: bytes) -> str:
        """Name of a client, for the log of requests: it has one once it is a robot."""
        robot = self._robots.get(client)
        return UNNAMED if robot is None else robot.name

    def _log_once(self, request: _Request, why: str) -> None:
        """Whoever connects could fill our log, so each reason stands there once."""
        kind = why[:40]
        if kind not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(kind)
            logger.warning("%s is refused: %s (said once)", request.message.peer, why)

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _log_failure(loop: asyncio.Task[None]) -> None:
    if not loop.cancelled() and (error := loop.exception()) is not None:
        logger.error("the gateway serves no client of GR00T any more", exc_info=error)


def build(
    config: PipelineConfig, gateway: GatewayConfig, access: Access, requests: RequestCounts
) -> GrootServer:
    """As ``Wire``."""
    return GrootServer(config, gateway, access, requests)
