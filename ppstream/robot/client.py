"""RobotClient: the robot's end of a session. Samples out, action chunks in, no torch.

The client decides nothing about motion: ``timeline`` holds the actions, ``control_loop.py``
executes them. Sending never waits; samples that cannot be sent now are counted and dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S, Clock, limit_ns, now_ns
from ppstream.core.errors import PpstreamError
from ppstream.core.forks import forks
from ppstream.robot.answer import Answer, Asking
from ppstream.robot.connection import CLOSED, RobotLink
from ppstream.robot.contract import Declarations, ask_contract
from ppstream.robot.feedback import Feedback
from ppstream.robot.outbox import Batch, Stream, Values
from ppstream.robot.rehearsal import AskRehearsal
from ppstream.robot.session import RobotSession
from ppstream.robot.statistics import ClientCounts, ClientStatistics
from ppstream.robot.timeline import ActionTimeline
from ppstream.robot.told_wait import Say, wait_conditioned, wait_executable, wait_open
from ppstream.wire.keys import ClientKeys
from ppstream.wire.robot_messages import ActionChunk, Conditioned, Described, ResetRequest, Samples

if TYPE_CHECKING:
    from ppstream.robot.fleet_directory import FleetDirectory

CONTRACT_S: Final = 10.0  # who asks before ``connect`` waits so long


class RobotClient:
    """One robot: declares its streams and actions, pushes samples, receives action chunks.

    All methods may be called from any thread; a closed client cannot be used again, nor one of the
    parent in a process that was forked. An exception on the receiving thread, such as one of
    ``on_chunk``, ends the thread: it is logged, ``failure`` has its traceback, and each call that
    needs the thread raises, also ``timeline.action_at``.

    Args:
        endpoint: where rank 0 listens, ``unix://PATH`` on this host, or ``tcp://HOST:PORT``.
        robot: a name for people and logs, of one robot at a time.
        streams: ``(name, dim)`` or ``(name, dim, dtype)``, every stream of the configuration; of a
            camera ``(name, (height, width, 3), "uint8")``: ``push`` takes its frames. None: as the
            server describes them, in any phase; ``connect`` asks it, within its limit.
        actions: action names in the order of a chunk's columns; None: as the server describes them.
        contract_s: ask in the constructor, for so long, and raise as ``contract``; None: later.
        batch_ms: gather samples this long before they are sent; 0: the caller sends each at once.
        blend_ms: how long a newer chunk takes to replace the one before; 0: at once.
        max_age_ms: execute no action later than this after its window's end, though its lease may
            run longer; the server may set less. None: the server's maximum.
        on_chunk: called by the receiving thread, or in ``ask``, with each chunk merged; be quick.
        clock: the clock that stamps the samples; leases and ages are judged by it alone.
        real_time: False when a recording is replayed at another speed than its own.
        keys: ``keys.client_keys(secret_file, server_file)``; a server of another host wants them.

    Raises:
        SpecError: streams or names cannot be declared so, or ``max_age_ms`` is not above 0.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        robot: str = "robot",
        streams: Sequence[Stream] | None = None,
        actions: Sequence[str] | None = None,
        contract_s: float | None = None,
        batch_ms: float = 0.0,
        blend_ms: float = 0.0,
        max_age_ms: float | None = None,
        on_chunk: Callable[[ActionChunk], None] | None = None,
        clock: Clock = now_ns,
        real_time: bool = True,
        keys: ClientKeys | None = None,
    ) -> None:
        self._declared = Declarations(streams, actions, round(batch_ms * NS_PER_MS))
        self._outbox, names = self._declared.outbox, self._declared.actions
        self.timeline = ActionTimeline(len(names), blend_ms=blend_ms, max_age_ms=max_age_ms)
        self.clock = clock
        self.timeline.is_ready = lambda: self._session.executable
        self.timeline.on_trouble = self._hurry
        self._feedback = Feedback(self.timeline, clock)
        self._endpoint = endpoint
        self._keys = keys
        self._directory: FleetDirectory | None = None
        self._session = RobotSession(
            robot,
            self._outbox.declarations,
            names,
            real_time=real_time,
            on_open=self._feedback.adopt,
        )
        self.on_chunk = on_chunk
        self._link: RobotLink | None = None
        self._linking = threading.Lock()  # held while the link is made or given up
        self._forks = forks.count
        self._asking = threading.Lock()
        self._asked: Asking | None = None
        self.counts_answers = True  # as executed; False: who asks says so, by ``executed``
        self._rehearsal = AskRehearsal(self._session, self.timeline)
        self._counts = ClientCounts()
        if contract_s is not None:
            self._learn(contract_s)

    @classmethod
    def from_fleet(
        cls, directory: FleetDirectory, *, find_s: float = 10.0, **options: Any
    ) -> RobotClient:
        """A robot of whichever pipeline ``directory`` names; ``options`` as the constructor's.

        It asks again whenever its session is lost, and holds meanwhile as its lease says. Raises
        PeerLostError, too: no pipeline was named within ``find_s``.
        """
        place = directory.wait(find_s)
        options = {"contract_s": CONTRACT_S, **options}  # what is named serves
        client = cls(place.endpoint, robot=directory.robot, keys=place.keys, **options)
        client._directory = directory
        return client

    def connect(self, timeout_s: float = 10.0, *, say: Say | None = None) -> None:
        """Open a session. From then on the client reconnects by itself, as a new session.

        After an error the client retries in the background until it is closed, once it has what it
        did not state; call again to wait for the session. Ranks that load a policy for minutes
        answer nobody until then: allow as long, and have ``say``, such as ``print``, told after 2 s
        what is waited for.

        Raises:
            HandshakeError: the server refuses this robot for good; the message is the difference.
            PeerLostError: no session in time; the message has the last refusal.
            ConfigError: the endpoint is malformed.
            PpstreamError: the client was closed.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        if not self._declared.is_known:
            began_ns = now_ns()
            self._learn(timeout_s, say)
            timeout_s -= round((now_ns() - began_ns) / NS_PER_S, 3)
        with self._linking:
            self._refuse_closed()
            if self._link is None:
                callbacks = (self._merge, self._turn, self._fail)
                self._link = RobotLink(
                    self._endpoint, self._session, *callbacks, keys=self._keys, clock=self.clock
                )
                self._link.directory, self._forks = self._directory, forks.count
                self._link.answers.get_ready = self._rehearsal.run
                self._link.start()
        wait_open(self._connected_link(), timeout_s, say)

    @property
    def contract(self) -> Described | None:
        """Answer of the server to what was not stated; None: all was, and ``connect`` compares it.

        Before ``connect`` the server is asked here, for 10 s at most; errors as ``connect``.
        """
        self._learn(CONTRACT_S)
        return self._declared.run

    @property
    def session(self) -> int:
        """Identity of the session that is open, as far as this side knows; 0: none."""
        return self._session.session

    @property
    def connected(self) -> bool:
        """True when a session is open, as far as this side knows."""
        return self.session != 0

    @property
    def failure(self) -> str | None:
        """Error that ended the receiving thread, with its traceback; None: the thread runs."""
        return self.timeline.failure

    @property
    def phase(self) -> str:
        """The run's phase as last heard; ``connecting`` before the first session."""
        return self._session.phase

    @property
    def ready(self) -> bool:
        """True when the phase permits to execute actions; the lease of each must permit it, too.

        False for good once the receiving thread has ended or the client was closed.
        """
        return self._session.executable and not (self.timeline.is_closed or self.failure)

    def wait_ready(self, timeout_s: float | None = None, *, say: Say | None = None) -> bool:
        """Wait until the phase permits actions; False: not in time. ``say`` as ``connect``.

        Raises:
            PeerLostError: the run ended.
            PpstreamError: ``connect`` was not called, or the client was closed.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        return wait_executable(self._connected_link(), timeout_s, say)

    def push(self, stream: str, stamp_ns: int | Values, values: Any) -> bool:
        """Send one sample ``[dim]``, or several ``[n, dim]`` with stamps ``[n]``; never waits.

        Values are copied; several have 1 MiB at most, each with 8 bytes of stamp. False: rank 0
        cannot receive now; the due samples were counted unsent.

        Raises:
            SpecError: the samples are not what was declared for ``stream``.
            PpstreamError: ``connect`` was not called.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        link = self._living_link()
        now = now_ns()
        with self._outbox.lock:
            begins = self._outbox.due_ns is None
            batches = self._outbox.add(stream, stamp_ns, values, now)
            if batches:
                return self._send_batches(link, batches, now)
        if begins:
            link.wake()  # its thread sends this batch if no push follows in time
        return self.connected

    def push_jpeg(self, stream: str, stamp_ns: int, jpeg: bytes) -> bool:
        """Send one frame of a camera that was declared ``(name, dim, "uint8", "jpeg")``.

        Never waits; False and errors as ``push``.
        """
        link = self._living_link()
        return self._send_batches(link, [self._outbox.encoded(stream, stamp_ns, jpeg)], now_ns())

    def ask(
        self, samples: Mapping[str, Any], timeout_s: float, stamp_ns: int | None = None
    ) -> Answer:
        """Send a sample of each stream, and wait for the chunk of a window that ends there.

        The caller's thread reads the chunk itself. All that arrive meanwhile, this one too, go to
        the timeline and ``on_chunk``. It counts as executed when it comes, also where all its steps
        are past, unless the timeline gives actions out, to a ``ControlLoop`` for one.

        Args:
            samples: values ``[dim]`` by stream, sent in this order: the one that ends windows last.
            timeout_s: how long the chunk may take; ``math.inf``: without limit, as in all waits.
            stamp_ns: of all samples; None: now.

        Raises:
            TimeoutError: no such chunk came in time, or another ``ask`` or a callback took it.
            PeerLostError: rank 0 cannot receive samples now, or the session was lost.
            RateError: it takes no more of them in this second, as with several robots it may be.
            SpecError: as ``push``.
            PpstreamError: ``connect`` was not called, or this is a callback of the client.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        until_ns = now_ns() + limit_ns(timeout_s)
        self._living_link().refuse_callbacks()
        asking = self.begin_asking(samples, stamp_ns, wait_s=timeout_s)
        if asking is None:
            raise TimeoutError(f"another ask() of this client waits for {timeout_s:g} s, ask later")
        is_sent = False
        try:
            is_sent = asking.link.send_and_work(asking.send, asking.is_over, until_ns)
        finally:
            self.end_asking(asking)
        return asking.result(timeout_s, is_sent=is_sent)

    def begin_asking(
        self, samples: Mapping[str, Any], stamp_ns: int | None = None, *, wait_s: float = 0
    ) -> Asking | None:
        """Begin an ``ask`` for others to await; None: another's still is. Errors as ``push``."""
        link = self._living_link()
        if not self._asking.acquire(timeout=min(max(0.0, wait_s), threading.TIMEOUT_MAX)):
            return None
        try:
            stamp = self.clock() if stamp_ns is None else stamp_ns
        except BaseException:
            self._asking.release()
            raise

        def send() -> bool:
            if self._feedback.tells_prefix:  # who asks again at once: the policy is to know
                self._feedback.send_merged(link.send, self._session)
            now, outbox = now_ns(), self._outbox
            self._session.rates.note(samples, now)
            with outbox.lock:
                batches = [b for key, v in samples.items() for b in outbox.add(key, stamp, v, now)]
                if outbox.due_ns is not None:
                    batches += outbox.pop_due(now, everything=True)
                self._rehearsal.asked(now)
                return self._send_batches(link, batches, now)

        self._asked = asking = Asking(self._endpoint, link, stamp, send)
        return asking

    def end_asking(self, asking: Asking) -> None:
        """Ends what ``begin_asking`` began."""
        self._asked = None
        self._asking.release()
        if self._feedback.tells_prefix:
            asking.link.wake()  # others may push the next window's samples

    def instruct(self, text: str) -> int:
        """Ask the policy to follow ``text`` from now on, through reconnects; empty: nothing.

        Returns the epoch; ``conditioned`` names it once the policy follows, or why not.

        Raises:
            SpecError: the text is too long for the wire or not UTF-8.
            PpstreamError: ``connect`` was not called.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        link = self._living_link()
        with link.changed:
            message = self._session.instruct(text)
            if self.connected and not link.send(message):
                self._session.on_lost(now_ns())  # the next session's Hello will say it
        link.wake()
        return message.conditioning_epoch

    @property
    def conditioned(self) -> Conditioned | None:
        """The server's newest answer to an instruction."""
        return self._session.conditioned

    def wait_conditioned(self, epoch: int, timeout_s: float) -> Conditioned | None:
        """Wait for the answer to the instruction ``epoch``, or a newer; None: late, or closed.

        Raises:
            PpstreamError: ``connect`` was not called.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        return wait_conditioned(self._living_link(), epoch, timeout_s)

    def executed(self, chunk: ActionChunk, at_ns: int) -> bool:
        """Tell that the first action of ``chunk`` was executed at ``at_ns``, the robot's clock.

        For those who play chunks from ``on_chunk`` themselves; ``timeline.action_at`` counts by
        itself. False when a newer chunk has replaced it.
        """
        return self.timeline.mark_executed(chunk, at_ns)

    def reset(self) -> None:
        """Begin a new episode: what is owed to the old one is dropped, here and on rank 0.

        Raises:
            PpstreamError: ``connect`` was not called.
            ReceiverEndedError: the receiving thread ended by an exception.
        """
        link = self._living_link()
        with self._outbox.lock, link.changed:
            self._send_gathered(link, now_ns(), everything=True)
            self.timeline.clear()
            self._session.session_epoch += 1
            if self.connected and not link.send(ResetRequest(self._session.session)):
                self._session.on_lost(now_ns())  # not heard: only a new session is safe
        link.wake()

    def statistics(self) -> ClientStatistics:
        self._feedback.collect()
        return self._counts.statistics(
            self._session,
            self.timeline.statistics(),
            self._feedback.quantiles(),
            failure=self.failure,
            undecodable=self._link.undecodable if self._link else 0,
        )

    def close(self) -> None:
        """Send what is gathered, say goodbye, release the socket. Twice is fine.

        A chunk that comes too late to be executed, or was not read yet, is counted as ``closed``
        and reported. A ``ControlLoop`` latches the fault ``client`` and brings the robot to rest.
        A process that was forked closes nothing: the session is its parent's.
        """
        if forks.count != self._forks:
            return
        with self._linking:
            link = self._link
            if link is None:
                self.timeline.close()
                return
        self._send_gathered(link, now_ns(), everything=True)
        with link.changed:
            self.timeline.close()  # so that the last chunks are reported, too
        self._feedback.collect()
        self._feedback.send_reports(link.send)
        self._send_state(link, now_ns(), is_last=True)
        link.close()

    def __enter__(self) -> RobotClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _learn(self, limit_s: float, say: Say | None = None) -> None:
        """Ask the server for what was not stated, if anything."""
        if self._declared.is_known:
            return
        run = ask_contract(self._endpoint, self._keys, limit_s, say=say, look=self._refuse_closed)
        with self._linking:
            if not self._declared.is_known:  # else another thread asked, too
                self._declared.complete(self._endpoint, run)
                self._outbox = self._declared.outbox
                self._session.declare(self._outbox.declarations, self._declared.actions)
                self.timeline.dim = len(self._declared.actions)

    def _refuse_closed(self) -> None:
        if self.timeline.is_closed:
            raise PpstreamError(CLOSED)

    def _connected_link(self) -> RobotLink:
        if forks.count != self._forks:  # else it would speak for the parent, and read its answers
            raise PpstreamError("this client is of the process that forked this one; make another")
        if self._link is None:
            raise PpstreamError("this client has no connection yet; call connect() first")
        return self._link

    def _living_link(self) -> RobotLink:
        link = self._connected_link()
        link.raise_failure()
        return link

    def _merge(self, chunk: ActionChunk) -> None:
        """The link's thread: a chunk arrived. Counts and notifications wait for ``_turn``."""
        link, asked = self._connected_link(), self._asked
        asked = asked if asked is not None and asked.awaits(chunk) else None
        is_awaited = asked is not None and self.counts_answers
        with link.lock:  # a reset comes wholly before or wholly after
            reason = self._session.reject(chunk) or ("closed" if self.timeline.is_closed else None)
            if reason is None:
                now, actions = self.clock(), self.timeline.actions_of(chunk)
                refusal = self.timeline.merge(chunk, now, actions, is_awaited=is_awaited)
        if reason is not None:
            self._drop(link, chunk, reason)
            return
        if asked is not None:
            asked.answer = Answer(chunk, actions, refusal)
        if refusal is None:
            self._rehearsal.newest = chunk
            self._feedback.merged(chunk, now_ns())
            if self.on_chunk is not None:
                self.on_chunk(chunk)

    def _drop(self, link: RobotLink, chunk: ActionChunk, reason: str) -> None:
        self._counts.add_dropped(reason)
        if reason == "closed":
            self._feedback.unread(chunk)
            self._feedback.send_reports(link.send)

    def _turn(self, now: int) -> int | None:
        """The link's thread: send what is due, and say when the next batch is.

        Reports leave here, some together and just after a chunk came: they delay no samples.
        """
        link, feedback = self._connected_link(), self._feedback
        feedback.send_merged(link.send, self._session)
        feedback.collect()
        reports_due_ns = feedback.send_due_reports(link.send, now)
        if not self._session.executable:
            feedback.await_ready(now)
        state_due_ns = self._send_state(link, now)
        self._send_gathered(link, now)
        ask_due_ns = self._rehearsal.turn(now)
        dues = (self._outbox.due_ns, state_due_ns, reports_due_ns, ask_due_ns)
        return min((due for due in dues if due is not None), default=None)

    def _send_state(self, link: RobotLink, now: int, *, is_last: bool = False) -> int | None:
        return self._feedback.send_state(link.send, self._session.session, now, is_last=is_last)

    def _fail(self, why: str) -> None:
        """The link's thread ends: the last message to rank 0 is the reason."""
        self.timeline.fail(why, f"client: {why}")
        self._send_state(self._connected_link(), now_ns(), is_last=True)

    def _hurry(self) -> None:
        """Any thread: a hold or a fault began."""
        if self._link is not None:
            self._feedback.hurry()
            self._link.wake()

    def _send_gathered(self, link: RobotLink, now: int, *, everything: bool = False) -> None:
        with self._outbox.lock:
            self._send_batches(link, self._outbox.pop_due(now, everything=everything), now)

    def _send_batches(self, link: RobotLink, batches: list[Batch], now: int) -> bool:
        session = self._session.session
        sent = unsent = 0
        for batch in batches:
            if session and link.send(Samples(session, batch.stream, batch.stamps, batch.values)):
                sent += batch.samples
            else:
                unsent += batch.samples
        self._counts.add_samples(sent, unsent)
        if sent:
            self._session.on_sent(now)
        if unsent and session:
            self._session.doubt()
            link.wake()
        return not unsent
