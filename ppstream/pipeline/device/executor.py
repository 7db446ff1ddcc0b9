"""The executor on rank 0's GPU: device-ordered, so the host runs ahead and waits for nothing.

For each envelope the host queues, on four streams, everything that will happen to it:

    stage A      wait for the credit · A into a slot
    sending      wait for A · copy the slot to the policy rank, count it
    receiving    wait for the peer's count · wait for a place in D_out
    stage C      wait for the receipt · copy the result to pinned memory

Where the link's kernels leave the times, ``rank0_stamped.py`` queues less, on two streams.
With D_in = 1 an envelope is sent by stage A's stream and received by stage C's, where the link can.
A credit is the receipt of the result ``d_in`` envelopes earlier, which this device sees. Freshness
(``credit = "before_window"``): A waits for it, and reads the rings after. Throughput
(``"after_window"``): the copy waits for it, A runs one envelope ahead, and its data ages meanwhile.

A stage A that waits for its credit waits for the policy rank, and so would a launch that finds the
driver's queue full: ``device_link.run_ahead`` bounds by nodes what stands queued so. A stage A of a
millisecond or more, as with parts of the policy at its end, or of many nodes, is queued shortly
before its credit should come if its nodes fit, else once that was seen, behind at most one that
runs: the host goes on to emit results meanwhile.

Of replicas (``links/device_replicas.py``) each envelope's way leads over the link of the one whose
turn it is, on the same streams. When one is lost, its waits are ended: what it owes is dropped, and
once nothing is under way the others line up anew.

The loop finishes envelopes in order once their last event is done: it decodes, checks and emits
one, counts it, and accounts later for several at once: stamps, waits, ledger, line. It does so
before a phase, an epoch or a run ends, before it sleeps with nothing under way, and each
``POLL_LATEST_NS``: code that has run a moment ago costs a fraction of what it costs behind a pause.
``tEmit`` is the end of C on the device, ``tPick`` the moment at which the host takes the envelope
up: latency is counted to there, the age of what it emits to the true emit.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.errors import PeerLostError, ProtocolError, WatchdogError
from ppstream.core.user_code import Fault
from ppstream.links.device_link import may_await, most_queued
from ppstream.links.device_replicas import DeviceReplicas
from ppstream.links.headers import FAILED, FAILURES, REPLICA_LOST
from ppstream.links.slots import GENERATION, INDEX
from ppstream.pipeline.device.event_times import Rank0Times, record_rank0_times
from ppstream.pipeline.device.in_flight import EARLY_NS, UNSETTLED_MAX, InFlight
from ppstream.pipeline.device.rank0_queue import Queueing
from ppstream.pipeline.device.rank0_stamped import StampedQueueing
from ppstream.pipeline.device.stage_a import AHEAD_NS
from ppstream.pipeline.device.stage_times import time_a_and_c
from ppstream.pipeline.flight import Flight
from ppstream.pipeline.keep_warm import KeepWarm
from ppstream.pipeline.policy_rank_peer import instruct_all, thread_cpus
from ppstream.pipeline.rank0 import WAIT_MAX_NS
from ppstream.policy.unwritten import Results, drawn_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ppstream.links.slots import Slot
    from ppstream.pipeline.device.in_flight import Queued
    from ppstream.pipeline.device.rank0_queue import Rank0Device
    from ppstream.pipeline.device.stage_a import DeviceStageA
    from ppstream.pipeline.loop import Rank0Loop
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
    from ppstream.pipeline.replica_losses import ReplicaLosses

POLL_LATEST_NS: Final = 5 * NS_PER_MS  # at the latest; sooner when something comes or falls due
POLL_NS: Final = 20_000  # an envelope that is late is polled for so often,
POLL_SHARE: Final = 8  # or in shares of its lateness, if these are longer
SPARE_NS: Final = 5_000  # after it should be done: a poll in vain costs more than that
GLANCE_NS: Final = 200_000  # descriptors are polled so often while envelopes leave no rest
ACCOUNTED_AT_ONCE: Final = 4  # envelopes, or more: the first costs twice what a further one does
INTAKE_NS: Final = 100_000  # so long before an envelope should be done samples may be taken in
NOW: Final = 0


class DeviceExecutor:
    """Rank 0's GPU, with the policy ranks in the order of the chain behind ``parts.link``.

    Args:
        parts: of rank 0.
        policy_ranks: of a chain, or all replicas.
        losses: of replicas.
    """

    def __init__(
        self,
        parts: Rank0Device,
        policy_ranks: tuple[PolicyRankPeer, ...],
        losses: ReplicaLosses | None = None,
    ) -> None:
        self.link = parts.link
        self._replicas = parts.link if isinstance(parts.link, DeviceReplicas) else None
        self._ranks, self._losses = policy_ranks, losses
        self._lost: set[int] = set()  # envelopes under way whose replica is lost
        self._is_lined_up = True  # no replica was lost since they lined up
        self._parts = parts
        self._ahead = 0  # of credits, of this phase's stage A; 0: it is queued with its credit
        self._most_queued = most_queued(parts.shape)
        self._most_underway = self._refilled_at = 0  # of this phase
        self._is_filling = True  # until all places are taken, and from ``_refilled_at`` on again
        self._waits_for_input = False
        self._before: Rank0Times | None = None
        self._owed: deque[Flight] = deque()  # have ended, and are not accounted for
        self._newest: Queued | None = None  # that was finished
        self._poll_due_ns = self._poll_latest_ns = 0  # by all that falls due; by the clock alone
        self._glance_ns = 0  # when at the latest while envelopes leave no rest
        self._is_launching = False

    @property
    def policy_ranks(self) -> tuple[PolicyRankPeer, ...]:
        """As ``Executor``; of replicas those that are left."""
        return self._ranks if self._losses is None else self._losses.policy_ranks

    @property
    def all_ranks(self) -> tuple[PolicyRankPeer, ...]:
        """As ``Executor``."""
        return self.policy_ranks

    def attach(self, loop: Rank0Loop) -> None:
        """As ``Executor``."""
        self._loop = loop
        for policy_rank in self.policy_ranks:
            policy_rank.attach(loop)
            loop.waiter.register(policy_rank.peer.fileno())
        if self._losses is not None:
            self._losses.rank0, self._losses.waiter = loop, loop.waiter
        parts = self._parts
        self._a: DeviceStageA = loop.stage_a  # type: ignore[assignment]
        is_fresh = self._is_fresh = loop.config.pipeline.credit == "before_window"
        self._queueing: Queueing | StampedQueueing
        if parts.stamps is not None:
            self._queueing = StampedQueueing(parts, parts.stamps, self._a)
        else:
            self._queueing = Queueing(parts, self._a, is_fresh=is_fresh)
        self._underway = self._none_underway(0)
        self._results = Results(drawn_for(loop.log.run_id))
        self._tells_provenance = loop.config.actions.provenance
        loop.book = self._book
        self._keep_warm = KeepWarm(loop.log, self._get_ready, AHEAD_NS)
        loop.mark.busy_with = self._at
        loop.log.queues_ahead = True
        loop.on_phase.append(self._on_phase)

    def _get_ready(self) -> None:
        self._a.rehearse()
        self._loop.stage_c.rehearse()

    def _none_underway(self, first: int, early_ns: int = 0) -> InFlight:
        """Nothing is under way, and ``first`` is the next envelope."""
        a_spins = self._is_fresh and self.link.spins
        ledger, clock, marks = self._loop.credits, self._parts.clock, self._queueing.marks
        return InFlight(ledger, clock, marks, a_spins=a_spins, first=first, early_ns=early_ns)

    def _on_phase(self, phase: str) -> None:
        if isinstance(self._queueing, StampedQueueing) and self._queueing.prepare():
            self._loop.log.event("stage_graphs", stage="A", graphs=self._queueing.graphs)
        self._waits_for_input = self._loop.pacing.name != "saturated"
        d_in = self._loop.credits.d_in
        self._ahead = self._parts.run_ahead(self._a)
        awaits = self._is_fresh and not self._ahead and may_await(self._parts.nodes(self._a))
        self._underway.early_ns = EARLY_NS if awaits else 0
        # many more than there are credits for only where input is never waited for
        beyond = 1 if self._waits_for_input else max(1, self._ahead)
        self._most_underway = min(self._most_queued, d_in + beyond)
        # several at once: the first behind a rest costs twice what a further one does
        self._refilled_at = self._most_underway - max(1, (self._most_underway - d_in) // 2)

    @contextmanager
    def running(self) -> Iterator[None]:
        """As ``Executor``."""
        self._before = None
        self._poll()
        try:
            yield
        finally:
            self._account()
        is_judged = self._loop.phase == "bring-up" and self._loop.log.record_mode == "throughput"
        if is_judged:  # what the policy rank knows of these envelopes has to be in its file
            for policy_rank in self.policy_ranks:
                policy_rank.newest_b(0)

    @property
    def in_flight(self) -> int:
        """As ``Executor``."""
        return len(self._underway)

    # ---- one envelope: queued ------------------------------------------------------------------

    def has_room(self) -> bool:
        """As ``Executor``; places that come free are taken several at once."""
        underway = len(self._underway)
        if underway >= self._most_underway:
            self._is_filling = False
        elif underway <= self._refilled_at:
            self._is_filling = True
        return (
            self._is_filling
            and self._is_lined_up
            and self._loop.log.on_idle is None
            and (self._ahead > 0 or self._underway.may_begin_now(is_fresh=self._is_fresh))
        )

    def begin(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """As ``Executor``: queue everything that will happen to it; nothing here waits."""
        self._is_launching = True
        self._queueing.envelope(flight, ends_ns)
        self._is_launching = False
        flight.sent_ns = now_ns()  # for the watchdog; the log has the device's
        self._keep_warm.began(flight.sent_ns)
        self._underway.add(flight, flight.sent_ns)
        if self._replicas is not None:
            flight.record.replica = self._replicas.turn(flight.index).replica + 1
        if not self._parts.shape.ahead:
            self._ring(flight.index)  # what brings it to the first is queued

    def _ring(self, index: int) -> None:
        if self._replicas is None:
            for policy_rank in self._ranks:
                policy_rank.peer.ring(index)
            return
        replica, at = self._replicas.turn(index)
        self._bear(self._ranks[replica], self._ranks[replica].peer.ring, at)

    def _at(self) -> str:
        """For the watchdog: a launch stands when the driver's queue is full."""
        at = self._loop.at()
        if not self._is_launching:
            return at
        nodes = self._parts.nodes(self._a)
        said = "kernels" if nodes is None else f"{nodes} nodes"
        return (
            f"{at}: a launch ({said} of stage A, {len(self._underway)} envelopes queued "
            "before it); one that stands says that the driver's queue is full and the device makes "
            "no progress"
        )

    # ---- one envelope: finished ----------------------------------------------------------------

    def finished(self) -> Flight | None:
        """As ``Executor``: the oldest envelope, once its events are all done."""
        if not self._underway.is_oldest_done():
            return None
        picked_ns = now_ns()
        self._newest = one = self._underway.finish(picked_ns)
        flight = one.flight
        flight.record.tPick = picked_ns
        if self._tells_provenance:  # of its times
            self._settle()
        self._a.settle(flight)
        return flight

    def result(self, flight: Flight) -> tuple[Slot, str | None]:
        """As ``Executor``."""
        result = self._queueing.result(flight.index)
        drop = self._read_header(flight, result.header.tolist())
        if drop is None and flight.epoch == self._loop.epoch and self._results.finds(result):
            drop = self._unwritten(flight, result)
        return result, drop

    def settle(self, flight: Flight, drop: str | None) -> int:
        """As ``Executor``: the device has stamped it; the rest is accounted for later."""
        assert self._newest is not None, "none was finished"
        return self._newest.passed.c1

    def _book(self, flight: Flight, at_ns: int) -> None:
        """As ``Rank0.book``, for several at once."""
        self._owed.append(flight)
        if self._tells_provenance or len(self._owed) >= UNSETTLED_MAX:
            self._account()

    def _is_account_due(self, now: int) -> bool:
        """True when several have ended, or one that ``POLL_LATEST_NS`` ago."""
        if len(self._owed) >= ACCOUNTED_AT_ONCE or not self._underway:
            return True
        return bool(self._owed) and now >= (self._owed[0].record.tPick or 0) + POLL_LATEST_NS

    def _account(self) -> None:
        """Account for all that have ended."""
        owed, commit = self._owed, self._loop.log.commit
        write_counts = self._loop.credits.write_counts
        while owed:
            record = owed.popleft().record
            if not self._tells_provenance:
                self._settle()
            assert self._before is not None, "it was settled"
            end_ns = self._before.c1
            if record.drop is None:
                record.tEmit = end_ns
            write_counts(record, end_ns)
            commit(record)

    def _settle(self) -> None:
        one, times = self._underway.settle()
        record_rank0_times(
            one.flight.record,
            times,
            self._before,
            one.credit_ns,
            one.queued_ns,
            waits_for_input=self._waits_for_input,
        )
        self._before = times

    def _unwritten(self, flight: Flight, result: Slot) -> str | None:
        """Returns why the policy's outputs may not be used, or None: it wrote them all."""
        text = self._results.unwritten(result, [owner.present for owner in flight.owners])
        if not text:
            return None
        self._loop.report_fault("B", Fault("unwritten", "unwritten", text), seq=flight.seq)
        return "unwritten"

    def _read_header(self, flight: Flight, header: list[int]) -> str | None:
        """Returns why the policy gave no actions on this envelope, or None."""
        generation, index = self._parts.shape.generation, flight.index
        if index in self._lost:
            self._lost.remove(index)
            return FAILURES[REPLICA_LOST]
        if self._replicas is not None:
            index = self._replicas.turn(index).at
        if header[INDEX] != index or header[GENERATION] != generation:
            raise ProtocolError(
                f"slot of result {flight.index} (generation {generation}) holds {header[INDEX]} "
                f"(generation {header[GENERATION]})"
            )
        return FAILURES[flight.failed or header[FAILED]]

    # ---- between envelopes ----------------------------------------------------------------------

    def wait(self, *, worked: bool) -> bool:
        """As ``Executor``: no descriptor tells the end of an event, so it is predicted.

        A rest looks at descriptors anyway: before one, nothing is looked at.
        """
        if not (self._is_lined_up or self._underway):
            self._line_up()
        if worked:
            begins, is_cut = self._loop.may_start(), self._loop.is_cut_due
            goes_on = begins or not self._underway or self._underway.is_oldest_done()
            if is_cut or (goes_on and now_ns() >= self._glance_ns):
                self._rest_until(NOW)
                return self._loop.may_start()
            if goes_on:
                return begins
        if self._underway:
            self._rest_until_done()
        else:
            self._account()
            self._loop.tidy()
            if self._loop.log.on_idle is not None:
                self._loop.log.run_when_idle()
            else:
                self._rest_until(self._due_ns(now_ns() + WAIT_MAX_NS))
        return self._loop.may_start()

    def _rest_until_done(self) -> None:
        """Until the oldest envelope should be, or is, or anything else happens.

        The end of an event has no descriptor. An envelope that is late is polled for: often, and
        less often the later it is. Samples that come by the clock are taken in shortly before, so
        that both cost one sleep.
        """
        due_ns = self._underway.oldest_due_ns() + SPARE_NS
        if not self._ahead and self._newest is not None:  # its credit is seen by the host
            due_ns -= self._newest.passed.c1 - self._newest.passed.received
            due_ns -= self._underway.lead_ns
        until_ns, poll_ns = due_ns, self._poll_due_ns
        if not self._waits_for_input:  # the next A begins when this one is done
            poll_ns = max(poll_ns, min(due_ns - INTAKE_NS, self._poll_latest_ns))
        while True:
            until_ns = max(now_ns() + POLL_NS, min(poll_ns, until_ns))
            if self._rest_until(until_ns) or not self._ahead or self._underway.is_oldest_done():
                return
            until_ns += (until_ns - due_ns) // POLL_SHARE

    def _wants_more(self) -> bool:
        return self._loop.may_begin() and self.has_room()

    def _due_ns(self, latest_ns: int) -> int:
        """Returns the latest instant at which something falls due by the clock alone."""
        source_ns = self._loop.source.next_due_ns()
        pacing_ns = self._loop.pacing.due_ns() if self._wants_more() else None
        return min(latest_ns, source_ns or latest_ns, pacing_ns or latest_ns)

    def _rest_until(self, until_ns: int) -> bool:
        """Sleep, unless that is past; then look if anything came, woke this thread, or is due.

        Returns True if something did or was.
        """
        phase = "" if self._underway else self._loop.phase  # beside envelopes nothing gets ready
        ready = self._keep_warm.wait(self._loop.waiter, until_ns - now_ns(), phase)
        now = now_ns()
        # some frames are told of by a wake alone, which may come to a wait that is over at once
        has_come = bool(ready) or self._loop.waiter.woken or self._loop.is_cut_due
        is_due = now >= self._poll_due_ns
        if has_come:
            self._poll()
        elif is_due:
            self._poll_by_clock()
        self._glance_ns = min(now + GLANCE_NS, self._poll_due_ns)
        return has_come or is_due

    def _poll(self) -> None:
        for policy_rank in self.policy_ranks:
            self._bear(policy_rank, policy_rank.peer.pump)
        self._poll_by_clock()

    def _poll_by_clock(self) -> None:
        """Look at everything but descriptors: a wait that ran out found none readable."""
        if self._loop.is_cut_due:  # it tells of the ledger
            self._account()
        self._loop.drain_inputs()
        if self._underway:  # else it was done before the rest
            self._loop.tidy()
        now = now_ns()
        self._a.ingest(now)
        if self._is_account_due(now):
            self._account()
        oldest = self._underway.oldest if self._underway else None
        for policy_rank in self.policy_ranks:
            while policy_rank.peer.inbox:
                frame = policy_rank.peer.inbox.popleft()
                self._bear(policy_rank, policy_rank.on_control_frame, frame)
            owed = oldest if self._owes(policy_rank, oldest) else None
            self._bear(policy_rank, policy_rank.check, now, owed, self._loop.result_limit_ns)
        if self._replicas is not None and not self._is_lined_up:
            self._replicas.end_waits_for_lost()
        if self._parts.clock.renew_when_due(self._account):
            self._loop.log.event("clock", **self._parts.clock.state._asdict())
        self._poll_latest_ns = now + POLL_LATEST_NS
        self._poll_due_ns = self._due_ns(self._poll_latest_ns)

    # ---- replicas that are lost -----------------------------------------------------------------

    def _owes(self, policy_rank: PolicyRankPeer, oldest: Flight | None) -> bool:
        """True when the next result is this rank's: of replicas it is one's."""
        if self._replicas is None or oldest is None:
            return True
        return self._ranks[self._replicas.turn(oldest.index).replica] is policy_rank

    def _bear(self, policy_rank: PolicyRankPeer, ask: Callable[..., None], *about: object) -> None:
        """Ask it; the run ends as ``ask`` raises, unless replicas enough are left without it."""
        try:
            ask(*about)
        except (PeerLostError, ProtocolError, WatchdogError) as error:
            if self._losses is None or self._replicas is None:
                raise
            turn, unreceived = self._replicas.turn, self._underway.unreceived()
            owed = [at for at in unreceived if self._ranks[turn(at).replica] is policy_rank]
            self._losses.accept(policy_rank, error)  # ends the waits for what it owes
            self._lost.update(owed)
            self._is_lined_up = False

    def _line_up(self) -> None:
        """Go on without the replicas that are lost: nothing is under way."""
        assert self._replicas is not None, "only replicas are lost"
        assert isinstance(self._queueing, Queueing), "chosen so"
        self._account()
        first = self._loop.started
        self._replicas.line_up(first)
        self._queueing.line_up()
        self._underway = self._none_underway(first, self._underway.early_ns)
        self._is_lined_up = True

    # ---- standalone stage times -----------------------------------------------------------------

    def measure(self, repeats: int) -> dict[str, Sequence[int]]:
        """As ``Executor``: on the device; A and C by themselves, B on envelopes sent one by one.

        On the policy ranks the next receipts and stages B stand queued already: nothing could be
        run beside them, least of all the same graphs. Of a chain B is the slowest place's, of
        replicas that of all.
        """
        durations_a, durations_c = time_a_and_c(
            self._loop, self._a, self._queueing, len(self.link.out), repeats
        )
        turns = 1 if self._replicas is None else len(self._ranks)
        each = -(-repeats // turns)
        for _ in range(each * turns):
            self._loop.run(1)
        found = [(policy_rank.rank, policy_rank.newest_b(each)) for policy_rank in self._ranks]
        durations: dict[str, Sequence[int]] = {"A": durations_a, "C": durations_c}
        if turns > 1:
            durations["B"] = tuple(chain.from_iterable(theirs for _, theirs in found))
            return durations | {f"replica{rank}": theirs for rank, theirs in found}
        durations["B"] = tuple(map(max, zip(*(theirs for _, theirs in found), strict=False)))
        places = {f"place{rank}": theirs for rank, theirs in found}
        return durations if len(places) == 1 else durations | places

    def thread_cpus(self) -> dict[str, list[int]]:
        """As ``Executor``."""
        return thread_cpus(self.policy_ranks)

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        """As ``Executor``."""
        instruct_all(self.policy_ranks, self._a.front, number, text, done)
