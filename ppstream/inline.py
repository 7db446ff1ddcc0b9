"""The unpipelined twin of ``stage0.py``: A, B and C in turn in one process, no link.

It is the oracle that pipelined output must equal, the baseline of every speed-up that is claimed,
and the way to run on one device. Same stages, same records, no overlap.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from ppstream.clock import now_ns
from ppstream.flight import Flight
from ppstream.rank0 import Rank0

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.slots import Slot
    from ppstream.stage1 import StageB


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

    def run(self, envelopes: int | None = None) -> None:
        self._start_limit = None if envelopes is None else self.started + envelopes
        while self.may_begin():
            self.wait_for_work()
            if self.pacing.due(now_ns()):
                flight = self.start()
                failed = self.infer(flight)
                self.finish(flight, failed=failed)

    def start(self) -> Flight:
        flight = self.next_flight()
        self.stage_a.build(flight, self.envelope.tensors, self.pacing.started())
        self.book_input_waits(flight)
        return flight

    def infer(self, flight: Flight) -> bool:
        """Stage B; returns whether the policy failed."""
        record = flight.record
        tb0 = record.tSend = now_ns()
        self.credits.commit(tb0)
        failed = False
        try:
            self.stage_b(flight.epoch, self.envelope, self.result.tensors)
        except Exception as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            failed = True
            text = "".join(traceback.format_exception(error))
            self.log.event("fault", stage="B", seq=flight.seq, fault="exception", text=text)
        tb1 = record.tRecv = now_ns()
        self.credits.receive(tb1)
        idle_ns = max(0, tb0 - self._previous_tb1) if self._previous_tb1 else 0
        self._previous_tb1 = tb1
        self.book_stage_b(record, [tb0, tb1, tb1 - tb0, 0, 0, 0, idle_ns, tb1 - tb0, 0])
        return failed

    def finish(self, flight: Flight, *, failed: bool) -> None:
        flight.record.tDecode = now_ns()
        self.credits.begin_decode(flight.record.tDecode)
        drop = "policy_error" if failed else self.decode_and_emit(flight, self.result)
        self.close_flight(flight, drop)

    def look(self) -> None:
        self.take_in()

    def is_idle(self) -> bool:
        return self.may_begin() and not self.pacing.due(now_ns())

    def wait_cause(self) -> str:
        return "input"

    def idle_slots(self) -> tuple[Slot, Slot]:
        return self.envelope, self.result

    def measure_b(self, repeats: int) -> Sequence[int]:
        durations = []
        for _ in range(repeats):
            began = now_ns()
            self.stage_b(self.epoch, self.envelope, self.result.tensors)
            durations.append(now_ns() - began)
        return durations
