"""Configurations and rings that several tests of streams and windows start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppstream.config.schema import (
    ActionConfig,
    BatchConfig,
    PipelineConfig,
    PipelineShape,
    PolicyConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.ingest.ring import RingBank, SensorRing
from ppstream.ingest.rows import NOTHING_NEEDED, Need, RowInput
from ppstream.ingest.window import WindowCutter
from ppstream.links.slots import SlotLayout

MS = 1_000_000


def stream(
    name: str = "joints", dim: int = 2, rate_hz: float = 1000.0, **more: Any
) -> StreamConfig:
    return StreamConfig(name=name, dim=dim, rate_hz=rate_hz, **more)


def config(
    *streams: StreamConfig,
    steps: int = 8,
    dt_ms: float = 10.0,
    rows: int = 1,
    **pipeline: Any,
) -> PipelineConfig:
    return PipelineConfig(
        name="case",
        streams=streams or (stream(),),
        window=WindowConfig(steps=steps, dt_ms=dt_ms),
        actions=ActionConfig(
            names=("a",), horizon=4, dt_ms=10.0, low=(-1.0,), high=(1.0,), lease_ms=100.0
        ),
        policy=PolicyConfig(target="nobody:build"),
        batch=BatchConfig(rows=rows),
        pipeline=PipelineShape(**pipeline),
    )


class Input:
    """Rows, their memory and a cutter with a slot to cut into."""

    def __init__(
        self,
        settings: PipelineConfig,
        capacity: int | None = None,
        needs: Mapping[str, Need] = NOTHING_NEEDED,
    ) -> None:
        self.config = settings
        self.banks = {
            one.name: RingBank(one, settings.batch.rows, capacity or settings.ring_samples(one))
            for one in settings.streams
        }
        self.rows = tuple(
            RowInput(self.banks, row, settings.reference.name, needs=needs)
            for row in range(settings.batch.rows)
        )
        self.cutter = WindowCutter(settings, self.rows, self.banks)
        self.layout = SlotLayout(("index",), self.cutter.inputs, settings.batch.rows)

    def slot(self) -> Any:
        """Fresh views of a slot full of rubbish: whatever is not written shows."""
        import torch

        return self.layout.views(torch.full((self.layout.slot_bytes,), 0xCD, dtype=torch.uint8))

    def check(self) -> None:
        for row in self.rows:
            for ring in row.rings.values():
                ring.check()


def held(ring: SensorRing) -> tuple[list[int], list[list[float]]]:
    """What a ring holds, oldest first, read from its bank as the resampling call reads it."""
    bank, row = ring.bank, ring.row
    order = (int(bank.head[row]) + np.arange(int(bank.count[row]))) % bank.capacity
    return bank.stamps_ns[row][order].tolist(), bank.values[row][order].tolist()


def at_ms(*times: float) -> NDArray[np.int64]:
    return np.array([round(time * MS) for time in times], dtype=np.int64)


def ramp(stamps_ns: NDArray[np.int64], dim: int = 2) -> NDArray[np.float32]:
    """Values that name their stamp: milliseconds, plus 1000 per column."""
    columns = np.arange(dim) * 1000
    return (stamps_ns[:, None] / MS + columns).astype(np.float32)
