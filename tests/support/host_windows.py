"""Stage A of the device-ordered loop without a GPU: windows cut on the host when they are queued.

They are as old as the host runs ahead; nothing else about the loop's order differs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from fake_cuda import FakePart

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import NS_PER_MS
from ppstream.cuda.driver import CudaStream
from ppstream.ingest.intake import Intake
from ppstream.ingest.window import WindowInfo
from ppstream.links.device_link import DeviceSlot, pinned_slots
from ppstream.links.slots import SlotLayout
from ppstream.pipeline.device.stage_a import DeviceFrontParts
from ppstream.pipeline.flight import Flight, name_rows, owners_of


class HostWindows:
    """Windows cut on the CPU, and copied in ``stream`` (DeviceStageA).

    Args:
        config: the lease.
        layout: of a window.
        slots: windows; more than can be queued.
        stream: that stage A is queued on.
        front: what follows the window.
        graphs: the copy is a part of a graph.
    """

    def __init__(
        self,
        config: PipelineConfig,
        layout: SlotLayout,
        slots: int,
        stream: CudaStream,
        front: DeviceFrontParts | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        self.intake: Intake
        self.rehearsed = 0
        self._lease_ns = round(config.actions.lease_ms * NS_PER_MS)
        self._stream = stream
        self._windows = pinned_slots(layout, slots)
        self._begin = min(layout.offsets.values())  # behind the header, which is the link's
        self._infos: list[WindowInfo | None] = [None] * slots

        self.front = front
        self._graphs = graphs
        self._staged: dict[int, int] = {}  # source of the copy into a slot, by its address

    nodes = 1  # the copy; a front part's kernels are not counted

    @property
    def front_ns(self) -> int:
        return 0 if self.front is None else self.front.duration_ns

    def ingest(self, now_ns: int) -> bool:
        """All is there: the rings are read where they are."""
        return True

    def rehearse(self) -> None:
        self.rehearsed += 1

    def graph(self, slot: DeviceSlot) -> FakePart | None:
        if not self._graphs or self.front is not None:
            return None
        begin, size = self._begin, slot.size

        def copy() -> None:
            ctypes.memmove(slot.address + begin, self._staged[slot.address], size - begin)

        return FakePart(copy)

    def enqueue(
        self,
        flight: Flight,
        slot: DeviceSlot,
        ends_ns: Sequence[int | None],
        launch: Callable[[], None] | None = None,
    ) -> int:
        place = flight.index % len(self._windows)
        window = self._windows[place]
        info = self.intake.cutter.cut(window.tensors, ends_ns, self._lease_ns)
        begin = self._begin
        source = window.raw.data_ptr() + begin
        target = slot if self.front is None else self.front.window
        self._infos[place] = info
        if launch is None:
            self._stream.copy(target.address + begin, source, target.size - begin)
        else:
            self._staged[slot.address] = source
            launch()
        flight.owners = owners_of(self.intake.rows, info.window_end_ns, self._lease_ns)
        if self.front is None:
            return 0
        return self.front.enqueue(flight, slot, self.front.rows_for(self.intake.rows, ends_ns))

    def settle(self, flight: Flight) -> None:
        info = self._infos[flight.index % len(self._windows)]
        assert info is not None, f"envelope {flight.index} was never cut"
        flight.received_ns = flight.record.tRx = info.newest_rx_ns
        flight.record.input_age_ns = info.input_age_ns
        name_rows(flight)
