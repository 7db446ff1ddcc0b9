"""The policy rank on a GPU: device-ordered, one result for each envelope.

For each envelope that will come the host queues, on three streams::

    receiving    wait for the count of the place before
    stage B      wait for it, too · the policy, from slot to slot
    sending      wait for B · the result to the next place · copy the header for the log
                 (of a lone short result: on stage B's stream)

Where the link's kernels leave the times, ``stamped_hop.py`` queues less, on two streams.

A short stage B is queued a few envelopes ahead of those that are over, and the host sleeps while
some of them come. Whatever stands queued for an envelope that is not there waits for rank 0, and so
would a launch that finds the driver's queue full: ``device_link.run_ahead`` bounds it by nodes. A
stage B of a millisecond or more, of many nodes, without a graph, or that takes instructions is
queued once its envelope was seen, behind at most one that runs, where it may await an envelope on
its way; and a receipt once rank 0 rang for its envelope, whose way is queued then. A stage B that
is queued when seen is given as few rows as hold the robots that are there: who is comes with the
receipt. So nothing waits here while the run is idle, and what the host does between two envelopes,
such as user code that loads its first kernel of a kind, never waits for rank 0's host. The loop
learns which envelope a slot held when that is over.
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.control.watchdog import is_warm
from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.errors import ProtocolError
from ppstream.core.realtime import timeouts_on_time
from ppstream.cuda.device_clock import DeviceClock
from ppstream.cuda.streams import stream
from ppstream.links.device_link import may_await, most_queued
from ppstream.links.headers import EPOCH, FAILED, FAILURES, SEQ, ResultStatus
from ppstream.links.slots import BACK, GENERATION, INDEX, Position
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.device.event_times import PolicyTimes, record_policy_times
from ppstream.pipeline.device.in_flight import towards
from ppstream.pipeline.device.policy_rank_queue import SlotPlan, sends_from_b, slot_plans
from ppstream.pipeline.device.stamped_hop import HeldStageB, StampedHop
from ppstream.pipeline.policy_rank import PolicyRank
from ppstream.policy.unwritten import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.links.device_link import DeviceLink
    from ppstream.links.slots import LinkShape
    from ppstream.observe.log_writer import PolicyRecord, TimestampLog
    from ppstream.pipeline.device.stage_b import DeviceStageB
    from ppstream.policy.batch_sizes import BatchSizes

POLL_NS: Final = 20_000  # while an envelope may come that stage B is not queued ahead of
EARLY_NS: Final = 500_000  # such a stage B is queued so long before the one that runs should end
IDLE_NS: Final = NS_PER_MS  # while none come
POLL_FRAMES_NS: Final = NS_PER_MS  # however many envelopes come
REST_NS: Final = 5 * NS_PER_MS  # at most: nothing waits for this rank's host while it is ahead
REST_SHARE: Final = 2  # of the envelopes queued ahead half may come meanwhile,
RESERVE_NS: Final = NS_PER_MS  # or all, where the stages that stand queued then last so long
BUSY_FOR_NS: Final = 20 * NS_PER_MS  # after the last one
NEWEST: Final = 4096  # durations of stage B that are kept


class PolicyDevice(NamedTuple):
    """Policy, link and streams of a policy rank's GPU."""

    config: PipelineConfig
    stage_b: DeviceStageB | HeldStageB
    link: DeviceLink
    peer: Peer
    log: TimestampLog
    waiter: Waiter
    clock: DeviceClock[Any]  # of the kind of its marks
    stream: torch.cuda.Stream  # stage B's, torch's current one
    shape: LinkShape
    nodes: int | None = None  # kernels, copies and memsets of a stage B, where they are known
    position: Position = BACK
    rank: int = 1
    parts_ns: Mapping[str, int] = MappingProxyType({})  # of each part, alone
    sizes: BatchSizes | None = None  # of batches; None: the whole one alone


class RunAheadRest:
    """Rests of a host that has queued envelopes ahead: some of these may be over meanwhile.

    A rest that was too long makes a gap that is none of the envelopes', and that the next rest must
    not follow: a gap counts for twice the usual one at most.

    Args:
        ahead: envelopes that are queued beyond the credits.
        most_queued: envelopes in all.

    Attributes:
        newest_ns: when the newest envelope was over.
    """

    def __init__(self, ahead: int, most_queued: int) -> None:
        self.newest_ns = 0
        self._ahead, self._most_queued = ahead, most_queued
        self._gap_ns = 0  # usually, between two

    def over(self, at_ns: int) -> None:
        """The next envelope was over at ``at_ns``."""
        self._gap_ns = towards(self._gap_ns, min(REST_NS, at_ns - self.newest_ns))
        self.newest_ns = at_ns

    def ns(self, now_ns: int) -> int:
        """Returns the rest from ``now_ns`` on."""
        if now_ns - self.newest_ns > BUSY_FOR_NS:
            return IDLE_NS
        ahead_ns = self._ahead * self._gap_ns
        spare_ns = self._most_queued * self._gap_ns - RESERVE_NS
        rest_ns = max(ahead_ns // REST_SHARE, min(ahead_ns, spare_ns))
        return max(POLL_NS, min(REST_NS, rest_ns))


class DevicePolicyRank(PolicyRank):
    """Stage B and its sends, queued ahead of what is over."""

    NAME = "stage B's loop"

    def __init__(self, parts: PolicyDevice) -> None:
        config = parts.config
        super().__init__(config, parts.stage_b, parts.peer, parts.log, parts.rank)
        self.link = parts.link
        self._parts = parts
        self._stream = stream("b")
        self._newest_b_ns: deque[int] = deque(maxlen=NEWEST)
        self._d_in = config.pipeline.d_in
        self._ahead = parts.shape.ahead  # of its envelopes; 0: stage B waits for none
        self._most_queued = most_queued(parts.shape)
        self._sizes = parts.sizes
        is_told = config.policy.instructions or self._sizes is not None
        self._may_await = may_await(parts.nodes) and not is_told
        self._plans = slot_plans(
            self.link,
            self._stream,
            self._d_in,
            relays=parts.position.relays,
            asks_who=parts.sizes is not None,
        )
        self._sends_on = self._stream if sends_from_b(self.link, self._d_in) else None
        self._announced = 0  # envelopes that rank 0 rang for, where stage B is not queued ahead
        self._expected = 0  # receipts queued
        self._arrived = 0  # envelopes seen, where stage B is not queued ahead
        self._queued = 0  # stages B queued
        self._is_launching = False
        self._records: deque[PolicyRecord] = deque()  # of each queued envelope
        self.log.queues_ahead = True
        self._before: PolicyTimes | None = None
        self._poll_frames_ns = 0  # when at the latest
        self._rest = RunAheadRest(self._ahead, self._most_queued)
        self._queued_ns = 0  # when a stage B was queued last behind no other
        if isinstance(self.link, StampedHop):
            self._plans = self.link.stamped(self._plans)
        parts.waiter.register(self.peer.fileno())

    def run(self, give_up: Callable[[], bool]) -> str:
        """As ``PolicyRank``."""
        if self._ahead:  # then no envelope waits for this rank's host
            return super().run(give_up)
        with timeouts_on_time():
            return super().run(give_up)

    def prepare(self) -> None:
        """Run the policy on every slot, before anything waits: it loads, allocates, records."""
        torch.cuda.set_stream(self._parts.stream)
        smaller = () if self._sizes is None else self._sizes.smaller
        for _ in range(2):
            for envelope, result in zip(self.link.into, self.link.out, strict=True):
                for rows in (None, *smaller):  # the whole batch first: the most memory
                    self._parts.stage_b(envelope, result, rows)
            torch.cuda.synchronize()

    def make_graphs(self) -> None:
        """Put a stage B that is queued ahead, and what stands around it, into one graph for each
        slot, where it is made of graphs; it was prepared.
        """
        stage_b, hop = self._parts.stage_b, self.link
        if not self._ahead or not isinstance(hop, StampedHop) or isinstance(stage_b, HeldStageB):
            return
        graphs = hop.hold(stage_b)
        if graphs:
            self._parts = self._parts._replace(stage_b=HeldStageB(stage_b))
        self.log.event("stage_graphs", stage="B", graphs=graphs)

    def step(self) -> bool:
        """As ``PolicyRank``: queue all that may be, then book all that is over.

        Before frames: some ask for what is over.
        """
        if self.log.on_idle is None:
            most = self._most_expected()
            while self._expected < most:
                self.queue_receipt()
        elif self.progress == self._expected:
            self.log.run_when_idle()
        while self._queued < self._expected and self.may_queue():
            self.queue()
        if now_ns() >= self._poll_frames_ns:
            self.rest(0)
        progress = self.progress
        while self.is_oldest_done():
            self.finish()
        return self.progress > progress

    def close(self) -> bool:
        """As ``DeviceLink.close``."""
        return self.link.close()

    def wait(self) -> None:
        """As ``PolicyRank``: the end of an event has no descriptor."""
        self.rest(self._rest_ns())

    def _most_expected(self) -> int:
        """Receipts that may be queued in all.

        Whoever may wait for the device, such as a tracer or user code, waits for all of those that
        are queued: then they are those that come without this rank's host.
        """
        if self._ahead:
            is_traced = self.log.mode == "trace"
            return self.progress + (self._d_in if is_traced else self._most_queued)
        while self.peer.bells:
            self._announced = self.peer.bells.popleft() + 1
        return min(self.progress + self._d_in, self._announced)

    def queue_receipt(self) -> None:
        """Queue the receipt of a further envelope."""
        self.link.queue_receive(self._expected)
        self._plan(self._expected).behind_receipt()
        self._expected += 1

    def may_queue(self) -> bool:
        """True when stage B of the next envelope may be queued: no launch may wait for rank 0.

        Not ahead of envelopes: behind at most one that runs, so that launches seldom stand at all.
        There one may await an envelope that rank 0 rang for, if its nodes fit.
        """
        if self._ahead:
            return True
        is_past = self._parts.clock.is_past
        while self._arrived < self._expected and is_past(self._plan(self._arrived).complete):
            self._arrived += 1
        runs = self._queued - self.progress
        awaited = 1 if runs and self._may_await else 0
        return runs <= 1 and self._queued < self._arrived + awaited

    def queue(self) -> None:
        """Queue everything that will happen to the next envelope."""
        index, link, plan = self._queued, self.link, self._plan(self._queued)
        if not link.queue_wait(index, self._stream):
            self._stream.wait_for(plan.complete)
        plan.before_b()
        rows = None if self._sizes is None else self._sizes.rows_for(plan.present.tobytes())
        failed = self.run_policy(index, plan, rows)
        # a copy of its own need not wait for B, and so cannot know the envelope's name
        link.queue_header(index, ResultStatus(epoch=0, seq=0, failed=failed))
        plan.behind_b()
        (plan.carry_fault if failed else plan.carry)()
        link.queue_send(index, self._sends_on)
        plan.behind_send()
        record = self.log.acquire()  # behind the policy: what its blocks took is this envelope's
        record.drop = FAILURES[failed]
        record.rows = rows or self._parts.config.batch.rows
        self._records.append(record)
        if self._queued == self.progress:
            self._queued_ns = now_ns()  # behind nothing: it begins now, or with its envelope
        self._queued += 1

    def run_policy(self, index: int, plan: SlotPlan, rows: int | None) -> int:
        """Queue stage B on ``rows``; returns the header's ``failed``: rank 0 is told why."""
        if nvtx_ranges.on:
            nvtx_ranges.B.push(
                0, index
            )  # epoch and seq are on their way: the host does not know them
        self._is_launching = True
        try:
            self._parts.stage_b(plan.envelope, plan.result, rows)
        except BaseException as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            self.report_fault(index, error)
            return failure(error)
        finally:
            self._is_launching = False
            if nvtx_ranges.on:
                nvtx_ranges.B.pop()
        return 0

    def finish(self) -> None:
        """Account for the oldest envelope, which is answered."""
        index = self.progress
        plan = self._plan(index)
        header = plan.header.tolist()
        if header[INDEX] != index or header[GENERATION] != self._parts.shape.generation:
            raise ProtocolError(
                f"slot of envelope {index} (generation {self._parts.shape.generation}) holds "
                f"{header[INDEX]} (generation {header[GENERATION]})"
            )
        times = PolicyTimes(*self._parts.clock.all_past_ns(plan.moments))
        record = self._records.popleft()
        record.epoch, record.seq, record.phase = header[EPOCH], header[SEQ], self.phase
        record.drop = record.drop or FAILURES[header[FAILED]]
        record_policy_times(record, times, self._before)
        self._rest.over(times.b1)
        self._before = times
        self._newest_b_ns.append(times.b1 - times.b0)
        if self._meter is not None:
            record.recompiles = self._meter.drain()
        self.log.commit(record)
        self.progress += 1

    def is_oldest_done(self) -> bool:
        """True when the oldest envelope is over: everything queued for it, on all three streams.

        Stage B may see the count itself, sooner than the receiving stream does.
        """
        if self.progress == self._queued:
            return False
        plan, is_past = self._plan(self.progress), self._parts.clock.is_past
        return (
            is_past(plan.last)
            and is_past(plan.complete)
            and (plan.named is plan.last or is_past(plan.named))
        )

    def rest(self, limit_ns: int) -> None:
        """Sleep, unless a frame comes. Then look around."""
        if self._parts.waiter.wait(limit_ns):
            self.peer.pump()
        now = now_ns()
        self._poll_frames_ns = now + POLL_FRAMES_NS
        if is_warm(self.phase):
            self.peer.check_alive(now, self._frozen_ns)
        if self._parts.clock.renew_when_due():
            self.log.event("clock", **self._parts.clock.state._asdict())

    def _rest_ns(self) -> int:
        return self._rest.ns(now_ns()) if self._ahead else self._rest_of_seen_ns()

    def _rest_of_seen_ns(self) -> int:
        """Returns the rest until shortly before a stage B could begin that is queued when seen.

        While one runs, that is when it should end; one that is queued behind it needs no host.
        While none is under way, the bell of the next one ends the rest.
        """
        if self.progress == self._queued:
            return POLL_NS if self._queued < self._expected else IDLE_NS
        usual_ns = self._newest_b_ns[-1] if self._newest_b_ns else 0
        begun_ns = max(self._rest.newest_ns, self._queued_ns)
        left_ns = begun_ns + usual_ns - EARLY_NS - now_ns()
        return max(POLL_NS, min(REST_NS, left_ns))

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

    def part_times(self, calls: int) -> dict[str, int]:
        """As ``PolicyRank``: of each part alone, before the run."""
        return dict(self._parts.parts_ns)

    def _plan(self, index: int) -> SlotPlan:
        return self._plans[index % len(self._plans)]

    def _at(self) -> str:
        """For the watchdog: a launch stands when the driver's queue is full."""
        if not self._is_launching:
            return f"envelope {self._queued}"
        nodes = "kernels" if self._parts.nodes is None else f"{self._parts.nodes} nodes"
        return (
            f"the launch of stage B for envelope {self._queued} ({nodes}, "
            f"{self._queued - self.progress} more queued before it): a launch that stands says "
            "that the driver's queue is full and the device makes no progress"
        )
