"""THE loop of the policy rank on a GPU: device-ordered, one result for each envelope.

For each envelope that will come the host queues, on three streams:

    receiving    wait for rank 0's count
    stage B      wait for the receipt · the policy, from slot to slot
    sending      wait for B · copy the result to rank 0, count it · copy the header for the log

It stays a few envelopes ahead of those that are over; a policy without a graph is queued only when
its envelope is there. While idle the waits stand queued (``link_peer.py``, rule 3). It learns which
envelope a slot held when that is over. The CPU's loop is ``stage1.py``.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ppstream import trace
from ppstream.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.cuda_streams import stream
from ppstream.device_clock import DeviceClock
from ppstream.ends import PeerLeftError
from ppstream.errors import PeerLostError, ProtocolError
from ppstream.headers import EPOCH
from ppstream.link_device import AHEAD
from ppstream.memops import Event
from ppstream.messages import (
    MAX_TEXT,
    Drain,
    Goodbye,
    Instructed,
    Instruction,
    Measure,
    Measured,
    PhaseChange,
    PolicyFault,
)
from ppstream.policy_compile import RecompileMeter
from ppstream.slots import GENERATION, INDEX
from ppstream.stage_events import PolicyTimes, book_policy
from ppstream.watchdog import WARMING_LIMIT_NS, Mark, is_patient, watched

if TYPE_CHECKING:
    from ppstream.config import PipelineConfig
    from ppstream.control import Peer
    from ppstream.link_device import DeviceLink
    from ppstream.stage_b_device import DeviceStageB
    from ppstream.timestamps import TimestampLog
    from ppstream.waiter import Waiter

POLL_NS: Final = 50_000  # while envelopes come; nothing waits for this rank's host
REST_NS: Final = 1_000_000  # while none come
NEWEST: Final = 4096  # durations of stage B that are kept
BUSY_FOR_NS: Final = 20_000_000  # after the last one


class Parts(NamedTuple):
    """What the loop is made of."""

    config: PipelineConfig
    stage_b: DeviceStageB
    link: DeviceLink
    peer: Peer
    log: TimestampLog
    waiter: Waiter
    clock: DeviceClock[Event]
    stream: torch.cuda.Stream  # stage B's, torch's current one
    generation: int
    runs_ahead: bool = True  # the policy is one launch: it may be queued before its envelope


class _Marks(NamedTuple):
    """The events of one envelope; used again for a later one."""

    complete: Event
    b0: Event
    b1: Event
    sent: Event


class Stage1Device:
    """The policy rank's loop; ends when rank 0 says drain."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self.link, self.peer, self.log = parts.link, parts.peer, parts.log
        self._parts = parts
        self._stream = stream("b")
        self._newest_b_ns: deque[int] = deque(maxlen=NEWEST)
        self.phase = "starting"
        self._meter = RecompileMeter() if config.policy.compile else None
        self.progress = 0  # envelopes answered, read by the heartbeat
        self.drain_reason: str | None = None
        self._ahead = config.pipeline.d_in + AHEAD
        slots = len(self.link.out)
        self._marks = [
            _Marks(*(Event() for _ in _Marks._fields)) for _ in range(self._ahead + slots)
        ]
        fields = len(self.link.into[0].header)
        self._headers = torch.zeros(
            slots, fields, dtype=torch.int64, pin_memory=torch.cuda.is_available()
        )
        self._header_bytes = fields * self._headers.itemsize
        self._expected = 0  # receipts queued
        self._queued = 0  # stages B queued
        self._failed: deque[bool] = deque()  # of each queued envelope
        self._before: PolicyTimes | None = None
        self.mark = Mark("stage B's loop", lambda: f"envelope {self._queued}")
        self._watchdog_ns = round(config.liveness.watchdog_s * NS_PER_S)
        self._frozen_ns = round(config.liveness.frozen_ms * NS_PER_MS)
        self._last_ns = now_ns()
        parts.waiter.register(self.peer.fileno())

    def prepare(self) -> None:
        """Run the policy on every slot, before anything waits: it loads, allocates, records."""
        torch.cuda.set_stream(self._parts.stream)
        for _ in range(2):
            for envelope, result in zip(self.link.into, self.link.out, strict=True):
                self._parts.stage_b(envelope, result)
            torch.cuda.synchronize()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """For the watchdog."""
        return (self.mark,)

    @property
    def standstill_ns(self) -> int:
        """How long the loop may stand still, as of now: it queues, and never waits for stage B."""
        patient = is_patient(self.phase, self.log.mode)
        return WARMING_LIMIT_NS if patient else self._watchdog_ns

    @watched
    def run(self, give_up: Callable[[], bool]) -> str:
        """Serve until rank 0 says drain; returns its reason.

        Raises:
            PeerLostError: rank 0 is gone, or ``give_up()`` while nothing was to be done.
        """
        while self.drain_reason is None:
            self.mark.turns += 1
            while self._expected - self.progress < self._ahead:
                self.queue_receipt()
            while self._queued < self._expected and self.may_queue():
                self.queue()
            self.peer.pump()
            if self.progress < self._queued and self._marks_of(self.progress).sent.is_done():
                self.finish()
            elif self.peer.inbox:
                self.take_frame(self.peer.inbox.popleft())
            elif give_up():
                raise PeerLostError("asked to stop, and rank 0 did not drain within its limit")
            else:
                self.wait()
        return self.drain_reason

    def queue_receipt(self) -> None:
        """Queue the receipt of a further envelope."""
        self.link.queue_receive(self._expected)
        self.link.receiving.record(self._marks_of(self._expected).complete)
        self._expected += 1

    def may_queue(self) -> bool:
        """Whether stage B of the next envelope may be queued.

        A stream takes some 1000 launches and then holds up the host: a policy of many kernels that
        is not replayed from a graph is queued once its envelope is there.
        """
        return self._parts.runs_ahead or self._marks_of(self._queued).complete.is_done()

    def queue(self) -> None:
        """Queue everything that will happen to the next envelope."""
        index, link = self._queued, self.link
        marks, place = self._marks_of(index), index % len(link.out)
        self._stream.wait_for(marks.complete)
        self._stream.record(marks.b0)
        failed = self.run_policy(index, place)
        self._stream.record(marks.b1)
        link.queue_header(index, (0, 0, failed))
        link.sending.wait_for(marks.b1)
        link.queue_send(index)
        header = self._headers.data_ptr() + place * self._header_bytes
        link.sending.copy(header, link.into[place].address, self._header_bytes)
        link.sending.record(marks.sent)
        self._failed.append(failed)
        self._queued += 1

    def run_policy(self, index: int, place: int) -> bool:
        """Queue stage B; returns whether the policy failed to: rank 0 is told why."""
        if trace.on:
            trace.B.push(0, index)  # epoch and seq are on their way: the host does not know them
        try:
            self._parts.stage_b(self.link.into[place], self.link.out[place])
        except Exception as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            kind = "memory" if isinstance(error, torch.OutOfMemoryError) else "exception"
            text = "".join(traceback.format_exception(error))[-MAX_TEXT:]
            self.peer.send(PolicyFault(index, kind, text))
            return True
        finally:
            if trace.on:
                trace.B.pop()
        return False

    def finish(self) -> None:
        """Book the oldest envelope, which is answered."""
        index = self.progress
        marks = self._marks_of(index)
        header = self._headers[index % len(self._headers)].tolist()
        if header[INDEX] != index or header[GENERATION] != self._parts.generation:
            raise ProtocolError(
                f"slot of envelope {index} (generation {self._parts.generation}) holds "
                f"{header[INDEX]} (generation {header[GENERATION]})"
            )
        host_ns = self._parts.clock.host_ns
        times = PolicyTimes(*(host_ns(event) for event in marks[:3]))
        record = self.log.take()
        (record.epoch, record.seq), record.phase = header[EPOCH], self.phase
        book_policy(record, times, self._before)
        record.drop = "policy_error" if self._failed.popleft() else None
        self._before = times
        self._newest_b_ns.append(times.b1 - times.b0)
        if self._meter is not None:
            record.recompiles = self._meter.take()
        self.log.commit(record)
        self.progress += 1
        self._last_ns = now_ns()
        if self._parts.clock.renew_when_due():
            self.log.event("clock", **self._parts.clock.state._asdict())

    def wait(self) -> None:
        """Sleep a little: the end of an event has no descriptor."""
        now = now_ns()
        if self.phase != "warming":
            self.peer.check_alive(now, self._frozen_ns)
        self._parts.clock.renew_when_due()
        is_busy = now - self._last_ns < BUSY_FOR_NS
        self._parts.waiter.wait(POLL_NS if is_busy else REST_NS)

    def take_frame(self, frame: object) -> None:
        match frame:
            case Drain():
                self.drain_reason = frame.reason
            case Goodbye():
                raise PeerLeftError(frame)
            case PhaseChange():
                self.phase = frame.phase
                self._before = None
                self.log.event("phase", phase=frame.phase)
                if self._meter is not None:
                    self._meter.phase(frame.phase, self.log.event)
            case Instruction():
                fault = self._parts.stage_b.instruct(frame.id, frame.text)
                self.peer.send(Instructed(frame.id, fault))
            case Measure():
                self.peer.send(Measured(self.measure(frame.repeats)))

    def measure(self, repeats: int) -> tuple[int, ...]:
        """Device times of stage B on the newest envelopes, which rank 0 sent one by one.

        With 0, the log is complete on disk instead.
        """
        if not repeats:
            self.log.flush()
            return ()
        return tuple(self._newest_b_ns)[-repeats:]

    def _marks_of(self, index: int) -> _Marks:
        return self._marks[index % len(self._marks)]
