"""Both ends of a link in one process, over a driver of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from fake_cuda import FakeDriver

from ppstream.cuda import driver
from ppstream.cuda.driver import CudaStream
from ppstream.links import device_counters
from ppstream.links.device_counters import COUNTER_BYTES, CountedLink, Places
from ppstream.links.device_link import device_slots, slot_count
from ppstream.links.slots import LinkShape

CPU = torch.device("cpu")
D = TypeVar("D", bound=FakeDriver)


@contextmanager
def driven_by(fake: D, patch: pytest.MonkeyPatch) -> Iterator[D]:
    """Counted links ask ``fake``; nothing that it did may have failed."""
    patch.setattr(driver, "driver", lambda: fake)
    patch.setattr(device_counters, "stream", lambda role: CudaStream())
    patch.setattr("torch.cuda.synchronize", lambda device=None: None)
    yield fake
    fake.close()
    assert not fake.failures, fake.failures


def linked(
    shape: LinkShape, make_puts: Any = None, make_waits: Any = None
) -> tuple[CountedLink, CountedLink]:
    """Both ends of a link in this process's memory, as ``peer`` lays it out on two GPUs."""
    count = slot_count(shape)
    memories = [
        torch.zeros(COUNTER_BYTES + count * layout.slot_bytes, dtype=torch.uint8)
        for layout in (shape.result, shape.envelope)  # what each end receives
    ]
    front, back = (memory.data_ptr() for memory in memories)

    def end(mine: int, out: Any, into: Any) -> CountedLink:
        my, their = (front, back) if mine == 0 else (back, front)
        slots = device_slots(memories[mine][COUNTER_BYTES:], into, count)
        places = Places(my, their, their + COUNTER_BYTES)
        return CountedLink(out, shape, CPU, slots, places, make_puts, make_waits)

    return end(0, shape.envelope, shape.result), end(1, shape.result, shape.envelope)
