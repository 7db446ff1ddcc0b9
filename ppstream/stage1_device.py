"""THE loop of the policy rank on a GPU: device-ordered, one result for each envelope.

For each envelope that will come the host queues, on three streams:

    receiving    wait for rank 0's count · copy the header for the log
    stage B      wait for rank 0's count · the policy, from slot to slot
    sending      wait for B · the result to rank 0 (a lone short one: by stage B's stream)

It stays a few envelopes ahead of those that are over, and sleeps while some of them come; a policy
without a graph is queued only when its envelope is there. While idle the waits stand queued
(``link_peer.py``, rule 3). It learns which envelope a slot held when that is over. The CPU's loop
is ``stage1.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ppstream import trace
from ppstream.clock import NS_PER_MS, now_ns
from ppstream.cuda_streams import stream
from ppstream.device_clock import DeviceClock
from ppstream.errors import PeerLostError, ProtocolError
from ppstream.headers import EPOCH
from ppstream.link_device import AHEAD
from ppstream.memops import Event
from ppstream.policy_rank import PolicyRank
from ppstream.realtime import end_timeouts_on_time
from ppstream.slots import GENERATION, INDEX
from ppstream.stage1_queueing import Place, places, sends_from_b
from ppstream.stage_events import PolicyTimes, book_policy
from ppstream.watchdog import WARMING_LIMIT_NS, Mark, is_patient, watched

if TYPE_CHECKING:
    from ppstream.config import PipelineConfig
    from ppstream.control import Peer
    from ppstream.link_device import DeviceLink
    from ppstream.stage_b_device import DeviceStageB
    from ppstream.timestamps import Stage1Record, TimestampLog
    from ppstream.waiter import Waiter

POLL_NS: Final = 50_000  # while envelopes come that stage B is not queued ahead of
IDLE_NS: Final = NS_PER_MS  # while none come
LOOK_NS: Final = NS_PER_MS  # frames are looked for so often, however many envelopes come
REST_NS: Final = 5 * NS_PER_MS  # at most: nothing waits for this rank's host while it is ahead
REST_ENVELOPES: Final = AHEAD // 2  # so many may come meanwhile: a wake-up costs more than one
BUSY_FOR_NS: Final = 20 * NS_PER_MS  # after the last one
GAPS: Final = 4  # that the usual one is of
NEWEST: Final = 4096  # durations of stage B that are kept


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


class Stage1Device(PolicyRank):
    """The policy rank's loop; ends when rank 0 says drain."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        super().__init__(config, parts.stage_b, parts.peer, parts.log)
        self.link = parts.link
        self._parts = parts
        self._stream = stream("b")
        self._newest_b_ns: deque[int] = deque(maxlen=NEWEST)
        self._d_in = config.pipeline.d_in
        self._ahead = self._d_in + AHEAD
        self._places = places(self.link, self._stream, self._d_in)
        self._sends_on = self._stream if sends_from_b(self.link, self._d_in) else None
        self._expected = 0  # receipts queued
        self._queued = 0  # stages B queued
        self._records: deque[Stage1Record] = deque()  # of each queued envelope
        self.log.queues_ahead = True
        self._before: PolicyTimes | None = None
        self.mark = Mark("stage B's loop", lambda: f"envelope {self._queued}")
        self._look_ns = 0  # when at the latest
        self._newest_ns = 0  # when the newest envelope was over
        self._gap_ns = 0  # usually, between two
        parts.waiter.register(self.peer.fileno())
        if not parts.runs_ahead:  # then its envelopes do wait for this rank's host
            end_timeouts_on_time()

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
            if self.log.on_dry is None:
                most = self.progress + self._most_ahead()
                while self._expected < most:
                    self.queue_receipt()
            elif self.progress == self._expected:
                self.log.dry()
            while self._queued < self._expected and self.may_queue():
                self.queue()
            if now_ns() >= self._look_ns:
                self.rest(0)
            if self.is_oldest_done():
                self.finish()
            elif self.peer.inbox:
                self.take_frame(self.peer.inbox.popleft())
            elif give_up():
                raise PeerLostError("asked to stop, and rank 0 did not drain within its limit")
            else:
                self.rest(self._rest_ns())
        return self.drain_reason

    def _most_ahead(self) -> int:
        """Receipts that may stand queued; while traced, those that come without this rank's help.

        A tracer may wait for the device, and with it for all of them.
        """
        return self._d_in if self.log.mode == "trace" else self._ahead

    def queue_receipt(self) -> None:
        """Queue the receipt of a further envelope."""
        self.link.queue_receive(self._expected)
        self._place(self._expected).behind_receipt()
        self._expected += 1

    def may_queue(self) -> bool:
        """Whether stage B of the next envelope may be queued.

        A stream takes some 1000 launches and then holds up the host: a policy of many kernels that
        is not replayed from a graph is queued once its envelope is there.
        """
        if self._parts.runs_ahead:
            return True
        return self._parts.clock.host_ns(self._place(self._queued).complete) is not None

    def queue(self) -> None:
        """Queue everything that will happen to the next envelope."""
        index, link, place = self._queued, self.link, self._place(self._queued)
        if not link.queue_wait(index, self._stream):
            self._stream.wait_for(place.complete)
        place.before_b()
        failed = self.run_policy(index, place)
        link.queue_header(index, (0, 0, failed))  # a copy of its own need not wait for B
        place.behind_b()
        link.queue_send(index, self._sends_on)
        place.behind_send()
        record = self.log.take()  # behind the policy: what its blocks took is this envelope's
        record.drop = "policy_error" if failed else None
        self._records.append(record)
        self._queued += 1

    def run_policy(self, index: int, place: Place) -> bool:
        """Queue stage B; returns whether the policy failed to: rank 0 is told why."""
        if trace.on:
            trace.B.push(0, index)  # epoch and seq are on their way: the host does not know them
        try:
            self._parts.stage_b(place.envelope, place.result)
        except Exception as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            self.tell_fault(index, error)
            return True
        finally:
            if trace.on:
                trace.B.pop()
        return False

    def finish(self) -> None:
        """Book the oldest envelope, which is answered."""
        index = self.progress
        place = self._place(index)
        header = place.header.tolist()
        if header[INDEX] != index or header[GENERATION] != self._parts.generation:
            raise ProtocolError(
                f"slot of envelope {index} (generation {self._parts.generation}) holds "
                f"{header[INDEX]} (generation {header[GENERATION]})"
            )
        past_ns = self._parts.clock.past_ns
        times = PolicyTimes(past_ns(place.complete), past_ns(place.b0), past_ns(place.b1))
        record = self._records.popleft()
        (record.epoch, record.seq), record.phase = header[EPOCH], self.phase
        book_policy(record, times, self._before)
        gap_ns = min(REST_NS, times.b1 - self._newest_ns)
        self._gap_ns += (gap_ns - self._gap_ns) // GAPS
        self._before, self._newest_ns = times, times.b1
        self._newest_b_ns.append(times.b1 - times.b0)
        if self._meter is not None:
            record.recompiles = self._meter.take()
        self.log.commit(record)
        self.progress += 1

    def is_oldest_done(self) -> bool:
        """Whether the oldest envelope is over."""
        if self.progress == self._queued:
            return False
        place, host_ns = self._place(self.progress), self._parts.clock.host_ns
        return host_ns(place.last) is not None and host_ns(place.named) is not None

    def rest(self, limit_ns: int) -> None:
        """Sleep, unless a frame comes: the end of an event has no descriptor. Then look around."""
        if self._parts.waiter.wait(limit_ns):
            self.peer.pump()
        now = now_ns()
        self._look_ns = now + LOOK_NS
        if self.phase != "warming":
            self.peer.check_alive(now, self._frozen_ns)
        if self._parts.clock.renew_when_due():
            self.log.event("clock", **self._parts.clock.state._asdict())

    def _rest_ns(self) -> int:
        if now_ns() - self._newest_ns > BUSY_FOR_NS:
            return IDLE_NS
        several_ns = REST_ENVELOPES * self._gap_ns if self._parts.runs_ahead else 0
        return max(POLL_NS, min(REST_NS, several_ns))

    def change_phase(self, phase: str) -> None:
        super().change_phase(phase)
        self._before = None

    def measure(self, repeats: int) -> tuple[int, ...]:
        """Device times of stage B on the newest envelopes, which rank 0 sent one by one.

        With 0, the log is complete on disk instead.
        """
        if not repeats:
            self.log.flush()
            return ()
        return tuple(self._newest_b_ns)[-repeats:]

    def _place(self, index: int) -> Place:
        return self._places[index % len(self._places)]
