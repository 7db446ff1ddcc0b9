"""Stage A: the newest window of every row, resampled straight into an envelope's slot."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.links.headers import FAILED
from ppstream.links.slots import SlotLayout, new_slots
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.flight import name_rows, owners_of
from ppstream.policy.batch_sizes import PRESENT
from ppstream.policy.compiled import compiled_parts
from ppstream.policy.unwritten import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.core.simulated_delay import Delay
    from ppstream.ingest.intake import Intake
    from ppstream.links.slots import Slot
    from ppstream.pipeline.flight import Flight
    from ppstream.pipeline.stage_b import StageB
    from ppstream.recording.items import RowMark
    from ppstream.recording.recorder import Recorder


AHEAD_NS: Final = 3 * NS_PER_MS // 10  # the window is what cools soonest
TIMED_CALLS: Final = 3
LONG_FRONT_MS: Final = 2.0  # longer ones get a thread of their own unless the user decides


class FrontParts:
    """The parts of a policy at place 0: from the window to the tensors of an envelope.

    Args:
        stage: runs them.
        window: a slot of this process alone, for what they read; zeros.
        part_times: mean duration of each of them in the newest calls.

    Attributes:
        carry_out: makes the call and returns what it raised, here or on a thread of its own;
            what else goes wrong meanwhile is raised and no fault of the policy.
    """

    def __init__(
        self, stage: StageB, window: Slot, part_times: Callable[[int], dict[str, int]]
    ) -> None:
        self._stage = stage
        self.compiled_parts = compiled_parts(stage)
        self.part_times = part_times
        self.window = window
        self.on_fault: Callable[[Flight, BaseException], None]  # set before the first run
        self.carry_out: Callable[[Callable[[], None]], BaseException | None] = _here

    def shortest_ns(self, envelope: Slot) -> int:
        """Times a few calls on zeros with every row present, before the first envelope.

        Raises what a part raises.
        """
        self.window.tensors[PRESENT].fill_(1)
        durations_ns = []
        for _ in range(TIMED_CALLS):
            begun_ns = now_ns()
            self._stage(-1, self.window, envelope)  # no run's epoch: state is reset behind it
            durations_ns.append(now_ns() - begun_ns)
        return min(durations_ns)

    def run(self, flight: Flight, envelope: Slot) -> int:
        """Returns the header's ``failed``: nothing behind runs on what was not made."""
        error = self.carry_out(partial(self._stage, flight.epoch, self.window, envelope))
        if error is None:
            return 0
        self.on_fault(flight, error)
        return failure(error)

    def instruct(self, number: int, text: str) -> str:
        """As ``StageB``."""
        return self._stage.instruct(number, text)


def _here(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
        return error
    return None


class StageA:
    """Cuts windows of its ``intake``, runs front parts; owned by the thread that owns the input.

    Attributes:
        intake: changed between phases.
        front: the policy's parts at place 0; None: there are none.
    """

    ahead_ns = AHEAD_NS  # of an envelope that is expected ``rehearse`` is over
    intake: Intake
    recorder: Recorder | None = None  # told of every window
    front: FrontParts | None = None

    def __init__(self, config: PipelineConfig, simulated: Delay) -> None:
        self._simulated = simulated
        self._scratch: Slot | None = None  # of dry runs
        self._ends: list[int] | None = None  # of the newest window, until it is accounted for
        self._lease_ns = round(config.actions.lease_ms * NS_PER_MS)

    def build(self, flight: Flight, slot: Slot, ends_ns: Sequence[int | None]) -> None:
        """Fill the slot, from ``tA0`` to ``tA1``; ``settle`` comes behind it.

        ``ends_ns`` fixes the window end of each row; None means the newest reference stamp.
        """
        record = flight.record
        record.tA0 = now_ns()
        if nvtx_ranges.on:
            nvtx_ranges.A.push(flight.epoch, flight.seq)
        self._fill(flight, slot, ends_ns)
        if nvtx_ranges.on:
            nvtx_ranges.A.pop()
        record.tA1 = now_ns()

    def _fill(self, flight: Flight, slot: Slot, ends_ns: Sequence[int | None]) -> None:
        front = self.front
        window = slot if front is None else front.window
        self._ends = self.intake.cutter.write(window.tensors, ends_ns, self._lease_ns)
        if self._simulated.takes_time:
            self._simulated.spend()
        if front is None:
            slot.words[FAILED] = 0
        else:
            self.settle(flight)  # rows may get other owners while a part runs
            slot.words[FAILED] = front.run(flight, slot)

    def take_in(self) -> None:
        """Take over samples that are new in the rings, where windows are not cut from these."""

    def rehearse(self) -> None:
        """Cut a window into memory that nobody reads; nothing is accounted for."""
        cutter = self.intake.cutter
        if self._scratch is None:
            layout = SlotLayout((), cutter.inputs, len(self.intake.rows))
            (self._scratch,) = new_slots(layout, 1)
        cutter.rehearse(self._scratch.tensors)

    def settle(self, flight: Flight) -> None:
        """Fill the flight's owners and their names, its arrival and input ages; record it.

        Before anything else is taken in: the rows are still those of the window.
        """
        if (ends := self._ends) is None:
            return
        info = self.intake.cutter.account(ends)
        self._ends, record = None, flight.record
        flight.received_ns = record.tRx = info.newest_rx_ns
        flight.owners = owners_of(self.intake.rows, info.window_end_ns, self._lease_ns)
        record.input_age_ns = info.input_age_ns
        name_rows(flight)
        if self.recorder is not None:
            tell_of_windows(self.recorder, flight)


def tell_of_windows(
    recorder: Recorder, flight: Flight, marks: Sequence[RowMark] | None = None
) -> None:
    """Record whose windows an envelope holds; ``marks`` as ``Recorder.windows``."""
    record = flight.record
    name = flight.epoch, flight.seq, record.phase or ""
    recorder.windows(record.tA0 or 0, *name, flight.owners, marks)
