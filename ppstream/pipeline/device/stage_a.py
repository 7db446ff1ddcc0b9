"""Stage A for a GPU: what the device-ordered loop asks of it, and windows of rings on the GPU.

They are read when the device comes to it, however far ahead the host runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.ingest.device.window import DeviceWindow
from ppstream.pipeline.flight import Owner, RowNames, name_rows, names_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.device.window_records import TakenWindow
    from ppstream.ingest.intake import Intake
    from ppstream.links.device_link import DeviceSlot
    from ppstream.pipeline.flight import Flight


class DeviceStageA(Protocol):
    """Stage A on a device.

    Attributes:
        intake: whose rings it reads; changed between phases, while nothing is queued.
        nodes: kernels, copies and memsets that one window queues.
    """

    intake: Intake

    @property
    def nodes(self) -> int: ...

    def ingest(self, now_ns: int) -> None:
        """Take over the samples that are new in the rings; never waits."""

    def enqueue(self, flight: Flight, slot: DeviceSlot, ends_ns: Sequence[int | None]) -> None:
        """Queue stage A into ``slot`` on the current stream; it reads the rings when it runs."""

    def settle(self, flight: Flight) -> None:
        """The envelope is complete, those before it were settled: fill the flight's owners and
        their names, its arrival and input ages, and book what it used.
        """


class RingWindows:
    """Windows of rings on the GPU (DeviceStageA): ``ingest/device/window.py``, one for each intake.

    Args:
        config: streams and window.
        slots: every slot that will be written.
        device: where they are.
        stream: torch's stream that stage A is queued on, the current one.
    """

    def __init__(
        self,
        config: PipelineConfig,
        slots: Sequence[DeviceSlot],
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self._config, self._slots = config, slots
        self._device, self._stream = device, stream
        self._lease_ns = round(config.actions.lease_ms * NS_PER_MS)
        self._intake: Intake | None = None
        self._window: DeviceWindow
        self._made_of: TakenWindow | None = None  # the newest, and whose its rows are
        self._owners: list[Owner] = []
        self._names: RowNames

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
        self._window = DeviceWindow(self._config, intake.rows, intake.banks, self._device)
        for slot in self._slots:
            self._window.prepare(slot.tensors)

    @property
    def nodes(self) -> int:
        return self._window.nodes

    def ingest(self, now_ns: int) -> None:
        self._window.ingest(now_ns)

    def enqueue(self, flight: Flight, slot: DeviceSlot, ends_ns: Sequence[int | None]) -> None:
        if ends_ns[0] is not None:
            self._window.ingest(now_ns(), ends_ns)
        self._window.enqueue(slot.tensors, self._stream)

    def settle(self, flight: Flight) -> None:
        taken = self._window.take()
        if taken is not self._made_of:
            self._made_of, self._owners = taken, taken_owners(taken, self._lease_ns)
            self._names = names_of(self._owners)
        flight.received_ns = flight.record.tRx = taken.info.newest_rx_ns
        flight.record.input_age_ns = taken.info.input_age_ns
        flight.owners = self._owners
        name_rows(flight, self._names)


def taken_owners(taken: TakenWindow, lease_ns: int) -> list[Owner]:
    """Returns the owner of each row of a complete window."""
    return [
        Owner(is_present, episode, end, end + lease_ns, received_ns)
        for is_present, episode, end, received_ns in zip(
            taken.present, taken.episodes, taken.info.window_end_ns, taken.received_ns, strict=True
        )
    ]
