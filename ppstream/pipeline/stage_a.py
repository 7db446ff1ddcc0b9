"""Stage A: the newest window of every row, resampled straight into an envelope's slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ppstream.core.clock import NS_PER_MS, now_ns, thread_cpu_ns
from ppstream.observe import nvtx_ranges
from ppstream.pipeline.flight import name_rows, owners_of

if TYPE_CHECKING:
    from torch import Tensor

    from ppstream.config.schema import PipelineConfig
    from ppstream.core.simulated_delay import Delay
    from ppstream.ingest.intake import Intake
    from ppstream.pipeline.flight import Flight
    from ppstream.recording.recorder import Recorder


class StageA:
    """Cuts windows of its ``intake``; owned by the thread that owns the input."""

    recorder: Recorder | None = None  # told of every window

    def __init__(self, config: PipelineConfig, simulated: Delay) -> None:
        self.intake: Intake
        self._simulated = simulated
        self._lease_ns = round(config.actions.lease_ms * NS_PER_MS)

    def build(
        self, flight: Flight, tensors: Mapping[str, Tensor], ends_ns: Sequence[int | None]
    ) -> None:
        """Fill the slot's tensors and the flight's record, from ``tA0`` to ``tA1``.

        ``ends_ns`` fixes the window end of each row; None means the newest reference stamp.
        """
        record = flight.record
        cpu_ns = thread_cpu_ns()
        record.tA0 = now_ns()
        if nvtx_ranges.on:
            nvtx_ranges.A.push(flight.epoch, flight.seq)
        info = self.intake.cutter.cut(tensors, ends_ns, self._lease_ns)
        self._simulated.spend()
        flight.received_ns = record.tRx = info.newest_rx_ns
        flight.owners = owners_of(self.intake.rows, info.window_end_ns, self._lease_ns)
        record.input_age_ns = info.input_age_ns
        name_rows(flight)
        if nvtx_ranges.on:
            nvtx_ranges.A.pop()
        if self.recorder is not None:
            name = (flight.epoch, flight.seq, record.phase or "")
            self.recorder.windows(record.tA0, *name, flight.owners)
        record.tA1 = now_ns()
        record.cpu_a_ns = thread_cpu_ns() - cpu_ns
