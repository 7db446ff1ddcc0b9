"""InlineExecutor: A, B and C in turn in one process, no link: the pipeline's unpipelined twin.

It is the oracle that pipelined output must equal, the baseline of every speed-up that is claimed,
and the way to run on one device. The twin differs from the pipeline by its executor alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppstream.core.clock import now_ns
from ppstream.links.headers import FAILURES
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.host_executor import OnHost
from ppstream.policy.compiled import compiled_parts
from ppstream.policy.unwritten import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.links.slots import Slot
    from ppstream.pipeline.flight import Flight
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
    from ppstream.pipeline.stage_b import StageB


class InlineExecutor(OnHost):
    """A whole pipeline on this rank; ``envelope`` and ``result`` are its only slots."""

    def __init__(self, stage_b: StageB, *, envelope: Slot, result: Slot) -> None:
        self.policy_ranks: tuple[PolicyRankPeer, ...] = ()
        self.all_ranks: tuple[PolicyRankPeer, ...] = ()
        self._stage_b = stage_b
        self.compiled_parts = compiled_parts(stage_b)
        self._envelope = envelope
        self._result = result
        self._answered: Flight | None = None
        self._unaccounted: Flight | None = None  # whose stage A has ended
        self._failed = 0  # which of FAILURES
        self._previous_tb1 = 0

    @property
    def in_flight(self) -> int:
        """As ``Executor``."""
        return self._answered is not None

    def has_room(self) -> bool:
        """As ``Executor``."""
        return self._answered is None

    def begin(self, flight: Flight, ends_ns: Sequence[int | None]) -> None:
        """As ``Executor``: stages A and B."""
        self._cost_a.enter()
        self._loop.stage_a.build(flight, self._envelope, ends_ns)
        self._cost_a.end()
        self._unaccounted = flight
        record, ledger = flight.record, self._loop.credits
        flight.sent_ns = record.tSend = now_ns()
        ledger.commit(flight.sent_ns)
        self._failed = self._run_policy(flight)
        self.account()
        tb0 = record.tSend = max(record.tSend, record.tA1 or 0)  # a GPU's A ends while B is queued
        tb1 = record.tRecv = now_ns()
        ledger.receive(tb1)
        self._times.stage(tb0, tb1)
        self._loop.usual_b_ns += (tb1 - tb0 - self._loop.usual_b_ns) >> 3
        record.B_ns = record.residence_ns = tb1 - tb0
        record.wait_input_ns = record.wait_output_ns = 0
        record.idle_ns = max(0, tb0 - self._previous_tb1) if self._previous_tb1 else 0
        self._previous_tb1 = tb1
        self._answered = flight

    def account(self) -> None:
        """Account for stage A, unless that is done: behind it, or while a GPU runs the policy."""
        if self._unaccounted is not None:
            flight, self._unaccounted = self._unaccounted, None
            self._account_a(flight)

    def _run_policy(self, flight: Flight) -> int:
        if nvtx_ranges.on:
            nvtx_ranges.B.push(flight.epoch, flight.seq)
        try:
            self._stage_b(flight.epoch, self._envelope, self._result)
        except BaseException as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            self._loop.report_policy_fault(flight, error)
            return failure(error)
        finally:
            if nvtx_ranges.on:
                nvtx_ranges.B.pop()
        return 0

    def finished(self) -> Flight | None:
        """As ``Executor``."""
        flight, self._answered = self._answered, None
        return flight

    def result(self, flight: Flight) -> tuple[Slot, str | None]:
        """As ``Executor``."""
        self._begin_c(flight)
        return self._result, FAILURES[self._failed]

    def settle(self, flight: Flight, drop: str | None) -> int:
        """As ``Executor``."""
        ended_ns = super().settle(flight, drop)
        self._stage_b.settle()
        return ended_ns

    def measure(self, repeats: int) -> dict[str, Sequence[int]]:
        """As ``Executor``."""
        return self._loop.time_in_turn(repeats)

    def instruct(self, number: int, text: str, done: Callable[[int, str], None]) -> None:
        """As ``Executor``."""
        done(number, self._stage_b.instruct(number, text))

    def _poll_after_wait(self, ready: Sequence[int]) -> bool:
        is_fresh = super()._poll_after_wait(ready)
        self._loop.stage_a.take_in()
        return is_fresh

    def _is_idle(self) -> bool:
        return self._answered is None and self._loop.may_begin()

    def _wait_cause(self) -> str:
        return "input"
