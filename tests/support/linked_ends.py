"""Both ends of a link in one process, over a driver of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from fake_cuda import FakeDriver

from ppstream.cuda import driver
from ppstream.cuda.driver import CudaStream
from ppstream.links import device_counters
from ppstream.links.device_counters import COUNTER_BYTES, CountedLink, CounterAddresses
from ppstream.links.device_link import device_slots, layouts, slot_count
from ppstream.links.slots import LinkShape, Position

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
    *shapes: LinkShape, make_puts: Any = None, make_waits: Any = None, make_stamped: Any = None
) -> tuple[CountedLink, ...]:
    """A link for each rank in this process's memory, as ``peer`` lays them out on GPUs.

    With one shape of two ranks, else of a chain with a rank for each; its policy ranks copy.
    """
    made = {"make_puts": make_puts, "make_waits": make_waits, "make_stamped": make_stamped}
    return tuple(map(ends(*shapes, **made), range(max(2, len(shapes)))))


def ends(
    *shapes: LinkShape, make_puts: Any = None, make_waits: Any = None, make_stamped: Any = None
) -> Callable[[int], CountedLink]:
    """Makes the ends one by one: of ``linked`` the one of a place."""
    if len(shapes) == 1:
        shapes = (shapes[0], shapes[0])
    places = len(shapes) - 1
    directions = [layouts(shape, Position(k, places)) for k, shape in enumerate(shapes)]
    count = slot_count(shapes[0])
    memories = [
        torch.zeros(COUNTER_BYTES + count * into.slot_bytes, dtype=torch.uint8)
        for _, into in directions
    ]

    def link(place: int) -> CountedLink:
        out, into = directions[place]
        my, their = (memories[k].data_ptr() for k in (place, Position(place, places).behind))
        slots = device_slots(memories[place][COUNTER_BYTES:], into, count)
        puts = None if place and places > 1 else make_puts
        where = CounterAddresses(my, their, their + COUNTER_BYTES)
        stamped = None if place and places > 1 else make_stamped
        return CountedLink(out, shapes[place], CPU, slots, where, puts, make_waits, stamped)

    return link
