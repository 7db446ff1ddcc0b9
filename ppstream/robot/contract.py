"""The contract of a run, asked for before a session: streams, actions, horizon and times.

A connection of its own, closed behind the answer. It declares nothing, and no row is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S, limit_ns, now_ns
from ppstream.core.errors import HandshakeError, PeerLostError
from ppstream.core.waiter import Waiter
from ppstream.robot.outbox import Stream
from ppstream.wire.contract import differences
from ppstream.wire.fields import DECODE_ERRORS, WIRE_MAJOR, WIRE_MINOR, encoder
from ppstream.wire.keys import ClientKeys
from ppstream.wire.message_socket import MessageSocket
from ppstream.wire.robot_messages import (
    Describe,
    Described,
    Lost,
    Ping,
    Refused,
    StreamDeclaration,
    to_robot,
)
from ppstream.wire.transports import connect_client

RETRY_NS: Final = (50 * NS_PER_MS, NS_PER_S)  # between two questions: at first, and at most
NOBODY: Final = 0  # no session has this number: whoever pings with it is told that it is lost
UNKNOWN_AFTER: Final = 3  # pings answered behind questions that were not: the server is too old
STATE_THEM: Final = "upgrade ppstream there, or state streams and actions"


def ask_contract(endpoint: str, keys: ClientKeys | None, timeout_s: float) -> Described:
    """Returns the contract of the run at ``endpoint``, whatever its phase.

    Raises:
        ConfigError: the endpoint is malformed, or on another host and there are no keys.
        HandshakeError: the server does not serve this version of the wire, or knows no Describe.
        PeerLostError: no answer in time.
    """
    socket = connect_client(endpoint, keys)
    waiter = Waiter()
    waiter.register(socket.fd)
    socket.wake = waiter.wake
    question = _Question(endpoint, socket)
    until_ns = now_ns() + limit_ns(timeout_s)
    try:
        while (now := now_ns()) < until_ns:
            question.send_due(now)
            if (contract := question.answer()) is not None:
                return contract
            waiter.wait(min(until_ns, question.due_ns) - now_ns())
    finally:
        waiter.close()
        socket.close()
    raise PeerLostError(
        f"{endpoint}: no contract: {question.lacks} within {timeout_s:g} s; start the run, and let "
        "it admit this robot's user or key; for ranks that load for longer pass contract_s=600, as "
        "connect()'s limit counts from later on, or state streams and actions"
    )


def check_contract(
    endpoint: str, run: Described, streams: Sequence[StreamDeclaration], actions: Sequence[str]
) -> None:
    """Raises HandshakeError with a line for each difference from what the robot declares."""
    if lines := differences(run, streams, actions):
        raise HandshakeError("\n  ".join([f"{endpoint}: another contract", *lines]))


def streams_of(run: Described) -> tuple[Stream, ...]:
    """Returns the streams of a contract as ``RobotClient`` takes them; cameras send raw frames."""
    return tuple((stream.name, stream.shape, stream.dtype) for stream in run.streams)


class _Question:
    """Describe, asked until it is answered.

    A server that does not know it says nothing at all. So from the second time on a ping of no
    session follows, which every version answers, and in order.
    """

    def __init__(self, endpoint: str, socket: MessageSocket) -> None:
        self.due_ns = 0
        self.lacks = "no connection"
        self._endpoint = endpoint
        self._socket = socket
        self._retry_ns = RETRY_NS[0]
        self._is_asked = False
        self._pings_answered = 0

    def send_due(self, now_ns: int) -> None:
        if now_ns < self.due_ns:
            return
        self.due_ns = now_ns + self._retry_ns
        if not self._socket.send(encoder.encode(Describe(WIRE_MAJOR, WIRE_MINOR))):
            return
        if self._is_asked:
            self._socket.send(encoder.encode(Ping(NOBODY)))
            self._retry_ns = min(2 * self._retry_ns, RETRY_NS[1])
        self._is_asked = True
        self.lacks = "no answer"

    def answer(self) -> Described | None:
        """Returns the contract once it is there. Raises HandshakeError: it will never be."""
        for frame in self._socket.drain():
            try:
                message = to_robot.decode(frame.body)
            except DECODE_ERRORS:
                continue
            if isinstance(message, Described):
                return message
            if isinstance(message, Refused):
                lines = [f"{self._endpoint}: no contract: {message.reason}", *message.details]
                raise HandshakeError("\n  ".join(lines))
            self._pings_answered += isinstance(message, Lost)
        if self._pings_answered >= UNKNOWN_AFTER:
            raise HandshakeError(f"{self._endpoint}: rank 0 knows no Describe; {STATE_THEM}")
        return None
