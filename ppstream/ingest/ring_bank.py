"""RingBank: the memory of one stream's rings, side by side for all rows.

One bank is one argument of the resampling call, which so serves every row at once and reads the
rings in place. What is written into it is ``ring.py``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ppstream.config.schema import StreamConfig


class RingBank:
    """Memory of one stream for all rows; the tensors go to the resampling call as they are.

    Values are float32 whatever the stream's dtype, since windows are: a float64 sample is rounded
    once, on arrival. A camera's frames stay uint8.

    Args:
        stream: gives the width D.
        rows: B, robots of one envelope.
        capacity: N, samples kept per row.
    """

    def __init__(self, stream: StreamConfig, rows: int, capacity: int) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"a bank needs rows and capacity above 0, got {rows} and {capacity}")
        self.stream = stream
        self.capacity = capacity
        self.is_image = stream.image is not None
        dtype = torch.uint8 if self.is_image else torch.float32
        self.values = torch.zeros(rows, capacity, stream.dim, dtype=dtype)
        self.stamps_ns = torch.zeros(rows, capacity, dtype=torch.int64)
        self.count = torch.zeros(rows, dtype=torch.int64)  # samples held
        self.head = torch.zeros(rows, dtype=torch.int64)  # slot of the oldest
