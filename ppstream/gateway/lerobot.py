"""LerobotServer: the policy server of LeRobot's asynchronous inference, over gRPC.

A client says that it is there, what it will send and what it wishes for; then it sends
observations, and asks for actions in a loop of its own. gRPC knows no sessions: a peer, one
connection of a client, is a robot, until that ends or it is silent. Of a peer that two clients
share neither is served. Handlers get and give bytes, which ``wire/lerobot.py`` reads and writes. No
model is ever loaded.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import unquote

import grpc

from ppstream.analysis.records import RequestError
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import PpstreamError, ProtocolError, SpecError
from ppstream.gateway.lerobot_contract import address_of, differences
from ppstream.gateway.lerobot_contract import describe as describe
from ppstream.gateway.lerobot_robot import (
    LOOK_S,
    QUIET_S,
    REMEDY,
    Connection,
    Observed,
    ServedRobot,
    SharedError,
    Step,
    ended,
)
from ppstream.gateway.request_log import CountedRequest, RequestCounts
from ppstream.gateway.session import GatewaySession, Reply, gateway_keys, reason_of
from ppstream.gateway.wires import Access
from ppstream.wire.endpoints import bracketed
from ppstream.wire.lerobot import (
    PIECE_MESSAGE_BYTES,
    Assembly,
    decode_instructions,
    decode_observation,
    encode_actions,
)

logger = logging.getLogger("ppstream")

SERVICE: Final = "transport.AsyncInference"
EMPTY: Final = b""
WAIT_S: Final = 2.0  # for actions; then an empty reply, and the client asks again
STREAM_LIMIT_S: Final = 10.0  # for all pieces of one observation
CLOSE_LIMIT_S: Final = 1.0
SWEEP_S: Final = 1.0
LOG_EVERY_NS: Final = NS_PER_S  # a robot's refusals, a line each
REFUSAL_CHARACTERS: Final = 2000  # of a status, which travels as a header
SPARE_SESSIONS: Final = 8  # beyond the rows: those that a robot has just left, and refused ones
SPARE_CONNECTIONS: Final = 64  # beyond those
CALLS_PER_CONNECTION: Final = 8
ROBOT_CHARACTERS: Final = 64  # of a name
BYTES_PER_MB: Final = 1_000_000

T = TypeVar("T")
Context = Any  # grpc.aio.ServicerContext: gRPC has no types


class LerobotServer:
    """One ``[[gateway]]`` of wire ``lerobot``, as ``WireServer``."""

    def __init__(
        self,
        config: PipelineConfig,
        gateway: GatewayConfig,
        _access: Access,
        requests: RequestCounts,
    ) -> None:
        self._config, self._gateway, self._requests = config, gateway, requests
        self._keys = gateway_keys(gateway)
        self._sessions_max = config.batch.rows + SPARE_SESSIONS
        self._threads = ThreadPoolExecutor(2 * self._sessions_max, "ppstream-gateway")
        self.robots: dict[str, ServedRobot] = {}  # by peer
        self._connections: dict[str, Connection] = {}  # by peer
        self._stranger = ServedRobot("a client", Connection())  # that is no robot
        self._numbers = itertools.count(1)
        self._server: Any = None
        self._port = 0
        self._sweeping: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._left_because: RequestError = "gone"

    @property
    def address(self) -> str:
        """As ``WireServer``."""
        host, _ = address_of(self._gateway)
        return f"{bracketed(host)}:{self._port}"

    async def __aenter__(self) -> LerobotServer:
        silence_ms = round(self._gateway.silence_s * NS_PER_S / NS_PER_MS)
        connections = self._sessions_max + SPARE_CONNECTIONS
        options = {
            "grpc.so_reuseport": 0,  # nobody else may listen at the same address
            "grpc.max_receive_message_length": PIECE_MESSAGE_BYTES,
            "grpc.max_concurrent_streams": CALLS_PER_CONNECTION,
            "grpc.max_allowed_incoming_connections": connections,
            "grpc.keepalive_time_ms": silence_ms // 2,
            "grpc.keepalive_timeout_ms": silence_ms // 2,
            "grpc.http2.ping_timeout_ms": silence_ms // 2,
            "grpc.keepalive_permit_without_calls": 1,
            "grpc.http2.max_pings_without_data": 0,
        }
        self._server = grpc.aio.server(
            options=tuple(options.items()),
            maximum_concurrent_rpcs=CALLS_PER_CONNECTION * connections,
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        host, port = address_of(self._gateway)
        try:
            self._port = self._server.add_insecure_port(f"{bracketed(host)}:{port}")
        except RuntimeError as error:
            reason = "in use, or not an address of this host"
            raise OSError(errno.EADDRINUSE, reason) from error
        await self._server.start()
        self._sweeping = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left_because = "gateway_ends"
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._server is not None:
            await self._server.stop(CLOSE_LIMIT_S)
        for peer in list(self.robots):
            self._leave(peer)
        await asyncio.gather(*self._leaving)
        self._threads.shutdown(wait=False)

    def _handlers(self) -> Any:
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Ready": unary(self._ready),
                "SendPolicyInstructions": unary(self._instructions),
                "SendObservations": grpc.stream_unary_rpc_method_handler(self._observations),
                "GetActions": unary(self._actions),
            },
        )

    # ---- the four calls -------------------------------------------------------------------------

    async def _ready(self, _: bytes, context: Context) -> bytes:
        """A client has started: a robot, or a new episode of one."""
        connection, robot = self._connection(context), self.robots.get(context.peer())
        told, status = robot or self._stranger, grpc.StatusCode.FAILED_PRECONDITION
        if connection.is_starting:
            await self._refuse(told, context, status, REMEDY)
        with connection.starting():
            if reason := await connection.refusal(robot, self._gateway.silence_s):
                await self._refuse(told, context, status, reason)
            await self._begin(context)
        return EMPTY

    async def _begin(self, context: Context) -> None:
        peer = context.peer()
        is_new = peer not in self.robots
        robot = await self._robot(context)
        session = robot.session
        assert session is not None, "opened"
        limit_s = self._gateway.timeout_ms * NS_PER_MS / NS_PER_S
        reason = f"the run is {session.client.phase}; start the client once it is ready"
        try:
            is_ready = await self._in_thread(session.client.wait_ready, limit_s)
            if is_ready and not is_new:
                await self._in_thread(session.reset)
                robot.restart()
        except PpstreamError as error:
            is_ready, reason = False, str(error)
        if not is_ready:
            self._leave(peer)
            await self._refuse(robot, context, grpc.StatusCode.FAILED_PRECONDITION, reason)

    async def _instructions(self, message: bytes, context: Context) -> bytes:
        """A client says what it will send: checked, and never loaded."""
        with (connection := self._connection(context)).call():
            robot = await self._robot(context)
            try:
                wanted = decode_instructions(message)
                lines = differences(self._config, self._gateway, wanted)
            except ProtocolError as error:
                lines = [str(error)]
            if lines:
                self._leave(context.peer())
                status = grpc.StatusCode.INVALID_ARGUMENT
                await self._refuse(robot, context, status, "\n".join(lines))
            connection.actions_max, connection.is_known = wanted.actions_per_chunk, True
            robot.is_fresh = True
            logger.info(
                "%s asks for %.64s %.128s on %.64s: served by this run's policy",
                robot.name,
                ascii(wanted.policy_type),
                ascii(wanted.pretrained_name_or_path),
                ascii(wanted.device),
            )
        return EMPTY

    async def _observations(self, messages: AsyncIterator[bytes], context: Context) -> bytes:
        with self._connection(context).call():
            return await self._observation(messages, context, await self._robot(context))

    async def _observation(
        self, messages: AsyncIterator[bytes], context: Context, robot: ServedRobot
    ) -> bytes:
        robot.tell_unchecked(self._config.actions.horizon)
        robot.is_fresh = False
        request = self._requests.received(robot.name, now_ns())
        request.begin()
        status = grpc.StatusCode
        if robot.is_busy:
            request.failed("busy")
            reason = "an observation of this robot is being read already"
            await self._refuse(robot, context, status.RESOURCE_EXHAUSTED, reason)
        robot.is_reading = True
        try:
            whole = await self._whole(messages)
            request.received_ns = now_ns()
            observing = self._in_thread(self._observe, robot, whole, request)
            robot.observing = asyncio.ensure_future(observing)
            await asyncio.shield(robot.observing)
        except TimeoutError:
            request.failed("bad_request")
            reason = f"an observation that takes longer than {STREAM_LIMIT_S:g} s"
            await self._refuse(robot, context, status.FAILED_PRECONDITION, reason)
        except (ProtocolError, SpecError) as error:
            request.failed("bad_request")
            await self._refuse(robot, context, status.INVALID_ARGUMENT, str(error))
        except SharedError as error:
            request.failed("bad_request")
            self._found_two(context)
            await self._refuse(robot, context, status.FAILED_PRECONDITION, str(error))
        except PpstreamError as error:
            request.failed(reason_of(error))
            await self._refuse(robot, context, status.FAILED_PRECONDITION, str(error))
        except asyncio.CancelledError:
            request.failed(self._left_because)
            raise
        except Exception:
            request.failed("gateway_failed")
            raise
        finally:
            robot.is_reading = False
        return EMPTY

    async def _actions(self, _: bytes, context: Context) -> bytes:
        """The newest actions, or nothing after a while: the client asks again at once."""
        until_ns = now_ns() + round(WAIT_S * NS_PER_S)
        connection, peer = self._connection(context), context.peer()
        try:
            with connection.call(asks=True):
                if not await connection.is_alone():
                    self._found_two(context)
                found = EMPTY
                if not connection.is_shared:
                    found = await self._next(connection, context, until_ns)
                limit_s = context.time_remaining()
                if connection.asking > 1 and (limit_s is None or limit_s > QUIET_S):
                    self._found_two(context)  # it ends by itself: nobody has cancelled it
                if connection.is_shared:  # told at once, it would ask again at once
                    await asyncio.sleep((until_ns - now_ns()) / NS_PER_S)
                    status = grpc.StatusCode.FAILED_PRECONDITION
                    await self._refuse(self._stranger, context, status, REMEDY)
                return found
        finally:
            if (robot := self.robots.get(peer)) is not None:
                robot.arrived.set()  # for a call beside, which had to wait for the end of this one

    async def _next(self, connection: Connection, context: Context, until_ns: int) -> bytes:
        try:
            while not connection.is_shared and (left_ns := until_ns - now_ns()) > 0:
                robot = self.robots.get(context.peer())
                if robot is None:
                    await asyncio.sleep(LOOK_S)  # its first observation may be on its way
                    continue
                robot.has_asked, robot.is_fresh = True, False
                robot.arrived.clear()
                if connection.asking == 1 and (found := robot.pop()) is not None:
                    return self._reply(robot, *found)
                await robot.wait(left_ns)
            return EMPTY
        except asyncio.CancelledError:
            if context.time_remaining() is None:  # it set no limit: its connection has ended
                self._leave(context.peer())
            raise

    # ---- behind the calls -----------------------------------------------------------------------

    async def _whole(self, messages: AsyncIterator[bytes]) -> bytes:
        assembly = Assembly(round(self._gateway.message_mb * BYTES_PER_MB))
        async with asyncio.timeout(STREAM_LIMIT_S):
            async for message in messages:
                whole = assembly.add(message)
                if whole is not None:
                    return whole
        raise ProtocolError("an observation that has no END")

    def _observe(self, robot: ServedRobot, whole: bytes, request: CountedRequest) -> None:
        observation = decode_observation(whole)
        session = robot.session
        assert session is not None, "opened"
        step = Step(observation.timestep, observation.timestamp)
        robot.take(Observed(step, request), self._config.actions.horizon)
        robot.check_pace(step, NS_PER_S / NS_PER_MS / self._config.actions.dt_ms)
        session.observe(observation.observation, request.received_ns)

    def _reply(self, robot: ServedRobot, reply: Reply, answered: Step) -> bytes:
        message = encode_actions(
            reply.actions[: robot.connection.actions_max],
            timestep=answered.timestep,
            timestamp=answered.timestamp,
            dt_s=self._config.actions.dt_ms * NS_PER_MS / NS_PER_S,
        )
        assert robot.session is not None, "it gave the reply"
        robot.session.handed_over(reply, now_ns())
        robot.answered(reply)
        return message

    def _connection(self, context: Context) -> Connection:
        """The connection of a call: of a client that connects anew, without a word, a new one.

        It may be any that was here lately, and gets no more actions than the fewest of them.
        """
        found = self._connections.get(context.peer())
        if found is None:
            asked = [one.actions_max for one in self._connections.values() if one.actions_max]
            found = self._connections[context.peer()] = Connection(min(asked, default=None))
        return found

    def _found_two(self, context: Context) -> None:
        """Serve neither of two clients: whose actions are whose, nobody can tell."""
        peer = context.peer()
        self._connection(context).found_two()
        if (robot := self.robots.get(peer)) is not None:
            logger.warning("%s is not served: %s", robot.name, REMEDY)
            self._leave(peer)

    async def _robot(self, context: Context) -> ServedRobot:
        """The robot of a call, with a session: of a client that connects anew, a new one."""
        peer, status = context.peer(), grpc.StatusCode.RESOURCE_EXHAUSTED
        if self._connection(context).is_shared:
            shared = grpc.StatusCode.FAILED_PRECONDITION
            await self._refuse(self._stranger, context, shared, REMEDY)
        robot = self.robots.get(peer)
        if robot is None:
            if len(self.robots) >= self._sessions_max:
                await self._refuse(self._stranger, context, status, "too many connections")
            name = f"lerobot-{next(self._numbers)}-{_readable(peer)}"[:ROBOT_CHARACTERS]
            robot = self.robots[peer] = ServedRobot(name, self._connection(context))
        async with robot.opening:
            if self.robots.get(peer) is not robot:
                await self._refuse(robot, context, status, "this robot has just left; call again")
            if robot.session is None:
                try:
                    await self._open(robot)
                except PpstreamError as error:
                    self._leave(peer)
                    found = str(error).splitlines()[-1].strip()
                    await self._refuse(robot, context, status, found)
                except BaseException:
                    self._leave(peer)
                    raise
        return robot

    async def _open(self, robot: ServedRobot) -> None:
        loop = asyncio.get_running_loop()
        session = GatewaySession(
            self._config,
            self._gateway,
            self._keys,
            robot.name,
            on_actions=lambda: _notify(loop, robot.arrived),
        )
        try:
            await self._in_thread(session.open)
        except BaseException:
            await self._in_thread(session.close)
            raise
        robot.session = session
        logger.info("%s is a robot", robot.name)

    def _leave(self, peer: str) -> None:
        """Give a robot's row back, soon. Twice is fine."""
        robot = self.robots.pop(peer, None)
        if robot is not None:
            robot.arrived.set()  # who waits for its actions looks for the robot after it
        if robot is not None and robot.session is not None:
            logger.info("%s has left", robot.name)
            robot.leave(self._left_because)
            task = asyncio.create_task(self._in_thread(robot.session.close))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _refuse(
        self, robot: ServedRobot, context: Context, status: Any, reason: str
    ) -> NoReturn:
        """End a call with the reason; the log has one line of each robot now and then."""
        if now_ns() - robot.told_ns >= LOG_EVERY_NS:
            robot.told_ns = now_ns()
            logger.info("%s is refused: %s", robot.name, "; ".join(reason.splitlines()))
        await context.abort(status, reason[:REFUSAL_CHARACTERS])
        raise AssertionError("abort raises")

    async def _sweep(self) -> None:
        """Robots have left whose connection has ended, or that have not called for long."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._gateway.silence_s / 2))
            limit_s = self._gateway.silence_s
            quiet = [one for one, robot in self.robots.items() if robot.is_silent(QUIET_S)]
            gone = await self._in_thread(ended, quiet, self._port) if quiet else ()
            for peer, robot in list(self.robots.items()):
                is_over = robot.is_silent(QUIET_S if peer in gone else limit_s)
                if robot.session is not None and is_over:
                    self._leave(peer)
            for peer, connection in list(self._connections.items()):
                is_forgotten = connection.is_idle and connection.is_silent(limit_s)
                if is_forgotten and peer not in self.robots:
                    del self._connections[peer]

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def build(
    config: PipelineConfig, gateway: GatewayConfig, access: Access, requests: RequestCounts
) -> LerobotServer:
    """As ``Wire``."""
    return LerobotServer(config, gateway, access, requests)


def _notify(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


def _readable(peer: str) -> str:
    """Address and port of a peer, as ``ipv4:127.0.0.1:50000``, for a name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", unquote(peer).partition(":")[2]).strip("-")
