"""THE loop of rank 0 on a GPU: device-ordered, so the host runs ahead and waits for nothing.

For each envelope the host queues, on four streams, everything that will happen to it:

    stage A      wait for the credit · A into a slot
    sending      wait for A · copy the slot to the policy rank, count it
    receiving    wait for the peer's count · wait for a place in D_out
    stage C      wait for the receipt · copy the result to pinned memory

A credit is the receipt of the result ``d_in`` envelopes earlier, an event of this device. Freshness
(``credit = "before_window"``): A waits for it, and reads the rings after. Throughput
(``"after_window"``): the copy waits for it, A runs one envelope ahead, and its data ages meanwhile.

The host finishes envelopes in order once their last event is done: books stamps, decodes, emits.
``tEmit`` is the end of C on the device; the age of what it emits is counted to the true emit. The
state of a run is ``rank0.py``'s, as for the CPU's loop in ``stage0.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ppstream.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.ends import PeerLeftError
from ppstream.errors import ProtocolError, WatchdogError
from ppstream.flight import Flight, name_rows
from ppstream.headers import FAILED
from ppstream.link_device import AHEAD
from ppstream.meeting import receive
from ppstream.messages import Goodbye, Instructed, Instruction, Measure, Measured, PolicyFault
from ppstream.rank0 import WAIT_MAX_NS, Rank0
from ppstream.slots import GENERATION, INDEX
from ppstream.stage0_queueing import Queueing
from ppstream.stage_events import Rank0Times, book_rank0
from ppstream.timestamps import EnvelopeRecord
from ppstream.underway import Underway
from ppstream.watchdog import watched

if TYPE_CHECKING:
    from ppstream.stage0_queueing import Parts
    from ppstream.stage_a_device import DeviceStageA

LOOK_NS: Final = 100_000  # with work at hand, inputs are looked at this often
POLL_NS: Final = 20_000  # an event has no descriptor: its end is looked for this often
RESULT_SPARE_NS: Final = 2 * NS_PER_S  # the policy rank notices first: it knows more
MEASURE_LIMIT_NS: Final = 120 * NS_PER_S


class Stage0Device(Rank0):
    """Rank 0 on a GPU with a policy rank behind ``parts.link``."""

    def __init__(self, *rank0_parts: Any, parts: Parts) -> None:
        super().__init__(*rank0_parts)
        self.link, self.peer = parts.link, parts.peer
        self._parts = parts
        self._a: DeviceStageA = self.stage_a  # type: ignore[assignment]
        self._is_fresh = self.config.pipeline.credit == "before_window"
        shape = self.config.pipeline
        self._ahead = shape.d_in + (AHEAD if self._a.reads_late or not self._is_fresh else 0)
        ring = self._ahead + len(self.link.into) + 1
        self._underway = Underway(self.credits, parts.clock, ring)
        self._queueing = Queueing(parts, self._a, self._underway, is_fresh=self._is_fresh)
        self._before: Rank0Times | None = None
        self._looked_ns = 0
        self._instructed: Callable[[int, str], None]  # set before anything can be answered
        self._frozen_ns = round(self.config.liveness.frozen_ms * NS_PER_MS)
        self.waiter.register(self.peer.fileno())

    @watched
    def run(self, envelopes: int | None = None) -> None:
        self._start_limit = None if envelopes is None else self.started + envelopes
        self._before = None
        self.look()
        while self.may_begin() or self._underway:
            moved = False
            while self.may_start():
                self.start()
                moved = True
            if self._underway.is_oldest_done():
                self.finish()
                moved = True
            if not moved:
                self.wait()
            if not moved or now_ns() - self._looked_ns > LOOK_NS:
                self.look()
        if self.phase == "bring-up":
            self.measure_b(0)  # what the policy rank knows of these envelopes is in its file

    # ---- one envelope: queued ------------------------------------------------------------------

    def may_start(self) -> bool:
        """Whether stage A may be queued: wanted, in bounds, and due."""
        return (
            len(self._underway) < self._limit() and self.may_begin() and self.pacing.due(now_ns())
        )

    def _limit(self) -> int:
        """Envelopes that may be under way: further ones only where input is never waited for."""
        if self.pacing.name == "saturated":
            return self._ahead
        return min(self._ahead, self.credits.d_in + 1)

    def start(self) -> None:
        """Queue everything that will happen to the next envelope; nothing here waits."""
        flight = self.next_flight()
        flight.sent_ns = now_ns()  # for the watchdog; the log has the device's
        self._queueing.envelope(flight, self.pacing.started())
        self._underway.add(flight, now_ns())

    # ---- one envelope: finished ----------------------------------------------------------------

    def finish(self) -> None:
        """Book, decode and emit the oldest envelope, whose events are all done."""
        flight, times, credit_ns, queued_ns = self._underway.finish()
        record, result = flight.record, self._queueing.result(flight.index)
        waits = self.pacing.name != "saturated"
        book_rank0(record, times, self._before, credit_ns, queued_ns, waits_for_input=waits)
        self._before = times
        self._a.settle(flight)
        name_rows(flight)
        failed = self._read_header(flight, result.header.tolist())
        if flight.epoch != self.epoch:
            drop: str | None = "stale"
        elif failed:
            drop = "policy_error"
        else:
            drop = self.decode_and_emit(flight, result)
        self._close(record, flight, drop, times)

    def _read_header(self, flight: Flight, header: list[int]) -> bool:
        """Returns whether the policy failed on this envelope."""
        generation = self._parts.shape.generation
        if header[INDEX] != flight.index or header[GENERATION] != generation:
            raise ProtocolError(
                f"slot of result {flight.index} (generation {generation}) holds {header[INDEX]} "
                f"(generation {header[GENERATION]})"
            )
        return bool(header[FAILED])

    def _close(
        self, record: EnvelopeRecord, flight: Flight, drop: str | None, times: Rank0Times
    ) -> None:
        """As Rank0.close_flight, at the device's time of the emit."""
        at_ns = times.c1
        if drop is None:
            record.tEmit = at_ns
            record.age_rank0_ns = now_ns() - flight.received_ns
        record.drop = drop
        self.credits.emit(at_ns)
        self.credits.book(record, at_ns)
        self.log.commit(record)
        self.finished += 1
        self.stage_c.count(drop)

    # ---- between envelopes ----------------------------------------------------------------------

    def look(self) -> None:
        self._looked_ns = now_ns()
        self.take_in()
        self._a.ingest(now_ns())
        self.peer.pump()
        while self.peer.inbox:
            self.take_frame(self.peer.inbox.popleft())
        self.check_peer(now_ns())
        if self._parts.clock.renew_when_due():
            self.log.event("clock", **self._parts.clock.state._asdict())

    def is_idle(self) -> bool:
        return not self.may_start()

    def wait_cause(self) -> str:
        return "result" if self._underway else "input"

    def wait(self) -> None:
        """Sleep until something can be looked at again."""
        if self._underway:
            self.waiter.wait(POLL_NS)
            return
        dues = (self.source.next_due_ns(), self.pacing.due_ns())
        now = now_ns()
        limits = [max(0, due - now) for due in dues if due is not None]
        self.waiter.wait(min([WAIT_MAX_NS, *limits]))

    def take_frame(self, frame: object) -> None:
        """One control frame that is not a heartbeat."""
        match frame:
            case PolicyFault():
                self.stage_c.last_fault = frame.kind
                self.log.event("fault", stage="B", fault=frame.kind, text=frame.text)
            case Instructed():
                self._instructed(frame.id, frame.fault)
            case Goodbye():
                raise PeerLeftError(frame)

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        self._instructed = done
        self.peer.send(Instruction(number, text))

    def check_peer(self, now: int) -> None:
        """Raise when the policy rank is silent, or an envelope overdue, for longer than allowed."""
        warming = self.phase == "warming"
        if not warming:
            self.peer.check_alive(now, self._frozen_ns)
        if not self._underway:
            return
        if self._drain_until_ns is not None and now > self._drain_until_ns:
            raise WatchdogError(
                f"{len(self._underway)} envelopes are under way {self.config.liveness.drain_s:g} s "
                "after the run was asked to stop; raise liveness.drain_s if stage B takes so long"
            )
        limit_ns = RESULT_SPARE_NS + self.standstill_ns
        if now - self._underway.oldest.sent_ns > limit_ns:
            raise WatchdogError(
                f"envelope {self._underway.oldest.index} is not through after "
                f"{limit_ns / NS_PER_S:.0f} s though the policy rank's heart beats: a device or "
                "the link is stuck"
            )

    # ---- standalone stage times -----------------------------------------------------------------

    def measure_own(self, repeats: int) -> tuple[list[int], list[int]]:
        """Device times of stage A and of stage C alone; nothing is in flight."""
        newest = (None,) * len(self.intake.rows)
        index = self.started
        marks = self._underway.marks(index)
        durations_a, durations_c = [], []
        for _ in range(repeats):
            self.take_in()
            self._a.ingest(now_ns())
            flight = Flight(index, self.epoch, 0, EnvelopeRecord())
            self._queueing.stage_a(flight, marks, newest)
            marks.a1.wait()
            self._a.settle(flight)
            durations_a.append(marks.a1.ns_since(marks.a0))
            self._queueing.stage_c(index, marks)
            marks.c1.wait()
            durations_c.append(marks.c1.ns_since(marks.c0))
        return durations_a, durations_c

    def measure_b(self, repeats: int) -> Sequence[int]:
        """Device times of stage B on envelopes that are sent one by one.

        On the policy rank the next receipts and stages B stand queued already: nothing could be
        run beside them, least of all the same graphs. With 0 it only waits until that rank's log
        is complete.
        """
        for _ in range(repeats):
            self.run(1)
        self.peer.send(Measure(repeats))
        frame = receive(self.peer, MEASURE_LIMIT_NS)
        while isinstance(frame, PolicyFault):
            self.take_frame(frame)
            frame = receive(self.peer, MEASURE_LIMIT_NS)
        if not isinstance(frame, Measured):
            raise ProtocolError(f"expected Measured from the policy rank, got {frame}")
        return frame.durations_ns
