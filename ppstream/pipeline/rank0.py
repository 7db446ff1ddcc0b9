"""State of a run on rank 0: phases, epochs, flights and counts; the base of ``loop.py``.

Also the log lines beside envelopes: robots' reports, and the ledger each second.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from ppstream.control.watchdog import ProgressMark, is_patient, stage_b_limit_ns
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.cpus import RunDelay
from ppstream.core.phases import SERVING
from ppstream.core.user_code import Fault, FirstFaults
from ppstream.ingest.intake import stream_lines
from ppstream.pipeline.flight import Flight
from ppstream.pipeline.stage_c import NoEmitter
from ppstream.pipeline.time_accounting import LINK, TimeAccount
from ppstream.policy.unwritten import policy_fault
from ppstream.wire.robot_messages import ChunkReport

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Mapping

    from ppstream.config.schema import PipelineConfig
    from ppstream.core.waiter import Waiter
    from ppstream.ingest.intake import Intake
    from ppstream.ingest.sources import Source
    from ppstream.links.slots import Slot
    from ppstream.observe.log_writer import TimestampLog
    from ppstream.pipeline.credits import CreditLedger
    from ppstream.pipeline.pacing import Pacing
    from ppstream.pipeline.stage_a import StageA
    from ppstream.pipeline.stage_c import StageC
    from ppstream.sessions.requests import Told
    from ppstream.wire.robot_messages import Emitter

SECOND_NS: Final = NS_PER_S  # of ledger lines, and of what looks by the second
OVERDUE_NS: Final = NS_PER_S // 4  # behind it an envelope waits for them: the loop never rests
WAIT_MAX_NS: Final = NS_PER_S // 10  # no wait is longer: limits are looked at this often


def write_reports(log: TimestampLog, reports: deque[Told]) -> None:
    """Writes what robots measured of chunks and themselves (``robot_state``), by their clocks."""
    while reports:
        found = reports.popleft()
        kind = "robot" if isinstance(found, ChunkReport) else "robot_state"
        log.line(kind, **msgspec.structs.asdict(found))


def write_ledger(rank0: Rank0) -> None:
    """One ledger line: samples by stream, envelopes, and what the action rules did to chunks."""
    with rank0.counting:
        found, finished = rank0.stage_c.statistics(), rank0.finished
    rank0.log.line(
        "ledger",
        streams=stream_lines(rank0.intake),
        envelopes={
            "received": rank0.started,
            "used": found.emitted,
            "dropped": found.dropped,
            "in_flight": rank0.started - finished,
        },
        actions={
            "chunks": found.chunks,
            "clipped_chunks": found.clipped_chunks,
            "clipped_values": found.clipped_values,
            "refused": found.violations,
        },
    )


class Rank0:
    """State of one run on rank 0, owned by the thread that runs stage A.

    Only ``request_stop`` and ``request_cut`` may be called from other threads.
    """

    def __init__(
        self,
        config: PipelineConfig,
        stage_a: StageA,
        stage_c: StageC,
        credit_ledger: CreditLedger,
        log: TimestampLog,
        waiter: Waiter,
    ) -> None:
        self.config = config
        self.stage_a = stage_a
        self.stage_c = stage_c
        self.credits = credit_ledger
        self.log = log
        self.waiter = waiter
        self.phase = "starting"
        self.on_phase: list[Callable[[str], None]] = []
        self.on_warm: list[Callable[[], None]] = []  # called once, behind the warm-up
        self.on_second: list[Callable[[int], None]] = []  # called while the loop runs
        self.epoch = 0
        self.started = 0  # envelopes of the whole run: the next index
        self.finished = 0
        self.planned: int | None = None  # envelopes of this phase at most; None: not known
        self.before: tuple[int, dict[str, int]] = 0, {}  # finished before it, and dropped
        self.counting = threading.Lock()  # what ended, and how: another thread may end envelopes
        self.intake: Intake
        self.blind_reads: Mapping[str, bool] = {}  # of the policy's parts
        self.source: Source
        self.pacing: Pacing
        self.emitter: Emitter = NoEmitter()
        #: The ledger's part of an envelope that has ended, and its line; an executor may do it.
        self.book: Callable[[Flight, int], None] = self._book
        self.on_decoded: Callable[[], None] = lambda: None  # behind the stamp that ends C
        self.stop_reason: str | None = None
        self.reports: deque[Told] = deque()  # from robots, filled while the source is drained
        self.source_fds: tuple[int, ...] = ()
        self._seq = 0
        self._cuts: deque[tuple[str, int]] = deque()  # no lock: a signal may ask, too
        self._lost: deque[tuple[int, int, str]] = deque()  # replicas, told by any thread
        self._cuts_ns: dict[int, int] = {}  # when epochs without an action were asked for
        self.mark = ProgressMark("rank 0's loop", self.at)
        self.marks: tuple[ProgressMark, ...] = (self.mark,)  # of every thread of the loop
        self._faults = FirstFaults(0)
        stage_c.on_fault = self.report_fault
        stage_c.on_refused = self._report_refused
        self._drain_limit_ns = round(config.liveness.drain_s * NS_PER_S)
        self.drain_until_ns: int | None = None
        self._watchdog_ns = round(config.liveness.watchdog_s * NS_PER_S)
        self.start_ns = round(config.liveness.start_s * NS_PER_S)
        self._next_second_ns = 0
        self.unread_ns = 0  # the longest time of this second in which nothing was taken in
        self._took_in_ns = 0
        self.usual_b_ns = 0  # a moving mean where results tell it, else as it was timed alone
        self.times = TimeAccount()  # of the thread that runs stage A, as the next
        self.run_delay = RunDelay()

    @property
    def standstill_ns(self) -> int:
        """Time that a thread of the loop may stand still, as of now."""
        patient = is_patient(self.phase, self.log.record_mode)
        return self.start_ns if patient else self._watchdog_ns

    @property
    def result_limit_ns(self) -> int:
        """Time that stage B may take, as of now."""
        return stage_b_limit_ns(self.standstill_ns, self.usual_b_ns)

    def at(self) -> str:
        """Name of the next envelope, for the watchdog."""
        return f"epoch {self.epoch}, seq {self._seq}"

    # ---- asked for from outside ------------------------------------------------------------

    def request_stop(self, reason: str) -> None:
        """Start no further envelope; what is in flight is finished. Callable from a signal."""
        if self.stop_reason is None:
            self.stop_reason = reason
        self.waiter.wake()

    @property
    def is_cut_due(self) -> bool:
        """True when a cut was asked for and not made: the next ``drain_inputs`` makes it."""
        return bool(self._cuts)

    def request_cut(self, reason: str) -> None:
        """Begin a new epoch at the next safe point: no result of an older one is emitted."""
        self._cuts.append((reason, now_ns()))
        self.waiter.wake()

    def lose_replica(self, rank: int, left: int, reason: str) -> None:
        """A replica is lost, and ``left`` go on: the phase is ``degraded`` from now on."""
        self._lost.append((rank, left, reason))
        self.waiter.wake()

    # ---- phases ----------------------------------------------------------------------------

    def enter(
        self,
        phase: str,
        *,
        intake: Intake,
        source: Source,
        pacing: Pacing,
        emitter: Emitter | None = None,
        envelopes: int | None = None,
    ) -> None:
        """Change the phase between two runs of the loop: nothing is in flight now.

        ``source`` fills ``intake``; without an emitter nothing reaches anybody. The phase takes so
        many ``envelopes`` at most, if it is known.
        """
        assert self.credits.in_system == 0, f"{self.credits.in_system} envelopes in flight"
        self.follow(source.fds)
        self.intake = self.stage_a.intake = self.stage_c.intake = intake
        self.source = source
        self.pacing = pacing
        self.emitter = emitter or NoEmitter()
        self.planned, self.before = envelopes, (self.finished, dict(self.stage_c.dropped))
        self.change_phase(phase)

    def change_phase(self, phase: str) -> None:
        """Log the phase, and call ``on_phase``."""
        self.phase = phase
        self.log.event("phase", phase=phase)
        for tell in self.on_phase:
            tell(phase)

    def follow(self, fds: tuple[int, ...]) -> None:
        """Poll a new source's descriptors instead of the old one's."""
        for fd in self.source_fds:
            self.waiter.unregister(fd)
        for fd in fds:
            self.waiter.register(fd)
        self.source_fds = fds

    def cut(self, reason: str, asked_ns: int | None = None) -> None:
        """A new epoch begins: ``seq`` restarts, older results will be dropped as ``stale``."""
        self.epoch += 1
        self._seq = 0
        last = self._cuts_ns.get(self.epoch - 1)  # its first action may just have been emitted
        self._cuts_ns = {} if last is None else {self.epoch - 1: last}
        self._cuts_ns[self.epoch] = asked_ns or now_ns()
        self.log.event(
            "epoch_cut", epoch=self.epoch, reason=reason, in_flight=self.credits.in_system
        )

    # ---- one envelope ----------------------------------------------------------------------

    def next_flight(self) -> Flight:
        """Take a record for the next envelope and name it."""
        record = self.log.acquire()
        record.epoch, record.seq = self.epoch, self._seq
        record.phase, record.pacing = self.phase, self.pacing.name
        self.started, self._seq = self.started + 1, self._seq + 1
        return Flight(self.started - 1, self.epoch, record.seq, record)

    def close_flight(self, flight: Flight, drop: str | None, at_ns: int) -> None:
        """The envelope was emitted or dropped at ``at_ns``: complete its line and count it."""
        record = flight.record
        if drop is None:
            record.tEmit = at_ns
            record.age_rank0_ns = flight.emit_ns - flight.received_ns
            cut_ns = self._cuts_ns.pop(flight.epoch, None)
            if cut_ns is not None:
                since_ns = flight.emit_ns - cut_ns
                self.log.event("first_action", epoch=flight.epoch, since_cut_ns=since_ns)
        record.drop = drop
        self.book(flight, at_ns)
        with self.counting:
            self.finished += 1
            self.stage_c.count(drop)

    def _book(self, flight: Flight, at_ns: int) -> None:
        record = flight.record
        self.credits.emit(at_ns)
        self.credits.write_counts(record, at_ns)
        record.w_emit_ns = 0  # an emitter never blocks
        self.log.commit(record)

    def report_fault(self, stage: str, fault: Fault, **fields: int) -> None:
        """A fault that this rank has found: print the first of its kind, and log it."""
        if not self._faults.report(stage, fault):
            fault = fault._replace(text="")
        self.log_fault(stage, fault, 0, **fields)

    def report_policy_fault(self, flight: Flight, error: BaseException) -> None:
        """A part of the policy raised here. Raises UserExitError: it called ``sys.exit()``."""
        self.report_fault("B", policy_fault(error), seq=flight.seq)

    def log_fault(self, stage: str, fault: Fault, rank: int, **fields: int) -> None:
        """One event, before the envelope it is about is counted."""
        self.stage_c.last_fault = fault
        kind, _, what, place, text = fault
        details = {"what": what, "place": place, "text": text}
        self.log.event("fault", stage=stage, rank=rank, fault=kind, **fields, **details)

    def _report_refused(self, fault: Fault) -> None:
        """No failure of a call, so no fault: actions that are finite and within rules are asked."""
        self._faults.report("C", fault)
        self.log.event("refused", rank=0, rule=fault.kind, what=fault.what)

    def decode_and_emit(self, flight: Flight, result: Slot) -> str | None:
        """Stage C; returns why nothing was emitted, or None.

        What is emitted belongs to this epoch, and is within its lease, at ``flight.emit_ns``: the
        stamp comes first, so a thread that loses its processor behind it breaks no promise.
        """
        rows = self.stage_c.decode(flight, result.arrays)
        flight.emit_ns = now_ns()
        self.on_decoded()
        if flight.epoch != self.epoch:  # a cut came while decoding
            return "stale"
        return self.stage_c.emit(flight, rows, self.emitter)

    def record_input_waits(self, flight: Flight) -> None:
        """Record the waits before stage A, and the link's time since, in this envelope's line."""
        record, pop_ns = flight.record, self.times.pop_ns
        record.w_input_ns = pop_ns("input")
        record.w_credit_ns = pop_ns("credit")
        record.busy_link_ns = pop_ns(LINK)
        record.run_delay_ns = self.run_delay.pop_ns()
        record.w_slot_ns = 0  # slots follow from credits: nobody ever waits for one

    # ---- the loop's bookkeeping --------------------------------------------------------------

    def drain_inputs(self) -> None:
        """Receive what has arrived, and cut the epoch when asked."""
        self.mark.turns += 1
        self.take_in()

    def take_in(self) -> None:
        """As ``drain_inputs``, on a thread that says nothing of the loop's progress."""
        now = now_ns()
        self._note_unread(now)
        self.source.drain(now)
        if self._cuts:
            asked_ns = self._cuts[0][1]
            reasons = [self._cuts.popleft()[0] for _ in range(len(self._cuts))]
            self.cut(", ".join(reasons), asked_ns)
        while self._lost:
            rank, left, reason = self._lost.popleft()
            self.log.event("replica_lost", rank=rank, left=left, reason=reason)
            if self.phase == "ready":
                self.change_phase("degraded")
        if self.stop_reason is not None and self.phase in SERVING:
            self.change_phase("draining")
            self.drain_until_ns = now + self._drain_limit_ns
        if now >= self._next_second_ns + OVERDUE_NS:
            self._end_second(now)

    def _note_unread(self, now: int) -> None:
        self.unread_ns = max(self.unread_ns, now - (self._took_in_ns or now))
        self._took_in_ns = now

    def tidy(self) -> None:
        """Before a rest: write what robots have told into the log, and do what is due each second.

        That takes as long as an envelope's way through a stage: it is done while none is under way.
        """
        write_reports(self.log, self.reports)
        if self.started == self.finished and (now := now_ns()) >= self._next_second_ns:
            self._end_second(now)

    def write_ledger(self) -> None:
        """One ledger line: samples by stream, and envelopes; what robots told comes before it."""
        write_reports(self.log, self.reports)
        write_ledger(self)

    def _end_second(self, now: int) -> None:
        self._next_second_ns = max(now - OVERDUE_NS, self._next_second_ns) + SECOND_NS
        self.write_ledger()
        self._note_unread(now_ns())
        for look in self.on_second:
            look(now)
        self.unread_ns = 0
