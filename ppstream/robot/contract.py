"""The contract of a run, asked for before a session: streams, actions, horizon and times.

A connection of its own, closed behind the answer. It declares nothing, and no row is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S, limit_ns, now_ns
from ppstream.core.errors import HandshakeError, PeerLostError
from ppstream.core.waiter import Waiter
from ppstream.robot.outbox import Outbox, Stream
from ppstream.robot.told_wait import LOOK_NS, Say, Told
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
    to_robot,
)
from ppstream.wire.transports import connect_client

RETRY_NS: Final = (50 * NS_PER_MS, NS_PER_S)  # between two questions: at first, and at most
NOBODY: Final = 0  # no session has this number: whoever pings with it is told that it is lost
UNKNOWN_AFTER: Final = 3  # pings answered behind questions that were not: the server is too old
STATE_THEM: Final = "upgrade ppstream there, or state streams and actions"


class Declarations:
    """Streams and actions of one robot: as it states them, else as the server describes them.

    Args:
        streams: ``RobotClient``'s; None: for the server to say, as ``actions``.
        batch_ns: the outbox's.

    Attributes:
        outbox: of the streams, and ``actions`` the names; empty where they are not known yet.
        is_known: nothing is left for the server to say.
        run: the server's description; None: it was not asked.

    Raises:
        SpecError: as ``Outbox``.
    """

    def __init__(
        self, streams: Sequence[Stream] | None, actions: Sequence[str] | None, batch_ns: int
    ) -> None:
        self._stated = streams, actions
        self._batch_ns = batch_ns
        self.outbox = Outbox(streams or (), batch_ns)
        self.actions = tuple(actions or ())
        self.is_known = streams is not None and actions is not None
        self.run: Described | None = None

    def complete(self, endpoint: str, run: Described) -> None:
        """Take from ``run`` what was not stated.

        Raises:
            HandshakeError: it differs from what was, with a line for each difference.
        """
        streams, actions = self._stated
        outbox = Outbox(streams_of(run) if streams is None else streams, self._batch_ns)
        names = run.actions if actions is None else tuple(actions)
        if lines := differences(run, outbox.declarations, names):
            raise HandshakeError("\n  ".join([f"{endpoint}: another contract", *lines]))
        self.outbox, self.actions, self.run, self.is_known = outbox, names, run, True


def streams_of(run: Described) -> tuple[Stream, ...]:
    """Returns the streams of a contract as ``RobotClient`` takes them; cameras send raw frames."""
    return tuple((stream.name, stream.shape, stream.dtype) for stream in run.streams)


def ask_contract(
    endpoint: str,
    keys: ClientKeys | None,
    timeout_s: float,
    *,
    say: Say | None = None,
    look: Callable[[], None] = lambda: None,
) -> Described:
    """Returns the contract of the run at ``endpoint``, whatever its phase.

    ``say`` as in ``Told``; ``look`` is called every ``LOOK_NS``, and what it raises ends the wait.

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
    told = Told(say, endpoint)
    try:
        while (now := now_ns()) < until_ns:
            look()
            question.send_due(now)
            if (contract := question.answer()) is not None:
                return contract
            told.tell(f"{question.lacks}, its ranks may still start", now)
            waiter.wait(min(until_ns - now, question.due_ns - now, LOOK_NS))
    finally:
        waiter.close()
        socket.close()
    raise PeerLostError(
        f"{endpoint}: no contract: {question.lacks} within {timeout_s:g} s; start the run, and let "
        "it admit this robot's user or key; for ranks that load for longer allow more, as "
        "connect(600) does, or state streams and actions"
    )


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
