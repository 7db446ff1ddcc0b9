"""AsyncRobotClient: a RobotClient for asyncio. Calls that wait are awaited, chunks are iterated.

The same client with the same thread underneath. It is not a control loop: an event loop has no
deadlines, so a robot that moves should execute its timeline from a ``ControlLoop`` thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from ppstream.core.clock import NS_PER_S, limit_ns, now_ns
from ppstream.core.errors import ReceiverEndedError
from ppstream.robot.answer import Answer, Asking
from ppstream.robot.client import RobotClient
from ppstream.robot.outbox import Values
from ppstream.wire.robot_messages import ActionChunk

SLICE_S: Final = 0.25  # of a wait in a thread: a cancelled one is over this soon


class AsyncRobotClient:
    """Wraps a client that is not connected yet; entering connects it, leaving closes it.

    One task iterates ``chunks``; everything else may be called from any task of that event loop,
    and ``push`` from any thread. The client's own ``on_chunk`` is called as before.
    """

    def __init__(self, client: RobotClient) -> None:
        self.client = client
        self.overtaken = 0  # chunks that a newer one replaced before they were iterated
        self._newest: ActionChunk | None = None
        self._arrival = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._then = client.on_chunk
        client.on_chunk = self._arrived

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Open a session; a cancelled call continues in the background until its timeout.

        Raises:
            HandshakeError: the server refuses this robot for good; the message is the difference.
            PeerLostError: no session in time; the message has the last refusal.
            PpstreamError: the client was closed.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self.client.connect, timeout_s)

    async def wait_ready(self) -> None:
        """Wait for a phase in which actions may be executed.

        Raises:
            PeerLostError: the run ended.
            PpstreamError: ``connect`` was not called, or the client was closed.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        while not await asyncio.to_thread(self.client.wait_ready, SLICE_S):
            pass

    def push(self, stream: str, stamp_ns: int | Values, values: Any) -> bool:
        """``RobotClient.push``: it never waits."""
        return self.client.push(stream, stamp_ns, values)

    async def ask(
        self, samples: Mapping[str, Any], timeout_s: float, stamp_ns: int | None = None
    ) -> Answer:
        """``RobotClient.ask`` as ``ask_on_loop``: on this host no thread has a part in it.

        Raises:
            TimeoutError: no chunk came in time.
            PeerLostError: rank 0 cannot receive samples now, or the session was lost.
            SpecError: the samples are not what was declared.
            PpstreamError: ``connect`` was not called.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        return await ask_on_loop(self.client, samples, timeout_s, stamp_ns)

    async def chunks(self) -> AsyncIterator[ActionChunk]:
        """Every chunk as it is merged; of several that arrived meanwhile only the newest.

        Ends when the client is closed.

        Raises:
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        loop = asyncio.get_running_loop()
        while True:
            look = loop.call_later(SLICE_S, self._arrival.set)  # wait_for may lose a cancellation
            try:
                await self._arrival.wait()
            finally:
                look.cancel()
            self._arrival.clear()
            chunk, self._newest = self._newest, None
            if chunk is not None:
                yield chunk
            elif (why := self.client.failure) is not None:
                raise ReceiverEndedError(why)
            elif self.client.timeline.is_closed:
                return

    async def close(self) -> None:
        """Say goodbye and release the socket. Twice is fine."""
        try:
            await asyncio.to_thread(self.client.close)
        except asyncio.CancelledError:
            self.client.close()  # the thread may not have begun: nothing else would do it
            raise
        finally:
            self._arrival.set()

    async def __aenter__(self) -> AsyncRobotClient:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _arrived(self, chunk: ActionChunk) -> None:
        """The receiving thread: hand over to the event loop, unless that has ended."""
        if self._then is not None:
            self._then(chunk)
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed: the timeline stays in use
                self._loop.call_soon_threadsafe(self._offer, chunk)

    def _offer(self, chunk: ActionChunk) -> None:
        self.overtaken += self._newest is not None
        self._newest = chunk
        self._arrival.set()


async def ask_on_loop(
    client: RobotClient,
    samples: Mapping[str, Any],
    timeout_s: float,
    stamp_ns: int | None = None,
    in_thread: Callable[..., Awaitable[Answer]] = asyncio.to_thread,
) -> Answer:
    """``RobotClient.ask``, awaited: sends and reads on the event loop's own thread.

    ``in_thread`` calls ``ask`` where that cannot be: while another asks, or when the server is on
    another host. A cancelled call continues there until its timeout. Errors as ``ask`` raises them.
    """
    until_ns = now_ns() + limit_ns(timeout_s)
    asking = client.begin_asking(samples, stamp_ns)
    if asking is None:
        return await in_thread(client.ask, samples, timeout_s, stamp_ns)
    try:
        is_sent = asking.link.open_visit(asking.send)
        if is_sent:
            try:
                await _wait(asking, until_ns)
            finally:
                asking.link.close_visit()
    finally:
        client.end_asking(asking)
    if is_sent is None:
        return await in_thread(client.ask, samples, timeout_s, stamp_ns)
    return asking.result(timeout_s, is_sent=is_sent)


async def _wait(asking: Asking, until_ns: int) -> None:
    """Do the work of the client's link whenever something arrives or falls due."""
    loop, link = asyncio.get_running_loop(), asking.link
    over: asyncio.Future[None] = loop.create_future()
    timer: asyncio.TimerHandle | None = None

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def read() -> None:
        if link.guest_read(asking.is_over):
            end()

    def turn() -> None:
        nonlocal timer
        left_ns, rest_ns = until_ns - now_ns(), link.guest_turn()
        if left_ns <= 0 or rest_ns is None or asking.is_over():
            end()
        else:
            timer = loop.call_later(min(left_ns, rest_ns) / NS_PER_S, turn)

    fd = os.dup(link.arrivals_fd)  # the loop's own: who closes the client closes that one
    try:
        loop.add_reader(fd, read)
        turn()
        await over
    finally:
        loop.remove_reader(fd)
        os.close(fd)
        if timer is not None:
            timer.cancel()
