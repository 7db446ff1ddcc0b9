"""The unpipelined twin of ``stage0.py``: A, B and C in turn in one process, no link.

It is the oracle that pipelined output must equal, the baseline of every speed-up that is claimed,
and the way to run on one device. Same stages, same records, no overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppstream.control.watchdog import stage_b_limit_ns, watched
from ppstream.core.clock import now_ns, thread_cpu_ns
from ppstream.links.headers import FAILURES
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.flight import Flight
from ppstream.pipeline.policy_rank import policy_fault
from ppstream.pipeline.rank0 import Rank0
from ppstream.policy.unwritten import failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppstream.links.slots import Slot
    from ppstream.pipeline.stage_b import StageB


class Inline(Rank0):
    """A whole pipeline on this rank; ``envelope`` and ``result`` are its only slots."""

    def __init__(
        self,
        *parts: Any,
        stage_b: StageB,
        envelope: Slot,
        result: Slot,
    ) -> None:
        super().__init__(*parts)
        self.stage_b = stage_b
        self.envelope = envelope
        self.result = result
        self._previous_tb1 = 0
        self._usual_b_ns = 0

    @property
    def standstill_ns(self) -> int:
        return stage_b_limit_ns(super().standstill_ns, self._usual_b_ns)

    @watched
    def run(self, envelopes: int | None = None) -> None:
        self._start_limit = None if envelopes is None else self.started + envelopes
        self.times.end()
        self.run_delay.begin()
        while self.may_begin():
            self.wait_for_work()
            if self.pacing.due(now_ns()):
                flight = self.start()
                self.finish(flight, self.infer(flight))

    def start(self) -> Flight:
        flight = self.next_flight()
        self.times.begin()
        self.stage_a.build(flight, self.envelope.tensors, self.pacing.started())
        self.book_input_waits(flight)
        return flight

    def infer(self, flight: Flight) -> str | None:
        """Stage B; returns why the policy gave no actions, or None."""
        record = flight.record
        tb0 = record.tSend = now_ns()
        self.credits.commit(tb0)
        failed = self.run_policy(flight.epoch, flight.seq)
        tb1 = record.tRecv = now_ns()
        self._usual_b_ns += (tb1 - tb0 - self._usual_b_ns) >> 3
        self.credits.receive(tb1)
        record.B_ns = record.residence_ns = tb1 - tb0
        record.wait_input_ns = record.wait_output_ns = 0
        record.idle_ns = max(0, tb0 - self._previous_tb1) if self._previous_tb1 else 0
        self._previous_tb1 = tb1
        return FAILURES[failed]

    def run_policy(self, epoch: int, seq: int) -> int:
        """Returns which of ``FAILURES`` it was."""
        if nvtx_ranges.on:
            nvtx_ranges.B.push(epoch, seq)
        try:
            self.stage_b(epoch, self.envelope, self.result)
        except BaseException as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            self.tell_fault("B", policy_fault(error), seq=seq)
            return failure(error)
        finally:
            if nvtx_ranges.on:
                nvtx_ranges.B.pop()
        return 0

    def finish(self, flight: Flight, drop: str | None) -> None:
        cpu_ns = thread_cpu_ns()
        flight.record.tDecode = now_ns()
        self.credits.begin_decode(flight.record.tDecode)
        if nvtx_ranges.on:
            nvtx_ranges.C.push(flight.epoch, flight.seq)
        drop = drop or self.decode_and_emit(flight, self.result)
        if nvtx_ranges.on:
            nvtx_ranges.C.pop()
        flight.record.cpu_c_ns = thread_cpu_ns() - cpu_ns
        flight.record.w_result_ns = 0  # it is there at once
        ended_ns = self.times.end(at_ns=flight.emit_ns if drop is None else None)
        self.close_flight(flight, drop, ended_ns)

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        done(number, self.stage_b.instruct(number, text))

    def look(self) -> None:
        self.take_in()

    def is_idle(self) -> bool:
        return self.may_begin() and not self.pacing.due(now_ns())

    def wait_cause(self) -> str:
        return "input"
