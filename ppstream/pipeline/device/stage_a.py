"""Stage A for a GPU: what the device-ordered loop asks of it; windows of rings on the GPU, and the
policy's parts behind them.

Rings are read when the device comes to it, however far ahead the host runs.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.simulated_delay import Delay
from ppstream.cuda.linear_graph import CapturedPart
from ppstream.ingest.device.window import DeviceWindow
from ppstream.links.headers import FAILED, EnvelopeStatus
from ppstream.pipeline.flight import Owner, RowNames, name_rows, names_of
from ppstream.pipeline.stage_a import StageA, tell_of_windows
from ppstream.policy.compiled import compiled_parts
from ppstream.policy.unwritten import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.cuda.driver import CudaStream
    from ppstream.cuda.linear_graph import GraphPart
    from ppstream.ingest.device.window_records import TakenWindow
    from ppstream.ingest.intake import Intake
    from ppstream.ingest.rows import RowInput
    from ppstream.links.device_link import DeviceSlot, Headers
    from ppstream.links.slots import Slot
    from ppstream.pipeline.device.stage_b import DeviceStageB
    from ppstream.pipeline.flight import Flight
    from ppstream.policy.batch_sizes import BatchSizes
    from ppstream.recording.items import RowMark
    from ppstream.recording.recorder import Recorder


#: Of an envelope that is expected a rehearsal is over: from cold caches it takes some 0.3 ms.
AHEAD_NS: Final = 7 * NS_PER_MS // 10

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class DeviceStageA(Protocol):
    """Stage A on a device.

    Attributes:
        intake: whose rings it reads; changed between phases, while nothing is queued.
        front: the policy's parts at place 0; None: there are none.
        front_ns: how long they take on the device.
        nodes: kernels, copies and memsets that it queues; None: not known.
        recorder: told of every window.
    """

    intake: Intake
    recorder: Recorder | None

    @property
    def front(self) -> DeviceFrontParts | None: ...

    @property
    def front_ns(self) -> int: ...

    @property
    def nodes(self) -> int | None: ...

    def ingest(self, now_ns: int) -> bool:
        """Take over the samples that are new in the rings; never waits. False: not all yet."""

    def rehearse(self) -> None:
        """Bring what stage A takes into the caches: an envelope is expected."""

    def graph(self, slot: DeviceSlot) -> GraphPart | None:
        """Returns stage A into ``slot`` for a larger graph, until the intake changes; None: some
        of it is queued by calls.
        """

    def enqueue(
        self,
        flight: Flight,
        slot: DeviceSlot,
        ends_ns: Sequence[int | None],
        launch: Callable[[], None] | None = None,
    ) -> int:
        """Queue stage A into ``slot`` on the current stream; it reads the rings when it runs.

        With ``launch`` that is what queues it: the start of a graph that holds ``graph(slot)``.
        Returns the header's ``failed``: a part of the policy raised while it was queued.
        """

    def settle(self, flight: Flight) -> None:
        """The envelope is complete, those before it were settled: fill the flight's owners and
        their names, its arrival and input ages, book what it used, and record it.
        """


class DeviceFrontParts:
    """The parts of a policy at place 0 on a GPU: from the window to the tensors of an envelope.

    They are queued on the stream that the window was queued on, so one window serves all envelopes.
    The host chooses the size of an envelope's batch when it queues the window, which then leaves
    out whoever comes behind these rows before it runs: such a robot is in the next one.

    Args:
        stage: queues them.
        window: a slot of this process alone, for what they read.
        headers: of as many windows as can be queued.
        nodes: kernels, copies and memsets of a call with all rows; None: not known.
        duration_ns: of such a call, usually.
        parts_ns: of each part, alone.
        stream: stage A's.
        sizes: of batches; None: the whole one alone.

    Attributes:
        smaller: sizes besides the whole batch.
    """

    def __init__(
        self,
        stage: DeviceStageB,
        window: DeviceSlot,
        headers: Headers,
        nodes: int | None,
        duration_ns: int,
        parts_ns: Mapping[str, int],
        stream: CudaStream,
        sizes: BatchSizes | None = None,
    ) -> None:
        self.window = window
        self.compiled_parts = compiled_parts(stage)
        self.nodes, self.duration_ns = nodes, duration_ns
        self.on_fault: Callable[[Flight, BaseException], None]  # set before the first run
        self._stage, self._headers, self._stream = stage, headers, stream
        self._parts_ns = parts_ns
        self._sizes = sizes
        self.smaller = () if sizes is None else sizes.smaller

    def prepare(self, slots: Sequence[DeviceSlot]) -> None:
        """Run on every slot, before anything waits: the parts load, allocate, record."""
        for _ in range(2):
            for slot in slots:
                for rows in (None, *self.smaller):  # the whole batch first: the most memory
                    self._stage(self.window, slot, rows)
            torch.cuda.synchronize()

    def rows_for(self, rows: Sequence[RowInput], ends_ns: Sequence[int | None]) -> int | None:
        """Returns the smallest size that holds the robots that are there now; None: all rows.

        ``ends_ns``: of their windows, as ``enqueue``.
        """
        if self._sizes is None:
            return None
        present = [row.present_at(end_ns) for row, end_ns in zip(rows, ends_ns, strict=True)]
        return self._sizes.rows_for(bytes(present))

    def enqueue(self, flight: Flight, slot: DeviceSlot, rows: int | None) -> int:
        """As ``DeviceStageA.enqueue``, behind the window, on its first ``rows``."""
        numbers = EnvelopeStatus(flight.epoch, flight.seq)
        self._stream.copy(self.window.address, *self._headers.write(flight.index, numbers))
        try:
            self._stage(self.window, slot, rows)
        except BaseException as error:  # noqa: BLE001 - user code: one envelope fails, the run goes on
            self.on_fault(flight, error)
            return failure(error)
        return 0

    def instruct(self, number: int, text: str) -> str:
        """As ``DeviceStageB``."""
        return self._stage.instruct(number, text)

    def part_times(self, calls: int) -> dict[str, int]:
        """Duration of each part alone, before the run."""
        return dict(self._parts_ns)


class RingWindows:
    """Windows of rings on the GPU (DeviceStageA): ``ingest/device/window.py``, one for each intake.

    Args:
        config: streams and window.
        slots: every slot that will be written.
        device: where they are.
        stream: torch's stream that stage A is queued on, the current one.
        front: what follows the window; prepared.
    """

    recorder: Recorder | None = None

    def __init__(
        self,
        config: PipelineConfig,
        slots: Sequence[DeviceSlot],
        device: torch.device,
        stream: torch.cuda.Stream,
        front: DeviceFrontParts | None = None,
    ) -> None:
        self._config, self.front = config, front
        self._windows = slots if front is None else (front.window,)
        self._device, self._stream = device, stream
        self._lease_ns = round(config.actions.lease_ms * NS_PER_MS)
        self._intake: Intake | None = None
        self._window: DeviceWindow
        self._made_of: TakenWindow | None = None  # the newest, and whose its rows are
        self._owners: list[Owner] = []
        self._names: RowNames
        self._marks: deque[tuple[int, Sequence[RowMark]]] = deque()  # of tables, for the recorder

    @property
    def intake(self) -> Intake:
        assert self._intake is not None, "no phase was entered"
        return self._intake

    @intake.setter
    def intake(self, intake: Intake) -> None:
        """Nothing is queued now: kernels may load, graphs be recorded and memory be allocated."""
        if intake is self._intake:
            return
        self._intake = intake
        self._window = DeviceWindow(
            self._config,
            intake.rows,
            intake.banks,
            self._device,
            is_limited=self.front is not None and bool(self.front.smaller),
        )
        for slot in self._windows:
            self._window.prepare(slot.tensors)

    @property
    def front_ns(self) -> int:
        return 0 if self.front is None else self.front.duration_ns

    @property
    def nodes(self) -> int | None:
        if self.front is None:
            return self._window.nodes
        return None if self.front.nodes is None else self._window.nodes + self.front.nodes

    def ingest(self, now_ns: int) -> bool:
        is_all = self._window.ingest(now_ns)
        if is_all and self.recorder is not None:
            self._mark(self.recorder)
        return is_all

    def rehearse(self) -> None:
        if self._window.rehearse() and self.recorder is not None:
            self._mark(self.recorder)

    def _mark(self, recorder: Recorder) -> None:
        """Note what has come by the newest table, which tells of it all."""
        if self._window.is_idle:
            self._marks.clear()
        table = self._window.rings.sequence
        if not self._marks or self._marks[-1][0] != table:
            self._marks.append((table, recorder.marks()))

    def graph(self, slot: DeviceSlot) -> GraphPart | None:
        if self.front is not None:
            return None
        return CapturedPart(self._window.graph(slot.tensors), self._window)

    def enqueue(
        self,
        flight: Flight,
        slot: DeviceSlot,
        ends_ns: Sequence[int | None],
        launch: Callable[[], None] | None = None,
    ) -> int:
        if ends_ns[0] is not None:
            self._window.ingest(now_ns(), ends_ns)
            if self.recorder is not None:
                self._mark(self.recorder)
        front = self.front
        tensors = (slot if front is None else front.window).tensors
        rows = None if front is None else front.rows_for(self.intake.rows, ends_ns)
        self._window.enqueue(tensors, self._stream, launch, rows)
        return 0 if front is None else front.enqueue(flight, slot, rows)

    def settle(self, flight: Flight) -> None:
        taken = self._window.pop()
        if taken is not self._made_of:
            self._made_of, self._owners = taken, taken_owners(taken, self._lease_ns)
            self._names = names_of(self._owners)
        flight.received_ns = flight.record.tRx = taken.info.newest_rx_ns
        flight.record.input_age_ns = taken.info.input_age_ns
        flight.owners = self._owners
        name_rows(flight, self._names)
        if self.recorder is not None:
            self._tell(self.recorder, flight)

    def _tell(self, recorder: Recorder, flight: Flight) -> None:
        """Record the window, unless it ran when a part of what had come was still to be sent."""
        marks, table = self._marks, self._window.table
        while marks and marks[0][0] < table:
            marks.popleft()
        if marks and marks[0][0] == table:
            tell_of_windows(recorder, flight, marks[0][1])


class QueuedWindows(StageA):
    """Stage A of a loop that runs the policy on the same GPU, behind the window on one stream.

    ``build`` only queues the window: the policy is queued while the GPU cuts it. ``settle`` waits
    for it and corrects ``tA1``, by what the GPU took. Of an envelope's host slot ``build`` writes
    ``rows`` and ``present`` alone, by which the policy is called; the policy reads the window where
    it lies.

    Args:
        config: streams and window.
        slot: that windows are written into; no copy of it is under way when one begins.
        device: where that is.
        stream: torch's stream of the stage and of the policy, the current one.
    """

    ahead_ns = AHEAD_NS

    def __init__(
        self,
        config: PipelineConfig,
        slot: DeviceSlot,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(config, Delay(0.0))
        self._windows = RingWindows(config, (slot,), device, stream)
        self._slot, self._stream = slot, stream
        self._begun, self._ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        self._queued_ns = 0

    @property
    def intake(self) -> Intake:
        """As ``RingWindows``."""
        return self._windows.intake

    @intake.setter
    def intake(self, intake: Intake) -> None:
        self._windows.intake = intake

    @property
    def recorder(self) -> Recorder | None:
        """As ``RingWindows``."""
        return self._windows.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._windows.recorder = recorder

    def take_in(self) -> None:
        """As ``StageA``: less is left to be sent when a window is due."""
        self._windows.ingest(now_ns())

    def _fill(self, flight: Flight, slot: Slot, ends_ns: Sequence[int | None]) -> None:
        while ends_ns[0] is None and not self._windows.ingest(now_ns()):
            self._stream.synchronize()  # blocks of memory come free behind copies
        self._queued_ns = now_ns()
        self._begun.record(self._stream)
        self._windows.enqueue(flight, self._slot, ends_ns)
        self._ended.record(self._stream)
        rows, present = slot.arrays["rows"], slot.arrays["present"]
        for number, served in enumerate(self.intake.rows):  # as the window finds them
            rows[number, 0], rows[number, 1] = served.session, served.session_epoch
            present[number] = served.present_at(ends_ns[number])
        slot.words[FAILED] = 0

    def rehearse(self) -> None:
        """As ``StageA``: nothing is cut, since what a window on a GPU uses it accounts for."""
        self._windows.rehearse()

    def settle(self, flight: Flight) -> None:
        """As ``StageA``; once for each ``build``, at any time before the next one."""
        flight.record.tA1 = max(flight.record.tA1 or 0, self._await_end())
        self._windows.settle(flight)

    def _await_end(self) -> int:
        """Returns when the GPU had cut the window."""
        self._ended.synchronize()
        took_ms: float = self._begun.elapsed_time(self._ended)
        return self._queued_ns + round(took_ms * NS_PER_MS)


def taken_owners(taken: TakenWindow, lease_ns: int) -> list[Owner]:
    """Returns the owner of each row of a complete window."""
    return [
        Owner(is_present, episode, end, end + lease_ns, received_ns)
        for is_present, episode, end, received_ns in zip(
            taken.present, taken.episodes, taken.info.window_end_ns, taken.received_ns, strict=True
        )
    ]
