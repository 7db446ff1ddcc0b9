"""RobotLink: the robot's socket, the session on it, and the thread that keeps both alive.

It speaks the session part of the wire by itself and hands on only action chunks. It holds no
samples, no actions and no opinion about motion.
"""

from __future__ import annotations

import logging
import select
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S, Clock, UnitCheck, now_ns
from ppstream.core.errors import ConfigError, PeerLostError, PpstreamError, ReceiverEndedError
from ppstream.core.phases import ENDING
from ppstream.core.waiter import Waiter
from ppstream.robot.rehearsal import AnswerWait
from ppstream.robot.session import RETRY_NS, RobotSession
from ppstream.wire.endpoints import unix_path
from ppstream.wire.fields import DECODE_ERRORS, encoder
from ppstream.wire.keys import ClientKeys
from ppstream.wire.message_socket import MAX_DRAIN, MessageSocket
from ppstream.wire.robot_messages import (
    PARTS_BYTES,
    ActionChunk,
    Bye,
    ClockQuestion,
    ClockReading,
    Described,
    FromRobot,
    Samples,
    in_parts,
    to_robot,
)
from ppstream.wire.transports import connect_client

if TYPE_CHECKING:
    from ppstream.robot.fleet_directory import FleetDirectory, FleetPlace

logger = logging.getLogger("ppstream")

SLICE_NS: Final = 50 * NS_PER_MS  # of a guest's wait: so late it sees that the link is closed
TURN_LATE_NS: Final = 250 * NS_PER_MS  # so late a guest sends what the thread did not come to
GIVE_UP_NS: Final = 500 * NS_PER_MS  # without a session at one server of a fleet: ask for another
VISIT_S: Final = 0.002  # for what the link's thread is reading; an event loop may wait so long
JOIN_S: Final = 2.0  # the thread waits for nothing that wake() does not end
CLOSED: Final = "this client was closed; make another"


class RobotLink:
    """Connects at once and goes on trying until it is closed.

    An exception that ends its thread, from a callback or of its own, is logged once; ``failure``
    is its text from then on, the session ends, and each call that sends or waits raises it.

    Args:
        endpoint: where rank 0 listens.
        session: this robot's session; ``changed`` guards it from now on.
        on_chunk: called by the link's thread with every chunk, whosoever it is.
        on_turn: called by the link's thread once per turn with the time; sends what is due and
            returns when it wants the next turn, or None.
        on_failure: called by the link's thread with ``failure``, before the goodbye.
        keys: of this robot; needed where the endpoint is not on this host.
        clock: that stamps samples; shown to the server when it asks, for traces.

    Raises:
        ConfigError: the endpoint is malformed, or on another host and there are no keys.
    """

    def __init__(
        self,
        endpoint: str,
        session: RobotSession,
        on_chunk: Callable[[ActionChunk], None],
        on_turn: Callable[[int], int | None],
        on_failure: Callable[[str], None],
        *,
        keys: ClientKeys | None = None,
        clock: Clock = now_ns,
    ) -> None:
        self.session = session
        self.lock = threading.RLock()  # of ``changed``, for who neither waits nor notifies
        self.changed = threading.Condition(self.lock)
        self.undecodable = 0
        self._endpoint = endpoint
        self._on_chunk = on_chunk
        self._on_turn = on_turn
        self._on_failure = on_failure
        self.failure: str | None = None
        self._cause: BaseException | None = None
        self.is_closing = False
        self._clock = clock
        self._unit = UnitCheck(clock) if session.real_time else None
        self.directory: FleetDirectory | None = None  # of a fleet: names another server
        self._trying_ns: int | None = None  # since when a session is asked for at this endpoint
        self._gate = select.epoll()  # shut while a guest reads: what comes wakes nobody else
        self._arrivals = Waiter()  # the guest's
        self.answers = AnswerWait()
        self._waiter = Waiter()
        self._waiter.register(self._gate.fileno())
        self.wake = self._waiter.wake
        self._socket = self._connected(endpoint, keys)
        self._thread = threading.Thread(target=self._run, name="ppstream-robot", daemon=True)
        self._reading = threading.Lock()  # held by who does the link's work: its thread or a guest
        self._guest = 0  # the thread's number; 0: nobody
        self._turn_ns = 0  # when a guest looks at what is due
        self._turned_ns = 0  # when somebody last did
        self._visit = threading.Lock()  # held while there is a guest, or while the thread reads

    def start(self) -> None:
        """Start the thread; apart from the constructor, so that callbacks may use the link."""
        self._trying_ns = now_ns()
        self._thread.start()

    def send(self, message: FromRobot) -> bool:
        """Send from any thread without waiting; False: nobody can take it now."""
        if isinstance(message, Samples) and message.values.nbytes >= PARTS_BYTES:
            head, values = in_parts(message)
            return self._socket.send(head, tail=values)
        return self._socket.send(encoder.encode(message))

    @property
    def endpoint(self) -> str:
        """Address where a session is asked for, as this process's socket spells it."""
        return self._socket.endpoint

    @property
    def is_ended(self) -> bool:
        """There is no more work: the link is closing, or an exception ended it."""
        return self.is_closing or self.failure is not None

    def raise_failure(self) -> None:
        """Raises ReceiverEndedError when the link's thread has ended by an exception."""
        if self.failure is not None:
            raise ReceiverEndedError(self.failure) from self._cause

    def raise_end(self) -> None:
        """Raises as ``raise_failure``, or PpstreamError when the link was closed."""
        self.raise_failure()
        if self.is_closing:
            raise PpstreamError(CLOSED)

    def send_and_work(
        self, send: Callable[[], bool], is_over: Callable[[], bool], until_ns: int
    ) -> bool:
        """Call ``send``, then do the link's work on the caller's thread until ``is_over()``.

        What arrives from now on is read without a switch of threads. On this host the link's thread
        sleeps on; else it is asked to rest, once ``send`` has returned: while the answer is being
        made. For one thread at a time.

        Args:
            send: False when there is nothing to wait for.
            is_over: looked at after each message.
            until_ns: when to give up, by this host's clock.

        Returns:
            What ``send`` returned.

        Raises:
            TimeoutError: the link's thread was in a callback until then.
            ReceiverEndedError: an exception ended the work, here or on the link's thread.
        """
        _acquire(self._visit, until_ns)
        self._guest = threading.get_ident()
        try:
            is_sent = send()
            if is_sent and self._is_gated:
                self._put_off_turn()
                self._work_beside(is_over, until_ns)
            elif is_sent:
                self.wake()
                _acquire(self._reading, until_ns)
                try:
                    self._work_until(is_over, until_ns)
                finally:
                    self._reading.release()
        finally:
            self._end_visit()
        if self.failure is not None:
            self.raise_failure()
        return is_sent

    def open_visit(self, send: Callable[[], bool]) -> bool | None:
        """Call ``send``, for a guest that waits for what arrives by itself, as an event loop does.

        The guest calls ``guest_turn`` at once and when that falls due again, ``guest_read``
        whenever ``arrivals_fd`` is readable, and ``close_visit`` at the end, all from this thread.

        Returns:
            What ``send`` returned: the visit goes on when True. None: it was not called, since
            another reads now, or the server is on another host.
        """
        if not self._is_gated or not self._visit.acquire(timeout=VISIT_S):
            return None
        self._guest = threading.get_ident()
        is_open = False
        try:
            if is_sent := send():
                self._gate.modify(self._socket.fd, 0)
                self._put_off_turn()
                is_open = True
        finally:
            if not is_open:
                self._end_visit()
        return is_sent

    @property
    def arrivals_fd(self) -> int:
        """Descriptor that is readable when something has come; the link's own."""
        return self._socket.fd

    def guest_turn(self) -> int | None:
        """Send what is due; returns for how many ns the guest may wait, None: not any more.

        The answer comes first: what is due is looked at when the guest, or a turn, is long overdue.
        """
        if self.is_ended:
            return None
        now = now_ns()
        if now < self._turn_ns:
            return self._turn_ns - now
        try:
            return min(self._turn(now), SLICE_NS)
        except Exception as error:  # noqa: BLE001 - as on the link's thread
            self._fail(error)
            return None

    def _put_off_turn(self) -> None:
        """A guest begins to wait: the link's thread sends what is due between two answers."""
        now = now_ns()
        if now - self._turned_ns < TURN_LATE_NS:
            self._turn_ns = now + SLICE_NS

    def guest_read(self, is_over: Callable[[], bool]) -> bool:
        """Receive what has come; True: ``is_over()``, or there is nothing to wait for any more."""
        try:
            return self.is_ended or self._read(is_over)
        except Exception as error:  # noqa: BLE001 - as on the link's thread
            self._fail(error)
            return True

    def close_visit(self) -> None:
        """Let the link's thread read again. Raises ReceiverEndedError as ``send_and_work``."""
        try:
            if not self.is_closing:  # else a callback may have closed it
                self._gate.modify(self._socket.fd, select.EPOLLIN)
        finally:
            self._end_visit()
        if self.failure is not None:
            self.raise_failure()

    def refuse_callbacks(self) -> None:
        """Raises PpstreamError when the caller does the link's work: it is in a callback."""
        here = threading.get_ident()  # a number goes on to another thread when its own has ended
        if here == self._guest or (here == self._thread.ident and self._thread.is_alive()):
            raise PpstreamError(
                "a callback of the client cannot wait for what its own thread would receive"
            )

    def close(self) -> None:
        """End the thread, hand on what came and stands unread, say goodbye, release the socket.

        Twice is fine.
        """
        with self.changed:
            if self.is_closing:
                return
            self.is_closing = True
            self.changed.notify_all()
        self.wake()
        here = threading.get_ident()
        if here == self._guest:  # in its callback: nobody else works
            self._end_visit()
        elif self._guest and here != self._thread.ident and self._visit.acquire(timeout=JOIN_S):
            self._visit.release()  # the guest has left
        if self._thread.ident not in (here, None):  # None: there was no memory to start it
            self._thread.join(JOIN_S)
        if self.failure is None:
            for frame in self._socket.drain():
                self._receive(frame.body)
        self._leave()
        self._socket.close()
        self._waiter.close()
        self._arrivals.close()
        self._gate.close()

    def _run(self) -> None:
        try:
            while not self.is_ended:
                with self._reading:
                    while not (self.is_ended or self._guest):
                        if self.directory is not None:
                            self._ask(self.directory)
                        if not self.is_ended and self._wait():
                            self._read_unless_visited()
                if self._guest:
                    with self._visit:
                        pass
        except BaseException as error:  # noqa: BLE001 - the top of a thread: its users raise it
            self._fail(error)

    def _connected(self, endpoint: str, keys: ClientKeys | None) -> MessageSocket:
        """A socket that wakes this link's thread."""
        made = connect_client(endpoint, keys)
        made.wake = self.wake
        self._gate.register(made.fd, select.EPOLLIN)
        self._arrivals.register(made.fd)
        self._is_gated = unix_path(endpoint) is not None  # ZeroMQ tells not all by its descriptor
        return made

    def _ask(self, directory: FleetDirectory) -> None:
        """Without a session: ask where there is one, and again when this server does not help."""
        now = now_ns()
        with self.changed:
            session = self.session
            if session.session:
                self._trying_ns = None
            if session.session or now < session.due_ns:
                return
            patience_ns = GIVE_UP_NS if session.refused is None else 0
            if session.is_hopeless:
                if not session.opened:  # no server has served it: its program has to change
                    return
                patience_ns = RETRY_NS[1]
            since_ns = self._trying_ns
            if since_ns is not None and now - since_ns < patience_ns:
                return
            failed = since_ns is not None or session.phase in ENDING
        try:
            place = directory.find(failed=failed)
        except PeerLostError as error:
            logger.info("%s", error)  # the server of before may come back
            place = None
        if self._visit.acquire(blocking=False):  # a guest reads from the socket of now
            try:
                with self.changed:
                    if not self.is_ended:  # it was closed while the directory was asked
                        self._move(place)
            finally:
                self._visit.release()

    def _move(self, place: FleetPlace | None) -> None:
        """Go to another server; the session's next words are a Hello there."""
        self._trying_ns = now_ns()
        if place is not None and place.endpoint != self._endpoint:
            try:
                made = self._connected(place.endpoint, place.keys)
            except ConfigError as error:  # the next question says that it does not serve
                logger.warning("the directory names %s: %s", place.pipeline, error)
                return
            logger.info("%s at %s is asked for a session", place.pipeline, place.endpoint)
            old, self._socket, self._endpoint = self._socket, made, place.endpoint
            self._gate.unregister(old.fd)
            self._arrivals.unregister(old.fd)
            old.close()
            self.session.moved(self._trying_ns)

    def _end_visit(self) -> None:
        """The guest's thread: the link's own goes on."""
        if self._guest:  # else it has closed the link meanwhile
            self._guest = 0
            self._visit.release()

    def _read_unless_visited(self) -> None:
        if self._visit.acquire(blocking=False):  # else what came is the guest's
            try:
                self._read(lambda: self.is_closing)
            finally:
                self._visit.release()

    def _work_beside(self, is_over: Callable[[], bool], until_ns: int) -> None:
        """Read while the link's thread sleeps; what is due leaves here, or when it wakes."""
        self._gate.modify(self._socket.fd, 0)
        self.answers.begin(now_ns())
        try:
            while (left_ns := until_ns - now_ns()) > 0:
                if (rest_ns := self.guest_turn()) is None:
                    break
                self.answers.wait(self._arrivals, min(left_ns, rest_ns))
                if self.guest_read(is_over):
                    self.answers.end(now_ns())
                    break
        finally:
            if not self.is_closing:  # else a callback may have closed it
                self._gate.modify(self._socket.fd, select.EPOLLIN)

    def _work_until(self, is_over: Callable[[], bool], until_ns: int) -> None:
        try:
            # It reads before it waits, too: the link's thread may have been told of what came.
            while not (is_over() or self.is_ended or self._read(is_over)):
                left_ns = until_ns - now_ns()
                if left_ns <= 0:
                    break
                self._wait(left_ns)
        except Exception as error:  # noqa: BLE001 - as on the link's thread
            self._fail(error)

    def _wait(self, limit_ns: int | None = None) -> bool:
        """Send what is due, and wait, for at most ``limit_ns``; False: nothing has come."""
        rest_ns = self._turn(now_ns())
        ready = self._waiter.wait(rest_ns if limit_ns is None else min(limit_ns, rest_ns))
        return bool(ready) or self._waiter.woken or not self._is_gated

    def _read(self, is_over: Callable[[], bool]) -> bool:
        """Receive what has come, each message before looking for the next; True: it is over."""
        for _ in range(MAX_DRAIN):
            for frame in self._socket.drain(limit=1):
                self._receive(frame.body)
            if is_over():
                return True
            if not self._socket.has_more:
                break
        return False

    def _fail(self, error: BaseException) -> None:
        """The work ends, on whatever thread: nobody may go on as if chunks could come."""
        *_, what = traceback.format_exception_only(error)
        trace = "".join(traceback.format_exception(error))
        text = (
            f"the receiving thread ended: {what.strip()}; close this client and make another\n"
            f"{trace.rstrip()}"
        ).encode("utf-8", "backslashreplace")  # a text may hold what no file takes
        self._cause = error
        with self.changed:
            self.failure = text.decode()
            self.changed.notify_all()
        with suppress(Exception):  # it may be the socket that failed
            self._on_failure(self.failure)
        with suppress(Exception):
            self._leave()
        self.wake()  # the link's own thread ends, too, where a guest's callback raised
        logger.error("%s", self.failure)

    def _leave(self) -> None:
        with self.changed:
            if self.session.session:
                self.send(Bye(self.session.session))
                self.session.session = 0

    def _turn(self, now: int) -> int:
        """Send what is due; returns for how long there is nothing to do."""
        self._turned_ns, self._turn_ns = now, now + SLICE_NS
        with self.changed:
            self._send_due(now)
            due_ns = self.session.due_ns
        if self._unit is not None:
            if self._unit.is_over(now):
                self._unit = None
            else:
                due_ns = min(due_ns, self._unit.due_ns)
        other_ns = self._on_turn(now)
        if other_ns is not None:
            due_ns = min(due_ns, other_ns)
        return max(0, due_ns - now_ns())

    def _send_due(self, now: int) -> None:
        """With ``changed`` held: what the session must say now; one that failed asks for none."""
        message = None if self.failure else self.session.due(now)
        if message is not None:
            self.session.was_sent(now, sent=self.send(message))

    def _receive(self, body: bytes | memoryview) -> None:
        try:
            message = to_robot.decode(body)
        except DECODE_ERRORS:
            self.undecodable += 1
            return
        if isinstance(message, ActionChunk):
            self._on_chunk(message)
            return
        if isinstance(message, ClockQuestion):
            self.send(ClockReading(message.session, message.asked_ns, self._clock()))
            return
        if isinstance(message, Described):  # nobody asked here
            return
        with self.changed:
            now = now_ns()
            if self.session.on_answer(message, now):
                self._send_due(now)  # the instruction: before samples follow
            if self.directory is not None and self.session.phase in ENDING:
                self.session.on_lost(now_ns())  # another pipeline may serve at once
            self.changed.notify_all()


def _acquire(lock: threading.Lock, until_ns: int) -> None:
    """Take what the link's thread holds while it reads, for ``until_ns`` at most.

    Raises:
        TimeoutError: it did not let go of it.
    """
    left_s = max(0, until_ns - now_ns()) / NS_PER_S
    if not lock.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
        raise TimeoutError("a callback of this client keeps its receiving thread; return sooner")
