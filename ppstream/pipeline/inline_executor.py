"""InlineExecutor: A, B and C in turn in one process, no link: the pipeline's unpipelined twin.

It is the oracle that pipelined output must equal, the baseline of every speed-up that is claimed,
and the way to run on one device. The twin differs from the pipeline by its executor alone.

While a long stage B runs, samples are taken in: else the newest ones would wait for it, or find no
room at their sender. Where the policy has only queued its work on a GPU, the loop's own thread does
it; where it holds that thread, another one. The rows and all that the loop keeps are that thread's
then, and the policy's is the envelope alone: nothing belongs to both.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from ppstream.control.watchdog import ProgressMark
from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.links.headers import FAILURES
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.host_executor import OnHost
from ppstream.pipeline.keep_warm import EARLY_NS, LATE_NS
from ppstream.pipeline.rank0 import WAIT_MAX_NS
from ppstream.policy.compiled import compiled_parts
from ppstream.policy.unwritten import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ppstream.links.slots import Slot
    from ppstream.pipeline.flight import Flight
    from ppstream.pipeline.loop import Rank0Loop
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
    from ppstream.pipeline.stage_b import StageB
    from ppstream.policy.host_staged import Busy

LONG_B_NS: Final = 20 * NS_PER_MS  # that it usually holds the thread: the other costs 0.5 ms
QUEUED_B_NS: Final = 2 * NS_PER_MS  # of a usual one on a GPU: a quicker one is waited for at once
LOOK_NS: Final = 100_000  # so often it is asked whether a GPU is done sooner than usual,
SOON_NS: Final = 20_000  # so often when it should be,
LATE_SHARE: Final = 8  # and in such shares of its lateness, if these are longer
LOOK_MIN_NS: Final = NS_PER_MS  # between two looks at a source that is due by the clock


class InlineExecutor(OnHost):
    """A whole pipeline on this rank; ``envelope`` and ``result`` are its only slots.

    ``begin_thread`` is called first by the thread that takes in while the policy holds the loop's.
    """

    def __init__(
        self,
        stage_b: StageB,
        *,
        envelope: Slot,
        result: Slot,
        begin_thread: Callable[[], None] | None = None,
    ) -> None:
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
        self._begin_thread = begin_thread
        self._is_b_over = True
        self._computed: Flight | None = None  # by the policy, now
        self._let_go_ns = 0  # when the policy of that one had queued its work
        self._usual_held_ns = 0  # that a policy holds the thread
        self._looked_ns = 0  # when it last took in beside a device
        self._input_failure: BaseException | None = None
        self._told: list[tuple[int, str, Callable[[int, str], None]]] | None = None
        self._mark_input = ProgressMark("the input thread")

    def attach(self, loop: Rank0Loop) -> None:
        """As ``Executor``."""
        super().attach(loop)
        loop.marks = (loop.mark, self._mark_input)

    @contextmanager
    def running(self) -> Iterator[None]:
        """As ``Executor``: with the thread that takes in, once it is needed."""
        pool = ThreadPoolExecutor(1, "input", self._begin_thread)
        with super().running(), pool as self._pool:
            yield

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
        is_held = self._is_thread_held()
        if is_held:
            self.account()  # rows may get other owners while it runs
        flight.sent_ns = record.tSend = now_ns()
        ledger.commit(flight.sent_ns)
        self._computed, self._let_go_ns, self._told = flight, 0, []
        with self._input_taken_in() if is_held else nullcontext():
            error = self._run_policy(flight)
            tb1 = record.tRecv = now_ns()
        self._computed = None
        if self._input_failure is not None:
            raise self._input_failure
        self._tell()
        held_ns, usual_ns = (self._let_go_ns or tb1) - flight.sent_ns, self._usual_held_ns
        self._usual_held_ns += (held_ns - usual_ns) >> 3 if usual_ns else held_ns
        self._failed = 0 if error is None else self._report(flight, error)
        self.account()
        tb0 = record.tSend = max(record.tSend, record.tA1 or 0)  # a GPU's A ends while B is queued
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

    def _run_policy(self, flight: Flight) -> BaseException | None:
        if nvtx_ranges.on:
            nvtx_ranges.B.push(flight.epoch, flight.seq)
        try:
            self._stage_b(flight.epoch, self._envelope, self._result)
        except BaseException as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            return error
        finally:
            if nvtx_ranges.on:
                nvtx_ranges.B.pop()
        return None

    def _report(self, flight: Flight, error: BaseException) -> int:
        self._loop.report_policy_fault(flight, error)
        return failure(error)

    def _is_thread_held(self) -> bool:
        """True when the policy is to hold the thread for long, or nothing is known of it: a first
        call may compile for minutes.
        """
        usual_b_ns = self._loop.usual_b_ns
        held_ns = self._usual_held_ns or usual_b_ns
        return not usual_b_ns or (usual_b_ns > LONG_B_NS and held_ns > LONG_B_NS)

    def await_device(self, device: Busy) -> None:
        """Return when a GPU has done what the policy has queued; account for stage A meanwhile.

        Where that usually takes long, and no other thread does, samples are taken in, too.
        """
        self.account()
        self._let_go_ns = now_ns()
        flight, usual_b_ns = self._computed, self._loop.usual_b_ns
        if flight is not None and self._is_b_over and usual_b_ns >= QUEUED_B_NS:
            began_ns = max(flight.sent_ns, flight.record.tA1 or 0)
            self._take_in_beside(device, began_ns, began_ns + usual_b_ns)
        device.synchronize()

    def _take_in_beside(self, device: Busy, began_ns: int, due_ns: int) -> None:
        """Until the device is done, as a rule when it is due: then this thread is awake and warm.

        What goes wrong here is no fault of the policy, in whose call this is: ``begin`` raises it.
        """
        while self._input_failure is None and not device.query():
            self._look_or_fail(began_ns, due_ns)

    def _look_or_fail(self, began_ns: int, due_ns: int) -> None:
        try:
            self._look(began_ns, due_ns)
        except BaseException as error:  # noqa: BLE001 - raised where the policy's call is over
            self._input_failure = error

    def _look(self, began_ns: int, due_ns: int) -> None:
        loop, waiter, warm = self._loop, self._waiter, self._keep_warm
        now, ready_ns = now_ns(), warm.ready_ns(began_ns, due_ns, loop.phase)
        if due_ns - EARLY_NS <= now < due_ns + LATE_NS:
            came = waiter.wait_awake(SOON_NS, SOON_NS)
        else:
            rest_ns = (ready_ns or due_ns - EARLY_NS) - now
            if rest_ns <= 0:
                rest_ns = max(SOON_NS, (now - due_ns) // LATE_SHARE)
            came = waiter.wait(min(LOOK_NS, rest_ns))
        if came or waiter.woken or now - self._looked_ns >= LOOK_MIN_NS:
            self._looked_ns = now
            loop.take_in()
        if ready_ns is not None and now_ns() >= ready_ns:
            warm.run()

    def _tell(self) -> None:
        """Have the policy take in the texts that came while it was computing."""
        found, self._told = self._told or (), None
        for told in found:
            self.instruct(*told)
        if found:
            self._waiter.wake()  # robots wait for what became of them

    @contextmanager
    def _input_taken_in(self) -> Iterator[None]:
        """Inside another thread takes in what comes. Raises what that thread has raised."""
        self._is_b_over = False
        taking = self._pool.submit(self._take_in)
        try:
            yield
        finally:
            self._is_b_over = True
            self._waiter.wake()
            taking.result()

    def _take_in(self) -> None:
        loop, mark = self._loop, self._mark_input
        with mark:
            while not self._is_b_over:
                mark.turns += 1
                due_ns = loop.source.next_due_ns()
                wait_ns = WAIT_MAX_NS if due_ns is None else due_ns - now_ns()
                self._waiter.wait(min(WAIT_MAX_NS, max(LOOK_MIN_NS, wait_ns)))
                loop.take_in()

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
        if self._told is None:
            done(number, self._stage_b.instruct(number, text))
        else:
            self._told.append((number, text, done))

    def _poll_after_wait(self, ready: Sequence[int]) -> bool:
        is_fresh = super()._poll_after_wait(ready)
        self._loop.stage_a.take_in()
        return is_fresh

    def _is_idle(self) -> bool:
        return self._answered is None and self._loop.may_begin()

    def _wait_cause(self) -> str:
        return "input"
